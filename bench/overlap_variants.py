"""What is run against what: schedules and how many micro-batches, and what perf/price says of
them.
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
"""One batch: nothing but the shared expert runs while something travels."""


@dataclass(frozen=True)
class Variant:
    """A schedule on one full batch or on its two halves. `what`: "both", or "compute" or "link"
    alone.
    """

    name: str
    schedule: Schedule
    num_micro_batches: int
    what: str = "both"

    def question(self) -> dict[str, Any]:
        """What a rank is asked to run."""
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
        """From op times of a full batch and of a micro-batch."""
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
"""Ways to run a step."""
CANDIDATES: tuple[Variant, ...] = (FULL, PREFILL, DECODE)
"""What a leader chooses from."""


def cheapest(prices: dict[str, Price], candidates: Sequence[Variant] = CANDIDATES) -> Variant:
    """What a leader would run."""
    return min(candidates, key=lambda variant: prices[variant.name].total_s)
