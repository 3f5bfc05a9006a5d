"""The bodies of /chat/completions and /completions as the API writes them, decoded strictly.

Field names are the API's. Unknown fields are ignored, as clients send extras. Ranges that need no other field are
checked here; the rest in openai.py.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError

T = TypeVar("T")

MAX_LEGACY_LOGPROBS = 5
INT64_MAX = 2**63 - 1
MAX_CACHE_SALT_CHARS = 256
MAX_PRIORITY = 4
"""Of a request, and its negative; what a level is worth is policy/batching's."""

_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Count = Annotated[int, Meta(ge=1, le=INT64_MAX)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: str


class Thinking(msgspec.Struct):
    """DeepSeek's switch: {"type": "enabled"} or {"type": "disabled"}."""

    type: str


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Any] | None = None


class Common(msgspec.Struct, kw_only=True):
    """Fields of both endpoints. None is what a client that leaves a field out may send as well."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    n: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    """0 and -1: all tokens."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """An extension: larger is sooner among those that wait, 0 if left out."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """An extension, as vLLM's: KV is reused only among requests of the same key and salt. "public": what the leading
    system messages of a chat leave behind is reused by everybody, and the rest as without a salt."""
    return_token_ids: bool | None = None
    """Also give the tokens of a reply as ids; only where it is not streamed."""


class ChatRequest(Common, kw_only=True):
    """A body of /chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    thinking: bool | Thinking | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None


class CompletionRequest(Common, kw_only=True):
    """A body of /completions."""

    prompt: str | list[str | int | list[_TokenId]]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    best_of: _Count | None = None


_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")


def decode(body: bytes, kind: type[T]) -> T:
    """Read a JSON body into `kind`. Raises RequestError, whatever the bytes are."""
    try:
        body.decode("utf-8")  # msgspec looks only into the strings that it keeps.
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _PATH.search(message)
        # `$.messages[0].content` -> messages[0].content; `[...]` stands for "some item or key".
        param = None if found is None else found["path"].removeprefix("$").removeprefix(".") or None
        if found is None:
            missing = re.search(r"missing required field `(?P<field>[^`]*)`", message)
            param = missing["field"] if missing else None
        said = _PATH.sub("", message)
        raise RequestError(f"{param or 'The body'}: {said[:1].lower()}{said[1:]}.", param) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not valid UTF-8 (byte {error.start}).") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
