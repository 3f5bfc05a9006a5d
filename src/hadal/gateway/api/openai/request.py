"""Read a request body of OpenAI's older APIs into engine options, checking every field.

Bodies of /chat/completions and /completions are decoded strictly into structs with the API's field
names; gateway/api/field_table lists all fields, also those not served. Structs check ranges that
depend on no other field; the functions below check the rest. Each RequestError names the
field; most say what to do. The bodies of /tokenize and /detokenize are here too. Does not depend on
a tokenizer: prompts are texts or the client's ids.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError
from hadal.gateway.api.base import (
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_OTHER_VALUES,
    MAX_PARTS,
    Common,
    Count,
    CountOrNone,
    TokenId,
    check_depth,
    check_end,
    common_fields,
    read_format,
    shortened,
)
from hadal.gateway.api.decoding import decode
from hadal.gateway.api.field_table import CHAT, COMPLETION
from hadal.gateway.api.fields import NamedBody, check_fields
from hadal.gateway.text.asks import PUBLIC, ChatAsk, CompletionAsk, PastCall, Rendering, Turn
from hadal.gateway.text.thinking import read_thinking
from hadal.gateway.text.tools import read_choice, read_tools

MAX_LEGACY_LOGPROBS = 5


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    """Text of a "refusal" part, which an assistant's earlier message may have."""


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """Call in an assistant's message of the history."""

    id: str
    function: CalledFunction
    type: str = "function"


class ReasoningDetail(msgspec.Struct):
    """OpenRouter's form of a reasoning. Only entries of type "reasoning.text" have a text."""

    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a chat, in the client's form."""

    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    """Refusal that the assistant sent instead of content."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    prefix: bool | None = None
    """DeepSeek's field: the reply continues this message, the last one, by the assistant."""
    partial: bool | None = None
    """Name of `prefix` at Moonshot and DashScope."""
    reasoning_content: str | None = None
    """Reasoning of the assistant's message, for templates that show it. With `prefix`: beginning of
    the reply's reasoning.
    """
    reasoning: str | None = None
    """Name of `reasoning_content` at OpenRouter and in vLLM."""
    reasoning_details: list[ReasoningDetail] | None = None
    """OpenRouter's other form, read if the message has no reasoning as a text."""


class ChatRequest(Common, kw_only=True):
    """Body of /chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    verbosity: str | None = None
    include_reasoning: bool | None = None
    """Field of vLLM and OpenRouter: false omits the reasoning from the reply."""
    add_generation_prompt: bool | None = None
    """vLLM's field. False: the template does not add the header of the assistant's next turn."""
    continue_final_message: bool | None = None
    """vLLM's field: the reply continues the last message, of any role but tool."""


class CompletionRequest(Common, kw_only=True):
    """Body of /completions."""

    prompt: str | list[str | int | list[TokenId]]
    max_tokens: CountOrNone | None = None
    """0: nothing is generated; with `echo` the prompt is returned."""
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    """vLLM's field: log-probabilities of the prompt's tokens; only without streaming."""
    best_of: CountOrNone | None = None
    """0: OpenAI's description allows it; it counts as left out."""


MAX_PROMPTS = 64
_LIST = re.compile(rb'"(prompt|tokens)"\s*:\s*\[')
"""Beginning of a list of prompts, or of tokens to decode. It cannot occur inside a string, where
the quotes around the name would be escaped.
"""
_IN_IDS = b"0123456789-, \t\r\n["


def parse_chat(body: bytes, api: str = CHAT) -> ChatAsk:
    """Read a body of /chat/completions, or of an `api` with equal fields. Raises RequestError."""
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
    if _is_prefix(request.messages[-1]):
        turns, prefix, reasoning = turns[:-1], turns[-1].content, turns[-1].reasoning
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
    if choosing.is_demanded:
        check_end(request, "tools that are strict or required")
    return ChatAsk(
        ask=replace(ask, omits_reasoning=hides),
        turns=turns,
        rendering=Rendering(
            thinking.is_on,
            thinking.template_kwargs,
            choosing,
            prefix,
            reasoning,
            opens_reply=request.add_generation_prompt is not False,
            goes_on=goes_on,
        ),
        budget=thinking.budget,
        budget_field=thinking.budget_field,
        switch_field=thinking.switch_field,
    )


def _is_prefix(message: ChatMessage) -> bool:
    return bool(message.prefix or message.partial)


def _check_goes_on(request: ChatRequest, turns: tuple[Turn, ...]) -> None:
    name = "continue_final_message"
    if request.add_generation_prompt:
        raise RequestError(f"{name} and add_generation_prompt are both true; set only one.", name)
    if _is_prefix(request.messages[-1]):
        raise RequestError(f"{name} and prefix are both true; set only one.", name)
    if turns[-1].calls or turns[-1].call_id:
        raise RequestError(
            f"{name}: the last message must be a text without tool calls, and not a tool result.",
            name,
        )
    if request.response_format is not None and turns[-1].role != "assistant":
        raise RequestError(
            f"{name} with response_format: the last message must have the role 'assistant', because"
            " its text is part of the answer.",
            name,
        )


