"""Published traces as workloads.

Missing facts are not invented. Without numbers of prompt parts, no text is a prefix of another, and
every request is its own session. Does not depend on plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, takewhile

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.lab.sim.workload import NO_PREFIX, V3, Parts, Workload
from hadal.stats.traces import MOONCAKE_PART_TOKENS, azure_rows, mooncake_rows

_NEVER = (0, 0, 1 << 62)


def mooncake(lines: Iterable[str]) -> Workload:
    """Return a Mooncake trace as a workload.

    A request is the next turn of a session if it is the first one to begin with all full parts of
    the session's last prompt, and at least as long as that prompt with its answer. All leading
    parts of its prompt that any earlier request had count as seen. `idle_s`: time since the last
    use of the deepest of them. Raises ConfigError for a malformed trace.
    """
    rows = sorted(mooncake_rows(lines), key=lambda row: row.at_s)
    end_to_turn: dict[int, tuple[int, int, int]] = {}
    """Last full part of a prompt without a next turn -> (session, turn, tokens with the answer)."""
    part_to_use: dict[int, tuple[int, float]] = {}
    """Part -> (its computed tokens: 512, fewer at the end of a prompt; time of its last use)."""
    sessions, turns, seen, idle_s = [], [], [], []
    for number, row in enumerate(rows):
        full = row.parts[: row.tokens_in // MOONCAKE_PART_TOKENS]
        known = list(takewhile(part_to_use.__contains__, row.parts))
        seen.append(sum(part_to_use[part][0] for part in known))
        idle_s.append(row.at_s - part_to_use[known[-1]][1] if known else np.inf)
        end = next(
            (part for part in reversed(full) if end_to_turn.get(part, _NEVER)[2] <= row.tokens_in),
            None,
        )
        session, turn, _ = (number, -1, 0) if end is None else end_to_turn.pop(end)
        sessions.append(session)
        turns.append(turn + 1)
        part_to_use.update(dict.fromkeys(full, (MOONCAKE_PART_TOKENS, row.at_s)))
        part_to_use.update(
            dict.fromkeys(row.parts[len(full) :], (row.tokens_in % MOONCAKE_PART_TOKENS, row.at_s))
        )
        if full:
            end_to_turn[full[-1]] = (session, turn + 1, row.tokens_in + row.tokens_out)
    first = np.cumsum([0, *(len(row.parts) for row in rows)])
    parts = Parts(
        MOONCAKE_PART_TOKENS,
        first,
        np.array([part for row in rows for part in row.parts], dtype=np.int64),
    )
    at_s = np.array([row.at_s for row in rows])
    return _workload(
        at_s,
        _ints(row.tokens_in for row in rows),
        _ints(row.tokens_out for row in rows),
        session=_ints(sessions),
        turn=_ints(turns),
        tokens_seen=_ints(seen),
        idle_s=np.array(idle_s),
        parts=parts,
    )


def azure(lines: Iterable[str]) -> Workload:
    """Return one of Azure's LLM inference traces as a workload. Second 0 is the first arrival.
    Raises ConfigError for a malformed trace.
    """
    rows = azure_rows(lines)
    return _workload(
        np.array([row.at_s for row in rows]),
        _ints(row.tokens_in for row in rows),
        _ints(row.tokens_out for row in rows),
    )


def _workload(
    at_s: Floats,
    tokens_in: Ints,
    tokens_out: Ints,
    *,
    session: Ints | None = None,
    turn: Ints | None = None,
    tokens_seen: Ints | None = None,
    idle_s: Floats | None = None,
    parts: Parts | None = None,
) -> Workload:
    """Return the workload of one tenant, without system prompts."""
    assert all(a <= b for a, b in pairwise(at_s)), "arrivals are in order"
    zeros = np.zeros(len(at_s), dtype=np.int64)
    return Workload(
        at_s,
        np.arange(len(at_s)) if session is None else session,
        zeros if turn is None else turn,
        tokens_in,
        tokens_out,
        zeros,
        zeros + NO_PREFIX,
        zeros,
        zeros if tokens_seen is None else tokens_seen,
        np.full(len(at_s), np.inf) if idle_s is None else idle_s,
        zeros,
        zeros + V3,
        parts,
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)
