"""Virtual token counters: they give the next tenant, and idle tenants save up no turns."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.policy.fairness import (
    MAX_COUNTERS,
    Claim,
    ServiceCounters,
    batch_of,
    in_turns,
    is_batch,
    owner_of,
    share_weight,
    tenant_to_requeue,
)
from hadal.policy.views import TenantView
from tests.fresh import fresh


def turns(waiting: list[tuple[str, float]], served: str = "", **held: int) -> str:
    counters = ServiceCounters()
    for tenant in served:
        counters.charge(tenant, 1.0)
    order = in_turns(waiting, lambda one: Claim(*one), counters, held)
    return "".join(tenant for tenant, _ in order)


@pytest.mark.promise("the next request is one of the tenant that was served least, over its weight")
def test_whoever_was_served_least_is_next() -> None:
    waiting = [(tenant, 1.0) for tenant in "aaaaabbc"]
    assert turns(waiting) == "abcabaaa"
    assert turns(waiting, "aa") == "bcbaaaaa"
    assert turns(waiting, a=1, b=1) == "cababaaa", "of equals, whoever holds least"


def test_a_turn_is_measured_in_work_and_not_in_requests() -> None:
    assert turns([("a", 10.0)] * 2 + [("b", 1.0)] * 15) == "abbbbbbbbbbabbbbb"


def test_weight_and_priority_make_work_cheaper() -> None:
    assert (share_weight(2.0, 0), share_weight(2.0, -4), share_weight(2.0, 4)) == (2.0, 2.0, 10.0)
    waiting = [("a", 1.0 / share_weight(4.0, 0))] * 6 + [("b", 1.0)] * 2
    assert turns(waiting) == "abaaaaba"


@pytest.mark.promise(
    "A tenant that comes back is lifted to the least served waiting tenant, less "
    "limits.burst_tokens"
)
def test_a_tenant_that_comes_back_is_lifted_to_those_that_wait() -> None:
    counters = ServiceCounters()
    counters.join("a", ())
    counters.charge("a", 100.0)
    counters.join("b", {"a"})
    assert counters["b"] == 100.0, "nothing is saved up"
    counters.charge("b", 50.0)
    counters.join("c", {"a", "b"})
    assert counters["c"] == 100.0, "to the smallest"
    counters.leave("a")
    counters.leave("c")
    counters.leave("b")
    counters.charge("b", 7.0)
    counters.join("d", ())
    assert counters["d"] == 157.0, "nobody waits: to whoever waited last"
    counters.join("b", {"d"})
    assert counters["b"] == 157.0, "a debt stays one"


@pytest.mark.promise(
    "A tenant that comes back is lifted to the least served waiting tenant, less "
    "limits.burst_tokens"
)
def test_one_that_was_away_may_be_ahead_by_a_burst_and_no_more() -> None:
    counters = ServiceCounters(burst=30.0)
    counters.charge("a", 100.0)
    counters.join("b", {"a"})
    assert counters["b"] == 70.0
    counters.charge("b", 20.0)
    counters.leave("b")
    counters.join("b", {"a"})
    assert counters["b"] == 90.0, "what it has had of its burst stays counted"
    counters.charge("a", 100.0)
    counters.join("b", {"a"})
    assert counters["b"] == 170.0, "and grows again as the others are served"


@pytest.mark.parametrize("others_wait", [True, False])
def test_however_many_come_back_all_begin_one_burst_below(others_wait: bool) -> None:
    counters = ServiceCounters(burst=30.0)
    counters.join("a", ())
    counters.charge("a", 1000.0)
    waiting = {"a"}
    if not others_wait:
        counters.leave("a")
        waiting.clear()
    for number in range(9):
        counters.join(f"t{number}", waiting)
        assert counters[f"t{number}"] == 970.0, "who has a burst lowers nobody"
        if others_wait:
            waiting.add(f"t{number}")
        else:
            counters.charge(f"t{number}", 1.0)
            counters.leave(f"t{number}")


def test_counters_of_tenants_that_are_gone_are_dropped() -> None:
    counters = ServiceCounters()
    for number in range(MAX_COUNTERS + 10):
        counters.join(f"t{number}", ())
        counters.charge(f"t{number}", 1.0)
        counters.leave(f"t{number}")
    assert len(counters._tenant_to_service) <= MAX_COUNTERS + 1
    assert counters[f"t{MAX_COUNTERS + 9}"] == MAX_COUNTERS + 10


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 9.0)), max_size=20))
def test_one_tenant_s_order_stays_and_none_is_ahead_by_more_than_one_request(
    waiting: list[tuple[str, float]],
) -> None:
    numbered = list(enumerate(waiting))
    got = list(in_turns(numbered, lambda one: Claim(*one[1]), ServiceCounters(), {}))
    for tenant in "abc":
        found = [one for one in got if one[1][0] == tenant]
        assert found == [one for one in numbered if one[1][0] == tenant]
    dearest = max((cost for _, cost in waiting), default=0.0)
    for end in range(len(got)):
        left = {one[1][0] for one in got[end:]}
        served = [sum(one[1][1] for one in got[:end] if one[1][0] == tenant) for tenant in left]
        assert not served or max(served) - min(served) <= dearest + 1e-9


@pytest.mark.promise(
    "their services, divided by weight, differ by no more than 2 max(L, 2 M) plus "
    "limits.burst_tokens"
)
def test_two_that_wait_all_the_time_are_served_alike_to_the_bound() -> None:
    """Serve two tenants, `slots` requests at a time; each request draws a token per step."""
    random: Random = fresh()
    for _ in range(30):
        weights = {tenant: random.choice([1.0, 1.0, 2.0, 5.0]) for tenant in "ab"}
        lengths = {tenant: (random.randint(1, 200), random.randint(1, 60)) for tenant in "ab"}
        slots = random.randint(1, 9)
        counters, served = ServiceCounters(), dict.fromkeys("ab", 0.0)
        for tenant in "ab":
            counters.join(tenant, ())
        running: list[tuple[str, int]] = []

        def serve(tenant: str, cost: float) -> None:
            counters.charge(tenant, cost / weights[tenant])  # noqa: B023
            served[tenant] += cost / weights[tenant]  # noqa: B023

        longest = max(num_in for num_in, _ in lengths.values())
        most = slots * max(sum(pair) for pair in lengths.values())
        bound = 2 * max(1.0 * longest, 2.0 * most) / min(weights.values())
        for _ in range(400):
            while len(running) < slots:
                tenant = min("ab", key=lambda one: counters[one])
                serve(tenant, 1.0 * lengths[tenant][0])
                running.append((tenant, lengths[tenant][1]))
            for tenant, _left in running:
                serve(tenant, 2.0)
            running = [(tenant, left - 1) for tenant, left in running if left > 1]
            assert abs(served["a"] - served["b"]) <= bound


def test_batches_come_behind_all_others_and_lift_nobody() -> None:
    counters = ServiceCounters()
    counters.charge(batch_of("a"), 1e9)
    counters.join("b", [batch_of("a")])
    assert counters["b"] == 0.0, "whoever is waited for is measured among those"
    counters.charge("b", 50.0)
    counters.join(batch_of("c"), ["b", batch_of("a")])
    assert counters[batch_of("c")] == 1e9
    counters.charge("d", 1e12)
    waiting = [batch_of("a"), "b", "d", batch_of("e"), "b"]
    turns = in_turns(waiting, lambda name: Claim(name, 10.0), counters, {})
    assert list(turns) == ["b", "b", "d", batch_of("e"), batch_of("a")]
    assert owner_of(batch_of("a")) == "a"
    assert is_batch(batch_of("a"))
    assert not is_batch("a")


def tenant(
    name: str, service: float, num_placed: int, *, weight: float = 1.0, is_waiting: bool = True
) -> TenantView:
    return TenantView(name, service, weight, num_placed, is_waiting)


def test_whoever_had_most_gives_way_to_whoever_stays_behind_it() -> None:
    asking, others = tenant("b", 100.0, 2), [tenant("a", 1000.0, 3), tenant("c", 900.0, 9)]
    assert tenant_to_requeue(asking, others, 200.0, 0.0) == "a"
    assert tenant_to_requeue(asking, others[::-1], 200.0, 0.9) == "a"
    assert tenant_to_requeue(asking, others, 200.0, 1.0) is None, "there is room in a step"
    assert tenant_to_requeue(asking, [], 200.0, 0.0) is None


def test_what_is_taken_is_not_taken_back() -> None:
    asking = tenant("b", 100.0, 2)
    assert tenant_to_requeue(asking, [tenant("a", 700.0, 3)], 200.0, 0.0) == "a"
    # Once all of b's requests are served, a would have less service than b.
    assert tenant_to_requeue(asking, [tenant("a", 699.0, 3)], 200.0, 0.0) is None
    # After giving up one, a still has more placed requests than b then has.
    assert tenant_to_requeue(asking, [tenant("a", 300.0, 5)], 200.0, 0.0) == "a"
    assert tenant_to_requeue(asking, [tenant("a", 300.0, 4)], 200.0, 0.0) is None
    assert tenant_to_requeue(asking, [tenant("a", 299.0, 99)], 200.0, 0.0) is None


def test_weights_count_in_what_a_tenant_keeps() -> None:
    asking = tenant("b", 0.0, 2, weight=0.5)
    heavy = tenant("a", 100.0, 8, weight=1.0, is_waiting=False)
    assert tenant_to_requeue(asking, [heavy], 100.0, 0.0) == "a", "7 against 3 at half the weight"
    heavier = tenant("a", 100.0, 8, weight=2.0, is_waiting=False)
    assert tenant_to_requeue(asking, [heavier], 100.0, 0.0) is None


def test_whoever_asks_for_less_than_its_share_loses_nothing() -> None:
    flood = tenant("b", 0.0, 15)
    small = tenant("a", 1e6, 2, is_waiting=False)
    assert tenant_to_requeue(flood, [small], 1.0, 0.0) is None
    # A tenant's only request runs to its end.
    assert tenant_to_requeue(tenant("b", 0.0, 0), [tenant("a", 1e6, 1)], 1.0, 0.0) is None


def test_tenants_that_both_wait_do_not_take_from_each_other_without_end() -> None:
    """Let two tenants fill all slots, at equal cost per request; the one with the least service
    goes next. Far fewer requests are preempted than end.
    """
    random, slots, cost = fresh(), 16, 100.0
    service, left = {"a": 0.0, "b": 3000.0}, {"a": [], "b": []}  # type: ignore[var-annotated]
    num_taken = num_ended = 0

    def view(name: str) -> TenantView:
        return tenant(name, service[name], len(left[name]))

    for _ in range(5000):
        while True:
            name = min(service, key=service.__getitem__)
            other = "ab".replace(name, "")
            if len(left["a"]) + len(left["b"]) == slots:
                if tenant_to_requeue(view(name), [view(other)], cost, 0.0) is None:
                    break
                left[other].pop()
                num_taken += 1
            left[name].append(random.randint(1, 99))
        for name in left:
            service[name] += 2.0 * len(left[name])
            num_ended += left[name].count(1)
            left[name] = [one - 1 for one in left[name] if one > 1]
    print(num_taken, "taken,", num_ended, "ended", service)
    assert num_taken < 0.1 * num_ended
    assert abs(service["a"] - service["b"]) < 2 * slots * cost
