"""Fields that several APIs share, decoded strictly, and their checks: `Common` for OpenAI's two
older endpoints, `Extensions` for every API.

Field names are OpenAI's; gateway/api/field_table lists all fields, also the refused ones. Decoding
checks ranges that depend on no other field; the functions below check the rest.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError
from hadal.core.plans import Sampling
from hadal.gateway.api.decoding import NO_SCHEMA, decode
from hadal.gateway.text.asks import INT64_MAX, AnswerFormat, CommonFields
from hadal.gateway.text.schemas import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, check_schema, is_deeper
from hadal.gateway.text.thinking import ThinkingFields

MAX_TOP_K = 2**31 - 1
MAX_CACHE_SALT_CHARS = 256
MAX_PRIORITY = 4
"""Highest priority of a request; its negative is the lowest. policy/batching applies them."""
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=INT64_MAX)]
CountOrNone = Annotated[int, Meta(ge=0, le=INT64_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UsageOptions(msgspec.Struct):
    """OpenRouter's option to ask for usage."""

    include: bool | None = None


class JsonSchema(msgspec.Struct):
    """Named schema. It is enforced even if `strict` is false."""

    name: str
    schema: msgspec.Raw = NO_SCHEMA
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = NO_SCHEMA
    """Schema without a name, as in llama.cpp, Together and Fireworks."""


class Extensions(ThinkingFields, kw_only=True):
    """Fields of every generating endpoint of all APIs; most of them are extensions. Thinking fields
    are refused where there is no chat template (gateway/api/field_table).
    """

    seed: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Extension: requests with larger values leave the queue sooner; 0 if left out."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    """Extension, as in vLLM: KV is reused only among requests of the same key and salt. "public":
    all tenants share the KV of leading system messages; for the rest the salt has no effect.
    """
    stop_repetition: bool | None = None
    """Extension: end a reply that repeats itself endlessly, with the finish reason "length".
    Default: true, but false with `ignore_eos`.
    """
    explain_cache: bool | None = None
    """Extension: usage also says why the prompt was not found whole in the cache."""
    do_sample: bool | None = None
    """Zhipu's field: false means a temperature of 0."""


def extensions(request: Extensions) -> dict[str, Any]:
    """Return the names and values of a body's `Extensions` fields, to make a `Common` of them."""
    return {name: getattr(request, name) for name in Extensions.__struct_fields__}


