"""The way from the body of an API request to what is asked of the engine, every field checked.

Each complaint is a RequestError that names the field and says what to do. Knows no tokenizer:
prompts are still text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError
from hadal.core.plans import Sampling
from hadal.gateway.decoding import NO_SCHEMA, decode
from hadal.gateway.field_table import CHAT, COMPLETION
from hadal.gateway.fields import NamedBody, check_fields
from hadal.gateway.text.schemas import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, check_schema, is_deeper
from hadal.gateway.text.thinking import TemplateValue, ThinkingFields, read_thinking
from hadal.gateway.text.tools import NO_TOOLS, Choosing, read_choice, read_tools

# The bodies of /chat/completions and /completions as the API writes them, decoded strictly.
#
# Field names are the API's; gateway/field_table has all of them, and those that are not served.
# Ranges that need no other field are checked with them, the rest below.


MAX_LEGACY_LOGPROBS = 5
INT64_MAX = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_CACHE_SALT_CHARS = 256
MAX_PRIORITY = 4
"""Highest priority of a request, and its negative the lowest; policy/batching says what a level is
worth.
"""

_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Count = Annotated[int, Meta(ge=1, le=INT64_MAX)]
_CountOrNone = Annotated[int, Meta(ge=0, le=INT64_MAX)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class UsageOptions(msgspec.Struct):
    """OpenRouter's way to ask for usage."""

    include: bool | None = None


class JsonSchema(msgspec.Struct):
    """A schema by name. `strict` false is held to as well."""

    name: str
    schema: msgspec.Raw = NO_SCHEMA
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchema | None = None
    schema: msgspec.Raw = NO_SCHEMA
    """A schema without a name, as llama.cpp, Together and Fireworks have it."""


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    """The text of a part of type "refusal", which an assistant's message in a history may have."""


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call in an assistant's message of the history."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """One message of a chat as clients write it."""

    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    """What the assistant said in the place of content."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    prefix: bool | None = None
    """DeepSeek's: the reply goes on where this message ends, which is an assistant's and the last."""
    partial: bool | None = None
    """Moonshot's and DashScope's name of `prefix`."""
    reasoning_content: str | None = None
    """DeepSeek's, with `prefix`: what the reply's reasoning begins with. Nothing elsewhere, where
    clients send back what they got.
    """


class Extensions(ThinkingFields, kw_only=True):
    """Fields of every endpoint that generates, in whichever API: extensions in most of them. Those of
    thinking are refused where there is no chat template (gateway/field_table).
    """

    seed: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)] | None = None
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
    do_sample: bool | None = None
    """Zhipu's: false is a temperature of 0."""


def extensions(request: Extensions) -> dict[str, Any]:
    """What a body says of them, for `Common`."""
    return {name: getattr(request, name) for name in Extensions.__struct_fields__}


class Common(Extensions, kw_only=True):
    """Fields of both of OpenAI's endpoints. None is what a client that leaves a field out may send
    as well.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    context_length_exceeded_behavior: Literal["error", "truncate"] | None = None
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
    stop: str | list[str] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    return_token_ids: bool | None = None
    """Also give the tokens of the prompt and of the reply as ids."""
    response_format: ResponseFormat | None = None
    """For /completions an extension."""


class ChatRequest(Common, kw_only=True):
    """A body of /chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    verbosity: str | None = None
    include_reasoning: bool | None = None
    """vLLM's and OpenRouter's: false, and the reply leaves its reasoning out."""
    add_generation_prompt: bool | None = None
    """vLLM's: false, and the template does not say whose turn it is."""
    continue_final_message: bool | None = None
    """vLLM's: the reply goes on where the last message ends, whoever said it."""


class CompletionRequest(Common, kw_only=True):
    """A body of /completions."""

    prompt: str | list[str | int | list[_TokenId]]
    max_tokens: _CountOrNone | None = None
    """0: nothing is generated; with `echo` the prompt comes back."""
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    """vLLM's: how likely the prompt's own tokens are; only where the reply is not streamed."""
    best_of: _CountOrNone | None = None
    """0 is what OpenAI's description allows, and means that it was left out."""


