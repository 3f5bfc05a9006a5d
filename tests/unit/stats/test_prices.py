"""Prices: integers, tiers that change on the second, exact sums."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.stats.prices import (
    BUCKET_US,
    DAY_S,
    H800_HOUR_MICRO_USD,
    R1,
    V3,
    ModelPrices,
    PriceList,
    Rates,
    micro_usd,
    price_list,
    rent_pico_usd,
    to_micro_usd,
)

DAY_US = DAY_S * 1_000_000
HALF_PAST_16_US = (16 * 3600 + 1800) * 1_000_000
HALF_PAST_0_US = 1800 * 1_000_000


def test_published_prices() -> None:
    """Check dollars per million tokens (hit, miss, out): DeepSeek's pricing page of February 2025."""
    for prices, standard, off_peak in (
        (V3, (0.07, 0.27, 1.10), (0.035, 0.135, 0.55)),
        (R1, (0.14, 0.55, 2.19), (0.035, 0.135, 0.55)),
    ):
        noon, night = prices.rates_at(DAY_US // 2), prices.rates_at(HALF_PAST_16_US)
        assert [rate / 1e6 for rate in (noon.hit, noon.miss, noon.out)] == list(standard)
        assert [rate / 1e6 for rate in (night.hit, night.miss, night.out)] == list(off_peak)


def test_discounts_are_those_announced() -> None:
    """Check discounts: V3's is half; R1's is 75 %, with two prices rounded by 0.25 cents."""
    assert V3.off_peak is not None
    assert R1.off_peak is not None
    for name in ("hit", "miss", "out"):
        assert 2 * getattr(V3.off_peak, name) == getattr(V3.standard, name)
        assert abs(4 * getattr(R1.off_peak, name) - getattr(R1.standard, name)) <= 4 * 2_500


@pytest.mark.parametrize(
    ("edge_us", "is_before_off_peak"), [(HALF_PAST_16_US, False), (HALF_PAST_0_US, True)]
)
@pytest.mark.parametrize("day", [0, 20_146])
def test_a_tier_changes_in_its_microsecond(
    day: int, edge_us: int, is_before_off_peak: bool
) -> None:
    at_us = day * DAY_US + edge_us
    assert (R1.rates_at(at_us - 1) == R1.off_peak) is is_before_off_peak
    assert (R1.rates_at(at_us) == R1.off_peak) is not is_before_off_peak
    assert R1.flat().rates_at(at_us) == R1.flat().rates_at(at_us - 1) == R1.standard


@given(st.integers(0, 40_000 * DAY_US))
def test_a_quarter_hour_has_one_tier(time_us: int) -> None:
    assert R1.rates_at(time_us) == R1.rates_at(time_us // BUCKET_US * BUCKET_US)


@pytest.mark.promise("so price times tokens is whole pico-dollars and every sum of income is exact")
@given(st.lists(st.tuples(*[st.integers(0, 10**12)] * 3), min_size=1, max_size=20))
def test_charges_add_up_however_they_are_grouped(requests: list[tuple[int, int, int]]) -> None:
    one_by_one = sum(R1.charge(0, *tokens) for tokens in requests)
    hit, miss, out = (sum(column) for column in zip(*requests, strict=True))
    assert one_by_one == R1.charge(0, hit, miss, out)


@pytest.mark.promise("so price times tokens is whole pico-dollars and every sum of income is exact")
def test_a_token_costs_what_it_costs() -> None:
    """Charge one computed prompt token of R1 by day: 0.55 micro-dollars, less than a whole one."""
    assert R1.charge(DAY_US // 2, 0, 1, 0) == 550_000
    assert to_micro_usd(R1.charge(DAY_US // 2, 0, 1, 0)) == 1
    assert to_micro_usd(10**6 * R1.charge(DAY_US // 2, 0, 1, 0)) == 550_000


def test_rent_is_exact() -> None:
    hour_us = 3600 * 10**6
    assert rent_pico_usd(hour_us, H800_HOUR_MICRO_USD) == 2 * 10**12
    assert sum((rent_pico_usd(1, 7) for _ in range(3600)), Fraction(0)) == 7
    assert to_micro_usd(Fraction(5 * 10**5)) == 0, "halves go to even"
    assert to_micro_usd(Fraction(15 * 10**5)) == 2


def test_lists_by_name_and_by_hand() -> None:
    assert price_list("deepseek-chat") is V3
    assert price_list("deepseek-reasoner-flat").off_peak is None
    own = price_list("0.14/0.55/2.19")
    assert own.standard == R1.standard
    assert own.off_peak is None


@pytest.mark.parametrize(
    "text", ["", "gpt", "1/2", "1/2/3/4", "1/2/x", "1/-2/3", "1/2/nan", "1/2/0.0000001"]
)
def test_what_is_no_list_is_told_what_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"Use deepseek-chat.*HIT/MISS/OUT"):
        price_list(text)


def test_amounts() -> None:
    assert micro_usd(2.0) == 2_000_000
    assert micro_usd("0.1") == 100_000
    assert micro_usd(0.000001) == 1
    for wrong in (float("inf"), float("nan"), -1, "x", 1e-7):
        with pytest.raises(ValueError, match="dollars"):
            micro_usd(wrong)


def test_tiers_that_counters_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="quarter hours"):
        PriceList("x", Rates(1, 1, 1), Rates(0, 0, 0), off_peak_from_s=60)
    with pytest.raises(ValueError, match="negative"):
        PriceList("x", Rates(1, -1, 1))


def test_a_tier_within_a_day() -> None:
    noon = PriceList("x", Rates(2, 2, 2), Rates(1, 1, 1), off_peak_from_s=3600, off_peak_to_s=7200)
    assert [noon.rates_at(hour * 3600 * 10**6).hit for hour in (0, 1, 2, 23)] == [2, 1, 2, 2]


def test_a_book_has_a_list_for_every_model() -> None:
    model_prices = ModelPrices(R1, {"chat": V3})
    assert model_prices.of("chat") is V3
    assert model_prices.of("other") is R1


@pytest.mark.promise("[ledger] batch_prices, by default half of prices")
def test_batches_cost_half() -> None:
    found = R1.halved().charge(12 * 3600 * 10**6, 2, 4, 6) * 2
    assert found == R1.charge(12 * 3600 * 10**6, 2, 4, 6)
    assert V3.halved().most(7, 9) * 2 == V3.most(7, 9)
    assert price_list("0.000001/0.000003/1").halved().standard == Rates(1, 2, 500_000)
