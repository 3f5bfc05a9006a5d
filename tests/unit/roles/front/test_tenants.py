"""Test quotas at the front: rate buckets, hard budgets, and what is known after a restart."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from hadal.core.config import Deployment
from hadal.core.messages.generation import Deliver
from hadal.core.messages.requests import Charged, Quota, Quotas, Spent, Submit
from hadal.core.messages.units import Cancel
from hadal.core.seams import Tick
from hadal.policy.fairness import batch_of
from hadal.policy.quotas import BUDGET_CODE, DAY_S, RATE_CODE
from hadal.roles.front.front import RESERVE_S, Front
from hadal.roles.front.tenants import RECENT_S, FrontTenants
from tests.fresh import fresh
from tests.unit.roles.driving import generation, of

DAY = 20_000
NOON_S = DAY * DAY_S + DAY_S / 2


def front_with(*quotas: Quota) -> Front:
    made = Front(Deployment(), epoch="f1", max_context=1000)
    made.handle(0.0, Quotas(NOON_S, quotas))
    return made


def ask(made: Front, now_s: float, name: str, *, num_prompt: int = 10, most: int = 0) -> Deliver:
    """Submit a request of tenant t; return its first delivery, or an empty one if there was none."""
    asked = msgspec.structs.replace(generation(name), prompt=(1,) * num_prompt, tenant="t")
    delivers = of(made.handle(now_s, Submit(asked, most_pico_usd=most)), Deliver)
    assert made.check() == []
    return delivers[0] if delivers else Deliver(name, ())


def test_a_request_that_is_let_in_says_what_is_left() -> None:
    made = front_with(Quota("t", tokens_per_minute=600, requests=2))
    first = ask(made, 0.0, "a")
    assert (first.final, first.tokens) == (False, ())
    assert first.limits is not None
    assert (first.limits.requests_left, first.limits.tokens_left) == (1, 590)
    ask(made, 0.0, "b")
    refused = ask(made, 0.0, "c")
    assert (refused.final, refused.error_status, refused.error_code) == (True, 429, RATE_CODE)
    assert made.totals.tokens_refused == 0, "more units would not help"
    made.handle(1.0, Cancel("a", -1))
    assert not ask(made, 1.0, "c").final


def test_others_hear_nothing_of_quotas() -> None:
    made = front_with(Quota("another", requests=1))
    assert of(made.handle(0.0, Submit(generation("a"))), Deliver) == []


def test_tokens_come_back_with_time() -> None:
    made = front_with(Quota("t", tokens_per_minute=60))
    assert not ask(made, 0.0, "a", num_prompt=50).final
    refused = ask(made, 0.0, "b", num_prompt=30)
    assert (refused.final, refused.retry_after_s) == (True, 20.0)
    assert not ask(made, 20.0, "c", num_prompt=30).final


def test_a_quota_that_is_changed_keeps_what_was_had() -> None:
    made = front_with(Quota("t", tokens_per_minute=60, day_pico_usd=100))
    made.handle(0.0, Spent(DAY, {"t": 40}, ()))
    ask(made, 0.0, "a", num_prompt=60, most=10)
    made.handle(0.0, Quotas(NOON_S, (Quota("t", tokens_per_minute=120, day_pico_usd=50),)))
    assert made.unread() == ()
    assert ask(made, 1.0, "b", num_prompt=10, most=1).error_code == RATE_CODE, "3 of 10"
    assert ask(made, 9.0, "c", num_prompt=10, most=1).error_code == BUDGET_CODE, "40 + 10 of 50"
    made.handle(9.0, Quotas(NOON_S + 9.0, ()))
    assert not ask(made, 9.0, "d", num_prompt=500, most=10**9).final


@pytest.mark.promise(
    "The written charges of a day do not exceed the budget: for each running request, "
    "the most that it can cost is reserved."
)
def test_a_budget_waits_for_the_ledger_and_is_kept_to_the_last() -> None:
    made = front_with(Quota("t", day_pico_usd=100))
    assert made.unread() == ("t",)
    assert ask(made, 0.0, "a", most=1).error_status == 503
    made.handle(0.0, Spent(DAY - 1, {"t": 0}, ()))
    assert made.unread() == ("t",), "that was yesterday's"
    made.handle(0.0, Spent(DAY, {"t": 70}, ()))
    assert ask(made, 0.0, "b", most=31).error_code == BUDGET_CODE
    assert not ask(made, 0.0, "b2", most=20).final
    assert ask(made, 0.0, "c", most=11).error_code == BUDGET_CODE, "what b2 can cost is put aside"
    made.handle(1.0, Charged("b2", "t", DAY, 5))
    assert not ask(made, 1.0, "d", most=25).final, "it did cost 5"
    assert ask(made, DAY_S / 2 - 1.0, "e", most=1).error_code == BUDGET_CODE
    assert not ask(made, DAY_S / 2 + 1.0, "f", most=75).final, "another day"


@pytest.mark.promise("A charge counts once, identified by its request's id")
def test_a_charge_counts_once_whoever_says_it_and_whenever() -> None:
    made = front_with(Quota("t", day_pico_usd=100))
    made.handle(0.0, Charged("early", "t", DAY, 10))
    made.handle(0.0, Charged("both", "t", DAY, 10))
    made.handle(1.0, Spent(DAY, {"t": 30}, ("both", "late")))
    for request_id in ("early", "both", "late"):
        made.handle(2.0, Charged(request_id, "t", DAY, 10))
    assert made.tenants._spent == {"t": 40}, "30 of the ledger, and what it did not have yet"
    made.handle(2.0, Charged("new", "t", DAY, 10))
    assert made.tenants._spent == {"t": 50}


@pytest.mark.promise(
    "With dollars_per_day a request is admitted if the budget covers the most that it "
    "can cost, beside all running requests"
)
def test_a_clock_that_is_set_back_over_midnight_opens_no_budget() -> None:
    tenants, quotas = FrontTenants(600.0), (Quota("t", day_pico_usd=100),)
    tenants.set(0.0, Quotas((DAY + 1) * DAY_S + 5.0, quotas))
    tenants.read(0.0, Spent(DAY + 1, {"t": 0}, ()))
    tenants.charged(1.0, Charged("tomorrow's", "t", DAY + 1, 7))
    tenants.set(2.0, Quotas((DAY + 1) * DAY_S - 5.0, quotas))
    assert tenants.unread() == ("t",), "it is another day, whose sum is read"
    tenants.charged(3.0, Charged("a", "t", DAY, 90))
    tenants.read(3.0, Spent(DAY, {"t": 5}, ()))
    assert tenants._spent == {"t": 95}
    assert tenants.refusal(3.0, "t", 0, 1, 1, 10) is not None
    assert tenants.refusal(3.0, "t", 0, 1, 1, 5) is None
    tenants.tick(13.0)
    assert tenants._spent == {"t": 7}, "and then the day comes after all"


def test_what_nobody_says_the_cost_of_is_put_aside_for_a_time_only() -> None:
    made = front_with(Quota("t", day_pico_usd=100))
    made.handle(0.0, Spent(DAY, {"t": 0}, ()))
    assert not ask(made, 0.0, "a", most=100).final
    made.handle(99.0, Tick())
    assert ask(made, 99.0, "b", most=1).error_code == BUDGET_CODE, "it runs on"
    made.handle(100.0, Cancel("a", -1))
    made.handle(100.0, Tick())
    later_s = 100.0 + RESERVE_S
    assert ask(made, later_s - 1.0, "b", most=1).error_code == BUDGET_CODE
    made.handle(later_s, Tick())
    assert not ask(made, later_s, "c", most=100).final
    assert made.check() == []


def test_a_batch_s_line_is_put_aside_until_its_cost_is_said() -> None:
    tenants = FrontTenants(600.0)
    tenants.set(0.0, Quotas(NOON_S, (Quota("t", day_pico_usd=100),)))
    tenants.read(0.0, Spent(DAY, {"t": 0}, ()))
    tenants.begin(0.0, "line", batch_of("t"), 1, 60)
    tenants.begin(1.0, "chat", "t", 1, 30)
    for ended in ("line", "chat"):
        tenants.ended(ended)
    tenants.tick(2.0)
    tenants.tick(602.0)
    assert tenants.check() == []
    assert tenants.refusal(602.0, "t", 0, 1, 1, 41) is not None
    # The chat's reservation has expired, the line's has not.
    assert tenants.refusal(602.0, "t", 0, 1, 1, 40) is None
    tenants.charged(9000.0, Charged("line", "t", DAY, 10))
    assert tenants.refusal(9000.0, "t", 0, 1, 1, 90) is None


@pytest.mark.promise(
    "With dollars_per_day a request is admitted if the budget covers the most that it "
    "can cost, beside all running requests"
)
@pytest.mark.promise(
    "The written charges of a day do not exceed the budget: for each running request, "
    "the most that it can cost is reserved."
)
def test_no_order_of_requests_charges_and_new_starts_exceeds_a_budget() -> None:
    """Simulate a ledger, a front that dies at times, and a gateway that repeats its charges."""
    random: Random = fresh()
    for _ in range(30):
        budget, ledger = random.randint(50, 500), dict[str, int]()
        now_s, number = 0.0, 0

        def begin() -> FrontTenants:
            made = FrontTenants(600.0)
            made.set(now_s, Quotas(NOON_S + now_s, (Quota("t", day_pico_usd=budget),)))  # noqa: B023
            return made

        tenants, running, unsaid = begin(), dict[str, int](), list[Charged]()
        for _ in range(200):
            now_s += random.random()
            what = random.random()
            if what < 0.5:
                most, number = random.randint(1, 60), number + 1
                if tenants.refusal(now_s, "t", 0, 1, 1, most) is None:
                    running[f"r{number}"] = most
                    tenants.begin(now_s, f"r{number}", "t", 1, most)
            elif what < 0.85 and running:
                name = random.choice(sorted(running))
                charge = Charged(name, "t", DAY, random.randint(0, running.pop(name)))
                ledger[name] = charge.pico_usd
                tenants.charged(now_s, charge)
                unsaid.append(charge)
            elif what < 0.9:
                tenants = begin()
                for name, most in running.items():  # Requests continue under the new front.
                    tenants.begin(now_s, name, "t", 1, most)
                events = [lambda t=tenants, c=c: t.charged(now_s, c) for c in unsaid]  # noqa: B023
                kept = dict(ledger)
                events.append(
                    lambda t=tenants, k=kept: t.read(
                        now_s,  # noqa: B023
                        Spent(DAY, {"t": sum(k.values())}, tuple(k)),
                    )
                )
                random.shuffle(events)
                for event in events:
                    event()
                assert tenants._spent["t"] == sum(ledger.values())
            assert sum(ledger.values()) + sum(running.values()) <= budget
            assert tenants.check() == []


def test_what_is_old_is_forgotten() -> None:
    tenants = FrontTenants(10.0)
    tenants.set(0.0, Quotas(NOON_S, (Quota("t", day_pico_usd=10),)))
    for number in range(5):
        tenants.charged(float(number), Charged(f"r{number}", "t", DAY, 1))
    tenants.tick(RECENT_S + 2.5)
    assert list(tenants._recent) == ["r3", "r4"]
