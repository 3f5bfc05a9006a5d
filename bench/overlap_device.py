"""A virtual device: an op is a timed sleep, but its bytes really travel. It tests schedules and transport.

Op times are inputs, so nothing follows for a model's speed. The device has its own clock: an op starts when the
device is free and its inputs have arrived, and the thread sleeps until the op ends. A thread that wakes late
posts its next exchange late, but the device's clock does not move. So late wake-ups do not add up, and other
processes on the cores hardly matter.

`measure_virtual` runs schedules on such ranks, in turn with one full batch, and compares them with
the prices of perf/price. The messages are real bytes over the mesh; the link is paced.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.claims import Claim
from bench.overlap_ranks import Ranks
from bench.overlap_variants import DECODE, FULL, LINK, LINK_FULL, PREFILL, Variant
from bench.paced import PacedGroup
from hadal.comm.group import Exchange, Group, Interval
from hadal.model.execute import execute
from hadal.overlap.plan import (
    ATTN_CORE,
    ATTN_IN,
    COMBINE_FINISH,
    COMBINE_START,
    DISPATCH_FINISH,
    DISPATCH_START,
    EXPERTS,
    GATE,
    SHARED,
    parse,
)
from hadal.perf.price import OpSeconds

COMPUTE_OPS = (ATTN_IN, ATTN_CORE, GATE, SHARED, EXPERTS)
HEAD_BYTES = 8
"""Bytes of an exchange's header (rank, tag), which the receiver checks."""


@dataclass(frozen=True)
class DeviceCase:
    """Milliseconds per op of one micro-batch in one layer; those of dispatch and combine are at the link's
    rate. A full batch is two micro-batches.
    """

    name: str
    attn_in_ms: float
    attn_core_ms: float
    gate_ms: float
    dispatch_ms: float
    shared_ms: float
    experts_ms: float
    combine_ms: float
    num_layers: int = 6
    bandwidth_bytes_per_s: float = 50e6

    def op_seconds(self, scale: float = 1.0) -> OpSeconds:
        """Return the seconds per op, for perf/price, of a batch that is as large as `scale` micro-batches."""
        times = (
            self.attn_in_ms,
            self.attn_core_ms,
            self.gate_ms,
            self.dispatch_ms,
            self.shared_ms,
            self.experts_ms,
            self.combine_ms,
        )
        return OpSeconds(*(scale * ms * 1e-3 for ms in times))


BALANCED = DeviceCase("balanced", 4.0, 3.5, 0.5, 10.0, 2.0, 10.0, 10.0)
"""Equal times on link and compute, attention and experts: the case prefill_dual is made for."""
DECODE_LIKE = DeviceCase("decode-like", 8.0, 8.0, 0.5, 8.0, 1.0, 4.0, 8.0)
"""Long attention, short experts: the case decode_five is made for."""


