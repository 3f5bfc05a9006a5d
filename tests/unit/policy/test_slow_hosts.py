"""Detecting a unit's slow host from the times that the others wait for it."""

from __future__ import annotations

import pytest

from hadal.policy.slow_hosts import CLEAR, ROUND_TRIP_S, SHARE, STEP_S, Stretch, may_rest, slow_host

STEPPING_S = 4.0


def stretch(
    waits_s: dict[str, dict[str, float]],
    num_steps: int = 10,
    round_trip_s: dict[str, float] | None = None,
) -> Stretch:
    return Stretch(STEPPING_S, num_steps, waits_s, round_trip_s or {})


def waits(
    hosts: str, slow: str, slow_s: float, others_s: float = 0.1
) -> dict[str, dict[str, float]]:
    """Return waits of `slow_s` between the slow host and the others, and short ones otherwise."""
    return {
        host: {
            other: slow_s if slow in (host, other) else others_s for other in hosts if other != host
        }
        for host in hosts
    }


def test_the_host_that_all_others_wait_for() -> None:
    found = slow_host(stretch(waits("abcd", "c", 3.0)))
    assert found is not None
    assert (found.host, found.share) == ("c", 0.75)


@pytest.mark.parametrize(
    "measured",
    [
        stretch({}),
        stretch({"a": {}}),
        stretch(waits("abcdef", "c", SHARE * STEPPING_S - 0.1)),
        stretch(waits("abcd", "c", 3.0, 3.1 / CLEAR)),
        stretch(waits("abcd", "c", 3.0), num_steps=int(3.0 / STEP_S) + 1),
        stretch({host: {} for host in "abcd"}),
        Stretch(0.0, 0, waits("abcd", "c", 3.0), {}),
    ],
    ids=["none", "one", "half", "not-clear", "not-felt", "unheard", "no-time"],
)
def test_none_is_slow(measured: Stretch) -> None:
    assert slow_host(measured) is None


def test_a_link_between_two_hosts_is_no_slow_host() -> None:
    waited = {host: dict.fromkeys(set("abcd") - {host}, 0.1) for host in "abcd"}
    waited["a"]["b"] = waited["b"]["a"] = 3.0
    assert slow_host(stretch(waited)) is None


def test_one_of_many_may_have_waited_less() -> None:
    """Shorten two waits for the slow host: single links to it may be fast."""
    waited = waits("abcdefgh", "c", 3.0)
    waited["a"]["c"] = waited["b"]["c"] = 0.1
    found = slow_host(stretch(waited))
    assert found is not None
    assert found.host == "c"
    waited["d"]["c"] = 0.1
    assert slow_host(stretch(waited)) is None


@pytest.mark.parametrize(
    ("num_resting", "num_hosts", "may"),
    [(0, 1, False), (0, 2, True), (1, 2, False), (1, 7, False), (1, 8, True), (2, 8, False)],
)
def test_few_rest_at_a_time(num_resting: int, num_hosts: int, may: bool) -> None:
    assert may_rest(num_resting, num_hosts) == may


def test_two_hosts_need_to_be_worth_it() -> None:
    """Compare two hosts: removing one halves the unit, so it must be clearly slow."""
    assert slow_host(stretch({"a": {"b": 2.9}, "b": {"a": 0.1}})) is None
    found = slow_host(stretch({"a": {"b": 3.1}, "b": {"a": 0.1}}))
    assert found is not None
    assert found.host == "b"


def test_of_two_that_wait_for_each_other_the_one_far_away_is_slow() -> None:
    waited = {"a": {"b": 3.8}, "b": {"a": 3.9}}
    assert slow_host(stretch(waited)) is None
    assert slow_host(stretch(waited, round_trip_s={"b": 1.0})) is None
    assert slow_host(stretch(waited, round_trip_s={"a": 0.01, "b": 0.015})) is None
    for far, near in ("ab", "ba"):
        found = slow_host(stretch(waited, round_trip_s={far: 2 * ROUND_TRIP_S, near: 0.001}))
        assert found is not None
        assert found.host == far
