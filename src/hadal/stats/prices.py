"""Prices of tokens and GPU-hours, in integers.

A price is whole micro-dollars per million tokens, so price times tokens is whole pico-dollars
(10^-12): sums of money are exact and are rounded once, to micro-dollars, when shown. A GPU-hour's
price is whole micro-dollars. An interval's cost is a fraction, stored as such until it is shown.

Source: DeepSeek's pricing page of February 2025, with the discount that began on 2025-02-26. "The
completion timestamp of each request determines its pricing tier." The page gives off-peak prices
beside their percentages (V3 50 %, R1 75 %). The prices are rounded (R1: 0.135, not 0.1375), and the
prices, not the percentages, are charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction

BUCKET_S = 900
"""Width of a counter's interval, a quarter hour: price tiers begin on one, and so do the hours of
every time zone.
"""
BUCKET_US = BUCKET_S * 1_000_000
DAY_S = 86_400
HOUR_S = 3_600
PICO_PER_MICRO = 1_000_000
H800_HOUR_MICRO_USD = 2_000_000
"""Rent of a GPU-hour, assumed by DeepSeek's overview of its inference system."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Micro-dollars per million tokens: cached prompt tokens, computed ones, and output tokens."""

    hit: int
    miss: int
    out: int

    def charge(self, tokens_hit: int, tokens_miss: int, tokens_out: int) -> int:
        """Return the charge in pico-dollars, exactly."""
        return self.hit * tokens_hit + self.miss * tokens_miss + self.out * tokens_out

    def halved(self) -> Rates:
        """Return half of each price, rounded up."""
        return Rates(-(-self.hit // 2), -(-self.miss // 2), -(-self.out // 2))


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of one model, with the hours of the UTC day in which off-peak prices apply. The
    constructor raises ValueError for a negative price, or a time that is no quarter hour.
    """

    name: str
    standard: Rates
    off_peak: Rates | None = None
    off_peak_from_s: int = 16 * HOUR_S + 1800
    """Start of off-peak in seconds of the UTC day, a whole quarter hour. The interval up to
    `off_peak_to_s` may cross midnight.
    """
    off_peak_to_s: int = 1800

    def __post_init__(self) -> None:
        for rates in (self.standard, self.off_peak or self.standard):
            if min(rates.hit, rates.miss, rates.out) < 0:
                raise ValueError(f"a price of {self.name} is negative.")
        for time_s in (self.off_peak_from_s, self.off_peak_to_s):
            if not 0 <= time_s < DAY_S or time_s % BUCKET_S:
                raise ValueError(
                    f"{self.name}: a tier begins or ends {time_s} s into the day; use"
                    " whole quarter hours."
                )

    def rates_at(self, completed_us: int) -> Rates:
        """Return the prices for a request that completes at this time (unix microseconds)."""
        if self.off_peak is None:
            return self.standard
        time_s = completed_us // 1_000_000 % DAY_S
        first, last = self.off_peak_from_s, self.off_peak_to_s
        is_off_peak = first <= time_s < last if first <= last else time_s >= first or time_s < last
        return self.off_peak if is_off_peak else self.standard

    def charge(self, completed_us: int, tokens_hit: int, tokens_miss: int, tokens_out: int) -> int:
        """Return the pico-dollars for tokens of requests completed at this time, or in the quarter
        hour that begins at it.
        """
        return self.rates_at(completed_us).charge(tokens_hit, tokens_miss, tokens_out)

    def most(self, num_prompt: int, num_output: int) -> int:
        """Return the most pico-dollars that a generation of these lengths can cost, at any time and
        with any number of cache hits.
        """
        return max(
            max(rates.hit, rates.miss) * num_prompt + rates.out * num_output
            for rates in (self.standard, self.off_peak or self.standard)
        )

    def halved(self) -> PriceList:
        """Return half of every price, in whole micro-dollars, rounded up: the default prices of batches."""
        off_peak = None if self.off_peak is None else self.off_peak.halved()
        name = f"{self.name}, batch"
        return replace(self, name=name, standard=self.standard.halved(), off_peak=off_peak)

    def flat(self) -> PriceList:
        """Return the prices without discount: DeepSeek's "theoretical income" is R1's flat prices
        for all tokens.
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
    """Return a known list by its name, or one written as "HIT/MISS/OUT" in dollars per million
    tokens. Raises ValueError.
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
            f"{text!r} is not a price list{why}. Use {', '.join(_LISTS)}, or dollars per"
            " million tokens as HIT/MISS/OUT, such as 0.14/0.55/2.19."
        ) from None


def micro_usd(dollars: str | float) -> int:
    """Return dollars, written with at most 6 decimals, as micro-dollars. Raises ValueError."""
    try:
        micro = Decimal(str(dollars).strip()).scaleb(6)
    except InvalidOperation:
        raise ValueError(f"{dollars!r} is not an amount of dollars") from None
    if not micro.is_finite() or micro < 0 or micro != micro.to_integral_value():
        raise ValueError(f"{dollars!r} dollars: use 0 or more, with at most 6 decimals")
    return int(micro)


@dataclass(frozen=True)
class ModelPrices:
    """Price list of each model."""

    default: PriceList = R1
    model_to_list: Mapping[str, PriceList] = field(default_factory=dict)

    def of(self, model: str) -> PriceList:
        return self.model_to_list.get(model, self.default)


def rent_pico_usd(rank_us: int, gpu_hour_micro_usd: int) -> Fraction:
    """Return the cost of `rank_us` rank-microseconds. An hour has 3.6e9 of them, and a micro-dollar
    is 1e6 pico-dollars.
    """
    return Fraction(rank_us * gpu_hour_micro_usd, HOUR_S)


def to_micro_usd(pico_usd: int | Fraction) -> int:
    """Return whole micro-dollars, halves rounded to even. Money is rounded only here."""
    return round(Fraction(pico_usd) / PICO_PER_MICRO)
