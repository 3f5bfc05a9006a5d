"""When a live unit's steps ran, one after another without a gap, and which of them ran while
experts moved.

Steps are taken from /trace: the ranks' own clocks, not a client's. Two traces are always asked for,
so that the unit goes on with the second when the first is full. Tracing costs every step the same
little, before as during a change.

    period of step n    from its first op on any rank to the first op of step n + 1: a pause between steps is in it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx
import msgspec

from hadal.gateway.desk.trace import TraceReply

STEPS_AT_ONCE = 20
WAIT_S = 120.0
"""Long: a trace that nobody waits for any more takes its steps all the same, and they would be
missing.
"""


@dataclass(frozen=True)
class Step:
    """Times of time.perf_counter(), which processes of a host share."""

    step_id: int
    start_s: float
    end_s: float
    num_tokens: int
    balance: dict[str, float]


@dataclass(frozen=True)
class Period:
    """From a step's start to the next one's."""

    step_id: int
    start_s: float
    seconds: float
    num_tokens: int


async def watch_steps(
    http: httpx.AsyncClient, unit: str, steps: list[Step], is_over: Callable[[], bool]
) -> None:
    """Append every step until it is over, and those of the last two traces: the unit must go on for
    that.
    """

    async def one_after_another() -> None:
        while not is_over():
            params = {"unit": unit, "steps": str(STEPS_AT_ONCE), "wait_s": str(WAIT_S)}
            reply = await http.get("/trace", params=params, timeout=WAIT_S + 10)
            reply.raise_for_status()
            steps.extend(_short(reply.content))

    await asyncio.gather(one_after_another(), one_after_another())
    steps.sort(key=lambda step: step.step_id)


def _short(content: bytes) -> list[Step]:
    found = []
    for step in msgspec.json.decode(content, type=TraceReply).steps:
        if step.events:
            start_s, end_s = min(e.start_s for e in step.events), max(e.end_s for e in step.events)
            found.append(Step(step.step_id, start_s, end_s, step.num_tokens, step.balance))
    return found


def periods(steps: Sequence[Step]) -> list[Period]:
    """Of steps that follow one another; where one is missing there is none."""
    return [
        Period(step.step_id, step.start_s, after.start_s - step.start_s, step.num_tokens)
        for step, after in pairwise(sorted(steps, key=lambda step: step.step_id))
        if after.step_id == step.step_id + 1
    ]
