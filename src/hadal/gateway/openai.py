"""From the body of an API request to what is asked of the engine, every field checked.

Each complaint is a RequestError that names the field and says what to do. Knows no tokenizer:
prompts are still text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from hadal.core.errors import RequestError
from hadal.core.plans import Sampling
from hadal.gateway.schemas import (
    INT64_MAX,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Thinking,
    check_served,
    decode,
)

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_OTHER_VALUES = 65_536
"""Most values of a body besides token ids; commas in its texts count as well."""
_LIST = re.compile(rb'"prompt"\s*:\s*\[')
"""The begin of a prompt that is a list. No text holds one: in a string the quotes around the name
would be escaped.
"""
_IN_IDS = b"0123456789-, \t\r\n["
PUBLIC = "public"
"""The `cache_salt` that shares a chat's leading system messages with everybody."""


@dataclass(frozen=True)
class Turn:
    """One message of a chat: role system, user or assistant, and its text."""

    role: str
    content: str


@dataclass(frozen=True)
class Ask:
    """What both endpoints ask of the engine. None: the model's or the deployment's default."""

    model: str
    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None
    max_name: str
    """The field that `max_tokens` was asked for by."""
    min_tokens: int
    temperature: float | None
    top_p: float | None
    sampling: Sampling
    """Everything but temperature, top_p and seed, which have defaults of their own."""
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    return_token_ids: bool
    stop_repetition: bool = True
    priority: int = 0
    """Larger is sooner among those that wait."""
    cache_salt: str | None = None
    """None: what the tenant's other requests leave behind is reused, and the other way round."""


@dataclass(frozen=True)
class ChatAsk:
    ask: Ask
    turns: tuple[Turn, ...]
    thinking: bool | None
    """None: as the chat template has it."""
    template_kwargs: dict[str, bool | int | float | str | None]


@dataclass(frozen=True)
class CompletionAsk:
    ask: Ask
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool


def parse_chat(body: bytes) -> ChatAsk:
    """Read a body of /chat/completions. Raises RequestError."""
    check_served(body, is_chat=True)
    request = decode(body, ChatRequest)
    for name, given in (("tools", request.tools), ("functions", request.functions)):
        if given:
            raise RequestError(f"{name} are not supported; leave them out.", name)
    if request.response_format is not None and request.response_format.type != "text":
        raise RequestError(
            f"response_format.type is {_short(request.response_format.type)}; only 'text' is"
            " supported.",
            "response_format",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    max_tokens = request.max_completion_tokens or request.max_tokens
    name = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
    kwargs = request.chat_template_kwargs or {}
    thinking = _thinking(request.thinking)
    if _is_effortless(request.reasoning_effort):
        if thinking:
            raise RequestError(
                "reasoning_effort is 'none', and thinking is enabled; send one.", "reasoning_effort"
            )
        thinking = False
    for key in ("thinking", "enable_thinking"):
        value = kwargs.get(key)
        if thinking is None and isinstance(value, bool):
            thinking = value
    return ChatAsk(
        ask=_ask(request, max_tokens, name, num_logprobs),
        turns=_turns(request.messages),
        thinking=thinking,
        template_kwargs=kwargs,
    )


def parse_completion(body: bytes) -> CompletionAsk:
    """Read a body of /completions. Raises RequestError."""
    check_served(body, is_chat=False)
    request = decode(body, CompletionRequest)
    if request.suffix:
        raise RequestError("suffix is not supported; leave it out.", "suffix")
    if request.best_of and request.best_of != (request.n or 1):
        raise RequestError("best_of other than n is not supported; leave it out.", "best_of")
    if request.echo and request.logprobs is not None:
        raise RequestError(
            "echo with logprobs is not supported: prompts are not scored. Leave one out.", "echo"
        )
    if request.cache_salt == PUBLIC:
        raise RequestError(
            f"cache_salt is '{PUBLIC}', which shares a chat's system messages; a plain prompt has"
            " none. Send a chat, or another salt.",
            "cache_salt",
        )
    num_logprobs = -1 if request.logprobs is None else request.logprobs
    return CompletionAsk(
        ask=_ask(request, request.max_tokens, "max_tokens", num_logprobs),
        prompts=_prompts(request.prompt),
        echo=bool(request.echo),
    )


def with_defaults(ask: Ask, temperature: float, top_p: float, seed: int, index: int) -> Sampling:
    """The sampling of choice `index`: the model's defaults where the client gave none, and a seed
    of its own.
    """
    return msgspec.structs.replace(
        ask.sampling,
        temperature=temperature if ask.temperature is None else ask.temperature,
        top_p=top_p if ask.top_p is None else ask.top_p,
        seed=(seed + index) & INT64_MAX,
    )


def _ask(
    request: ChatRequest | CompletionRequest,
    max_tokens: int | None,
    max_name: str,
    num_logprobs: int,
) -> Ask:
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} exceeds {max_name} {max_tokens}.", "min_tokens"
        )
    if request.return_token_ids and request.stream:
        raise RequestError(
            "return_token_ids: a stream does not carry them; ask without stream.",
            "return_token_ids",
        )
    if len(request.stop_token_ids or ()) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids has more than {MAX_STOP_IDS} ids.", "stop_token_ids")
    return Ask(
        model=request.model,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        n=request.n or 1,
        max_tokens=max_tokens,
        max_name=max_name,
        min_tokens=min_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        sampling=Sampling(
            top_k=max(0, min(request.top_k or 0, 2**31 - 1)),
            min_p=request.min_p or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=(
                1.0 if request.repetition_penalty is None else request.repetition_penalty
            ),
            num_logprobs=num_logprobs,
            logit_bias=_logit_bias(request.logit_bias or {}),
        ),
        seed=request.seed,
        stops=_stops(request.stop),
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        ignore_eos=bool(request.ignore_eos),
        return_token_ids=bool(request.return_token_ids),
        stop_repetition=(
            not request.ignore_eos if request.stop_repetition is None else request.stop_repetition
        ),
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )


