"""Anthropic's Messages API, as DeepSeek's own platform offers it: read its bodies.

    body --MessagesRequest--> ChatAsk, as for /chat/completions       Piece --PartFold--> blocks

A system text, then turns with blocks as content: text, thinking, tool_use and tool_result. A
reply is a message of blocks of the first three types; in a stream, each block begins, grows and
stops. Thinking of earlier turns is left out, as DeepSeek-R1 requires, so its signature is not
checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError
from hadal.gateway.api.base import (
    MAX_MESSAGES,
    MAX_PARTS,
    Common,
    Extensions,
    check_depth,
    common_fields,
    extensions,
    schema_format,
)
from hadal.gateway.api.decoding import NO_SCHEMA, decode
from hadal.gateway.api.field_table import MESSAGE
from hadal.gateway.api.fields import NamedBody, check_fields
from hadal.gateway.edge.errors import UNTHREADED
from hadal.gateway.text.asks import INT64_MAX, AnswerFormat, ChatAsk, PastCall, Rendering, Turn
from hadal.gateway.text.thinking import ThinkingSwitch, read_thinking
from hadal.gateway.text.tools import ToolWords, read_choice, read_tools

_BLOCK_TYPE = re.compile(r"content\[\d+\]\.type$")
_Count = Annotated[int, Meta(ge=1, le=INT64_MAX)]


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class PlainBlock(msgspec.Struct):
    """Text block where no other types are allowed."""

    type: Literal["text"]
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Assistant's thinking of an earlier turn: accepted and ignored."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    """Redacted thinking from another service: accepted and ignored."""

    data: str | None = None


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """Call made by an assistant."""

    id: str
    name: str
    input: dict[str, Any]


class ToolReference(msgspec.Struct, tag="tool_reference"):
    """Reference to a deferred tool that a search found. The tool is offered from then on."""

    tool_name: str


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """Result of a call."""

    tool_use_id: str
    content: str | list[TextBlock | ToolReference] | None = None
    is_error: bool | None = None


InputBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct):
    """Message of the conversation. A system message has only text."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class ToolChoice(msgspec.Struct):
    """Policy for tool calls: "auto", "any" (must call), "tool" (must call `name`), or "none"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct):
    """Schema for the answer."""

    type: Literal["json_schema"]
    schema: msgspec.Raw = NO_SCHEMA


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class ClientTool(msgspec.Struct, kw_only=True):
    """Function offered by the client."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """True: the tool is offered only once a tool_reference names it."""


class ContextEdit(msgspec.Struct):
    """Change to the conversation before it is read. `keep`: the amount that stays."""

    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct):
    edits: list[ContextEdit] | None = None


class CountRequest(Extensions, kw_only=True):
    """Body of /v1/messages/count_tokens: a conversation."""

    model: str
    messages: list[InputMessage]
    system: str | list[PlainBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    context_management: ContextManagement | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: _Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    thread: Any = None
    """Conversation stored on the server; refused here."""


def parse_messages(body: bytes) -> ChatAsk:
    """Read a body of /v1/messages. Raises RequestError."""
    named = check_fields(body, MESSAGE)
    return named.read(lambda: _chat_of(_decode(named.body, MessagesRequest), named))


def parse_count(body: bytes) -> ChatAsk:
    """Read a body of /v1/messages/count_tokens. Raises RequestError."""
    named = check_fields(body, MESSAGE)

    def read() -> ChatAsk:
        request = _decode(named.body, CountRequest)
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        return _chat_of(MessagesRequest(**fields, max_tokens=1), named)

    return named.read(read)


def _decode(body: bytes, kind: type[CountRequest]) -> Any:
    try:
        return decode(body, kind)
    except RequestError as error:
        if error.param is not None and _BLOCK_TYPE.search(error.param):
            served = "text, thinking, redacted_thinking, tool_use or tool_result"
            raise RequestError(f"{error} Send blocks of type {served}.", error.param) from None
        raise


def _chat_of(request: MessagesRequest, named: NamedBody) -> ChatAsk:
    if request.thread is not None:
        raise RequestError(
            "thread is not supported: this server stores no conversations. Leave it out, and send all"
            " messages of the conversation.",
            "thread",
            UNTHREADED,
        )
    _check_edits(request.context_management)
    output = request.output_config or OutputConfig()
    # DeepSeek's converter for this API has a system message between turns in the user's turn.
    has_reminders = any(message.role == "system" for message in request.messages)
    reminds = {"system_reminders": True} if has_reminders else None
    thinking = read_thinking(request, output_effort=output.effort, variables=reminds)
    choice = request.tool_choice or ToolChoice("auto")
    choosing = read_choice(
        _choice_of(choice),
        read_tools(_tools_of(request.tools or [], _referenced(request.messages)), _WORDS),
        not choice.disable_parallel_tool_use,
        _WORDS,
    )
    turns, prefix = _turns(request)
    if output.format and request.output_format not in (None, output.format):
        raise RequestError(
            "output_config.format and output_format differ; send one.",
            "output_format",
        )
    format = _format_of(output.format or request.output_format)
    common = Common(
        model=request.model,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        **extensions(request),
    )
    ask = replace(
        common_fields(
            common,
            request.max_tokens,
            named.sent("max_tokens"),
            format=format,
            stop_name="stop_sequences",
        ),
        omits_reasoning=(
            isinstance(request.thinking, ThinkingSwitch) and request.thinking.display == "omitted"
        ),
        ends_with_room=True,  # Clients send a default max_tokens even if their user set none.
    )
    return ChatAsk(
        ask,
        turns,
        Rendering(thinking.is_on, thinking.template_kwargs, choosing, prefix),
        budget=thinking.budget,
        budget_field=thinking.budget_field,
        switch_field=thinking.switch_field,
    )


_CLEAR_THINKING = "clear_thinking_20251015"
"""Type of the edit that drops reasoning of earlier turns; all of it is dropped here anyway."""


def _check_edits(asked: ContextManagement | None) -> None:
    for index, edit in enumerate((asked and asked.edits) or ()):
        if edit.type != _CLEAR_THINKING:
            where = f"context_management.edits[{index}].type"
            raise RequestError(
                f"{where} is {edit.type[:40]!r}; only {_CLEAR_THINKING!r} is supported. Leave the"
                " edit out, and shorten the conversation in the client.",
                where,
            )


def _referenced(messages: Sequence[InputMessage]) -> set[str]:
    """Return the names of deferred tools that results in the conversation refer to."""
    return {
        part.tool_name
        for message in messages
        if not isinstance(message.content, str)
        for block in message.content
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
        for part in block.content
        if isinstance(part, ToolReference)
    }


def _format_of(format: OutputFormat | None) -> AnswerFormat | None:
    if format is None:
        return None
    return schema_format("answer", bytes(format.schema), "output_config.format")


_WORDS = ToolWords(
    "", "input_schema", "one of type 'any'", 'one of {"type": "tool", "name": ...}', max_name=128
)
_CLIENTS = ("bash_", "text_editor_", "memory_", "computer_", "browser_")
"""Type prefixes of tools that the client runs, with schemas defined by Anthropic."""


def _tools_of(tools: Sequence[ClientTool], referenced: Collection[str]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form, which chat templates expect. A deferred tool is left out
    unless it is in `referenced`.
    """
    given = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            runs = "the client runs; this server does not have the schema of that type"
            if not tool.type.startswith(_CLIENTS):
                runs = "a provider would have to run; this server runs no tools"
            raise RequestError(
                f"tools[{index}].type is {tool.type[:40]!r}, which {runs}. Send a tool with an"
                " input_schema.",
                f"tools[{index}].type",
            )
        if tool.defer_loading and tool.name not in referenced:
            continue
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.input_schema is None:
            raise RequestError(
                f"tools[{index}].input_schema is missing; send a JSON schema.",
                f"tools[{index}].input_schema",
            )
        check_depth(tool.input_schema, f"tools[{index}].input_schema")
        function["parameters"] = tool.input_schema
        if tool.strict:
            function["strict"] = True
        given.append({"type": "function", "function": function})
    return given


