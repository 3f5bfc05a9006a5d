"""Workloads small enough to count by hand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hadal.lab.sim.workload import NO_PREFIX, V3, Workload


class Row(NamedTuple):
    at_s: float
    session: int
    turn: int
    tokens_in: int
    tokens_out: int
    tokens_reasoning: int = 0
    tokens_seen: int = 0
    idle_s: float = np.inf
    prefix: int = NO_PREFIX
    prefix_tokens: int = 0
    model: int = V3


def of(*rows: Row) -> Workload:
    """Return a workload of these requests, of one tenant."""
    at_s, session, turn, num_in, num_out, reasoning, seen, idle_s, prefix, prefix_tokens, model = (
        map(np.array, zip(*rows, strict=True))
    )
    return Workload(
        at_s,
        session,
        turn,
        num_in,
        num_out,
        reasoning,
        prefix,
        prefix_tokens,
        seen,
        idle_s,
        np.zeros_like(turn),
        model,
    )
