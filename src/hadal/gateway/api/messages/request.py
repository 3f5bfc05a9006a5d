"""Anthropic's Messages API, as DeepSeek's own platform offers it: read its bodies.

    body --MessagesRequest--> ChatAsk, as for /chat/completions       Piece --PartFold--> blocks

Messages become turns in turns.py, tools in tools.py, edits of the conversation in edits.py. A
reply is a message of blocks of text, thinking and tool_use; in a stream, each block begins, grows
and stops. Without `thinking` in the request nothing is thought, as in Anthropic's service, unless
the deployment has another setting. A model that always thinks does so without showing it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hadal.core.balance import OFF
from hadal.core.errors import RequestError
from hadal.gateway.api.base import Common, Extensions, common_fields, extensions, schema_format
from hadal.gateway.api.decoding import NO_SCHEMA, decode
from hadal.gateway.api.field_table import MESSAGE
from hadal.gateway.api.fields import NamedBody, check_fields
from hadal.gateway.api.messages.edits import ContextManagement, read_edits
from hadal.gateway.api.messages.tools import AvailableTools, ClientTool, ToolChoice
from hadal.gateway.api.messages.turns import InputMessage, PlainBlock, effort_of, read_turns
from hadal.gateway.edge.errors import UNTHREADED
from hadal.gateway.text.asks import INT64_MAX, AnswerFormat, ChatAsk, Rendering, Turn
from hadal.gateway.text.thinking import Thinking, ThinkingSwitch, read_thinking

_BLOCK_TYPES = (
    (re.compile(r"content\[\d+\]\.content\[\d+\]\.type$"), "text or tool_reference"),
    (
        re.compile(r"content\[\d+\]\.type$"),
        "text, thinking, redacted_thinking, tool_use or tool_result",
    ),
    (re.compile(r"\.tool\.type$"), "tool_reference, or tool_definition in a tool_addition"),
)
"""Path of a block's type -> served types, for errors."""
_Count = Annotated[int, Meta(ge=1, le=INT64_MAX)]


class OutputFormat(msgspec.Struct):
    """Schema for the answer."""

    type: Literal["json_schema"]
    schema: msgspec.Raw = NO_SCHEMA


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


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
    thread: Any = None
    """Conversation stored on the server; refused here."""


class MessagesRequest(CountRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: _Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None


def parse_messages(body: bytes, unasked: str = OFF) -> ChatAsk:
    """Read a body of /v1/messages. `unasked`: the deployment's gateway.unasked_thinking. Raises
    RequestError.
    """
    named = check_fields(body, MESSAGE)
    return named.read(lambda: _chat_of(_decode(named.body, MessagesRequest), named, unasked))


def parse_count(body: bytes, unasked: str = OFF) -> ChatAsk:
    """Read a body of /v1/messages/count_tokens as a body of /v1/messages. Raises RequestError."""
    named = check_fields(body, MESSAGE)

    def read() -> ChatAsk:
        request = _decode(named.body, CountRequest)
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        return _chat_of(MessagesRequest(**fields, max_tokens=1), named, unasked)

    return named.read(read)


def _decode(body: bytes, kind: type[CountRequest]) -> Any:
    try:
        return decode(body, kind)
    except RequestError as error:
        for path, served in _BLOCK_TYPES:
            if error.param is not None and path.search(error.param):
                raise RequestError(f"{error} Send type {served}.", error.param) from None
        raise


def _chat_of(request: MessagesRequest, named: NamedBody, unasked: str) -> ChatAsk:
    if request.thread is not None:
        raise RequestError(
            "thread is not supported: this server stores no conversations. Leave it out, and send all"
            " messages of the conversation.",
            "thread",
            UNTHREADED,
        )
    _check_formats(request)
    output = request.output_config or OutputConfig()
    effort = effort_of(request.messages) or output.effort
    thinking = read_thinking(request, output_effort=effort)
    tools = AvailableTools(request.tools or [])
    chat = read_turns(request.system, request.messages, tools)
    choosing = tools.choosing(request.tool_choice or ToolChoice("auto"))
    turns, prefix = _without_last(request.messages, chat.turns)
    is_off = unasked == OFF and not _is_asked(request, thinking)
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
            format=_format_of(output.format or request.output_format),
            stop_name="stop_sequences",
        ),
        omits_reasoning=(
            isinstance(request.thinking, ThinkingSwitch) and request.thinking.display == "omitted"
        ),
        hides_reasoning=is_off or thinking.is_on is False,
        ends_with_room=True,  # Clients send a default max_tokens even if their user set none.
    )
    return ChatAsk(
        ask,
        turns,
        Rendering(
            False if is_off else thinking.is_on,
            thinking.template_kwargs,
            choosing,
            prefix,
            may_stay_open=is_off,
            keeps_places=True,
        ),
        budget=thinking.budget,
        budget_field=thinking.budget_field,
        switch_field=thinking.switch_field,
        edits=read_edits(
            request.context_management,
            thinks=not _is_disabled(request.thinking),
            excluded_ids=chat.defining_ids,
        ),
    )


def _is_asked(request: CountRequest, thinking: Thinking) -> bool:
    """Return True if the request decides about thinking, or leaves it to the model."""
    by_other = thinking.is_on is not None or thinking.budget_field
    return request.thinking is not None or bool(by_other)


def _is_disabled(thinking: bool | ThinkingSwitch | None) -> bool:
    if isinstance(thinking, ThinkingSwitch):
        return thinking.type == "disabled"
    return thinking is False


def _check_formats(request: CountRequest) -> None:
    """Raise RequestError if both names of the format are sent with different formats."""
    format = request.output_config and request.output_config.format
    if format and request.output_format not in (None, format):
        raise RequestError(
            "output_config.format and output_format differ; send one.",
            "output_format",
        )


def _format_of(format: OutputFormat | None) -> AnswerFormat | None:
    if format is None:
        return None
    return schema_format("answer", bytes(format.schema), "output_config.format")


def _without_last(
    messages: Sequence[InputMessage], turns: list[Turn]
) -> tuple[tuple[Turn, ...], str]:
    """Return the conversation and the text that the reply continues: that of a last message by the
    assistant, or "". Raises RequestError.
    """
    if not turns:
        raise RequestError("messages has no text; send some.", "messages")
    if messages[-1].role != "assistant":
        return tuple(turns), ""
    if len(messages) == 1 or len(turns) == 1 or turns[-1].calls:
        raise RequestError(
            "The last message, an assistant's, cannot be continued: it is the only message, or"
            " results of its tool calls are missing. Add a user message or the results.",
            "messages",
        )
    return tuple(turns[:-1]), turns[-1].content
