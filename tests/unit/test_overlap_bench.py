"""The overlap benchmark's own arithmetic: who used the machine, which repetitions count, what was
sent.
"""

from __future__ import annotations

import pytest
import torch

from bench.overlap_device import BALANCED, DECODE_LIKE
from bench.overlap_echo import _Echo
from bench.overlap_gate import (
    CLOCK_TICKS,
    FOREIGN_MAX,
    Series,
    Timed,
    foreign_share,
    parse_usage,
    spread,
)
from bench.overlap_variants import CANDIDATES, DECODE, FULL, PREFILL, SCHEDULED, cheapest
from hadal.overlap.plan import parse


def stat(busy: int) -> str:
    return f"cpu  {busy - 5} 1 1 900 50 1 1 1 0 0\ncpu0 1 2 3\n"


def test_others_are_what_is_busy_and_not_ours() -> None:
    before, after = parse_usage(stat(100), 10.0), parse_usage(stat(100 + 2 * CLOCK_TICKS), 12.0)
    assert after.busy_s - before.busy_s == pytest.approx(2.0)
    assert foreign_share(before, after, own_s=1.6, num_cores=2) == pytest.approx(0.1)
    assert (
        foreign_share(before, after, own_s=2.5, num_cores=2) == 0.0
    )  # Ticks are coarse: never below nothing.


def test_a_pair_counts_when_both_are_clean() -> None:
    clean, dirty = FOREIGN_MAX, FOREIGN_MAX + 0.01
    series = Series(
        [
            {"a": Timed(3.0, clean), "b": Timed(2.0, clean)},
            {"a": Timed(9.0, dirty), "b": Timed(2.0, clean)},
            {"a": Timed(4.0, clean), "b": Timed(9.0, dirty)},
        ]
    )
    assert series.ratios("a", "b") == [1.5]
    assert series.seconds("a") == [3.0, 4.0]
    assert series.median_s("b") == 2.0
    assert series.median_s("c") is None
    assert series.num_dropped(["a", "b"]) == 2
    assert spread([1.0, 3.0, 2.0]) == "2.00 [1.00-3.00]"


def test_a_variant_is_asked_for_as_it_is() -> None:
    for variant in SCHEDULED:
        assert parse(*variant.question()["schedule"]) == variant.schedule


def test_prices_of_the_virtual_cases() -> None:
    """What the virtual device is held to can be reached, and the leader would choose it."""
    for case, best, bar in ((BALANCED, PREFILL, 1.85), (DECODE_LIKE, DECODE, 1.6)):
        full, half = case.op_seconds(2.0), case.op_seconds()
        prices = {variant.name: variant.price(full, half, 8) for variant in SCHEDULED}
        assert prices[FULL.name].total_s / prices[best.name].total_s >= bar
        assert cheapest(prices, CANDIDATES) is best


def test_an_echo_is_ones_own_message() -> None:
    sent, buffer = torch.arange(5, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    assert _Echo({1: sent}, None).wait()[1] is sent
    assert torch.equal(_Echo({1: sent}, {1: buffer}).wait()[1], sent)
    assert torch.equal(buffer[:5], sent)
