"""The way from the body of an API request to what is asked of the engine, every field checked.

Bodies of /chat/completions and /completions are decoded strictly into structs with the API's field names;
gateway/api/field_table has all of them, and those not served. Ranges that need no other field are
checked with the structs, the rest below. Each complaint is a RequestError that names the field and says
what to do. Knows no tokenizer: prompts are still text.
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


class ChatRequest(Common, kw_only=True):
    """A body of /chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None
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

    prompt: str | list[str | int | list[TokenId]]
    max_tokens: CountOrNone | None = None
    """0: nothing is generated; with `echo` the prompt comes back."""
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    """vLLM's: how likely the prompt's own tokens are; only where the reply is not streamed."""
    best_of: CountOrNone | None = None
    """0 is what OpenAI's description allows, and means that it was left out."""


MAX_PROMPTS = 64
_LIST = re.compile(rb'"(prompt|tokens)"\s*:\s*\[')
"""The begin of a prompt, or of what is to be a text again, that is a list. No text holds one: in a
string the quotes around the name would be escaped.
"""
_IN_IDS = b"0123456789-, \t\r\n["


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
        check_end(request, "tools that are strict or have to be called")
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

    tokens: list[TokenId]
    model: str | None = None


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
