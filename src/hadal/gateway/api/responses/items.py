"""Input items of a response: as the turns of a chat, and as lists for clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from hadal.core.errors import RequestError
from hadal.gateway.api.base import MAX_PARTS, refuse
from hadal.gateway.api.lists import is_ascending, list_page, read_limit
from hadal.gateway.api.responses.calls import (
    CALL_TYPES,
    FUNCTION,
    PATCH,
    SEARCH,
    STREAMED,
    arguments_of,
)
from hadal.gateway.api.responses.tools import (
    OfferedTools,
    ResponseTool,
    ToolSource,
    found_text,
    shown,
)
from hadal.gateway.api.sealed import opened
from hadal.gateway.text.asks import PastCall, Turn

MAX_LISTED = 100
"""Maximum number of items of an input on one page."""
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
MESSAGE, REFERENCE = "message", "item_reference"
_FERNET = "gAAAAA"
"""Beginning of all tokens of Fernet, the form of OpenAI's encrypted texts."""
REASONING, MORE_TOOLS, SEARCH_OUTPUT = "reasoning", "additional_tools", "tool_search_output"
_OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    SEARCH_OUTPUT,
)
_TYPES = (MESSAGE, "agent_message", REASONING, *CALL_TYPES, *_OUTPUTS, MORE_TOOLS, REFERENCE)


@dataclass(frozen=True)
class ItemTurns:
    """Items of an input as turns."""

    turns: tuple[Turn, ...]
    call_to_path: Mapping[str, str] = field(default_factory=dict)
    """Id of a call that an item answers -> path of that item's id."""
    num_unreadable: int = 0
    """Number of texts that another server encrypted; they are passed over."""


def turns_of(items: str | Sequence[InputItem], tools: OfferedTools) -> ItemTurns:
    """Return items as turns: calls join an assistant turn just before them. Raises RequestError."""
    if isinstance(items, str):
        return ItemTurns((Turn("user", items),))
    if not items:
        refuse("input", "is empty; send a text or a list of items")
    fold = _TurnFold(tools)
    for index, item in enumerate(items):
        fold.add(item, f"input[{index}]")
    turns = fold.end()
    if not turns:
        refuse("input", "contains no message; send one")
    return ItemTurns(turns, fold.call_to_path, fold.num_unreadable)


def sources_in(items: str | Sequence[InputItem]) -> list[ToolSource]:
    """Return the lists of tools in an input: given ones, and results of tool searches."""
    if isinstance(items, str):
        return []
    return [
        ToolSource(f"input[{index}].tools", item.tools or (), item.type == SEARCH_OUTPUT)
        for index, item in enumerate(items)
        if item.type in (MORE_TOOLS, SEARCH_OUTPUT)
    ]


def without_earlier_reasoning(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns without reasoning before the last user's."""
    last = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=0)
    return tuple(replace(turn, reasoning="") for turn in turns[:last]) + tuple(turns[last:])