MAX_METADATA = 16
MAX_METADATA_CHARS = 512
MAX_NAME_CHARS = 64
"""OpenAI's limit for names of those who speak."""
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_OTHER_VALUES = 65_536
"""Most values of a body besides token ids; commas in its texts count as well."""
_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_LIST = re.compile(rb'"(prompt|tokens)"\s*:\s*\[')
"""The begin of a prompt, or of what is to be a text again, that is a list. No text holds one: in a
string the quotes around the name would be escaped.
"""
_IN_IDS = b"0123456789-, \t\r\n["
PUBLIC = "public"
"""The `cache_salt` that shares a chat's leading system messages with everybody."""


@dataclass(frozen=True)
class PastCall:
    """A call of a tool that an assistant made. `arguments`: JSON as text, as it wrote them."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """One message of a chat: role system, user, assistant or tool, and its text."""

    role: str
    content: str
    calls: tuple[PastCall, ...] = ()
    """An assistant's."""
    call_id: str = ""
    """Which call a tool's message is the result of."""
    name: str = ""
    """Of who says it, for templates that show it."""

    @property
    def num_chars(self) -> int:
        """Length of its texts."""
        return len(self.content) + sum(len(call.name) + len(call.arguments) for call in self.calls)


@dataclass(frozen=True)
class AnswerFormat:
    """What an answer's text must be."""

    name: str
    schema: dict[str, Any] | None
    """None: any JSON object."""
    field: str = "response_format"
    """By which it was asked for."""


@dataclass(frozen=True)
class CommonFields:
    """What both endpoints ask of the engine. None: the model's or the deployment's default."""

    model: str
    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None
    max_name: str
    """The field that `max_tokens` was asked for by."""
    prompt_name: str
    """The field that the prompt was given by."""
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    sampling: Sampling
    """Everything but temperature, top_p, top_k and seed, which have defaults of their own."""
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
    format: AnswerFormat | None = None
    """None: any text."""
    omits_reasoning: bool = False
    """The reply says that the model thinks, and not what."""
    ends_with_room: bool = False
    """More tokens may be asked for than the context, or the server's limit, has room for: the answer
    ends there.
    """
    has_usage_so_far: bool = False
    """With `include_usage`: each chunk of a stream has the usage so far."""


@dataclass(frozen=True)
class ChatAsk:
    """A body of /chat/completions, checked."""

    ask: CommonFields
    turns: tuple[Turn, ...]
    thinking: bool | None
    """None: as the chat template has it."""
    template_kwargs: Mapping[str, TemplateValue]
    choosing: Choosing = NO_TOOLS
    prefix: str = ""
    """What the reply begins with and goes on from."""
    reasoning: str = ""
    """What its reasoning begins with; without a prefix, the reply goes on from there."""
    opens_reply: bool = True
    goes_on: bool = False
    """It goes on from the last turn."""
    budget: int | None = None
    """Most tokens of its reasoning; None: no limit of their own."""
    budget_field: str = ""
    """Field that asked for the budget."""
    switch_field: str = field(default="", compare=False)
    """Field that demands thinking, if one does."""


@dataclass(frozen=True)
class CompletionAsk:
    """A body of /completions, checked."""

    ask: CommonFields
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    has_echoed_logprobs: bool = False
    """Those of the prompt's tokens stand before those of the reply's."""
    has_prompt_logprobs: bool = False
    """vLLM's form of them."""
    suffix: str | None = None
    """What follows what is asked for; None: nothing has to."""


def parse_chat(body: bytes, api: str = CHAT) -> ChatAsk:
    """Read a body of /chat/completions, or one of `api` that has the same fields. Raises RequestError."""
    named = check_fields(body, api)
    return named.read(lambda: _chat_of(decode(named.body, ChatRequest), named))


