"""What tokens and GPU-hours cost, in integers.

A price is whole micro-dollars per million tokens, so price times tokens is whole pico-dollars
(10^-12): sums of money are exact and are rounded once, to micro-dollars, when shown. A GPU-hour's
price is whole micro-dollars; an interval's cost is a fraction, kept as one until it is shown.

Source: DeepSeek's pricing page of February 2025, with the discount that began on 2025-02-26. "The
completion timestamp of each request determines its pricing tier." The page gives off-peak prices
beside their percentages (V3 50 %, R1 75 %); the prices are rounded (R1: .135, not .1375), and
prices are what is charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction

BUCKET_S = 900
"""Counters are kept by quarter hours: tiers of prices begin on one, and so do the hours of every
time zone.
"""
BUCKET_US = BUCKET_S * 1_000_000
DAY_S = 86_400
HOUR_S = 3_600
PICO_PER_MICRO = 1_000_000
H800_HOUR_MICRO_USD = 2_000_000
"""The rent that DeepSeek's overview of its inference system assumes."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Micro-dollars per million tokens: of a prompt found in the cache, of one computed, and of
    output.
    """

    hit: int
    miss: int
    out: int

    def charge(self, tokens_hit: int, tokens_miss: int, tokens_out: int) -> int:
        """Pico-dollars, exactly."""
        return self.hit * tokens_hit + self.miss * tokens_miss + self.out * tokens_out

    def halved(self) -> Rates:
        """Half of it, rounded up."""
        return Rates(-(-self.hit // 2), -(-self.miss // 2), -(-self.out // 2))


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of one model, with the hours of the UTC day in which others hold. Raises ValueError at
    birth.
    """

    name: str
    standard: Rates
    off_peak: Rates | None = None
    off_peak_from_s: int = 16 * HOUR_S + 1800
    """Seconds of the UTC day, a whole quarter hour. The time until `off_peak_to_s` may pass
    midnight.
    """
    off_peak_to_s: int = 1800

    def __post_init__(self) -> None:
        for rates in (self.standard, self.off_peak or self.standard):
            if min(rates.hit, rates.miss, rates.out) < 0:
                raise ValueError(f"a price of {self.name} is negative.")
        for time_s in (self.off_peak_from_s, self.off_peak_to_s):
            if not 0 <= time_s < DAY_S or time_s % BUCKET_S:
                raise ValueError(
                    f"{self.name}: a tier begins or ends {time_s} s into the day; whole quarter"
                    " hours are allowed."
                )

    def rates_at(self, completed_us: int) -> Rates:
        """What holds for a request that is completed at this time (unix microseconds)."""
        if self.off_peak is None:
            return self.standard
        time_s = completed_us // 1_000_000 % DAY_S
        first, last = self.off_peak_from_s, self.off_peak_to_s
        is_off_peak = first <= time_s < last if first <= last else time_s >= first or time_s < last
        return self.off_peak if is_off_peak else self.standard

    def charge(self, completed_us: int, tokens_hit: int, tokens_miss: int, tokens_out: int) -> int:
        """Pico-dollars for tokens of requests completed at this time, or in the quarter hour that
        begins at it.
        """
        return self.rates_at(completed_us).charge(tokens_hit, tokens_miss, tokens_out)

    def most(self, num_prompt: int, num_output: int) -> int:
        """Pico-dollars that a generation of these lengths can cost at most, whenever it ends and
        whatever is found of its prompt.
        """
        return max(
            max(rates.hit, rates.miss) * num_prompt + rates.out * num_output
            for rates in (self.standard, self.off_peak or self.standard)
        )

    def halved(self) -> PriceList:
        """Half of every price, whole micro-dollars, rounded up: what batches cost where nothing else
        is said.
        """
        off_peak = None if self.off_peak is None else self.off_peak.halved()
        name = f"{self.name}, batch"
        return replace(self, name=name, standard=self.standard.halved(), off_peak=off_peak)

    def flat(self) -> PriceList:
        """The same without a discount: DeepSeek's "theoretical income" is R1's, flat, for all
        tokens.
        """
        return replace(self, name=f"{self.name}, flat", off_peak=None)


V3 = PriceList("deepseek-chat", Rates(70_000, 270_000, 1_100_000), Rates(35_000, 135_000, 550_000))
R1 = PriceList(
    "deepseek-reasoner", Rates(140_000, 550_000, 2_190_000), Rates(35_000, 135_000, 550_000)
)
_LISTS: dict[str, PriceList] = {
    V3.name: V3,
    R1.name: R1,
    f"{V3.name}-flat": V3.flat(),
    f"{R1.name}-flat": R1.flat(),
}


def price_list(text: str) -> PriceList:
    """A known list by its name, or one written as "HIT/MISS/OUT" in dollars per million tokens.
    Raises ValueError.
    """
    if text in _LISTS:
        return _LISTS[text]
    parts = text.split("/")
    try:
        hit, miss, out = (micro_usd(part) for part in parts)
        return PriceList(text, Rates(hit, miss, out))
    except ValueError as error:
        why = f" ({error})" if len(parts) == 3 else ""
        raise ValueError(
            f"{text!r} is no price list{why}. Take {', '.join(_LISTS)}, or dollars per million"
            " tokens as HIT/MISS/OUT, such as 0.14/0.55/2.19."
        ) from None


def micro_usd(dollars: str | float) -> int:
    """Dollars, written with at most 6 decimals, as micro-dollars. Raises ValueError."""
    try:
        micro = Decimal(str(dollars).strip()).scaleb(6)
    except InvalidOperation:
        raise ValueError(f"{dollars!r} is no amount of dollars") from None
    if not micro.is_finite() or micro < 0 or micro != micro.to_integral_value():
        raise ValueError(f"{dollars!r} dollars: 0 or more is needed, with at most 6 decimals")
    return int(micro)


@dataclass(frozen=True)
class ModelPrices:
    """Which model is sold at which prices."""

    default: PriceList = R1
    model_to_list: Mapping[str, PriceList] = field(default_factory=dict)

    def of(self, model: str) -> PriceList:
        return self.model_to_list.get(model, self.default)


def rent_pico_usd(rank_us: int, gpu_hour_micro_usd: int) -> Fraction:
    """Cost of so many rank-microseconds. An hour has 3.6e9 of them and a micro-dollar 1e6
    pico-dollars.
    """
    return Fraction(rank_us * gpu_hour_micro_usd, HOUR_S)


def to_micro_usd(pico_usd: int | Fraction) -> int:
    """Rounded, halves to even: the one rounding that money sees."""
    return round(Fraction(pico_usd) / PICO_PER_MICRO)