def check_ids(ask: Ask, vocab_size: int) -> None:
    """Raise RequestError for a token id that the model does not have."""
    biased = tuple(token for token, _ in ask.sampling.logit_bias)
    for name, tokens in (("stop_token_ids", ask.stop_token_ids), ("logit_bias", biased)):
        for token in tokens:
            if token >= vocab_size:
                raise RequestError(
                    f"{name}: {token} is no token id; the vocabulary has {vocab_size}.", name
                )


def check_num_ids(body: bytes, max_tokens: int) -> None:
    """Raise RequestError for a body with more token ids in a row than a prompt has, or more values
    than any body.

    Looks at the bytes alone, before they become as many numbers: those of a body of 4 MiB take half
    a second, in which nothing else is done in the process, threads or not. These are milliseconds.
    """
    num_commas = body.count(b",")
    if num_commas > MAX_PROMPTS * max_tokens + MAX_OTHER_VALUES:
        raise RequestError(
            f"The body has {num_commas} values or more; {MAX_PROMPTS} prompts of {max_tokens}"
            " tokens are the most.",
            "prompt",
            "context_length_exceeded",
        )
    for found in _LIST.finditer(body) if num_commas > max_tokens else ():
        # Only up to a quote, where another prompt may begin: so no byte is looked at twice.
        quote = body.find(b'"', found.end())
        *lists, _ = body[found.end() : quote if quote >= 0 else len(body)].split(
            b"]", MAX_PROMPTS + 2
        )
        for number, ids in enumerate(lists, 1):
            if ids.translate(None, _IN_IDS):
                break
            num_ids = ids.count(
                b","
            )  # One more than that, or as many where a comma parts it from the list before.
            if num_ids > max_tokens + 1:
                raise RequestError(
                    f"The prompt has {num_ids} tokens or more; at most {max_tokens} are allowed."
                    " Shorten prompt.",
                    "prompt",
                    "context_length_exceeded",
                )
            if number > MAX_PROMPTS + 1:  # The last may be what follows a list of lists.
                raise RequestError(
                    f"prompt has more than {MAX_PROMPTS} entries; no more are allowed.", "prompt"
                )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed.", "stop"
        )
    for text in stops:
        if not text or len(text) > MAX_STOP_CHARS:
            raise RequestError(
                f"stop: every string needs 1 to {MAX_STOP_CHARS} characters.", "stop"
            )
    return tuple(dict.fromkeys(stops))


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed.",
            "logit_bias",
        )
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise RequestError(f"logit_bias: the key {_short(key)} is no token id.", "logit_bias")
    return tuple((int(key), value) for key, value in bias.items())