def _chat_of(request: ChatRequest, named: NamedBody) -> ChatAsk:
    for index, tool in enumerate(request.tools or []):
        check_depth(tool, f"tools[{index}]")
    tools = read_tools(request.tools or [])
    choosing = read_choice(request.tool_choice, tools, request.parallel_tool_calls)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    name = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
    verbosity = {} if request.verbosity is None else {"verbosity": request.verbosity}
    thinking = read_thinking(request, variables=verbosity)
    turns, prefix, reasoning = _turns(request.messages), "", ""
    if _is_prefix(last := request.messages[-1]):
        turns, prefix, reasoning = turns[:-1], turns[-1].content, last.reasoning_content or ""
    goes_on = bool(request.continue_final_message)
    if goes_on:
        _check_goes_on(request, turns)
    ask = common_fields(
        request,
        request.max_completion_tokens or request.max_tokens,
        named.sent(name),
        num_logprobs,
        format=read_format(request.response_format),
    )
    hides = request.include_reasoning is False
    hides = hides or bool(request.reasoning and request.reasoning.exclude)
    if choosing.is_held:
        _check_end(request, "tools that are strict or have to be called")
    return ChatAsk(
        ask=replace(ask, omits_reasoning=hides),
        turns=turns,
        thinking=thinking.is_on,
        template_kwargs=thinking.template_kwargs,
        choosing=choosing,
        prefix=prefix,
        reasoning=reasoning,
        opens_reply=request.add_generation_prompt is not False,
        goes_on=goes_on,
        budget=thinking.budget,
        budget_field=thinking.budget_field,
        switch_field=thinking.switch_field,
    )


def _is_prefix(message: ChatMessage) -> bool:
    return bool(message.prefix or message.partial)


def _check_goes_on(request: ChatRequest, turns: tuple[Turn, ...]) -> None:
    name = "continue_final_message"
    if request.add_generation_prompt:
        raise RequestError(f"{name} and add_generation_prompt are both true; send one.", name)
    if _is_prefix(request.messages[-1]):
        raise RequestError(f"{name} and prefix are both true; send one.", name)
    if turns[-1].calls or turns[-1].call_id:
        raise RequestError(
            f"{name}: the last message is to be a text, and no call or result.", name
        )
    if request.response_format is not None and turns[-1].role != "assistant":
        raise RequestError(
            f"{name} and a response_format: the last message is to be an assistant's, as what it"
            " says belongs to the answer.",
            name,
        )


def with_model(body: bytes, name: str) -> bytes:
    """A body with this model, for one that may leave it out."""
    fields = decode(body, dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": name})


def parse_completion(body: bytes) -> CompletionAsk:
    """Read a body of /completions. Raises RequestError."""
    named = check_fields(body, COMPLETION)
    return named.read(lambda: _completion_of(decode(named.body, CompletionRequest), named))


def _completion_of(request: CompletionRequest, named: NamedBody) -> CompletionAsk:
    if request.best_of and request.best_of != (request.n or 1):
        raise RequestError("best_of other than n is not supported; leave it out.", "best_of")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError(
            "prompt_logprobs: a stream does not carry them; ask without stream, or for echo with"
            " logprobs.",
            "prompt_logprobs",
        )
    if request.suffix and request.echo:
        raise RequestError("echo and suffix exclude each other; leave one out.", "echo")
    if request.cache_salt == PUBLIC:
        raise RequestError(
            f"cache_salt is '{PUBLIC}', which shares a chat's system messages; a plain prompt has"
            " none. Send a chat, or another salt.",
            "cache_salt",
        )
    prompts = _prompts(request.prompt)
    if request.suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("suffix needs a prompt that is text.", "suffix")
    num_logprobs = -1 if request.logprobs is None else request.logprobs
    num_echoed = num_logprobs if request.echo else -1
    num_asked = -1 if request.prompt_logprobs is None else request.prompt_logprobs
    ask = common_fields(
        request,
        request.max_tokens,
        named.sent("max_tokens"),
        num_logprobs,
        format=read_format(request.response_format),
        prompt_name="prompt",
    )
    sampling = msgspec.structs.replace(ask.sampling, num_prompt_logprobs=max(num_echoed, num_asked))
    return CompletionAsk(
        ask=replace(ask, sampling=sampling),
        prompts=prompts,
        echo=bool(request.echo),
        has_echoed_logprobs=num_echoed >= 0,
        has_prompt_logprobs=num_asked >= 0,
        suffix=request.suffix or None,
    )


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A body of /tokenize in vLLM's form: a prompt, or a chat with the fields of one."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """A body of /detokenize in vLLM's form."""

    tokens: list[_TokenId]
    model: str | None = None


BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
"""What a batch can ask."""
BATCH_WINDOW = "24h"


class NewBatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body of /batches."""

    input_file_id: str
    endpoint: Annotated[str, Meta(extra_json_schema={"enum": [*BATCH_ENDPOINTS]})]
    completion_window: Annotated[str, Meta(extra_json_schema={"enum": [BATCH_WINDOW]})]
    metadata: dict[str, str] | None = None
    output_expires_after: msgspec.Raw = NO_SCHEMA
    """Not served: refused by name."""


@dataclass(frozen=True)
class SamplingDefaults:
    """How a model wants to be sampled where a client does not say otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: of all tokens."""


def with_defaults(ask: CommonFields, own: SamplingDefaults, seed: int, index: int) -> Sampling:
    """The sampling of choice `index`: the model's own where the client gave none, and a seed for
    itself.
    """
    return msgspec.structs.replace(
        ask.sampling,
        temperature=own.temperature if ask.temperature is None else ask.temperature,
        top_p=own.top_p if ask.top_p is None else ask.top_p,
        top_k=own.top_k if ask.top_k is None else ask.top_k,
        seed=(seed + index) & INT64_MAX,
    )


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
    """What a body asks of the engine. `max_name`, `prompt_name` and `stop_name` are what the endpoint
    calls these fields. Raises RequestError.
    """
    if format is not None:
        _check_end(request, "a response_format")
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
        include_usage=bool(options.include_usage or (request.usage and request.usage.include)),
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
        format=format,
        ends_with_room=request.context_length_exceeded_behavior == "truncate",
        has_usage_so_far=bool(options.continuous_usage_stats),
    )


