"""Variants that the overlap benchmarks compare: a schedule and a number of micro-batches, with the
time that perf/price predicts for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hadal.overlap.plan import DECODE_FIVE, PREFILL_DUAL, SEQUENTIAL, Schedule, parse
from hadal.perf.price import OpSeconds, Price, price

SHARED_ONLY = parse(
    "shared_only", "attn_in attn_core gate dispatch> shared >dispatch experts combine> >combine"
)
"""One batch in which only the shared expert runs during communication."""


@dataclass(frozen=True)
class Variant:
    """A schedule on one full batch or on its two halves. `what` is "both", "compute" (alone) or "link" (alone)."""

    name: str
    schedule: Schedule
    num_micro_batches: int
    what: str = "both"

    def question(self) -> dict[str, Any]:
        """Return the question that makes a rank run this variant."""
        text = str(self.schedule).removeprefix(self.schedule.name).strip()
        offset = self.schedule.offset
        if offset is not None:
            text = text.removeprefix(f"+{offset}").strip()
        return {
            "schedule": (self.schedule.name, text, offset),
            "num_micro_batches": self.num_micro_batches,
            "what": self.what,
        }

    def price(self, full: OpSeconds, half: OpSeconds, num_layers: int) -> Price:
        """Return the price, from op times of a full batch and of a micro-batch."""
        return price(
            self.schedule, [full] if self.num_micro_batches == 1 else [half, half], num_layers
        )


FULL = Variant("one full batch", SEQUENTIAL, 1)
TWO = Variant("two micro-batches", SEQUENTIAL, 2)
SHARED = Variant("shared expert only", SHARED_ONLY, 1)
PREFILL = Variant("prefill_dual", PREFILL_DUAL, 2)
DECODE = Variant("decode_five", DECODE_FIVE, 2)
COMPUTE = Variant("compute only", SEQUENTIAL, 2, "compute")
LINK = Variant("link only", SEQUENTIAL, 2, "link")
COMPUTE_FULL = Variant("compute only, full", SEQUENTIAL, 1, "compute")
LINK_FULL = Variant("link only, full", SEQUENTIAL, 1, "link")

SCHEDULED: tuple[Variant, ...] = (FULL, TWO, SHARED, PREFILL, DECODE)
"""Variants that run a whole step."""
CANDIDATES: tuple[Variant, ...] = (FULL, PREFILL, DECODE)
"""Variants that a leader chooses from."""


def cheapest(prices: dict[str, Price], candidates: Sequence[Variant] = CANDIDATES) -> Variant:
    """Return the variant with the lowest price, which a leader (scheduler) would run."""
    return min(candidates, key=lambda variant: prices[variant.name].total_s)
