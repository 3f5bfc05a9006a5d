"""Keep system messages between other turns at their place, with templates that move them.

Most templates of this family write all system messages at the prompt's beginning. A client that
adds one in each round would then change the beginning each time, and find nothing in the cache.
V3.2's writes it behind the header of the reply, where it would be the model's own words. Such a
message goes into the turn before it, in the marks of DeepSeek's converter (deepseek-recipe).
One between the first text of the user and the first answer goes to the beginning: it never moves
again, and conversations that begin with other words share it.

    system, user, system, assistant, user, system
    -->  system, user, assistant, user with <system-reminder> ... </system-reminder>
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from hadal.gateway.text.asks import Turn

FIRST, SECOND = "first text", "second text"
SAMPLE = ({"role": "user", "content": FIRST}, {"role": "system", "content": SECOND})
"""Messages that show if a template keeps the place of a system message."""


def keeps_places(rendered: str) -> bool:
    """Return True if a template kept the place of the system message in SAMPLE, before the header
    of the reply.
    """
    is_last = rendered.rstrip().endswith(SECOND)
    return 0 <= rendered.find(FIRST) < rendered.find(SECOND) and not is_last


def in_place(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns without system messages, except for those at the beginning."""
    found: list[Turn] = []
    is_reminder = False
    for turn in _with_first_ones_ahead(turns):
        follows_one = is_reminder and turn.role == "user"
        is_reminder = turn.role == "system" and bool(found) and found[-1].role != "system"
        if is_reminder:
            text = f"<system-reminder>\n{turn.content}\n</system-reminder>"
            role = "tool" if found[-1].role == "tool" else "user"
            turn = Turn(role, text, call_id=found[-1].call_id)
        # Other turns of one role stay apart, as in a chat without reminders.
        if (is_reminder or follows_one) and found[-1].role == turn.role:
            found[-1] = replace(found[-1], content=f"{found[-1].content}\n{turn.content}")
        else:
            found.append(turn)
    return tuple(found)


def _with_first_ones_ahead(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yield the turns, those of the system between the first of the user and the first answer in
    one with the first ones: some templates accept only one.
    """
    groups = [(role, list(group)) for role, group in itertools.groupby(turns, attrgetter("role"))]
    lead = groups.pop(0)[1] if groups and groups[0][0] == "system" else []
    roles = [role for role, _ in groups[:3]]
    if roles[:2] == ["user", "system"] and roles[2:] != ["user"]:
        behind = groups.pop(1)[1]
        texts = [turn.content for turn in (*lead[-1:], *behind)]
        lead = [*lead[:-1], Turn("system", "\n\n".join(filter(None, texts)))]
    yield from lead
    for _, group in groups:
        yield from group
