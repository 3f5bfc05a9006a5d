"""The choice between reading and computing a prefix, by price."""

from __future__ import annotations

import pytest

from hadal.core.rates import StepRates
from hadal.policy.cached_prefix import Prefix, ReadRates, choose_prefix, usable_blocks

RATES = StepRates(1e-3, 1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "num"), [(0, 0), (1, 0), (64, 0), (65, 1), (128, 1), (129, 2)]
)
def test_the_last_position_is_always_computed(num_tokens: int, num: int) -> None:
    assert usable_blocks(num_tokens) == num


def test_nothing_on_disk_is_nothing_to_decide() -> None:
    assert choose_prefix(3, 2, 0, RATES, ReadRates(9.0, 9.0)) == Prefix(3, 2)


@pytest.mark.parametrize(
    ("rates", "loads"), [(None, ReadRates(9.0, 9.0)), (RATES, None), (None, None)]
)
def test_while_something_is_not_measured_it_is_read(
    rates: StepRates | None, loads: ReadRates | None
) -> None:
    prefix = choose_prefix(1, 0, 2, rates, loads)
    found = (prefix.num_memory, prefix.num_loading, prefix.num_blocks, prefix.load_s)
    assert found == (1, 2, 3, 0.0)


def test_the_cheaper_is_taken_and_the_queue_counts() -> None:
    compute_s = RATES.chunk_s(64, 2 * 64)
    loads = ReadRates(0.5 * compute_s, 0.2 * compute_s)
    prefix = choose_prefix(1, 0, 2, RATES, loads, queued_s=0.05 * compute_s)
    assert prefix == Prefix(1, 0, 2, pytest.approx(0.95 * compute_s))
    found = choose_prefix(1, 0, 2, RATES, loads, queued_s=0.15 * compute_s)
    assert found == Prefix(1, 0, num_recomputed=2)


def test_deep_blocks_are_dearer_to_compute() -> None:
    loads = ReadRates(0.0, 2 * RATES.chunk_s(0, 64))
    assert choose_prefix(0, 0, 1, RATES, loads).num_recomputed == 1
    assert choose_prefix(30, 0, 1, RATES, loads).num_loading == 1


@pytest.mark.parametrize("others", [{"dispatch_s": 1e-3}, {"mean_s": 1e-3}])
def test_what_others_do_for_a_token_counts_as_computing(others: dict[str, float]) -> None:
    loads = ReadRates(0.0, 1.5 * RATES.chunk_s(0, 64))
    assert choose_prefix(0, 0, 1, RATES, loads).num_recomputed == 1
    assert choose_prefix(0, 0, 1, StepRates(1e-3, 1e-6, **others), loads).num_loading == 1
