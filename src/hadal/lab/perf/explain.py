"""Price of a step, with a table of its stages (seconds, bound, exposed time) and a trace of this
one step. lab/perf/trace has traces of successive steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from hadal.core.messages.questions import TracedStep
from hadal.core.plans import OpTime, TraceEvent
from hadal.lab.perf.layer import Kernel, MicroBatchLoad
from hadal.lab.perf.roofline import LAUNCH, LINK, Timed
from hadal.overlap.plan import COMBINE, DISPATCH, Schedule
from hadal.overlap.trace import WAIT
from hadal.perf.costs import EVERY_LAYER, NUM_POSTS, OPS, POST
from hadal.perf.price import OpSeconds, Price, extended, price

HOST = "host"
DENSE_LAYERS = "dense layers"


@dataclass(frozen=True, slots=True)
class StepPart:
    """Part of a step outside its MoE layers."""

    name: str
    seconds: float
    bound: str


def part_of(name: str, kernels: Sequence[Timed | Kernel], num: int = 1) -> StepPart:
    """Return `num` repetitions of these kernels as a part, with the bound of the longest."""
    longest = max(kernels, key=attrgetter("seconds"))
    return StepPart(name, num * sum([kernel.seconds for kernel in kernels]), longest.bound)


@dataclass(frozen=True, slots=True)
class StageRow:
    """Row of the table of stages: a kernel or exchange of MoE layers, or a part outside of them."""

    op: str
    """Op of the schedule; "step" outside MoE layers; "post" for issuing and receiving exchanges."""
    name: str
    micro_batch_s: float
    """Seconds of the first micro-batch in one MoE layer; for other parts, of the whole step."""
    seconds: float
    """Seconds in the whole step."""
    bound: str
    """Bounding resource: compute, memory, link, launch or host."""
    exposed_s: float
    """Time that the row adds to the step: all of a kernel, and the unhidden part of an exchange."""


@dataclass(frozen=True)
class StepPrice:
    """Price of a step. The exposed times of `stages` add up to `seconds`."""

    phase: str
    schedule: Schedule
    num_layers: int
    """Number of MoE layers, and one more for each new draft."""
    walked: Price
    parts: tuple[StepPart, ...]
    micro_batches: tuple[MicroBatchLoad, ...]
    kernels: tuple[tuple[Kernel, ...], ...]
    """Kernels of an MoE layer, by micro-batch."""
    ops: tuple[OpSeconds, ...]
    tokens_per_s_gpu: float = 0.0
    """Tokens/s per GPU: computed prompt tokens or decode's output; 0 until `finished` sets it."""
    tokens_per_s_user: float | None = None
    """Output tokens/s of a request. None for prefill, where queueing determines a user's wait, and
    before `finished`.
    """
    extrapolated: tuple[str, ...] = ()
    """Inputs outside the range that the curves were fitted to, as text."""
    hbm_bytes: float = 0.0

    @cached_property
    def seconds(self) -> float:
        return self.walked.total_s + sum(part.seconds for part in self.parts)

    @property
    def micro_batch_layer_s(self) -> float:
        """Seconds of an MoE layer over the number of micro-batches, as in DeepSeek's figures."""
        return self.walked.total_s / (max(self.num_layers, 1) * len(self.micro_batches))

    def finished(
        self,
        *,
        tokens_per_s_gpu: float,
        tokens_per_s_user: float | None,
        extrapolated: tuple[str, ...],
        hbm_bytes: float,
    ) -> StepPrice:
        """Return a copy with the figures that are derived from the price."""
        return replace(
            self,
            tokens_per_s_gpu=tokens_per_s_gpu,
            tokens_per_s_user=tokens_per_s_user,
            extrapolated=extrapolated,
            hbm_bytes=hbm_bytes,
        )

    @cached_property
    def stages(self) -> tuple[StageRow, ...]:
        """Table of stages, in the order of a layer."""
        waits = self._waits()
        rows = []
        for index, kernel in enumerate(self.kernels[0]):
            total_s = self.num_layers * sum(kernels[index].seconds for kernels in self.kernels)
            exposed_s = waits.get(kernel.op, 0.0) if kernel.bound == LINK else total_s
            rows.append(
                StageRow(kernel.op, kernel.name, kernel.seconds, total_s, kernel.bound, exposed_s)
            )
        posts_s = 4 * self.num_layers * sum(op.post for op in self.ops)
        if posts_s > 0.0:
            rows.append(
                StageRow(
                    "post", "issue and receive", 4 * self.ops[0].post, posts_s, LAUNCH, posts_s
                )
            )
        for part in self.parts:
            rows.append(
                StageRow("step", part.name, part.seconds, part.seconds, part.bound, part.seconds)
            )
        return tuple(rows)

    def _waits(self) -> dict[str, float]:
        """Return the exposed time of each exchange over all layers."""
        exchanges = (DISPATCH, COMBINE)

        def of(num_layers: int) -> tuple[float, ...]:
            events: list[TraceEvent] = []
            price(self.schedule, self.ops, num_layers, events)
            waits = [event for event in events if event.lane == WAIT]
            return tuple(
                sum(e.end_s - e.start_s for e in waits if e.op == exchange)
                for exchange in exchanges
            )

        return dict(zip(exchanges, extended(self.schedule, self.num_layers, of), strict=True))

    def op_times(self) -> tuple[OpTime, ...]:
        """Return the time of each op in the whole step, as a rank reports it (perf/costs). The time
        of dense layers is divided among the ops that run in every layer, by their shares.
        """
        seconds = {
            op: self.num_layers * sum(getattr(times, op) for times in self.ops) for op in OPS
        }
        seconds[POST] *= NUM_POSTS
        every_s = sum(seconds[op] for op in EVERY_LAYER)
        dense_s = sum(part.seconds for part in self.parts if part.name == DENSE_LAYERS)
        for op in EVERY_LAYER:
            seconds[op] *= 1.0 + dense_s / every_s
        return tuple(
            OpTime(op, self.num_layers * len(self.ops), total_s) for op, total_s in seconds.items()
        )

    def traced(self, num_layers: int | None = None) -> TracedStep:
        """Return the MoE layers (or the first `num_layers`) as a traced step, for overlap/trace."""
        events: list[TraceEvent] = []
        price(self.schedule, self.ops, num_layers or self.num_layers, events)
        num_tokens = round(sum(batch.num_tokens for batch in self.micro_batches))
        return TracedStep(0, self.schedule.name, len(self.micro_batches), num_tokens, tuple(events))
