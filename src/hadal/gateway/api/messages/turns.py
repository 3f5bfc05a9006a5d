"""Messages of /v1/messages, and the turns that they become.

    blocks     text, thinking, tool_use, tool_result; in system messages also changes of tools
    turns      role, text, calls and reasoning; the result of a call is a turn of its own

Consecutive messages of one role are one turn. Reasoning of earlier turns goes with its turn; the
chat template decides if the model reads it again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from hadal.core.errors import RequestError
from hadal.gateway.api.base import MAX_MESSAGES, MAX_PARTS, check_depth, refuse
from hadal.gateway.api.messages.tools import (
    AvailableTools,
    ToolAdditionBlock,
    ToolReference,
    ToolRemovalBlock,
)
from hadal.gateway.api.sealed import opened
from hadal.gateway.text.asks import PastCall, Turn

_BILLING = "x-anthropic-billing-header:"
"""Beginning of a line that Claude Code puts before its system text. It differs between starts of
the client, so it would keep the whole prompt from being found in the cache.
"""


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class PlainBlock(msgspec.Struct):
    """Text block where no other types are allowed."""

    type: Literal["text"]
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """Assistant's thinking of an earlier turn. Without a text, the signature may have it."""

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


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """Result of a call."""

    tool_use_id: str
    content: str | list[TextBlock | ToolReference] | None = None
    is_error: bool | None = None


InputBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
)
_TYPE_TO_ROLE: dict[type[msgspec.Struct], str] = {
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolUseBlock: "assistant",
    ToolResultBlock: "user",
    ToolAdditionBlock: "system",
    ToolRemovalBlock: "system",
}
"""Type of a block -> the only role of messages that may have it. All may have text."""


class MessageConfig(msgspec.Struct):
    """Options that a system message sets from there on."""

    effort: str | None = None


