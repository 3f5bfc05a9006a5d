"""Test FrontRequests: the queue's order, sums, deadlines, and what `check` detects."""

from __future__ import annotations

import math

import msgspec
import pytest

from hadal.core.errors import InvariantError
from hadal.core.request import State, Transition
from hadal.roles.front.record import Record
from hadal.roles.front.requests import FrontRequests, Placed
from tests.unit.roles.driving import generation


def book_of(*names: str) -> FrontRequests:
    membership = FrontRequests()
    for number, name in enumerate(names):
        asked = msgspec.structs.replace(generation(name, 63), arrived_s=float(number))
        membership.add(asked, 100.0)
    return membership


def test_one_that_comes_back_is_ahead_of_those_that_came_after_it() -> None:
    membership = book_of("a", "b", "c")
    first = membership.by_id["a"]
    membership.move(first, Transition.PLACE)
    assert membership.next_queued(0.0) is membership.by_id["b"]
    membership.move(first, Transition.LOSE)
    membership.move(first, Transition.REQUEUE)
    assert membership.next_queued(0.0) is first
    assert membership.counts[State.QUEUED] == 3


def test_without_text_only_the_length_of_what_was_streamed_is_kept() -> None:
    membership = FrontRequests()
    asked = msgspec.structs.replace(generation("a"), output=(7, 8, 9))
    record = membership.add(asked, 100.0, keeps_text=False)
    assert (record.output, record.num_output) == ([], 3)
    assert (
        membership.add(msgspec.structs.replace(asked, request_id="b"), 100.0).output,
        membership.check(),
    ) == ([7, 8, 9], [])


def of_tenant(membership: FrontRequests, name: str, tenant: str, arrived_s: float) -> Record:
    made = msgspec.structs.replace(generation(name), tenant=tenant, arrived_s=arrived_s)
    return membership.add(made, 100.0)


@pytest.mark.promise("the next request is one of the tenant that was served least, over its weight")
def test_next_is_one_of_the_tenant_that_units_work_least_for() -> None:
    membership = FrontRequests()
    for number in range(4):
        of_tenant(membership, f"a{number}", "a", 0.0)
    for number in range(2):
        of_tenant(membership, f"b{number}", "b", 1.0)
    order = []
    while (record := membership.next_queued(2.0)) is not None:
        order.append(record.request_id)
        membership.move(record, Transition.PLACE)
        record.prefill_unit = "prefill-0"
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert membership.check() == []
    assert [membership.has_fewer(tenant, "") for tenant in ("a", "b", "c")] == [False, True, True]
    assert not membership.has_fewer("c/batch", "")
    membership.move(membership.by_id["b0"], Transition.CANCEL)
    assert membership.tenant_to_placed == {"a": 4, "b": 1}


def test_an_answer_counts_as_service_too() -> None:
    """The tenant with more output tokens waits for the other one, though their prompts are equal."""
    membership = FrontRequests()
    for tenant in "ab":
        of_tenant(membership, f"{tenant}0", tenant, 0.0)
        of_tenant(membership, f"{tenant}1", tenant, 0.0)
    for name in ("a0", "b0"):
        record = membership.by_id[name]
        membership.move(record, Transition.PLACE)
        record.prefill_unit = "prefill-0"
    membership.grow(membership.by_id["a0"])
    found = membership.next_queued(2.0)
    assert found is not None
    assert found.request_id == "b1"
    for _ in range(2):
        membership.grow(membership.by_id["b0"])
    found = membership.next_queued(2.0)
    assert found is not None
    assert found.request_id == "a1"


def test_one_that_backs_off_is_passed_over_until_then() -> None:
    membership = book_of("a", "b")
    membership.by_id["a"].not_before_s = 5.0
    assert membership.next_queued(4.9) is membership.by_id["b"]
    assert membership.next_queued(5.0) is membership.by_id["a"]
    assert (membership.next_retry_s(1.0), membership.next_retry_s(5.0)) == (5.0, math.inf)


def test_blocks_are_counted_while_placed_and_grow() -> None:
    membership = book_of("a")
    record = membership.by_id["a"]
    membership.move(record, Transition.PLACE)
    record.prefill_unit = "prefill-0"
    assert (record.num_blocks, membership.num_blocks_placed, membership.num_placed) == (1, 1, 1)
    for _ in range(2):
        membership.grow(record)
        assert (record.num_blocks, membership.num_blocks_placed) == (2, 2)
    assert membership.check() == []
    membership.move(record, Transition.CANCEL)
    found = (membership.num_blocks_placed, membership.by_id, sum(membership.counts.values()))
    assert found == (0, {}, 0)


def test_a_step_that_cannot_happen_is_a_bug() -> None:
    membership = book_of("a")
    with pytest.raises(InvariantError, match="cannot"):
        membership.move(membership.by_id["a"], Transition.PULLED)


def test_overdue_are_those_that_waited_too_long_since_they_came_or_moved() -> None:
    membership = book_of("a", "b", "c")
    membership.by_id["b"].moved_s = 50.0
    assert [record.request_id for record in membership.overdue(102.0)] == ["a", "c"]
    assert membership.overdue(149.9) == []
    assert [record.request_id for record in membership.overdue(150.0)] == ["b"]


def test_check_sees_owners_that_do_not_fit_the_state() -> None:
    membership = book_of("a")
    membership.by_id["a"].decode_unit = "decode-0"
    assert any("owns" in problem for problem in membership.check())


def test_check_sees_a_wrong_sum_and_a_lost_place_in_the_queue() -> None:
    membership = book_of("a", "b")
    membership.fingerprint_to_placed["f"] = Placed(1)
    membership._tenant_to_queue[""].pop()
    membership.counts[State.QUEUED] = 7
    assert len(membership.check()) == 3