class Common(Extensions, kw_only=True):
    """Fields of both older OpenAI endpoints. None: left out, or sent as null."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    context_length_exceeded_behavior: Literal["error", "truncate"] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    n: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    """0 or -1: sample from all tokens."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    """Divisor of positive logits, factor of negative ones. Below the minimum, logits could become
    infinite.
    """
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    """True: also return the token ids of the prompt and the reply."""
    response_format: ResponseFormat | None = None
    """An extension in /completions."""


MAX_METADATA = 16
MAX_METADATA_CHARS = 512
MAX_NAME_CHARS = 64
"""OpenAI's limit for names of speakers."""
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_OTHER_VALUES = 65_536
"""Maximum number of values of a body besides token ids; commas in its texts count as well."""
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def common_fields(
    request: Common,
    max_tokens: int | None,
    max_name: str,
    num_logprobs: int = -1,
    *,
    format: AnswerFormat | None = None,
    prompt_name: str = "messages",
    stop_name: str = "stop",
) -> CommonFields:
    """Return the engine options of a body. `max_name`, `prompt_name` and `stop_name`: the
    endpoint's names for these fields. Raises RequestError.
    """
    if format is not None:
        check_end(request, "a response_format")
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {min_tokens} exceeds {max_name} {max_tokens}.", "min_tokens"
        )
    options = request.stream_options or StreamOptions()
    if len(request.stop_token_ids or ()) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids has more than {MAX_STOP_IDS} ids.", "stop_token_ids")
    return CommonFields(
        model=request.model,
        stream=bool(request.stream),
        include_usage=bool(
            options.include_usage
            or request.explain_cache
            or (request.usage and request.usage.include)
        ),
        n=request.n or 1,
        max_tokens=max_tokens,
        max_name=max_name,
        prompt_name=prompt_name,
        min_tokens=min_tokens,
        temperature=0.0 if request.do_sample is False else request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(0, min(request.top_k, MAX_TOP_K)),
        sampling=Sampling(
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
        stops=_stops(request.stop, stop_name),
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        ignore_eos=bool(request.ignore_eos),
        return_token_ids=bool(request.return_token_ids),
        stop_repetition=(
            not request.ignore_eos if request.stop_repetition is None else request.stop_repetition
        ),
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        explains_cache=bool(request.explain_cache),
        format=format,
        ends_with_room=request.context_length_exceeded_behavior == "truncate",
        has_usage_so_far=bool(options.continuous_usage_stats),
    )


def read_format(asked: ResponseFormat | None) -> AnswerFormat | None:
    """Return the format in `response_format`, or None for plain text. Raises RequestError."""
    if asked is None:
        return None
    beside = b"" if bytes(asked.schema) == b"null" else bytes(asked.schema)
    if asked.type == "text":
        if beside:
            raise _bad_format(
                "response_format.type is 'text', which takes no schema; send type 'json_schema'."
            )
        return None
    if asked.type not in ("json_object", "json_schema"):
        raise _bad_format(
            f"response_format.type is {shortened(asked.type)}; 'text', 'json_object' and 'json_schema'"
            " are supported."
        )
    if beside and asked.json_schema is not None:
        raise _bad_format("response_format has both schema and json_schema; send one.")
    if beside and not (asked.type == "json_object" and decode(beside, object) == {}):
        return schema_format(asked.type, beside, "response_format")
    if asked.type == "json_object":
        return AnswerFormat("json_object", None)
    if asked.json_schema is None:
        raise _bad_format("response_format.json_schema needs a name and a schema.")
    name, raw = asked.json_schema.name, bytes(asked.json_schema.schema)
    if not _SCHEMA_NAME.fullmatch(name):
        raise _bad_format(
            "response_format.json_schema.name needs 1 to 64 letters, digits, '_' and '-'."
        )
    return schema_format(name, raw, "response_format")


def schema_format(name: str, raw: bytes, field: str) -> AnswerFormat:
    """Return the format of an answer that follows a JSON schema; `field` is the request's field.
    Raises RequestError.
    """
    if len(raw) > MAX_SCHEMA_BYTES:
        raise _bad_format(
            f"The schema of {field} {name!r} has {len(raw)} bytes; at most {MAX_SCHEMA_BYTES} are"
            " allowed.",
            field,
        )
    schema = decode(raw, object)
    if not isinstance(schema, dict):
        raise _bad_format(
            f"The schema of {field} {name!r} is not an object; send a JSON object.", field
        )
    return AnswerFormat(name, check_schema(schema, f"{field} {name!r}", field), field)


def check_end(request: Common, of: str) -> None:
    """Raise RequestError for a field that would move the answer's end, because the format
    determines it. `of`: the format's name in the message.
    """
    for name, is_asked in (
        ("ignore_eos", request.ignore_eos),
        ("min_tokens", request.min_tokens),
        ("stop_token_ids", request.stop_token_ids),
    ):
        if is_asked:
            raise RequestError(
                f"{name} cannot be combined with {of}: the format determines the answer's end.",
                name,
            )


def _bad_format(message: str, field: str = "response_format") -> RequestError:
    return RequestError(message, field)


def refuse(where: str, why: str) -> NoReturn:
    """Raise RequestError for the field `where`, which begins the message."""
    raise RequestError(f"{where} {why}.", where)


def check_depth(value: Any, field: str) -> None:
    """Raise RequestError if a value nests deeper than MAX_SCHEMA_DEPTH."""
    if is_deeper(value, MAX_SCHEMA_DEPTH):
        raise RequestError(f"{field} nests deeper than {MAX_SCHEMA_DEPTH} levels.", field)


def check_ids(ask: CommonFields, vocab_size: int) -> None:
    """Raise RequestError for a token id that the model does not have."""
    biased = tuple(token for token, _ in ask.sampling.logit_bias)
    for name, tokens in (("stop_token_ids", ask.stop_token_ids), ("logit_bias", biased)):
        for token in tokens:
            if token >= vocab_size:
                raise RequestError(
                    f"{name}: {token} is not a token id; the vocabulary has {vocab_size} tokens.",
                    name,
                )


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise RequestError if the metadata exceeds OpenAI's limits for a response or a batch."""
    texts = (text for pair in metadata.items() for text in pair)
    if len(metadata) > MAX_METADATA or any(len(text) > MAX_METADATA_CHARS for text in texts):
        raise RequestError(
            f"metadata: at most {MAX_METADATA} entries of {MAX_METADATA_CHARS} characters are"
            " allowed.",
            "metadata",
        )


def _stops(stop: str | list[str] | None, name: str) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"{name} has {len(stops)} strings; at most {MAX_STOPS} are allowed.", name
        )
    for text in stops:
        if not text or len(text) > MAX_STOP_CHARS:
            raise RequestError(
                f"{name}: every string needs 1 to {MAX_STOP_CHARS} characters.", name
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
            raise RequestError(
                f"logit_bias: the key {shortened(key)} is not a token id.", "logit_bias"
            )
    return tuple((int(key), value) for key, value in bias.items())


def shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