class _TurnFold:
    """Turns of the items so far."""

    def __init__(self, tools: OfferedTools) -> None:
        self.call_to_path: dict[str, str] = {}
        self.num_unreadable = 0
        self._tools = tools
        self._turns: list[Turn] = []
        self._reasoning: list[str] = []
        """Reasoning that belongs to the next assistant turn."""
        self._behind: dict[int, list[str]] = {}
        """Index of a turn -> assistant texts after its calls; they are added to the turn's text."""

    def add(self, item: InputItem, where: str) -> None:
        """Add an item. Raises RequestError."""
        kind = item.type or MESSAGE
        check_type(kind, where)
        if kind in CALL_TYPES:
            self._add_call(item, CALL_TYPES[kind], where)
        elif kind in _OUTPUTS:
            self._add_output(item, where)
        elif kind == MESSAGE:
            turn = Turn(_role_of(item, where), _text_of(item.content, f"{where}.content"))
            self._add_message(turn)
        elif kind == "agent_message":
            self._add_agent_message(item, where)
        elif kind == REASONING:
            self._add_reasoning(item)

    def end(self) -> tuple[Turn, ...]:
        """Return the turns of all items."""
        for at, texts in self._behind.items():
            content = "".join((self._turns[at].content, *texts))
            self._turns[at] = replace(self._turns[at], content=content)
        return tuple(self._turns)

    def _add_call(self, item: InputItem, kind: str, where: str) -> None:
        name = needed_text(item.name, f"{where}.name") if kind in STREAMED else kind
        field = "operation" if kind == PATCH else "action" if kind != SEARCH else "arguments"
        arguments = arguments_of(
            kind, item.arguments, item.input, item.operation if kind == PATCH else item.action
        )
        if arguments is None:
            field = "arguments" if kind == FUNCTION else field
            refuse(f"{where}.{field}", "is missing or of another type")
        call_id = needed_text(item.call_id or item.id, f"{where}.call_id")
        call = PastCall(call_id, self._tools.flat_of(name, item.namespace, kind), arguments)
        if not self._turns or self._turns[-1].role != "assistant":
            self._turns.append(Turn("assistant", ""))
        last = self._with_reasoning(self._turns[-1])
        self._turns[-1] = replace(last, calls=(*last.calls, call))

    def _add_output(self, item: InputItem, where: str) -> None:
        call_id = item.call_id or (item.id if item.type == "local_shell_call_output" else None)
        call_id = needed_text(call_id, f"{where}.call_id")
        if item.type == SEARCH_OUTPUT:
            output = found_text(item.tools or (), self._tools)
        elif item.type == "apply_patch_call_output" and item.output is None:
            output = item.status or "completed"
        else:
            output = _text_of(item.output, f"{where}.output")
            if item.status == "failed":
                output = f"failed: {output}"
        self.call_to_path.setdefault(call_id, f"{where}.call_id")
        self._turns.append(Turn("tool", output, call_id=call_id))
        self._reasoning = []

    def _add_message(self, turn: Turn) -> None:
        if turn.role != "assistant":
            self._turns.append(turn)
            self._reasoning = []
        elif self._turns and self._turns[-1].calls:
            self._turns[-1] = self._with_reasoning(self._turns[-1])
            self._behind.setdefault(len(self._turns) - 1, []).append(turn.content)
        else:
            self._turns.append(self._with_reasoning(turn))

    def _add_agent_message(self, item: InputItem, where: str) -> None:
        """Add a message of another agent of the client. Its encrypted part is the text that a model
        gave to a call, which only the client's own provider encrypts.
        """
        parts = item.content if isinstance(item.content, list) else []
        given = [
            MessagePart("input_text", part.encrypted_content)
            if part.encrypted_content is not None and not part.encrypted_content.startswith(_FERNET)
            else part
            for part in parts
        ]
        kept = [part for part in given if part.encrypted_content is None]
        self.num_unreadable += len(given) - len(kept)
        text = _text_of(kept if parts else item.content, f"{where}.content")
        self._add_message(Turn("user", text))

    def _add_reasoning(self, item: InputItem) -> None:
        parts = [MessagePart(text=item.content)] if isinstance(item.content, str) else item.content
        text = "".join(part.text or "" for part in parts) if parts else None
        if text is None and item.encrypted_content:
            text = opened(item.encrypted_content)
            self.num_unreadable += text is None
        if text:
            self._reasoning.append(text)

    def _with_reasoning(self, turn: Turn) -> Turn:
        """Return the turn with the reasoning that came before it."""
        texts, self._reasoning = self._reasoning, []
        return replace(turn, reasoning="\n".join(filter(None, (turn.reasoning, *texts))))


