"""Plans for little traffic: quick to price, and cheap to simulate."""

from __future__ import annotations

from functools import cache

from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.rent import Rent
from hadal.lab.sim.plan.plan import HardwarePlans, SearchOptions, price_hardware
from hadal.lab.sim.plan.traffic import Traffic
from hadal.lab.sim.plan.units import Pricing
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.policy.slo import Slo

SMALL = Traffic(
    requests_per_s=20.0,
    tokens_in=1500.0,
    tokens_out=200.0,
    cached_share=0.5,
    variation_in=0.5,
    name="a little",
)
SLO = Slo(2.0, 0.04)


@cache
def small(hardware: str = "h200", usd: float = 2.5) -> HardwarePlans:
    """Return the priced plans for SMALL on one hardware: all pairs of unit widths. `usd`: price of
    a GPU-hour.
    """
    return price_hardware(
        Pricing(HARDWARE[hardware], DEEPSEEK_V3, SMALL, SLO),
        Rent(usd, "given", ""),
        SearchOptions(),
    )
