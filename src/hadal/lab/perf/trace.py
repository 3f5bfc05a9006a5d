"""Simulated steps of a unit as one trace for Perfetto or chrome://tracing, by overlap/trace.

    step          |step 0 decode_five                                  ||step 1 ...
                  |dense layers|   |   |  |  |output head|host and draw||dense layers
    compute mb0                aaacccg>......EEE>.......                 a track for each micro-batch's ops,
    compute mb1                ......aaacccg>......EEE>.                 its exchanges, and exposed waits
    requests, KV positions, expert imbalance: counters

Parts outside the MoE layers are in the step's own track. Draft layers are drawn with the MoE
layers, the draft projection after them. Prices and counters are those of the slowest rank.
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
"""Track of a step's parts outside the MoE layers."""
_SLACK_S = 1e-9


def steps_trace(unit: str, steps: Sequence[tuple[float, StepPrice]]) -> dict[str, Any]:
    """Return a Trace Event Format object of successive steps, given as (start in seconds, price).
    Its times are in us from the start of the first step.

    A step that begins before the end of the last drawn one only adds to the counters and is not
    drawn. Raises ValueError for begins that are not finite or not in order.
    """
    begins = [begin_s for begin_s, _ in steps]
    if not all(map(math.isfinite, begins)) or begins != sorted(begins):
        raise ValueError("steps must have finite start times in ascending order.")
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
    """Return a step that begins at `begin_s`: dense layers, MoE layers, then the other parts."""
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
    """Yield (name, value) of each counter, for the slowest rank."""
    batches = priced.micro_batches
    tokens, context = (
        sum(batch.num_tokens for batch in batches),
        sum(batch.context_tokens for batch in batches),
    )
    if priced.phase == DECODE:
        # pairs = context x (1 + drafts), tokens = requests x (1 + drafts): solve for requests.
        pairs = sum(batch.num_pairs for batch in batches)
        yield "requests", round(tokens * context / pairs, 3) if pairs else 0.0
    else:
        yield "tokens", round(tokens, 3)
    yield "KV positions", round(context, 3)
    yield (
        "expert imbalance",
        round(max((batch.expert_imbalance for batch in batches), default=1.0), 4),
    )
