"""Simulated steps of a unit as one trace for Perfetto or chrome://tracing, by overlap/trace.

    step          |step 0 decode_five                                  ||step 1 ...
                  |dense layers|   |   |  |  |output head|host and draw||dense layers
    compute mb0                aaacccg>......EEE>.......                 a track for each micro-batch's ops,
    compute mb1                ......aaacccg>......EEE>.                 its exchanges, and exposed waits
    requests, KV positions, expert imbalance: counters

What a step does outside of its MoE layers stands in the track of the step itself; drafts' layers
are drawn with the MoE layers, and their projection after them. A price is of the slowest rank, and
so is what is counted here.

Prices nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hadal.core.config import DECODE
from hadal.core.messages.questions import TracedStep
from hadal.core.plans import TraceEvent
from hadal.lab.perf.explain import DENSE_LAYERS, StepPrice
from hadal.overlap.trace import chrome_trace

STEP = "step"
"""The lane of a step's own track."""
_SLACK_S = 1e-9


def steps_trace(unit: str, steps: Sequence[tuple[float, StepPrice]]) -> dict[str, Any]:
    """A Trace Event Format object of (begin in seconds, price) of successive steps; times in us
    from the first's begin.

    A step that begins before the one before it is over is not drawn, only counted. Raises ValueError
    for times that are not finite or go back.
    """
    begins = [begin_s for begin_s, _ in steps]
    if not all(map(math.isfinite, begins)) or begins != sorted(begins):
        raise ValueError("steps must be given in the order in which they began, at finite times.")
    drawn: list[TracedStep] = []
    free_s = -math.inf
    for number, (begin_s, priced) in enumerate(steps):
        if begin_s >= free_s - _SLACK_S:
            drawn.append(traced_step(number, max(begin_s, free_s), priced))
            free_s = max(begin_s, free_s) + priced.seconds
    found = chrome_trace(unit, drawn, is_apart=True)
    for begin_s, priced in steps:
        ts = round((begin_s - begins[0]) * 1e6, 3)
        found["traceEvents"] += [
            {"ph": "C", "pid": 0, "name": name, "ts": ts, "args": {name: value}}
            for name, value in _counted(priced)
        ]
    return found


def traced_step(number: int, begin_s: float, priced: StepPrice) -> TracedStep:
    """The whole step from `begin_s` on: dense layers, MoE layers, then the other parts in turn."""
    before = [part for part in priced.parts if part.name == DENSE_LAYERS]
    after = [part for part in priced.parts if part.name != DENSE_LAYERS]
    moe_s = begin_s + sum(part.seconds for part in before)
    events, now_s = [], begin_s
    for part in before:
        events.append(TraceEvent(0, STEP, part.name, 0, 0, now_s, now_s + part.seconds))
        now_s += part.seconds
    step = priced.traced()
    events += [
        msgspec.structs.replace(event, start_s=moe_s + event.start_s, end_s=moe_s + event.end_s)
        for event in step.events
    ]
    now_s = moe_s + priced.walked.total_s
    for part in after:
        events.append(
            TraceEvent(0, STEP, part.name, 0, priced.num_layers, now_s, now_s + part.seconds)
        )
        now_s += part.seconds
    return msgspec.structs.replace(step, step_id=number, events=tuple(events))


def _counted(priced: StepPrice) -> Iterator[tuple[str, float]]:
    """(name, value) of what the step had on its slowest rank."""
    batches = priced.micro_batches
    tokens, context = (
        sum(batch.num_tokens for batch in batches),
        sum(batch.context_tokens for batch in batches),
    )
    if priced.phase == DECODE:
        # Each request's row attends to its whole context once for itself and once for each draft.
        pairs = sum(batch.num_pairs for batch in batches)
        yield "requests", round(tokens * context / pairs, 3) if pairs else 0.0
    else:
        yield "tokens", round(tokens, 3)
    yield "KV positions", round(context, 3)
    yield (
        "expert imbalance",
        round(max((batch.expert_imbalance for batch in batches), default=1.0), 4),
    )
