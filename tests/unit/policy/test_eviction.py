"""Lru and Arc: evictable blocks leave in order, withdrawn ones stay, Arc protects reused ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from hadal.policy.eviction import Arc, Lru
from tests.fresh import fresh


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big")


def come(policy: Lru | Arc, *numbers: int) -> None:
    """Add the blocks of one text and offer them for eviction at once."""
    policy.tick()
    for position, number in enumerate(numbers):
        policy.add(key_of(number), position)
        policy.offer(key_of(number))


def use(policy: Lru | Arc, *numbers: int) -> None:
    policy.tick()
    for number in numbers:
        policy.use(key_of(number))


def go(policy: Lru | Arc, count: int) -> list[int]:
    """Return the victims, in order."""
    victims = [policy.victim() for _ in range(count)]
    return [int.from_bytes(victim, "big") for victim in victims if victim is not None]


BOTH = pytest.mark.parametrize("make", [Lru, lambda: Arc(100)], ids=["lru", "arc"])


@BOTH
def test_the_oldest_goes_first_and_of_one_text_the_deepest(make: Callable[[], Lru | Arc]) -> None:
    policy = make()
    come(policy, 1, 2, 3)
    come(policy, 4, 5)
    assert go(policy, 9) == [3, 2, 1, 5, 4]
    assert (len(policy), policy.num_offered) == (0, 0)


@BOTH
def test_a_use_makes_it_young(make: Callable[[], Lru | Arc]) -> None:
    policy = make()
    come(policy, 1, 2)
    come(policy, 3, 4)
    use(policy, 1, 2)
    assert go(policy, 9) == [4, 3, 2, 1]


@BOTH
def test_what_is_withdrawn_stays_until_it_is_offered(make: Callable[[], Lru | Arc]) -> None:
    policy = make()
    come(policy, 1, 2, 3)
    policy.withdraw(key_of(3))
    policy.remove(key_of(2))
    assert go(policy, 9) == [1]
    assert (key_of(3) in policy, policy.num_offered) == (True, 0)
    use(policy, 3)
    assert go(policy, 1) == []
    policy.offer(key_of(3))
    policy.offer(key_of(3))
    assert go(policy, 9) == [3]


def test_conversations_outlive_a_flood_of_prompts_in_arc_and_not_in_lru() -> None:
    """Serve ten conversations in turn; between two turns of each, more new blocks arrive than fit."""
    left = []
    for policy in (Lru(), Arc(60)):
        num_kept, number = 0, 1000
        for turn in range(40):
            first = turn % 10 * 3
            chain = (first, first + 1, first + 2)
            if key_of(first) in policy:
                num_kept += turn >= 20
                use(policy, *chain)
            else:
                come(policy, *chain)
                if turn < 10:
                    use(policy, *chain)
            come(policy, *range(number, number + 9))
            number += 9
            while len(policy) > 60:
                assert policy.victim() is not None
        left.append(num_kept)
    assert left == [0, 20]


def test_arc_gives_those_used_once_more_room_when_they_are_missed() -> None:
    """Use every entry twice, 50 blocks apart, and never again."""
    arc = Arc(60)
    num_kept = 0
    for number in range(1200):
        come(arc, number)
        if number >= 50:
            num_kept += key_of(number - 50) in arc
            if key_of(number - 50) in arc:
                use(arc, number - 50)
            else:
                come(arc, number - 50)
        while len(arc) > 60:
            arc.victim()
    assert num_kept > 900
    # If half of the capacity always belonged to entries used twice, none would last 50 blocks.
    assert arc._room_once > 40


def test_arc_remembers_no_more_than_its_capacity() -> None:
    arc = Arc(10)
    for number in range(500):
        come(arc, number)
        if number % 3 == 0:
            use(arc, number)
        while len(arc) > 10:
            arc.victim()
    assert len(arc._gone_once) <= 10
    assert len(arc._gone_again) <= 10


@BOTH
@pytest.mark.parametrize("seed", [1, fresh().getrandbits(32)])
def test_who_goes_was_offered_and_nobody_is_lost(make: Callable[[], Lru | Arc], seed: int) -> None:
    print(f"seed {seed}")
    random, policy = Random(seed), make()
    here: dict[int, bool] = {}
    """Key -> whether it is offered."""
    for number in range(3000):
        policy.tick()
        new = number if random.random() < 0.6 else max(0, number - random.randrange(200))
        if new not in here:
            policy.add(key_of(new), random.randrange(9))
            here[new] = False
        one = random.choice(list(here))
        act = random.randrange(5)
        if act == 0:
            policy.use(key_of(one))
        elif act == 1:
            policy.withdraw(key_of(one))
            here[one] = False
        elif act == 2:
            policy.remove(key_of(one))
            del here[one]
        else:
            policy.offer(key_of(one))
            here[one] = True
        if random.random() < 0.3:
            gone = go(policy, 1)
            assert bool(gone) == any(here.values())
            assert all(here.pop(key) for key in gone)
        assert (len(policy), policy.num_offered) == (len(here), sum(here.values()))
    assert len(go(policy, len(here))) == sum(here.values())
