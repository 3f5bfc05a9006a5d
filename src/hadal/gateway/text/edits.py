"""Edit a chat before the model reads it: remove reasoning and results of calls of earlier turns.

    turns --render--> prompt --edit--> fewer turns --render--> shorter prompt ...

Edits are made in their order, each on what the one before left. Which edit is made depends on the
number of tokens, so the caller passes a function that renders turns. The client's own conversation
is unchanged: each request has it whole, and is edited anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hadal.gateway.text.asks import ContextEdit, PastCall, ReasoningEdit, ToolUsesEdit, Turn
from hadal.gateway.text.chat import Prompt

CLEARED = "[cleared]"
"""Text in place of a removed result, so that the model knows of it."""
_NO_ARGUMENTS = "{}"


@dataclass(frozen=True)
class AppliedEdit:
    """Edit that was made. `num_cleared`: number of results, or of turns with reasoning."""

    edit: ContextEdit
    num_cleared: int
    num_tokens: int
    """Number of tokens that the prompt lost."""


@dataclass(frozen=True)
class EditedPrompt:
    """Prompt, the edits that were made, and its number of tokens before all edits."""

    prompt: Prompt
    applied: tuple[AppliedEdit, ...] | None
    """None: the client did not mention edits."""
    num_original_tokens: int


def edit_prompt(
    turns: tuple[Turn, ...],
    edits: Sequence[ContextEdit],
    render: Callable[[tuple[Turn, ...]], Prompt],
) -> EditedPrompt:
    """Make the edits and return the prompt. Raises what `render` raises."""
    prompt = render(turns)
    num_original_tokens = len(prompt.ids)
    applied: list[AppliedEdit] = []
    for edit in edits:
        if isinstance(edit, ReasoningEdit):
            edited, num_cleared = _without_reasoning(turns, edit.keep)
        else:
            if not _is_due(edit, turns, len(prompt.ids)):
                continue
            edited, num_cleared = _without_results(turns, edit)
        if not num_cleared:
            continue
        shorter = render(edited)
        num_tokens = len(prompt.ids) - len(shorter.ids)
        if isinstance(edit, ToolUsesEdit) and num_tokens < edit.min_tokens:
            continue
        # A result shorter than CLEARED makes the prompt longer; no tokens were removed then.
        applied.append(AppliedEdit(edit, num_cleared, max(0, num_tokens)))
        turns, prompt = edited, shorter
    return EditedPrompt(prompt, tuple(applied), num_original_tokens)


def _is_due(edit: ToolUsesEdit, turns: Sequence[Turn], num_tokens: int) -> bool:
    num = sum(len(turn.calls) for turn in turns) if edit.is_by_calls else num_tokens
    return num > edit.trigger


def _without_reasoning(turns: tuple[Turn, ...], keep: int) -> tuple[tuple[Turn, ...], int]:
    """Return the turns, and the number of turns without their reasoning now. All messages of an
    assistant between two messages of the user count as one turn, with the calls among them.
    """
    numbers: list[int] = []
    for turn in turns:
        last = numbers[-1] if numbers else 0
        numbers.append(last + (turn.role == "user"))
    thinking = sorted({n for n, turn in zip(numbers, turns, strict=True) if turn.reasoning})
    cleared = frozenset(thinking[: max(0, len(thinking) - keep)])
    edited = tuple(
        replace(turn, reasoning="") if n in cleared else turn
        for n, turn in zip(numbers, turns, strict=True)
    )
    return edited, len(cleared)


def _without_results(turns: tuple[Turn, ...], edit: ToolUsesEdit) -> tuple[tuple[Turn, ...], int]:
    """Return the turns, and the number of results that were removed."""
    id_to_name = {call.id: call.name for turn in turns for call in turn.calls}
    ids = [turn.call_id for turn in turns if turn.role == "tool"]
    kept = {*ids[max(0, len(ids) - edit.keep) :], *edit.excluded_ids}
    cleared = {
        turn.call_id
        for turn in turns
        if turn.role == "tool"
        and turn.call_id not in kept
        and id_to_name.get(turn.call_id) not in edit.excluded
        and turn.content not in ("", CLEARED)
    }

    def without_arguments(call: PastCall) -> PastCall:
        named = edit.inputs if isinstance(edit.inputs, bool) else call.name in edit.inputs
        return replace(call, arguments=_NO_ARGUMENTS) if named and call.id in cleared else call

    edited = tuple(
        replace(turn, content=CLEARED)
        if turn.call_id in cleared
        else replace(turn, calls=tuple(map(without_arguments, turn.calls)))
        if turn.calls
        else turn
        for turn in turns
    )
    return edited, len(cleared)