def read_format(asked: ResponseFormat | None) -> AnswerFormat | None:
    """What `response_format` says. Raises RequestError."""
    if asked is None:
        return None
    beside = b"" if bytes(asked.schema) == b"null" else bytes(asked.schema)
    if asked.type == "text":
        if beside:
            raise _bad_format(
                "response_format.schema needs response_format.type 'json_schema', and it is 'text'."
            )
        return None
    if asked.type not in ("json_object", "json_schema"):
        raise _bad_format(
            f"response_format.type is {_short(asked.type)}; 'text', 'json_object' and 'json_schema'"
            " are supported."
        )
    if beside and asked.json_schema is not None:
        raise _bad_format("response_format has a schema and a json_schema; send one.")
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
    """An answer that a JSON schema says, which `field` asks for. Raises RequestError."""
    if len(raw) > MAX_SCHEMA_BYTES:
        raise _bad_format(
            f"The schema of {field} {name!r} has {len(raw)} bytes; at most {MAX_SCHEMA_BYTES} are"
            " allowed.",
            field,
        )
    schema = decode(raw, object)
    if not isinstance(schema, dict):
        raise _bad_format(f"The schema of {field} {name!r} is no object, as it has to be.", field)
    return AnswerFormat(name, check_schema(schema, f"{field} {name!r}", field), field)


def _check_end(request: Common, of: str) -> None:
    for name, is_asked in (
        ("ignore_eos", request.ignore_eos),
        ("min_tokens", request.min_tokens),
        ("stop_token_ids", request.stop_token_ids),
    ):
        if is_asked:
            raise RequestError(
                f"{name} and {of} exclude each other: the format says where the answer ends.", name
            )


def _bad_format(message: str, field: str = "response_format") -> RequestError:
    return RequestError(message, field)


def check_depth(value: Any, field: str) -> None:
    """Raise RequestError for what nests deeper than anything needs to."""
    if is_deeper(value, MAX_SCHEMA_DEPTH):
        raise RequestError(f"{field} nests deeper than {MAX_SCHEMA_DEPTH} levels.", field)


def check_ids(ask: CommonFields, vocab_size: int) -> None:
    """Raise RequestError for a token id that the model does not have."""
    biased = tuple(token for token, _ in ask.sampling.logit_bias)
    for name, tokens in (("stop_token_ids", ask.stop_token_ids), ("logit_bias", biased)):
        for token in tokens:
            if token >= vocab_size:
                raise RequestError(
                    f"{name}: {token} is no token id; the vocabulary has {vocab_size}.", name
                )


