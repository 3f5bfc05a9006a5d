"""Test a decode leader that took over ranks: which of their KV it continues to use, and which it frees."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hadal.core.messages.generation import Generation
from hadal.core.messages.pools import Freed
from hadal.core.messages.units import FrontUp, Resume, Returned, Tokens, UnitUp
from hadal.core.plans import DecodePlan, Held, HeldKv, Join
from hadal.core.seams import Effect, Execute, RankReset, Tick
from hadal.roles.decode.held import HELD_S
from hadal.roles.decode.leader import DecodeLeader
from tests.unit.roles.driving import decode_leader, done, generation, of, sent

NUM_BLOCKS = 8


def taken_over(*held: tuple[HeldKv, ...]) -> tuple[DecodeLeader, list[Effect]]:
    """Return a leader that has just received its ranks' reports of held KV, and its effects."""
    leader = decode_leader(NUM_BLOCKS, len(held), num_slots=2, max_context=400)
    leader.start(0.0)
    ranks = tuple(range(len(held)))
    effects = leader.handle(
        1.0,
        RankReset(
            (),
            ranks,
            pools=tuple(f"pool-{rank}" for rank in ranks),
            formation=7,
            held={rank: Held(kv, {1: 3}) for rank, kv in enumerate(held)},
        ),
    )
    assert leader.audit() == []
    return leader, effects


def asked(name: str, attempt_id: int, *, prompt: int = 70, output: int = 5) -> Generation:
    made = generation(name, prompt=prompt, max_tokens=20)
    return msgspec.structs.replace(made, output=tuple(range(output)), attempt_id=attempt_id)


def handle(leader: DecodeLeader, now_s: float, *events: Any) -> list[Effect]:
    effects = leader.handle(now_s, *events)
    assert leader.audit() == []
    return effects


def joins(effects: list[Effect]) -> dict[int, tuple[Join, ...]]:
    return {
        rank: plan.joins
        for execute in of(effects, Execute)
        for rank, plan in enumerate(execute.plans)
        if isinstance(plan, DecodePlan) and plan.joins
    }


def test_it_says_what_its_ranks_hold_and_frees_the_rest() -> None:
    _, effects = taken_over((HeldKv(70, (2, 3), 80, 71),), (HeldKv(71, (5,), 40, 40),))
    (up,) = {up.held for up in sent(effects, UnitUp)}
    assert up == (70, 71)
    freed = {effect.rank: set(effect.block_ids) for effect in of(effects, Freed)}
    assert freed == {0: {1, 4, 5, 6, 7}, 1: {1, 2, 3, 4, 6, 7}}


def test_what_the_front_names_goes_on_from_its_last_token_on_its_rank() -> None:
    leader, _ = taken_over((), (HeldKv(70, (2, 3), 80, 71), HeldKv(71, (5,), 40, 40)))
    handle(leader, 1.1, FrontUp("f"))
    effects = handle(leader, 1.2, Resume((asked("a", 70),), is_last=True))
    (joined,) = joins(effects)[1]
    found = (joined.block_ids, joined.num_tokens, joined.last_token, joined.output_index)
    assert found == ((2, 3), 74, 4, 5)
    assert (joined.attempt_id, joined.is_pulled) == (70, False)
    assert [effect.block_ids for effect in of(effects, Freed)] == [(5,)]
    assert leader.blocks.num_used == 2
    (tokens,) = sent(handle(leader, 1.3, done(0, {2: 9})), Tokens)
    assert tokens.indices == (5).to_bytes(8, "little")


def test_kv_that_was_only_pulled_is_fetched() -> None:
    leader, _ = taken_over((HeldKv(70, (2, 3), 75, 74),))
    effects = handle(leader, 1.2, FrontUp("f"), Resume((asked("a", 70),), is_last=True))
    assert joins(effects)[0][0].is_pulled


@pytest.mark.parametrize(
    "held",
    [
        HeldKv(71, (2, 3), 80, 71),  # The KV of another attempt.
        HeldKv(70, (2, 3), 73, 71),  # Fewer tokens than delivered: the request continued elsewhere.
        HeldKv(70, (2,), 80, 71),  # A block too few for its tokens.
    ],
)
def test_what_is_not_there_is_given_back(held: HeldKv) -> None:
    leader, _ = taken_over((held,))
    effects = handle(leader, 1.2, FrontUp("f"), Resume((asked("a", 70),), is_last=True))
    assert [back.request_id for back in sent(effects, Returned)] == ["a"]
    assert leader.blocks.num_used == 0


def test_of_a_request_on_two_ranks_the_one_that_has_all_of_it_counts() -> None:
    leader, _ = taken_over((HeldKv(70, (2, 3), 72, 71),), (HeldKv(70, (4, 5), 75, 71),))
    effects = handle(leader, 1.2, FrontUp("f"), Resume((asked("a", 70),), is_last=True))
    assert joins(effects).keys() == {1}
    assert leader.blocks.num_used == 2


def test_another_fronts_kv_is_freed_and_so_is_what_nobody_asks_for() -> None:
    leader, _ = taken_over((HeldKv(70, (2, 3), 80, 71),))
    handle(leader, 1.2, FrontUp("f"))
    assert leader.blocks.num_used == 2
    handle(leader, 1.3, FrontUp("g"))
    assert leader.blocks.num_used == 0
    leader, _ = taken_over((HeldKv(70, (2, 3), 80, 71),))
    handle(leader, 1.0 + HELD_S - 0.1, Tick())
    assert leader.blocks.num_used == 2
    handle(leader, 1.1 + HELD_S, Tick())
    assert leader.blocks.num_used == 0


def test_a_rank_that_is_lost_before_anybody_goes_on_takes_its_kv_with_it() -> None:
    leader, _ = taken_over((HeldKv(70, (2, 3), 80, 71),), ())
    handle(leader, 1.1, RankReset((0,), (), pools=("", "pool-1"), formation=8))
    effects = handle(leader, 1.2, FrontUp("f"), Resume((asked("a", 70),), is_last=True))
    assert [back.request_id for back in sent(effects, Returned)] == ["a"]