def _thinking(value: bool | Thinking | None) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value.type not in ("enabled", "disabled"):
        raise RequestError(
            f"thinking.type is {_short(value.type)}; use 'enabled' or 'disabled'.", "thinking.type"
        )
    return value.type == "enabled"


_SERVED_EFFORTS = ("medium", "high", "xhigh")
"""DeepSeek's API knows low, high and max; these three all mean high, its default, and the one way a
model thinks here (its guide to the thinking mode).
"""


def _is_effortless(effort: str | None) -> bool:
    """Whether `reasoning_effort` turns thinking off. Raises RequestError for one that is not
    served.
    """
    if effort is None or effort in _SERVED_EFFORTS:
        return False
    if effort != "none":
        raise RequestError(
            f"reasoning_effort is {_short(effort)}, which is not supported: the model thinks in one"
            " way. Leave it out, or send 'high', or 'none' for an answer without thinking.",
            "reasoning_effort",
        )
    return True


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _turns(messages: list[ChatMessage]) -> tuple[Turn, ...]:
    if not messages:
        raise RequestError("messages is empty; send at least one message.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed.", "messages"
        )
    return tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(messages))


def _turn(message: ChatMessage, where: str) -> Turn:
    if message.role in ("tool", "function") or message.tool_calls or message.function_call:
        raise RequestError(
            f"{where}: tools are not supported; leave tool messages and calls out.", where
        )
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"{where}.role is {_short(message.role)}; use 'system', 'developer', 'user' or"
            " 'assistant'.",
            f"{where}.role",
        )
    for name, given in (("prefix", message.prefix), ("audio", message.audio)):
        if given:
            raise RequestError(f"{where}.{name} is not supported; leave it out.", f"{where}.{name}")
    content = message.refusal if message.content is None else message.content
    if content is None:
        if role != "assistant":
            where = f"{where}.content"
            raise RequestError(f"{where} is missing; send a string or a list of text parts.", where)
        return Turn(role, "")
    if isinstance(content, str):
        return Turn(role, content)
    if len(content) > MAX_PARTS:
        raise RequestError(f"{where}.content has more than {MAX_PARTS} parts.", f"{where}.content")
    for index, part in enumerate(content):
        if part.type == "refusal" and role == "assistant" and part.refusal is not None:
            continue
        if part.type != "text":
            raise RequestError(
                f"{where}.content[{index}].type is {_short(part.type)}; only 'text' parts are"
                " supported.",
                f"{where}.content[{index}].type",
            )
        if part.text is None:
            raise RequestError(
                f"{where}.content[{index}].text is missing.", f"{where}.content[{index}].text"
            )
    return Turn(role, "".join(part.text or part.refusal or "" for part in content))


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """One string, several, one list of token ids, or several."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise RequestError(
            "prompt is empty; send a string, a list of strings, or token ids.", "prompt"
        )
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise RequestError("prompt mixes strings, token ids and lists; send one kind.", "prompt")
    if kinds == {int}:
        ids = tuple(item for item in prompt if isinstance(item, int))
        if min(ids) < 0:
            raise RequestError("prompt holds a negative token id.", "prompt")
        return (ids,)
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed.", "prompt"
        )
    if not all(prompt):
        raise RequestError("prompt holds an empty entry.", "prompt")
    return tuple(tuple(item) if isinstance(item, list) else str(item) for item in prompt)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
