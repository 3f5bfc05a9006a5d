"""Price a schedule: its makespan from op times, on one compute lane and one link.

Walks the same order that is executed (overlap/plan.order). The link carries one exchange at a time,
in the order of their starts; `>x` waits for its own exchange. The link is one lane although it is
full duplex: in an all-to-all every rank sends as much as it receives, so two concurrent exchanges
share the same two directions. Steps of a prototype on paced links matched these predictions within
2 % in nine of ten cases at EP2. On request it records the walk as events of the same form as a live
trace (overlap/trace draws either). Independent of the source of the times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hadal.core.plans import TraceEvent
from hadal.overlap.plan import (
    ATTN_CORE,
    ATTN_IN,
    COMBINE,
    COMBINE_START,
    DISPATCH,
    DISPATCH_FINISH,
    DISPATCH_START,
    EXPERTS,
    GATE,
    SEQUENTIAL,
    SHARED,
    Schedule,
    order,
)
from hadal.overlap.trace import COMPUTE, LINK, WAIT

_STEADY_LAYERS = 8
"""Layers after which the pipeline of two micro-batches is full: each two more add the same time."""


@dataclass(frozen=True, slots=True)
class OpSeconds:
    """Times of a micro-batch in a layer: dispatch and combine on the link, others in compute."""

    attn_in: float
    attn_core: float
    gate: float
    dispatch: float
    shared: float
    experts: float
    combine: float
    post: float = 0.0
    """Compute seconds of each start or finish of a communication (codec, copies, system calls)."""


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted times of a step of `num_layers` layers."""

    total_s: float
    exposed_s: float
    """Seconds in which compute waits for the link."""
    compute_s: float
    link_s: float


def price(
    schedule: Schedule,
    micro_batches: Sequence[OpSeconds],
    num_layers: int,
    events: list[TraceEvent] | None = None,
) -> Price:
    """Return the makespan of one or two micro-batches; append the walk to `events` as rank 0,
    starting at 0 s.
    """
    now_s = link_free_s = exposed_s = compute_s = link_s = 0.0
    arrives_s: dict[tuple[int, str], float] = {}
    computes = [
        {
            ATTN_IN: times.attn_in,
            ATTN_CORE: times.attn_core,
            GATE: times.gate,
            SHARED: times.shared,
            EXPERTS: times.experts,
        }
        for times in micro_batches
    ]
    for micro_batch, layer, op in _ops(schedule, num_layers, len(micro_batches)):
        before_s, op_s = now_s, computes[micro_batch].get(op)
        times = micro_batches[micro_batch]
        if op_s is not None:
            now_s += op_s
            compute_s += op_s
        elif op in (DISPATCH_START, COMBINE_START):
            now_s += times.post
            compute_s += times.post
            seconds = times.dispatch if op == DISPATCH_START else times.combine
            link_free_s = max(link_free_s, now_s) + seconds
            link_s += seconds
            arrives_s[micro_batch, op] = link_free_s
            if events is not None:
                name = DISPATCH if op == DISPATCH_START else COMBINE
                events.append(
                    TraceEvent(
                        0, LINK, name, micro_batch, layer, link_free_s - seconds, link_free_s
                    )
                )
        else:
            started = DISPATCH_START if op == DISPATCH_FINISH else COMBINE_START
            waits_s = max(0.0, arrives_s.pop((micro_batch, started)) - now_s)
            if events is not None and waits_s > 0.0:
                name = DISPATCH if op == DISPATCH_FINISH else COMBINE
                events.append(TraceEvent(0, WAIT, name, micro_batch, layer, now_s, now_s + waits_s))
            before_s += waits_s
            now_s += waits_s + times.post
            exposed_s += waits_s
            compute_s += times.post
        if events is not None and now_s > before_s:
            events.append(TraceEvent(0, COMPUTE, op, micro_batch, layer, before_s, now_s))
    return Price(now_s, exposed_s, compute_s, link_s)


def price_stack(schedule: Schedule, micro_batches: Sequence[OpSeconds], num_layers: int) -> Price:
    """Return the price of `num_layers` layers, extrapolated from `price` of a few (`extended`)."""

    def of(num: int) -> tuple[float, ...]:
        walked = price(schedule, micro_batches, num)
        return walked.total_s, walked.exposed_s, walked.compute_s, walked.link_s

    return Price(*extended(schedule, num_layers, of))


def extended(
    schedule: Schedule, num_layers: int, of: Callable[[int], tuple[float, ...]]
) -> tuple[float, ...]:
    """Return the sums over `num_layers` layers. `of(n)` computes them for n layers; beyond
    _STEADY_LAYERS the result is extrapolated, because a full pipeline's sums are linear in n.
    """
    if num_layers <= _STEADY_LAYERS:
        return of(num_layers)
    if schedule is SEQUENTIAL:
        return tuple(num_layers * value for value in of(1))
    short, long = of(_STEADY_LAYERS - 2), of(_STEADY_LAYERS)
    more = (num_layers - _STEADY_LAYERS) / 2
    return tuple(b + more * (b - a) for a, b in zip(short, long, strict=True))


@lru_cache(maxsize=64)
def _ops(
    schedule: Schedule, num_layers: int, num_micro_batches: int
) -> tuple[tuple[int, int, str], ...]:
    """Return the order as a tuple, cached: a leader prices the same few schedules every step."""
    return tuple(order(schedule, num_layers, num_micro_batches))
