"""Schedule of a layer's ops as one frozen value, checked at construction; printed, priced and
executed from the same value.

    sequential          attn_in attn_core gate dispatch> >dispatch shared experts combine> >combine
    prefill_dual   +0   attn_in attn_core gate dispatch> | >dispatch experts combine> | shared >combine
    decode_five    +2   attn_in | attn_core gate | dispatch> shared | >dispatch experts combine> | >combine |

`x>` starts a communication, `>x` finishes it, `|` ends a stage: there the other micro-batch may
run. Without `|` at the end, the last stage continues into the next layer's first, so that attention
hides the other micro-batch's combine. The offset is the number of stages by which the second
micro-batch trails. Independent of tensors and times. Source of the stages: DeepSeek-V3/R1 inference
overview, the figures of prefill and decode overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ATTN_IN, ATTN_CORE, GATE = "attn_in", "attn_core", "gate"
DISPATCH_START, DISPATCH_FINISH = "dispatch>", ">dispatch"
SHARED, EXPERTS = "shared", "experts"
COMBINE_START, COMBINE_FINISH = "combine>", ">combine"
DISPATCH, COMBINE = "dispatch", "combine"
"""Exchanges on the link between start and finish: names in times and traces, not ops of a schedule."""

NEEDS: dict[str, tuple[str, ...]] = {
    ATTN_IN: (),
    ATTN_CORE: (ATTN_IN,),
    GATE: (ATTN_CORE,),
    DISPATCH_START: (GATE,),
    DISPATCH_FINISH: (DISPATCH_START,),
    SHARED: (ATTN_CORE,),
    EXPERTS: (DISPATCH_FINISH,),
    COMBINE_START: (EXPERTS,),
    COMBINE_FINISH: (COMBINE_START, SHARED),
}
"""Op -> ops of the same layer and micro-batch that must run before it; `>combine` is the last."""


@dataclass(frozen=True)
class Schedule:
    """Order of a layer's ops, by stages. The constructor raises ValueError for an op that is
    missing, unknown, repeated or before one that it needs, and for an offset out of range.
    """

    name: str
    stages: tuple[tuple[str, ...], ...]
    offset: int | None = None
    """Stages by which micro-batch 2 trails; None: it starts after micro-batch 1 ran all layers."""
    runs_on: bool = False
    """True if a layer's last stage and the next layer's first are one: the other micro-batch does
    not run between them.
    """

    def __post_init__(self) -> None:
        done: set[str] = set()
        for op in self.ops:
            if op not in NEEDS:
                raise ValueError(f"{self.name}: {op!r} is not an op. Known: {', '.join(NEEDS)}.")
            if op in done:
                raise ValueError(f"{self.name}: {op} occurs twice.")
            missing = [need for need in NEEDS[op] if need not in done]
            if missing:
                raise ValueError(f"{self.name}: {op} comes before {', '.join(missing)}.")
            done.add(op)
        if done != NEEDS.keys():
            raise ValueError(f"{self.name}: {', '.join(sorted(NEEDS.keys() - done))} never runs.")
        if self.offset is not None and not 0 <= self.offset < len(self.stages):
            raise ValueError(
                f"{self.name}: offset {self.offset} is outside the layer's {len(self.stages)}"
                " stages."
            )

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(op for stage in self.stages for op in stage)

    def __str__(self) -> str:
        offset = "" if self.offset is None else f"+{self.offset} "
        end = "" if self.runs_on else " |"
        return f"{self.name} {offset}{' | '.join(' '.join(stage) for stage in self.stages)}{end}"


def parse(name: str, text: str, offset: int | None = None) -> Schedule:
    """Parse a schedule from one line of text. Raises ValueError with the wrong op and the reason."""
    text = text.strip()
    stages = tuple(tuple(part.split()) for part in text.removesuffix("|").split("|"))
    return Schedule(name, stages, offset, runs_on=not text.endswith("|"))


def order(
    schedule: Schedule, num_layers: int, num_micro_batches: int
) -> Iterator[tuple[int, int, str]]:
    """Yield (micro-batch, layer, op) in the order in which a rank computes them. Only this function
    interleaves.

    Micro-batches take turns of one stage each, the first always ahead, so the later half of a split
    prompt finds the earlier half's KV written.
    """
    turns: list[list[tuple[int, str]]] = []
    for layer in range(num_layers):
        for index, stage in enumerate(schedule.stages):
            ops = [(layer, op) for op in stage]
            if schedule.runs_on and index == 0 and turns:
                turns[-1] += ops
            else:
                turns.append(ops)
    if num_micro_batches == 1 or schedule.offset is None:
        for micro_batch in range(num_micro_batches):
            for ops in turns:
                yield from ((micro_batch, layer, op) for layer, op in ops)
        return
    for turn in range(len(turns) + schedule.offset):
        for micro_batch, at in ((0, turn), (1, turn - schedule.offset)):
            if 0 <= at < len(turns):
                yield from ((micro_batch, layer, op) for layer, op in turns[at])


SEQUENTIAL = parse(
    "sequential", "attn_in attn_core gate dispatch> >dispatch shared experts combine> >combine"
)
PREFILL_DUAL = parse(
    "prefill_dual",
    "attn_in attn_core gate dispatch> | >dispatch experts combine> | shared >combine",
    0,
)
DECODE_FIVE = parse(
    "decode_five",
    "attn_in | attn_core gate | dispatch> shared | >dispatch experts combine> | >combine |",
    2,
)
SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule for schedule in (SEQUENTIAL, PREFILL_DUAL, DECODE_FIVE)
}


def schedule_named(name: str) -> Schedule:
    """Return the schedule with this name. Raises ValueError if there is none."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; use one of {', '.join(SCHEDULES)}.")
    return SCHEDULES[name]