class InputMessage(msgspec.Struct):
    """Message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock] | None = None
    """A system message may have none if it sets options."""
    clear_at: Literal["next_user_message", "never"] | None = None
    """"next_user_message": the text of this system message is not shown once a message of the user
    follows.
    """
    output_config: MessageConfig | None = None


@dataclass
class MessageTurns:
    """Turns of a conversation, as they are read from its messages."""

    tools: AvailableTools
    turns: list[Turn] = field(default_factory=list)
    call_ids: set[str] = field(default_factory=set)
    """Ids of all calls so far."""
    defining_ids: set[str] = field(default_factory=set)
    """Ids of the calls with results that define tools for the rest of the conversation."""


def read_turns(
    system: str | Sequence[PlainBlock] | None,
    messages: Sequence[InputMessage],
    tools: AvailableTools,
) -> MessageTurns:
    """Return the turns of a request; `tools` follows the changes that they make. Raises
    RequestError.
    """
    if not messages:
        raise RequestError("messages is empty; send at least one message.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed.", "messages"
        )
    chat = MessageTurns(tools)
    text = _system_text(system or "")
    if text:
        chat.turns.append(Turn("system", text))
    last_user = max((at for at, each in enumerate(messages) if each.role == "user"), default=-1)
    for at, message in enumerate(messages):
        _MessageReader(chat, message, f"messages[{at}]", is_old=at < last_user).read()
    return chat


def effort_of(messages: Sequence[InputMessage]) -> str | None:
    """Return the effort that the last message with one sets; None if none does."""
    efforts = [each.output_config.effort for each in messages if each.output_config is not None]
    return next((effort for effort in reversed(efforts) if effort is not None), None)


class _MessageReader:
    """Reader of one message."""

    def __init__(
        self, chat: MessageTurns, message: InputMessage, where: str, *, is_old: bool
    ) -> None:
        """`is_old`: a message of the user follows."""
        self._chat = chat
        self._message = message
        self._where = where
        self._is_cleared = message.clear_at == "next_user_message" and is_old
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[PastCall] = []
        self._num_others = 0
        """Number of blocks that are not part of the message's own turn."""

    def read(self) -> None:
        """Add the message's turns; results of calls are turns of their own."""
        role = self._message.role
        for number, block in enumerate(self._blocks()):
            where = f"{self._where}.content[{number}]"
            only = _TYPE_TO_ROLE.get(type(block), role)
            if only != role:
                kind = type(block).__struct_config__.tag
                refuse(where, f"is a {kind} block, which only {only} messages may have")
            self._take(block, where)
        if self._texts or self._calls or self._reasoning or not self._num_others:
            turn = Turn(
                role,
                "".join(self._texts),
                tuple(self._calls),
                reasoning="".join(self._reasoning),
            )
            self._add(turn)

    def _blocks(self) -> Sequence[InputBlock]:
        """Return the blocks. Raises RequestError, also for options of another role."""
        message, where = self._message, self._where
        for name in ("clear_at", "output_config"):
            if message.role != "system" and getattr(message, name) is not None:
                refuse(f"{where}.{name}", "is only for messages of role system")
        content = message.content
        if content is None:
            if message.output_config is None or message.output_config.effort is None:
                refuse(f"{where}.content", "is missing; send a text or blocks")
            self._num_others += 1
            return ()
        if isinstance(content, str):
            return (TextBlock(content),)
        if len(content) > MAX_PARTS:
            refuse(f"{where}.content", f"has more than {MAX_PARTS} blocks; send fewer")
        return content

    def _take(self, block: InputBlock, where: str) -> None:
        chat = self._chat
        match block:
            case TextBlock(text):
                if self._is_cleared:
                    self._num_others += 1
                else:
                    self._texts.append(text)
            case ThinkingBlock(thinking, signature):
                self._reasoning.append(thinking or opened(signature or "") or "")
            case ToolUseBlock(id, name, input):
                check_depth(input, f"{where}.input")
                self._calls.append(PastCall(id, name, json.dumps(input, ensure_ascii=False)))
                chat.call_ids.add(id)
            case ToolResultBlock(id, content, is_error):
                self._num_others += 1
                if id not in chat.call_ids:
                    refuse(
                        f"{where}.tool_use_id",
                        f"is {id[:64]!r}, the id of no earlier tool_use block",
                    )
                # Templates have no other place to show that a call failed.
                failed = "Error: " if is_error else ""
                text = self._result(content or "", id, f"{where}.content")
                self._add(Turn("tool", failed + text, call_id=id))
            case ToolAdditionBlock(tool):
                self._change(chat.tools.add(tool, f"{where}.tool"))
            case ToolRemovalBlock(tool):
                self._change(chat.tools.remove(tool, f"{where}.tool"))
            case _:
                pass  # Redacted thinking: only the server that made it can read it.

    def _change(self, text: str) -> None:
        """Show a change of tools in the message's turn."""
        self._num_others += 1
        if text:
            self._texts.append(text)

    def _result(
        self, content: str | Sequence[TextBlock | ToolReference], id: str, where: str
    ) -> str:
        if isinstance(content, str):
            return content
        if len(content) > MAX_PARTS:
            refuse(where, f"has more than {MAX_PARTS} blocks; send fewer")
        texts = []
        for number, part in enumerate(content):
            if isinstance(part, TextBlock):
                texts.append(part.text)
                continue
            self._chat.defining_ids.add(id)
            at = f"{where}[{number}].tool_name"
            texts.append(self._chat.tools.refer(part.tool_name, at))
        return "".join(texts)

    def _add(self, turn: Turn) -> None:
        turns = self._chat.turns
        if turns and turn.role == turns[-1].role and turn.role in _JOINED:
            turn = _together(turns.pop(), turn)
        turns.append(turn)


_JOINED = {"user": "\n", "assistant": ""}
"""Role -> separator of its texts. Consecutive messages of one of these roles become one turn. A
reply continues an assistant's text exactly, so the assistant's separator is empty.
"""


def _together(turn: Turn, more: Turn) -> Turn:
    text = _JOINED[turn.role].join(part for part in (turn.content, more.content) if part)
    reasoning = turn.reasoning + more.reasoning
    return Turn(turn.role, text, (*turn.calls, *more.calls), reasoning=reasoning)


def _system_text(system: str | Sequence[PlainBlock]) -> str:
    """Return the system text without the line for billing that may be its first block."""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    if len(texts) > MAX_PARTS:
        refuse("system", f"has more than {MAX_PARTS} blocks; send fewer")
    if texts and texts[0].startswith(_BILLING) and "\n" not in texts[0].rstrip("\r\n"):
        texts = texts[1:]
    return "".join(texts)