class VirtualDevice:
    """Device of one rank. An executor calls `run_op` for (micro-batch, layer, op)."""

    def __init__(
        self, group: Group, case: DeviceCase, num_micro_batches: int, what: str = "both"
    ) -> None:
        """`what`: "both", "compute" (nothing is sent) or "link" (ops take no time)."""
        times = case.op_seconds(2.0 / num_micro_batches)
        self._seconds = {
            op: 0.0 if what == "link" else float(getattr(times, op)) for op in COMPUTE_OPS
        }
        self._group = group
        self._peers = (
            [peer for peer in group.members if peer != group.rank] if what != "compute" else []
        )
        self._num_bytes = {
            DISPATCH_START: int(times.dispatch * case.bandwidth_bytes_per_s),
            COMBINE_START: int(times.combine * case.bandwidth_bytes_per_s),
        }
        # Allocated beforehand, one per micro-batch, so that a post costs only the transport.
        self._payloads = {
            (micro_batch, op): torch.zeros(
                max(HEAD_BYTES, size // max(1, len(self._peers))), dtype=torch.uint8
            )
            for micro_batch in range(num_micro_batches)
            for op, size in self._num_bytes.items()
        }
        self._under_way: dict[int, tuple[int, Exchange]] = {}
        self.free_s = 0.0
        """Clock of the device: time at which it is free again."""
        self.wait_s = 0.0
        self.dispatches_s: list[float] = []
        self.combines_s: list[float] = []

    def start(self, start_s: float) -> None:
        """Set the clock. All ranks of the unit must get the same time."""
        self.free_s = start_s
        _sleep_until(start_s)

    def run_op(self, micro_batch: int, layer: int, op: str) -> Interval | None:
        """Run one op; model/execute calls this."""
        if op in self._num_bytes:
            self._post(micro_batch, layer, op)
        elif op in (DISPATCH_FINISH, COMBINE_FINISH):
            return self._finish(micro_batch, op)
        else:
            self.free_s += self._seconds[op]
            _sleep_until(self.free_s)
        return None

    def _post(self, micro_batch: int, layer: int, op: str) -> None:
        if not self._peers:
            return
        tag = (layer * 2 + micro_batch) * 2 + (op == COMBINE_START)
        payload = self._payloads[micro_batch, op]
        payload[:HEAD_BYTES] = _head(self._group.rank, tag)
        self._under_way[micro_batch] = (
            tag,
            self._group.exchange(dict.fromkeys(self._peers, payload)),
        )

    def _finish(self, micro_batch: int, op: str) -> Interval | None:
        if not self._peers:
            return None
        tag, exchange = self._under_way.pop(micro_batch)
        for peer, data in exchange.wait().items():
            expected = _head(peer, tag)
            if not torch.equal(data[:HEAD_BYTES], expected):
                raise ValueError(
                    f"rank {peer} sent {data[:HEAD_BYTES].tolist()} where {expected.tolist()} was"
                    " due."
                )
        interval = exchange.interval
        self.wait_s += max(0.0, interval.end_s - self.free_s)
        self.free_s = max(self.free_s, interval.end_s)
        seconds = interval.end_s - interval.start_s
        (self.dispatches_s if op == DISPATCH_FINISH else self.combines_s).append(seconds)
        return interval


class VirtualRank:
    """A rank that is a virtual device; implements bench/overlap_rank.Work."""

    def __init__(self, group: Group, case: DeviceCase) -> None:
        self._group = PacedGroup(group, case.bandwidth_bytes_per_s)
        self._case = case

    def run(self, question: dict[str, Any]) -> dict[str, Any]:
        """Run a schedule from `start_s` on. Return end_s on the device's clock, and the seconds of
        waiting, dispatches and combines.
        """
        num_micro_batches = question["num_micro_batches"]
        device = VirtualDevice(self._group, self._case, num_micro_batches, question["what"])
        device.start(question["start_s"])
        execute(
            parse(*question["schedule"]),
            self._case.num_layers,
            range(num_micro_batches),
            device.run_op,
        )
        return {
            "end_s": device.free_s,
            "wait_s": device.wait_s,
            "dispatches_s": device.dispatches_s,
            "combines_s": device.combines_s,
        }


def _head(rank: int, tag: int) -> Tensor:
    return torch.tensor([rank, tag], dtype=torch.int32).view(torch.uint8)


def _sleep_until(when_s: float) -> None:
    seconds = when_s - time.perf_counter()
    if seconds > 0:
        time.sleep(seconds)


VARIANTS = (FULL, PREFILL, DECODE)
PREFILL_BAR, DECODE_BAR, MAX_OVER_PRICE = 1.75, 1.5, 1.05
"""Minimum speed-ups against one full batch in sequence; largest measured time, as a multiple of the priced time."""


@dataclass
class VirtualResult:
    """Seconds of each repetition, by variant. All variants ran repetition i before any ran the next."""

    case: DeviceCase
    num_ranks: int
    priced_s: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def num_repetitions(self) -> int:
        return len(self.seconds[FULL.name])

    def fastest_s(self, variant: Variant) -> float:
        """Return the fastest repetition: other processes on the cores can only delay a thread."""
        return min(self.seconds[variant.name])

    def speed_up(self, variant: Variant) -> float:
        """Return the speed-up against one full batch."""
        return self.fastest_s(FULL) / self.fastest_s(variant)

    def error(self, variant: Variant) -> float:
        """Return the measured time as a multiple of the priced time."""
        return self.fastest_s(variant) / self.priced_s[variant.name]

    def __str__(self) -> str:
        parts = [
            f"{v.name} {self.fastest_s(v) * 1e3:.0f} ms,"
            f" {self.speed_up(v):.2f}x, {self.error(v):.3f} of its price"
            for v in VARIANTS
        ]
        told = "; ".join(parts)
        return f"EP{self.num_ranks} {self.case.name}, fastest of {self.num_repetitions}: {told}"


def measure_virtual(
    ranks: Ranks, case: DeviceCase, num_pairs: int, variants: Sequence[Variant] = VARIANTS
) -> VirtualResult:
    """Run every variant `num_pairs` times in turn. A variant's price comes from the case's op times and the
    measured times of the link.
    """
    ranks.ask({"do": "device", "case": asdict(case)})
    result = VirtualResult(case, len(ranks))
    full = _with_link(case.op_seconds(2.0), ranks, LINK_FULL)
    half = _with_link(case.op_seconds(), ranks, LINK)
    for variant in variants:
        result.priced_s[variant.name] = variant.price(full, half, case.num_layers).total_s
        result.seconds[variant.name] = []
    for _ in range(num_pairs):
        for variant in variants:
            elapsed_s = ranks.run(variant.question())[0]["elapsed_s"]
            result.seconds[variant.name].append(elapsed_s)
    return result


def claims(result: VirtualResult) -> list[Claim]:
    """Return the claims of a case: the speed-up that the schedule made for this case must reach, and the
    largest errors of prices.
    """
    if result.case.name == BALANCED.name:
        chosen, bar, what = PREFILL, PREFILL_BAR, "hides a balanced link"
    else:
        chosen, bar, what = DECODE, DECODE_BAR, "hides where attention is long"
    unit = f"EP{result.num_ranks}"
    found = [
        Claim(f"{chosen.name} {what}, {unit}", result.speed_up(chosen), "sequential", bar),
    ]
    if chosen is DECODE:
        ahead = result.fastest_s(PREFILL) / result.fastest_s(DECODE)
        found.append(
            Claim(
                f"{DECODE.name} is ahead where attention is long, {unit}", ahead, PREFILL.name, 1.0
            )
        )
    return found + [
        Claim(
            f"{variant.name} takes what its price says, {result.case.name}, {unit}",
            result.error(variant),
            "its price",
            MAX_OVER_PRICE,
            is_most=True,
        )
        for variant in (FULL, chosen)
    ]


def _with_link(times: OpSeconds, ranks: Ranks, variant: Variant) -> OpSeconds:
    """Return `times` with the measured seconds of one dispatch and one combine on an otherwise idle
    link, of the slowest rank.
    """
    answers = ranks.run(variant.question())
    dispatch_s = max(statistics.median(answer["dispatches_s"]) for answer in answers)
    combine_s = max(statistics.median(answer["combines_s"]) for answer in answers)
    return replace(times, dispatch=dispatch_s, combine=combine_s)