def _choice_of(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _turns(request: MessagesRequest) -> tuple[tuple[Turn, ...], str]:
    """Return the conversation and the text that the reply continues: that of a last message by the
    assistant, or "".
    """
    messages = request.messages
    if not messages:
        raise RequestError("messages is empty; send at least one message.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed.", "messages"
        )
    turns: list[Turn] = []
    if request.system:
        turns.append(Turn("system", _joined(request.system)))
    for index, message in enumerate(messages):
        for turn in _turns_of(message, f"messages[{index}]"):
            if turns and turn.role == turns[-1].role and turn.role in _JOINED:
                turns[-1] = _together(turns[-1], turn)
            else:
                turns.append(turn)
    if messages[-1].role != "assistant":
        return tuple(turns), ""
    if len(messages) == 1 or turns[-1].calls:
        raise RequestError(
            "The last message, an assistant's, cannot be continued: it is the only message, or"
            " results of its tool calls are missing. Add a user message or the results.",
            "messages",
        )
    return tuple(turns[:-1]), turns[-1].content


_JOINED = {"user": "\n", "assistant": ""}
"""Role -> separator of its texts. Consecutive messages of one of these roles become one turn. A
reply continues an assistant's text exactly, so the assistant's separator is empty.
"""


def _together(turn: Turn, more: Turn) -> Turn:
    text = _JOINED[turn.role].join(part for part in (turn.content, more.content) if part)
    return Turn(turn.role, text, (*turn.calls, *more.calls))


def _turns_of(message: InputMessage, where: str) -> Iterator[Turn]:
    """Yield a message's turns; results of tools are turns of their own."""
    blocks = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
    if len(blocks) > MAX_PARTS:
        raise RequestError(
            f"{where}.content has more than {MAX_PARTS} blocks; send fewer.", f"{where}.content"
        )
    texts: list[str] = []
    calls: list[PastCall] = []
    num_results = 0
    for number, block in enumerate(blocks):
        is_assistants = not isinstance(block, TextBlock | ToolResultBlock)
        if message.role == "system" and not isinstance(block, TextBlock):
            raise RequestError(
                f"{where}.content[{number}]: a system message may have only text blocks.",
                f"{where}.content[{number}]",
            )
        if not isinstance(block, TextBlock) and is_assistants != (message.role == "assistant"):
            raise RequestError(
                f"{where}.content[{number}]: "
                + (
                    "only assistant messages may have thinking or tool_use blocks."
                    if is_assistants
                    else "tool_result blocks belong in a user message."
                ),
                f"{where}.content[{number}]",
            )
        match block:
            case TextBlock(text):
                texts.append(text)
            case ToolUseBlock(id, name, input):
                check_depth(input, f"{where}.content[{number}].input")
                calls.append(PastCall(id, name, json.dumps(input, ensure_ascii=False)))
            case ToolResultBlock(tool_use_id, content, is_error):
                if not tool_use_id:
                    raise RequestError(
                        f"{where}.content[{number}].tool_use_id is empty; send the id of the tool_use block.",
                        f"{where}.content[{number}].tool_use_id",
                    )
                num_results += 1
                # Templates have no other place to show that a call failed.
                failed = "Error: " if is_error else ""
                yield Turn("tool", failed + _result(content or ""), call_id=tool_use_id)
            case _:
                continue  # Thinking of earlier turns is left out.
    if texts or calls or not num_results:
        yield Turn(message.role, "".join(texts), tuple(calls))


def _result(content: str | Sequence[TextBlock | ToolReference]) -> str:
    if isinstance(content, str):
        return content
    if len(content) > MAX_PARTS:
        raise RequestError(
            f"A content field has more than {MAX_PARTS} blocks; send fewer.", "messages"
        )
    return "".join(
        part.text
        if isinstance(part, TextBlock)
        else f"The tool {part.tool_name} can be called now.\n"
        for part in content
    )


def _joined(content: str | Sequence[PlainBlock]) -> str:
    if isinstance(content, str):
        return content
    if len(content) > MAX_PARTS:
        raise RequestError(
            f"A content field has more than {MAX_PARTS} blocks; send fewer.", "messages"
        )
    return "".join(block.text for block in content)