def listed(items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the items of an input as clients may fetch them, each with an id of its own."""
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    data: list[dict[str, Any]] = []
    taken: set[str] = set()
    for index, item in enumerate(items):
        fields = {name: getattr(item, name) for name in item.__struct_fields__}
        if item.type == MESSAGE and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [MessagePart(kind, item.content)]
        if item.tools is not None:
            fields["tools"] = shown(item.tools)
        if isinstance(content := fields["content"], list):
            fields["content"] = [_listed_part(part) for part in content]
        # Fields that clients' types require are present, even if they were not sent.
        if item.type == REASONING:
            fields["summary"] = item.summary or []
        elif item.type != MORE_TOOLS and (item.type != MESSAGE or item.role == "assistant"):
            fields["status"] = item.status or "completed"
        if item.type in ("tool_search_call", SEARCH_OUTPUT):
            fields["execution"] = item.execution or "client"
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


def check_type(kind: str, where: str) -> None:
    """Raise RequestError if the item at `where` is of an unsupported type."""
    if kind not in _TYPES:
        refuse(f"{where}.type", f"is {kind[:40]!r}; supported: {', '.join(_TYPES)}")


def needed_text(text: str | None, where: str) -> str:
    if not text:
        refuse(where, "is missing")
    return text


def _role_of(item: InputItem, where: str) -> str:
    if item.role not in ("user", "assistant", "system", "developer"):
        refuse(f"{where}.role", "must be 'user', 'assistant', 'system' or 'developer'")
    return "system" if item.role == "developer" else item.role


def _text_of(content: str | Sequence[ItemPart] | None, where: str) -> str:
    if content is None:
        refuse(where, "is missing; send a text or a list of parts")
    if isinstance(content, str):
        return content
    if len(content) > MAX_PARTS:
        refuse(where, f"has more than {MAX_PARTS} parts")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, OutputPart) and (part.stdout is not None or part.stderr is not None):
            texts.append(_shell_text(part))
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal") or text is None:
            why = "is not supported; send input_text or output_text with a text"
            refuse(f"{where}[{index}]", why)
        texts.append(text)
    return "".join(texts)


def _shell_text(part: OutputPart) -> str:
    """Return the output of one of a shell's commands as a text, with the way in which it ended."""
    outcome = part.outcome or {}
    end = (
        "timed out" if outcome.get("type") == "timeout" else f"exit code {outcome.get('exit_code')}"
    )
    return "".join(
        text if text.endswith("\n") else f"{text}\n"
        for text in (part.stdout, part.stderr, f"[{end}]")
        if text
    )


class ItemPart(msgspec.Struct, omit_defaults=True):
    """Part of a content, an output or a summary: input_text, output_text, text, refusal ..."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None


class MessagePart(ItemPart):
    """Part of a content: of the types above, or an agent_message's encrypted_content."""

    encrypted_content: str | None = None


class OutputPart(ItemPart):
    """Part of a call's output: of a content's types, or the output of one of a shell's commands,
    which has no type.
    """

    stdout: str | None = None
    stderr: str | None = None
    outcome: dict[str, Any] | None = None


class InputItem(msgspec.Struct):
    """Item of a conversation: a message, a call or its output, reasoning, tools, or an
    "item_reference" to an item of a response. Without a type it is a message, or if it only has an
    id, a reference.
    """

    type: str | None = None
    role: str | None = None
    author: str | None = None
    """Agent of the client that sent an agent_message."""
    recipient: str | None = None
    content: str | list[MessagePart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    """Arguments of a call: a text, but a tool search has an object."""
    input: str | None = None
    """Input of a custom tool's call."""
    action: dict[str, Any] | None = None
    """Commands of a shell's call."""
    operation: dict[str, Any] | None = None
    """Change of a file, of a call of apply_patch."""
    output: str | list[OutputPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None
    """Reasoning, if its content is not sent."""
    tools: list[ResponseTool] | None = None
    """Tools that are offered from this item on."""
    execution: str | None = None
    """Side that runs a tool search: "client" or "server"."""
    status: str | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        if self.type is None:
            is_reference = self.id is not None and self.role is None and self.content is None
            self.type = REFERENCE if is_reference else MESSAGE
