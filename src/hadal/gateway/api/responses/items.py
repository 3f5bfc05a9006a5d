"""Input items of a response: as the turns of a chat, and as lists for clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from hadal.core.errors import RequestError
from hadal.gateway.api.base import MAX_PARTS
from hadal.gateway.api.lists import is_ascending, list_page, read_limit
from hadal.gateway.api.responses.tools import OfferedTools, as_arguments
from hadal.gateway.text.asks import PastCall, Turn

MAX_LISTED = 100
"""Maximum number of items of an input on one page."""
_TEXTS = ("input_text", "output_text", "text")
_NO_TOOLS = OfferedTools()
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ITEMS = "message, function_call, custom_tool_call, their outputs, reasoning, item_reference"


def turns_of(items: str | Sequence[InputItem], tools: OfferedTools = _NO_TOOLS) -> tuple[Turn, ...]:
    """Return items as turns: calls join an assistant turn just before them. Raises RequestError."""
    if isinstance(items, str):
        return (Turn("user", items),)
    if not items:
        raise RequestError("input is empty; send a text or a list of items.", "input")
    turns: list[Turn] = []
    behind: dict[int, list[str]] = {}
    """Index of a turn -> assistant texts after its calls; they are added to the turn's text."""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type in ("function_call", "custom_tool_call"):
            is_custom = item.type == "custom_tool_call"
            call = PastCall(
                needed_text(item.call_id, f"{where}.call_id"),
                tools.flat_of(needed_text(item.name, f"{where}.name"), item.namespace),
                as_arguments(item.input or "") if is_custom else item.arguments or "{}",
            )
            if turns and turns[-1].role == "assistant":
                turns[-1] = replace(turns[-1], calls=(*turns[-1].calls, call))
            else:
                turns.append(Turn("assistant", "", (call,)))
        elif item.type in _OUTPUTS:
            output = _text_of(item.output, f"{where}.output")
            turns.append(
                Turn("tool", output, call_id=needed_text(item.call_id, f"{where}.call_id"))
            )
        elif item.type == "message":
            turn = Turn(_role_of(item, where), _text_of(item.content, f"{where}.content"))
            if turn.role == "assistant" and turns and turns[-1].calls:
                behind.setdefault(len(turns) - 1, []).append(turn.content)
            else:
                turns.append(turn)
        elif item.type != "reasoning":  # Reasoning is left out.
            raise RequestError(
                f"{where}.type is {item.type[:40]!r}; supported: {_ITEMS}.", f"{where}.type"
            )
    for at, texts in behind.items():
        turns[at] = replace(turns[at], content="".join((turns[at].content, *texts)))
    if not turns:
        raise RequestError("input contains only reasoning; send a message.", "input")
    return tuple(turns)


def listed(items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the items of an input as clients may fetch them, each with an id of its own."""
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    data: list[dict[str, Any]] = []
    taken: set[str] = set()
    for index, item in enumerate(items):
        fields = {name: getattr(item, name) for name in item.__struct_fields__}
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [ItemPart(kind, item.content)]
        if isinstance(content := fields["content"], list):
            fields["content"] = [_listed_part(part) for part in content]
        # Fields that clients' types require are present, even if they were not sent.
        if item.type == "reasoning":
            fields["summary"] = item.summary or []
        elif item.type != "message" or item.role == "assistant":
            fields["status"] = item.status or "completed"
        item_id = item.id or f"item_{index}"
        while item_id in taken:  # Ids may repeat, but pages continue from an id.
            item_id = f"{item_id}_{index}"
        taken.add(item_id)
        fields["id"] = item_id
        data.append({name: value for name, value in fields.items() if value is not None})
    return data


def _listed_part(part: ItemPart) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if part.type == "output_text" else {}
    return {**msgspec.to_builtins(part), **more}


def input_page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of `listed`'s result by `order`, `limit` and `after`. Raises RequestError."""
    limit = read_limit(query, MAX_LISTED)
    rows = items if is_ascending(query) else items[::-1]
    if after := query.get("after"):
        at = next((index for index, row in enumerate(rows) if row["id"] == after), None)
        if at is None:
            raise RequestError(
                f"after: this input has no item {after[:80]!r}; send an id of this list.", "after"
            )
        rows = rows[at + 1 :]
    return list_page(rows[: limit + 1], limit)


def needed_text(text: str | None, where: str) -> str:
    if not text:
        raise RequestError(f"{where} is missing.", where)
    return text


def _role_of(item: InputItem, where: str) -> str:
    if item.role not in ("user", "assistant", "system", "developer"):
        raise RequestError(
            f"{where}.role must be 'user', 'assistant', 'system' or 'developer'.", f"{where}.role"
        )
    return "system" if item.role == "developer" else item.role


def _text_of(content: str | Sequence[ItemPart] | None, where: str) -> str:
    if content is None:
        raise RequestError(f"{where} is missing; send a text or a list of parts.", where)
    if isinstance(content, str):
        return content
    if len(content) > MAX_PARTS:
        raise RequestError(f"{where} has more than {MAX_PARTS} parts.", where)
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal") or text is None:
            raise RequestError(
                f"{where}[{index}] is not supported; send input_text or output_text with a text.",
                f"{where}[{index}]",
            )
        texts.append(text)
    return "".join(texts)


class ItemPart(msgspec.Struct, omit_defaults=True):
    """Part of a content, an output or a summary: input_text, output_text, text, refusal ..."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """Item of a conversation: a "message", a "function_call" or "custom_tool_call" and its output,
    "reasoning", or an "item_reference" to an item of a response. Without a type it is a message.
    """

    type: str = "message"
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    """Input of a custom tool's call."""
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    status: str | None = None
    id: str | None = None
