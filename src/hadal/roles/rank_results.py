"""One result of a step out of its ranks' parts. Knows nothing of who is a member."""

from __future__ import annotations

import msgspec

from hadal.core.plans import Draw, OpTime, StepDone, TraceEvent
from hadal.overlap.plan import COMBINE, DISPATCH


def merge(step_id: int, offsets: tuple[int, ...], parts: dict[int, StepDone]) -> StepDone:
    """Keys become the core's (`offsets`, by rank, are added); times are those of the slowest
    rank.
    """
    keys: list[int] = []
    tokens: list[int] = []
    draws: dict[int, Draw] = {}
    failed: dict[int, str] = {}
    chosen: dict[str, OpTime] = {}
    events: list[TraceEvent] = []
    for rank in sorted(parts):
        part, offset = parts[rank], offsets[rank]
        keys += [offset + key for key in part.keys]
        tokens += part.tokens
        draws.update({offset + key: draw for key, draw in part.draws.items()})
        failed.update({offset + key: reason for key, reason in part.failed.items()})
        for op_time in part.op_times:
            known = chosen.get(op_time.op)
            if known is not None:
                # An exchange lasts until the last peer has sent: only where it is shortest is it
                # the bytes' own time.
                pick = min if op_time.op in (DISPATCH, COMBINE) else max
                op_time = pick(known, op_time, key=lambda one: one.seconds)
            chosen[op_time.op] = op_time
        events += [msgspec.structs.replace(event, rank=rank) for event in part.events]
    return StepDone(
        step_id,
        tuple(keys),
        tuple(tokens),
        draws,
        max(part.elapsed_s for part in parts.values()),
        None,
        failed,
        tuple(chosen.values()),
        tuple(events),
    )
