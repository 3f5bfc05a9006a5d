"""Test how a unit's steps reveal a slow host."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hadal.core.plans import StepDone, Waited
from hadal.policy.slow_hosts import ROUND_TRIP_S, SlowHost
from hadal.roles.ranks.slow import NUM_STRETCHES, STRETCH_S, SlowHosts

STEP_S = 0.25
HOSTS = {0: "a", 1: "b", 2: "b", 3: "c"}


def part(
    rank: int, num_rows: int = 2, busy_s: float = 0.05, alone_s: dict[str, float] | None = None
) -> StepDone:
    """Return a rank's step: it computes for `busy_s`, and waits for the rest."""
    keys = tuple(range(num_rows))
    waited = Waited(STEP_S - busy_s, alone_s or {})
    return StepDone(0, keys, keys, {}, STEP_S, waited=waited)


def found_in(
    parts: Sequence[StepDone],
    num_stretches: int = NUM_STRETCHES,
    *,
    has_rows: bool = True,
    trips_s: dict[str, float] | None = None,
    hosts: dict[int, str] = HOSTS,
) -> SlowHost | None:
    """Return the slow host found after `num_stretches` of steps with these parts, or None."""
    slow_hosts = SlowHosts(has_rows=has_rows)
    slow_hosts.began(hosts)
    found = None
    for number in range(int(num_stretches * STRETCH_S / STEP_S)):
        now_s = STEP_S * (number + 1)
        for host, trip_s in (trips_s or {}).items():
            slow_hosts.answered(host, trip_s)
        found = slow_hosts.stepped(now_s, now_s - STEP_S, dict(enumerate(parts))) or found
    return found


def waiting_for(slow: str, **options: float) -> list[StepDone]:
    """Return all ranks' parts of a step: ranks of other hosts wait for host `slow` alone."""
    return [
        part(rank, **options, alone_s={} if host == slow else {slow: 0.2})  # type: ignore[arg-type]
        for rank, host in HOSTS.items()
    ]


@pytest.mark.parametrize("has_rows", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("slow", "abc")
def test_the_host_that_all_wait_for(slow: str, *, has_rows: bool) -> None:
    found = found_in(waiting_for(slow), has_rows=has_rows)
    assert found is not None
    assert found.host == slow
    assert found.share == pytest.approx(0.8)


def test_a_part_of_the_time_is_too_short() -> None:
    assert found_in(waiting_for("c"), NUM_STRETCHES - 1) is None


@pytest.mark.parametrize("has_rows", [True, False], ids=["decode", "prefill"])
def test_a_host_that_has_more_to_do_is_not_slow(*, has_rows: bool) -> None:
    """The host's rank may have the only prompt (prefill) or the only request (decode)."""
    parts = waiting_for("c", num_rows=0)
    parts[3] = part(3, num_rows=1, busy_s=STEP_S)
    assert found_in(parts, has_rows=has_rows) is None


def test_a_host_that_takes_longer_for_as_much_is_slow() -> None:
    parts = waiting_for("c")
    parts[3] = part(3, busy_s=STEP_S)
    found = found_in(parts)
    assert found is not None
    assert found.host == "c"


def test_a_formation_begins_anew() -> None:
    slow_hosts = SlowHosts(has_rows=True)
    parts = dict(enumerate(waiting_for("c")))
    for number in range(int(3 * NUM_STRETCHES * STRETCH_S / STEP_S)):
        now_s = STEP_S * (number + 1)
        if number % int(2 * STRETCH_S / STEP_S) == 0:
            slow_hosts.began(HOSTS)
        assert slow_hosts.stepped(now_s, now_s - STEP_S, parts) is None


def test_of_two_hosts_the_leader_s_own_stays() -> None:
    hosts = {0: "a", 1: "b"}
    parts = [part(0, alone_s={"b": 0.2}), part(1, alone_s={"a": 0.2})]
    assert found_in(parts, hosts=hosts) is None
    found = found_in(parts, hosts=hosts, trips_s={"a": 0.0, "b": 2 * ROUND_TRIP_S})
    assert found is not None
    assert found.host == "b"


def test_one_host_is_never_slow() -> None:
    assert found_in(waiting_for("c"), hosts=dict.fromkeys(range(4), "a")) is None
