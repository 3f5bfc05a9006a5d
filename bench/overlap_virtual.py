"""Overlap on virtual devices: measured in turn with one full batch, and beside what perf/price
says.

Ranks are processes, their messages real bytes over the mesh, the link paced; an op is a timed
sleep. See bench/overlap_device for what that proves.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from bench.claims import Claim
from bench.overlap_device import BALANCED, DeviceCase
from bench.overlap_ranks import Ranks
from bench.overlap_variants import DECODE, FULL, LINK, LINK_FULL, PREFILL, Variant
from hadal.perf.price import OpSeconds

VARIANTS = (FULL, PREFILL, DECODE)
PREFILL_BAR, DECODE_BAR, MAX_OVER_PRICE = 1.75, 1.5, 1.05
"""Speed-ups over one full batch in sequence, and measured over priced time."""


@dataclass
class VirtualResult:
    """Seconds of each repetition, by variant; repetition i of all variants ran one after the
    other.
    """

    case: DeviceCase
    num_ranks: int
    priced_s: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def num_repetitions(self) -> int:
        return len(self.seconds[FULL.name])

    def fastest_s(self, variant: Variant) -> float:
        """The fastest repetition: others on the cores only ever make a thread wake later."""
        return min(self.seconds[variant.name])

    def speed_up(self, variant: Variant) -> float:
        """Over one full batch."""
        return self.fastest_s(FULL) / self.fastest_s(variant)

    def error(self, variant: Variant) -> float:
        """Measured over priced."""
        return self.fastest_s(variant) / self.priced_s[variant.name]

    def __str__(self) -> str:
        parts = [
            f"{v.name} {self.fastest_s(v) * 1e3:.0f} ms,"
            f" {self.speed_up(v):.2f}x, {self.error(v):.3f} of its price"
            for v in VARIANTS
        ]
        told = "; ".join(parts)
        return f"EP{self.num_ranks} {self.case.name}, fastest of {self.num_repetitions}: {told}"


def measure(
    ranks: Ranks, case: DeviceCase, num_pairs: int, variants: Sequence[Variant] = VARIANTS
) -> VirtualResult:
    """Run every variant `num_pairs` times in turn. The price is made of the op times and of the
    link as measured.
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
    """What the schedule that a case is made for must be worth in it."""
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
    """Put in what one dispatch and one combine take when nothing else is under way, the slowest
    rank's.
    """
    answers = ranks.run(variant.question())
    dispatch_s = max(statistics.median(answer["dispatches_s"]) for answer in answers)
    combine_s = max(statistics.median(answer["combines_s"]) for answer in answers)
    return replace(times, dispatch=dispatch_s, combine=combine_s)
