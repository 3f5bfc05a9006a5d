"""The bodies of /chat/completions and /completions as the API writes them, decoded strictly.

Field names are the API's. Unknown fields are ignored, as clients send extras. Ranges that need no
other field are checked here; the rest in openai.py.
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
_CountOrNone = Annotated[int, Meta(ge=0, le=INT64_MAX)]
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
    refusal: str | None = None
    """The text of a part of type "refusal", which an assistant's message in a history may have."""


class ChatMessage(msgspec.Struct):
    """One message of a chat as clients write it."""

    role: str
    content: str | list[Part] | None = None
    refusal: str | None = None
    """What the assistant said in the place of content."""
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    prefix: bool | None = None
    """DeepSeek's: the reply goes on where this message ends. Not served."""


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
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    """Logits are divided by it: with a smaller one they would not stay finite numbers."""
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """An extension: larger is sooner among those that wait, 0 if left out."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """An extension, as vLLM's: KV is reused only among requests of the same key and salt. "public":
    what the leading system messages of a chat leave behind is reused by everybody, and the rest as
    without a salt.
    """
    stop_repetition: bool | None = None
    """An extension: a reply that repeats itself without end is ended as if it had reached its
    length, unless this is false or `ignore_eos` asks for so many tokens whatever they are.
    """
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
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None


class CompletionRequest(Common, kw_only=True):
    """A body of /completions."""

    prompt: str | list[str | int | list[_TokenId]]
    max_tokens: _CountOrNone | None = None
    """0: nothing is generated; with `echo` the prompt comes back."""
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    best_of: _CountOrNone | None = None
    """0 is what OpenAI's description allows, and means that it was left out."""


NOT_SERVED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's and SGLang's
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "chat_template": (),
    "continue_final_message": (),
    "custom_logit_processor": (),
    "documents": (),
    "ebnf": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (),
    "input_ids": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "lora_path": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "no_stop_trim": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_detection": (),
    "return_hidden_states": (),
    "return_tokens_as_token_ids": (),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "stream_reasoning": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "vllm_xargs": (),
    # llama.cpp's and others'
    "dry_multiplier": (0,),
    "grammar": (),
    "mirostat": (0,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
"""Fields that change an answer and are not served, each with the values that leave it as it is. So
does null, and where the default is not true also false, "" and what is empty. Any other value is
refused by name. What changes no answer (metadata, store, service_tier) is ignored.
"""
_CHAT_ONLY = {"add_special_tokens": (), "echo": (), "prefix": ()}
_COMPLETION_ONLY = {"add_special_tokens": (True,)}
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_MAX_HARMLESS_BYTES = 64
_CHAT_FIELDS = {**NOT_SERVED, **_CHAT_ONLY}
_COMPLETION_FIELDS = {**NOT_SERVED, **_COMPLETION_ONLY}
_SMALL = ("logit_bias", "stop", "stop_token_ids")
_MAX_SMALL_BYTES = 1 << 18
"""No value that is allowed is as long, and one of megabytes takes a second to read."""
_ChatNotServed, _CompletionNotServed = (
    msgspec.defstruct(
        name, [(field, msgspec.Raw, msgspec.Raw(b"null")) for field in (*fields, *_SMALL)]
    )
    for name, fields in (
        ("ChatNotServed", _CHAT_FIELDS),
        ("CompletionNotServed", _COMPLETION_FIELDS),
    )
)


def check_served(body: bytes, *, is_chat: bool) -> None:
    """Raise RequestError for a field of another server that would change the answer and is not
    served here, and for one that is longer than it can be: nothing of it is read before.
    """
    fields, kind = (
        (_CHAT_FIELDS, _ChatNotServed) if is_chat else (_COMPLETION_FIELDS, _CompletionNotServed)
    )
    given = decode(body, kind)
    for name in _SMALL:
        if len(getattr(given, name)) > _MAX_SMALL_BYTES:
            raise RequestError(
                f"{name} has more than {_MAX_SMALL_BYTES} bytes; it is too long.", name
            )
    for name, harmless in fields.items():
        raw = bytes(getattr(given, name))
        nothing = (None,) if any(value is True for value in harmless) else _NOTHING
        if len(raw) <= _MAX_HARMLESS_BYTES and _is_one_of(
            msgspec.json.decode(raw), (*nothing, *harmless)
        ):
            continue
        raise RequestError(f"{name} is not supported; leave it out.", name)


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """In Python 0 equals False and 1 equals True; in JSON neither does."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
    )


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
