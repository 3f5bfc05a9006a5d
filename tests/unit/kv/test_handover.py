"""Test leases: released once, expired in order, blocks shared by several."""

from __future__ import annotations

import pytest

from hadal.kv.leases import HeldLease, Leases


def lease(name: str, deadline_s: float, *block_ids: int) -> HeldLease:
    return HeldLease(name, 0, block_ids, deadline_s)


def test_release_gives_the_lease_once() -> None:
    membership = Leases()
    membership.open(lease("a", 5.0, 1, 2))
    assert ("a", 0) in membership
    assert membership.release("a", 1) is None  # The attempt differs.
    assert membership.release("a", 0) == lease("a", 5.0, 1, 2)
    assert membership.release("a", 0) is None
    assert len(membership) == 0


def test_leases_expire_at_their_deadline_oldest_first() -> None:
    membership = Leases()
    for name, deadline_s in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        membership.open(lease(name, deadline_s))
    assert membership.next_deadline_s == 1.0
    assert membership.expired(0.9) == []
    assert [ended.request_id for ended in membership.expired(2.0)] == ["a", "b"]
    assert membership.next_deadline_s == 3.0


def test_an_attempt_has_one_lease() -> None:
    membership = Leases()
    membership.open(lease("a", 1.0))
    with pytest.raises(ValueError, match="has a lease already"):
        membership.open(lease("a", 2.0))


def test_deadlines_are_opened_in_order() -> None:
    membership = Leases()
    membership.open(lease("a", 2.0))
    with pytest.raises(ValueError, match="order"):
        membership.open(lease("b", 1.0))


def test_clear_ends_all() -> None:
    membership = Leases()
    membership.open(lease("a", 1.0, 3))
    assert [ended.request_id for ended in membership.clear()] == ["a"]
    assert membership.next_deadline_s is None


def test_a_block_may_be_under_two_leases_but_not_in_one_twice() -> None:
    membership = Leases()
    membership.open(lease("a", 1.0, 3, 4))
    membership.open(lease("b", 1.0, 3))
    assert membership.check() == []
    assert membership.owners() == [(("a", 0), (3, 4)), (("b", 0), (3,))]
    assert membership.owners(1) == []
    membership.open(lease("c", 1.0, 5, 5))
    assert membership.check() == ["a lease has a block twice"]
