"""Field `context_management` of /v1/messages: the edits that it asks for, and their report.

    {"edits": [{"type": "clear_thinking_20251015", "keep": ...},
               {"type": "clear_tool_uses_20250919", "trigger": ..., "keep": ..., ...}]}
    reply: {"applied_edits": [{"type": ..., "cleared_tool_uses": 4, "cleared_input_tokens": 9000}]}

gateway/text/edits makes the edits. Edits that would change nothing are read and then left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError
from hadal.gateway.api.base import refuse
from hadal.gateway.text.asks import INT64_MAX, ContextEdit, ReasoningEdit, ToolUsesEdit
from hadal.gateway.text.edits import AppliedEdit

CLEAR_THINKING = "clear_thinking_20251015"
CLEAR_TOOL_USES = "clear_tool_uses_20250919"
MAX_EDITS = 4
"""Maximum number of edits in a request: each may render the prompt once more."""
_COMPACTION_FIELDS = ("instructions", "pause_after_compaction")
_TOOL_USES_FIELDS = ("trigger", "clear_at_least", "clear_tool_inputs", "exclude_tools")


class EditAmount(msgspec.Struct, forbid_unknown_fields=True):
    """Number of something: {"type": "tool_uses", "value": 3}."""

    type: str
    value: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None


class EditFields(msgspec.Struct, forbid_unknown_fields=True):
    """Change to the conversation before it is read. `keep`: the amount that stays."""

    type: str
    keep: EditAmount | str | None = None
    trigger: EditAmount | None = None
    clear_at_least: EditAmount | None = None
    clear_tool_inputs: bool | list[str] | None = None
    exclude_tools: list[str] | None = None
    instructions: Any = None
    """Field of compaction, as the next one: an edit that is not made here."""
    pause_after_compaction: Any = None


class ContextManagement(msgspec.Struct):
    edits: list[EditFields] | None = None


def read_edits(
    asked: ContextManagement | None, *, thinks: bool, excluded_ids: Collection[str]
) -> tuple[ContextEdit, ...] | None:
    """Return the edits to make; None if the field is not sent. Raises RequestError.

    `thinks`: False if the request turns thinking off. `excluded_ids`: calls with results that no
    edit removes.
    """
    if asked is None:
        return None
    edits: list[ContextEdit] = []
    given = asked.edits or []
    if len(given) > MAX_EDITS:
        raise RequestError(
            f"context_management.edits has {len(given)} entries; at most {MAX_EDITS} are allowed.",
            "context_management.edits",
        )
    for index, edit in enumerate(given):
        where = f"context_management.edits[{index}]"
        if edit.type == CLEAR_THINKING:
            if index:
                refuse(f"{where}.type", f"is {CLEAR_THINKING!r}, which must be the first edit")
            if not thinks:
                refuse(f"{where}.type", f"is {CLEAR_THINKING!r}, but thinking is disabled")
            _check_absent(edit, (*_TOOL_USES_FIELDS, *_COMPACTION_FIELDS), where)
            keep = _kept_turns(edit, where)
            edits += [] if keep is None else [ReasoningEdit(keep)]
        elif edit.type == CLEAR_TOOL_USES:
            _check_absent(edit, _COMPACTION_FIELDS, where)
            edits.append(_tool_uses(edit, where, frozenset(excluded_ids)))
        else:
            refuse(
                f"{where}.type",
                f"is {edit.type[:40]!r}; {CLEAR_THINKING!r} and {CLEAR_TOOL_USES!r} are supported."
                " Leave the edit out, and shorten the conversation in the client",
            )
    return tuple(edits)


def _check_absent(edit: EditFields, names: Sequence[str], where: str) -> None:
    """Raise RequestError for fields of other edits."""
    for name in names:
        if getattr(edit, name) is not None:
            refuse(f"{where}.{name}", f"is not a field of {edit.type!r}; leave it out")


def _kept_turns(edit: EditFields, where: str) -> int | None:
    """Return the number of turns that keep their reasoning; None: all."""
    keep = edit.keep
    if keep is None:
        return ReasoningEdit().keep
    kind = keep if isinstance(keep, str) else keep.type
    if kind == "all":
        return None
    if isinstance(keep, str) or kind != "thinking_turns":
        refuse(f"{where}.keep", 'needs "all" or {"type": "thinking_turns", "value": ...}')
    value = _value(keep, f"{where}.keep")
    if not value:
        refuse(f"{where}.keep.value", "is 0; send 1 or more")
    return value


def _tool_uses(edit: EditFields, where: str, excluded_ids: frozenset[str]) -> ToolUsesEdit:
    plain = ToolUsesEdit()
    trigger, is_by_calls = plain.trigger, False
    if edit.trigger is not None:
        trigger = _typed(edit.trigger, ("input_tokens", "tool_uses"), f"{where}.trigger")
        is_by_calls = edit.trigger.type == "tool_uses"
    keep, least = plain.keep, plain.min_tokens
    if isinstance(edit.keep, str):
        refuse(f"{where}.keep", 'needs {"type": "tool_uses", "value": ...}')
    if edit.keep is not None:
        keep = _typed(edit.keep, ("tool_uses",), f"{where}.keep")
    if edit.clear_at_least is not None:
        least = _typed(edit.clear_at_least, ("input_tokens",), f"{where}.clear_at_least")
    inputs = edit.clear_tool_inputs or False
    return ToolUsesEdit(
        trigger=trigger,
        is_by_calls=is_by_calls,
        keep=keep,
        min_tokens=least,
        excluded=frozenset(edit.exclude_tools or ()),
        excluded_ids=excluded_ids,
        inputs=inputs if isinstance(inputs, bool) else frozenset(inputs),
    )


def _typed(amount: EditAmount, types: Sequence[str], where: str) -> int:
    if amount.type not in types:
        refuse(f"{where}.type", f"is {amount.type[:40]!r}; send {' or '.join(map(repr, types))}")
    return _value(amount, where)


def _value(amount: EditAmount, where: str) -> int:
    if amount.value is None:
        refuse(f"{where}.value", "is missing; send a number")
    return amount.value


def report(applied: Sequence[AppliedEdit]) -> dict[str, Any]:
    """Return the field `context_management` of a reply."""
    return {"applied_edits": [*map(_reported, applied)]}


def _reported(one: AppliedEdit) -> dict[str, Any]:
    is_thinking = isinstance(one.edit, ReasoningEdit)
    return {
        "type": CLEAR_THINKING if is_thinking else CLEAR_TOOL_USES,
        "cleared_thinking_turns" if is_thinking else "cleared_tool_uses": one.num_cleared,
        "cleared_input_tokens": one.num_tokens,
    }
