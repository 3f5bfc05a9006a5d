"""choose_victims: the latest arrivals, no more than needed, never all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.policy.preemption import choose_victims
from hadal.policy.views import HolderView


@pytest.mark.promise(
    "The latest request of the tenant with the most blocks is preempted: the front "
    "requeues it, and it is prefilled again later."
)
def test_a_tenant_that_grows_takes_nothing_from_one_that_holds_less() -> None:
    flood = [HolderView(slot, slot, 3, "flood") for slot in range(4)]
    holders = [*flood, HolderView(8, 90, 2, "other"), HolderView(9, 91, 2, "other")]
    assert choose_victims(holders, 1) == [3]
    assert choose_victims(holders, 7) == [3, 2, 1], "while it holds more"
    # The flood's last request stays, as it is the oldest: the other tenant gives one.
    assert choose_victims(holders, 10) == [3, 2, 1, 9]


def test_the_latest_goes_first() -> None:
    holders = [HolderView(0, 5, 2), HolderView(1, 9, 2), HolderView(2, 7, 2)]
    assert choose_victims(holders, 1) == [1]
    assert choose_victims(holders, 3) == [1, 2]


def test_the_oldest_stays_whatever_is_missing() -> None:
    assert choose_victims([HolderView(0, 1, 1), HolderView(1, 2, 1)], 100) == [1]
    assert choose_victims([HolderView(0, 1, 1)], 1) == []
    assert choose_victims([], 1) == []


def test_nothing_missing_nobody_goes() -> None:
    assert choose_victims([HolderView(0, 1, 1), HolderView(1, 2, 1)], 0) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=10), st.integers(-3, 30))
def test_no_victim_is_in_vain(sizes: list[int], missing: int) -> None:
    holders = [HolderView(slot, slot, size) for slot, size in enumerate(sizes)]
    victims = choose_victims(holders, missing)
    assert victims == sorted(victims, reverse=True)
    assert 0 not in victims
    assert not victims or sum(sizes[slot] for slot in victims[:-1]) < missing
    assert sum(sizes[slot] for slot in victims) >= missing or len(victims) == len(sizes) - 1


def test_those_of_batches_go_first_however_little_they_hold() -> None:
    holders = [
        HolderView(1, 5, 9, "a"),
        HolderView(2, 6, 9, "a"),
        HolderView(3, 1, 2, "a/batch"),
        HolderView(4, 2, 1, "b/batch"),
    ]
    assert choose_victims(holders, 1) == [3]
    assert choose_victims(holders, 3) == [3, 4]
    assert choose_victims(holders, 4) == [3, 4, 2]
    assert choose_victims(holders, 99) == [3, 4, 2], "the oldest stays of those that are waited for"