def check_metadata(metadata: dict[str, str]) -> None:
    """Raise RequestError for more of it than OpenAI takes with a response or a batch."""
    texts = (text for pair in metadata.items() for text in pair)
    if len(metadata) > MAX_METADATA or any(len(text) > MAX_METADATA_CHARS for text in texts):
        raise RequestError(
            f"metadata: at most {MAX_METADATA} entries of {MAX_METADATA_CHARS} characters are"
            " allowed.",
            "metadata",
        )


def read_limit(query: Mapping[str, str], most: int, default: int = 20) -> int:
    """How many objects of a list are asked for. Raises RequestError."""
    text = query.get("limit", str(default))
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= most:
        raise RequestError(f"limit is {text[:40]!r}; 1 to {most} is possible.", "limit")
    return int(text)


def is_ascending(query: Mapping[str, str]) -> bool:
    """The order in which a list is asked for: what is left out is descending. Raises RequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order has to be 'asc' or 'desc'.", "order")
    return order == "asc"


def list_page(objects: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A page of a list. `objects`: one more than fits, if there are more."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }


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
        name = found[1].decode()
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
                    f"{name} has {num_ids} tokens or more; at most {max_tokens} are allowed."
                    f" Shorten {name}.",
                    name,
                    "context_length_exceeded",
                )
            if number > MAX_PROMPTS + 1:  # The last may be what follows a list of lists.
                raise RequestError(
                    f"{name} has more than {MAX_PROMPTS} entries; no more are allowed.", name
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
            raise RequestError(f"logit_bias: the key {_short(key)} is no token id.", "logit_bias")
    return tuple((int(key), value) for key, value in bias.items())


_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def _turns(messages: list[ChatMessage]) -> tuple[Turn, ...]:
    if not messages:
        raise RequestError("messages is empty; send at least one message.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed.", "messages"
        )
    for index, message in enumerate(messages):
        if _is_prefix(message) and (message is not messages[-1] or message.role != "assistant"):
            raise RequestError(
                f"messages[{index}].prefix: the reply can go on from the last message alone, which"
                " is to be an assistant's.",
                f"messages[{index}].prefix",
            )
    if _is_prefix(messages[-1]) and len(messages) == 1:
        raise RequestError("messages has nothing to reply to; put a message first.", "messages")
    return tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(messages))


def _turn(message: ChatMessage, where: str) -> Turn:
    if message.role == "function" or message.function_call:
        raise RequestError(f"{where}: functions are not supported; send tools.", where)
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(
            f"{where}.tool_call_id is missing; say which call this is the result of.",
            f"{where}.tool_call_id",
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{where}.tool_calls: only an assistant calls tools.", f"{where}.tool_calls"
        )
    if len(message.tool_calls or ()) > MAX_PARTS:
        raise RequestError(
            f"{where}.tool_calls has more than {MAX_PARTS} entries.", f"{where}.tool_calls"
        )
    if len(message.name or "") > MAX_NAME_CHARS:
        raise RequestError(
            f"{where}.name has more than {MAX_NAME_CHARS} characters.", f"{where}.name"
        )
    text = _text_of(message, where)
    calls = tuple(
        PastCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    )
    role, call_id = _ROLES[message.role], message.tool_call_id or ""
    return Turn(role, text, calls, call_id, message.name or "")


def _text_of(message: ChatMessage, where: str) -> str:
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"{where}.role is {_short(message.role)}; use 'system', 'developer', 'user',"
            " 'assistant' or 'tool'.",
            f"{where}.role",
        )
    if message.audio:
        raise RequestError(f"{where}.audio is not supported; leave it out.", f"{where}.audio")
    content = message.refusal if message.content is None else message.content
    if content is None:
        if role != "assistant":
            where = f"{where}.content"
            raise RequestError(f"{where} is missing; send a string or a list of text parts.", where)
        return ""
    if isinstance(content, str):
        return content
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
    return "".join(part.text or part.refusal or "" for part in content)


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
    if [] in prompt:
        raise RequestError("prompt holds an empty list of token ids.", "prompt")
    return tuple(tuple(item) if isinstance(item, list) else str(item) for item in prompt)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
