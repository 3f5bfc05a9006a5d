"""Prices of a GPU-hour by kind of GPU, if a source states one; the user gives the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hadal.lab.perf.hardware import hardware_named


@dataclass(frozen=True, slots=True)
class Rent:
    """Dollars per GPU-hour, with their source."""

    usd: float
    source: str
    as_of: str
    """Year and month of the source; empty for a price that the user gave."""


RENTS: dict[str, Rent] = {
    "h800": Rent(2.00, "assumed by DeepSeek-V3/R1's inference system overview", "2025-02"),
    "h100": Rent(2.35, "one-year rental, SemiAnalysis", "2026-03"),
    "h200": Rent(2.50, "the low end of $2.5 to $7 on offer", "2026-03"),
    "gb200": Rent(2.21, "total cost of owning it, no rent: SemiAnalysis", "2026-03"),
}
"""Price by hardware name. H20 and B200 are missing on purpose: no trustworthy price was found."""
GIVEN = "given"


def rents(given: Mapping[str, float]) -> dict[str, Rent]:
    """Return RENTS with the prices in `given` added or replaced. Raises ValueError for unknown
    hardware or a price that is not positive and finite.
    """
    for name, usd in given.items():
        hardware_named(name)
        if not (usd > 0.0 and math.isfinite(usd)):
            raise ValueError(
                f"the price of a GPU-hour of {name} is ${usd:g}; it must be above 0 and finite."
            )
    return RENTS | {name.lower(): Rent(usd, GIVEN, "") for name, usd in given.items()}
