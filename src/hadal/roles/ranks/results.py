"""One result of a step out of its ranks' parts. Knows nothing of who is a member."""

from __future__ import annotations

import msgspec

from hadal.core.drafts import summed
from hadal.core.plans import NO_LINK_BYTES, Draw, OpTime, Score, StepDone, TraceEvent
from hadal.overlap.plan import COMBINE, DISPATCH


def merge(step_id: int, offsets: tuple[int, ...], parts: dict[int, StepDone]) -> StepDone:
    """Keys become the inner leader's (`offsets`, by rank, are added), rows follow the ranks' one
    behind the other, and times are those of the slowest rank.
    """
    keys: list[int] = []
    tokens: list[int] = []
    draws: dict[int, Draw] = {}
    failed: dict[int, str] = {}
    scores: dict[int, tuple[Score, ...]] = {}
    chosen: dict[str, OpTime] = {}
    events: list[TraceEvent] = []
    link_bytes = NO_LINK_BYTES
    for rank in sorted(parts):
        part, offset = parts[rank], offsets[rank]
        draws.update({len(tokens) + row: draw for row, draw in part.draws.items()})
        keys += [offset + key for key in part.keys]
        tokens += part.tokens
        failed.update({offset + key: reason for key, reason in part.failed.items()})
        scores.update({offset + key: of_chunk for key, of_chunk in part.scores.items()})
        link_bytes = link_bytes.plus(part.link_bytes)
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
        scores=scores,
        link_bytes=link_bytes,
        drafts=summed(part.drafts for part in parts.values()),
    )