def with_model(body: bytes, name: str) -> bytes:
    """Return the body with this model name, for endpoints with an optional model."""
    fields = decode(body, dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": name})


def parse_completion(body: bytes) -> CompletionAsk:
    """Read a body of /completions. Raises RequestError."""
    named = check_fields(body, COMPLETION)
    return named.read(lambda: _completion_of(decode(named.body, CompletionRequest), named))


def _completion_of(request: CompletionRequest, named: NamedBody) -> CompletionAsk:
    if request.best_of and request.best_of != (request.n or 1):
        raise RequestError("best_of must equal n; leave it out.", "best_of")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError(
            "prompt_logprobs is not supported in a stream; send stream false, or echo with logprobs.",
            "prompt_logprobs",
        )
    if request.suffix and request.echo:
        raise RequestError("echo and suffix cannot be combined; leave one out.", "echo")
    if request.cache_salt == PUBLIC:
        raise RequestError(
            f"cache_salt is '{PUBLIC}', which shares the KV of a chat's system messages; a plain"
            " prompt has none. Send a chat, or another salt.",
            "cache_salt",
        )
    prompts = _prompts(request.prompt)
    if request.suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("suffix needs a prompt of text, not token ids.", "suffix")
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
    """Body of /tokenize in vLLM's form: a prompt, or a chat with a chat's fields."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /detokenize in vLLM's form."""

    tokens: list[TokenId]
    model: str | None = None


def check_num_ids(body: bytes, max_tokens: int) -> None:
    """Raise RequestError for a body with more token ids in a row than a prompt may have, more
    prompts than MAX_PROMPTS, or more values than any body may have.

    Scans bytes only, which takes milliseconds. Parsing the numbers of a 4 MiB body takes half a
    second and blocks the process, even in a thread.
    """
    num_commas = body.count(b",")
    if num_commas > MAX_PROMPTS * max_tokens + MAX_OTHER_VALUES:
        raise RequestError(
            f"The body has {num_commas} values or more; at most {MAX_PROMPTS} prompts of"
            f" {max_tokens} tokens are allowed.",
            "prompt",
            "context_length_exceeded",
        )
    for found in _LIST.finditer(body) if num_commas > max_tokens else ():
        name = found[1].decode()
        # Scan only up to the next quote, where another list may begin: no byte is scanned twice.
        quote = body.find(b'"', found.end())
        *lists, _ = body[found.end() : quote if quote >= 0 else len(body)].split(
            b"]", MAX_PROMPTS + 2
        )
        for number, ids in enumerate(lists, 1):
            if ids.translate(None, _IN_IDS):
                break
            num_ids = ids.count(
                b","
            )  # A list has one id more than commas, or as many if a comma precedes it.
            if num_ids > max_tokens + 1:
                raise RequestError(
                    f"{name} has {num_ids} tokens or more; at most {max_tokens} are allowed."
                    f" Shorten {name}.",
                    name,
                    "context_length_exceeded",
                )
            if number > MAX_PROMPTS + 1:  # A list of lists ends with one more "]".
                raise RequestError(f"{name} has more than {MAX_PROMPTS} entries; send fewer.", name)


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
                f"messages[{index}].prefix: a reply can continue only the last message, and only if"
                " its role is 'assistant'.",
                f"messages[{index}].prefix",
            )
    if _is_prefix(messages[-1]) and len(messages) == 1:
        raise RequestError(
            "messages has only the prefix; put a user message before it.", "messages"
        )
    return tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(messages))


def _turn(message: ChatMessage, where: str) -> Turn:
    if message.role == "function" or message.function_call:
        raise RequestError(f"{where}: functions are not supported; send tools.", where)
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(
            f"{where}.tool_call_id is missing; send the id of the call with this result.",
            f"{where}.tool_call_id",
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{where}.tool_calls: only assistant messages may have tool calls.",
            f"{where}.tool_calls",
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
    reasoning = _reasoning_of(message, where)
    return Turn(role, text, calls, call_id, message.name or "", reasoning)


def _reasoning_of(message: ChatMessage, where: str) -> str:
    """Return the reasoning of an assistant's message. Clients may repeat it in other forms."""
    details = message.reasoning_details or ()
    if len(details) > MAX_PARTS:
        where = f"{where}.reasoning_details"
        raise RequestError(f"{where} has more than {MAX_PARTS} entries.", where)
    text, other = message.reasoning_content or "", message.reasoning or ""
    if text and other and text != other:
        raise RequestError(
            f"{where}.reasoning_content and {where}.reasoning have different values; send one.",
            f"{where}.reasoning",
        )
    text = text or other or "".join(each.text or "" for each in details)
    if text and message.role != "assistant":
        raise RequestError(f"{where}: only assistant messages may have a reasoning.", where)
    return text


def _text_of(message: ChatMessage, where: str) -> str:
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"{where}.role is {shortened(message.role)}; use 'system', 'developer', 'user',"
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
                f"{where}.content[{index}].type is {shortened(part.type)}; only 'text' parts are"
                " supported.",
                f"{where}.content[{index}].type",
            )
        if part.text is None:
            raise RequestError(
                f"{where}.content[{index}].text is missing.", f"{where}.content[{index}].text"
            )
    return "".join(part.text or part.refusal or "" for part in content)


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """Return one string, several strings, one list of token ids, or several lists, as prompts."""
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
            raise RequestError("prompt contains a negative token id; send ids from 0.", "prompt")
        return (ids,)
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed.", "prompt"
        )
    if [] in prompt:
        raise RequestError(
            "prompt contains an empty list; every prompt needs at least one token id.", "prompt"
        )
    return tuple(tuple(item) if isinstance(item, list) else str(item) for item in prompt)
