"""Test the role of a rank's process: what it accepts and drops, and its heartbeats."""

from __future__ import annotations

import pytest

from hadal.core.cache import NAME_BYTES, NO_NAME, DiskLocation
from hadal.core.errors import InvariantError
from hadal.core.messages.pools import Freed, Named, Pull, ReadBlocks, StoreBlocks
from hadal.core.messages.ranks import (
    RankAnswered,
    RankDo,
    RankDone,
    RankForm,
    RankFormed,
    RankHeartbeat,
    RankHeld,
    RankStage,
    RankStaged,
    RankStep,
    RankUp,
    RankWho,
)
from hadal.core.messages.units import KvLease
from hadal.core.plans import (
    BlocksRead,
    BlocksStored,
    DecodePlan,
    Formed,
    FormPlan,
    KvPulled,
    Member,
    NamedBlocks,
    PrefillPlan,
    Staged,
    StagePlan,
    StepDone,
)
from hadal.core.seams import Execute, Form, Send, Stage, Tick, WakeAt
from hadal.roles.ranks.rank import RankProgress, RankRole
from tests.unit.roles.driving import done, of, sent

LEASE = KvLease("pool", (1, 2), (0, 0), 100)


def make_rank() -> RankRole:
    return RankRole(RankUp("decode-0", 2, "e1", "127.0.0.1", 7000, "pool-2"))


def form(formation: int, epoch: str = "e1") -> RankForm:
    members = (Member(0, "e0", "127.0.0.1", 6999), Member(2, epoch, "127.0.0.1", 7000))
    return RankForm(FormPlan(formation, 3, members, b"", 4))


def formed_rank() -> RankRole:
    rank = make_rank()
    rank.start(0.0)
    rank.handle(0.0, form(1))
    rank.handle(0.0, Formed(1, None))
    return rank


def step(step_id: int, formation: int = 1) -> RankStep:
    return RankStep(formation, DecodePlan(step_id, (), (), ()))


def test_it_announces_itself_until_it_is_in_a_generation() -> None:
    rank = make_rank()
    up = RankUp("decode-0", 2, "e1", "127.0.0.1", 7000, "pool-2")
    assert rank.start(0.0) == [Send("supervisor", up), Send("decode-0", up), WakeAt(0.25)]
    assert rank.handle(0.25, Tick()) == [Send("decode-0", up), WakeAt(0.5)]
    rank.handle(0.3, form(1))
    assert sent(rank.handle(0.5, Tick()), RankHeartbeat) == [RankHeartbeat(2, "e1", 1, 0, False)]
    assert not sent(rank.handle(0.75, Tick()), RankUp)


def test_steps_of_its_generation_run_and_others_are_dropped() -> None:
    rank = make_rank()
    rank.start(0.0)
    assert rank.handle(0.0, step(0)) == []
    assert of(rank.handle(0.0, form(1)), Form) == [Form(form(1).plan)]
    assert rank.handle(0.0, step(0)) == []  # Not formed yet.
    found = sent(rank.handle(0.0, Formed(1, None)), RankFormed)
    assert found == [RankFormed(2, "e1", Formed(1, None))]
    assert rank.handle(0.0, step(0)) == [Execute((step(0).plan,))]
    assert rank.handle(0.0, step(1, formation=2)) == []
    assert sent(rank.handle(0.0, done(0)), RankDone) == [RankDone(2, "e1", 1, done(0))]
    assert rank.num_stale == 3


def test_a_new_generation_makes_the_steps_before_it_void() -> None:
    rank = formed_rank()
    rank.handle(0.0, step(0))
    rank.handle(0.0, step(1))
    rank.handle(0.0, form(2))
    assert rank.handle(0.0, done(0, error="PeerLost: aborted")) == []
    assert rank.handle(0.0, done(1, error="formation 1 is over")) == []
    rank.handle(0.0, Formed(2, None))
    assert of(rank.handle(0.0, step(0, formation=2)), Execute)


def test_an_older_or_foreign_form_is_dropped() -> None:
    rank = formed_rank()
    assert rank.handle(0.0, form(1)) == []
    assert rank.handle(0.0, form(2, epoch="e0")) == []
    assert rank.formation == 1
    rank.handle(0.0, form(2))
    assert rank.handle(0.0, Formed(1, "formation 1 is over")) == []


def test_a_rank_that_could_not_form_does_no_steps() -> None:
    rank = make_rank()
    rank.start(0.0)
    rank.handle(0.0, form(1))
    rank.handle(0.0, Formed(1, "PeerLost: rank 0", (0,)))
    assert rank.handle(0.0, step(0)) == []


def test_three_steps_at_once_are_one_too_many() -> None:
    rank = formed_rank()
    rank.handle(0.0, step(0))
    rank.handle(0.0, step(1))
    with pytest.raises(InvariantError, match="too many"):
        rank.handle(0.0, step(2))


def test_a_step_is_done_when_it_is_the_one_that_runs() -> None:
    rank = formed_rank()
    with pytest.raises(InvariantError, match="not the one that runs"):
        rank.handle(0.0, done(0))
    rank.handle(0.0, step(0))
    rank.handle(0.0, step(1))
    with pytest.raises(InvariantError, match="not the one that runs"):
        rank.handle(0.0, done(1))


def test_it_says_where_its_experts_can_be_had() -> None:
    rank = RankRole(RankUp("decode-0", 2, "e1", "127.0.0.1", 7000, "pool-2", 7001))
    assert sent(rank.start(0.0), RankUp)[0].expert_port == 7001
    assert sent(make_rank().start(0.0), RankUp)[0].expert_port == 0


def test_stages_of_its_generation_are_begun_and_answered() -> None:
    rank = make_rank()
    rank.start(0.0)
    plan = StagePlan(1, 4, 0, (1, 2), ())
    assert rank.handle(0.0, RankStage(plan)) == []  # An order for its predecessor.
    rank.handle(0.0, form(1))
    assert rank.handle(0.0, RankStage(plan)) == []  # Not formed yet.
    rank.handle(0.0, Formed(1, None))
    assert rank.handle(0.0, RankStage(plan)) == [Stage(plan)]
    staged = Staged(1, 4, 0, None, 2)
    assert rank.handle(0.0, staged) == [Send("decode-0", RankStaged(2, "e1", staged))]
    assert rank.num_stale == 2


def test_a_new_generation_makes_the_stages_before_it_void() -> None:
    rank = formed_rank()
    rank.handle(0.0, RankStage(StagePlan(1, 4, 0, (1, 2), ())))
    rank.handle(0.0, form(2))
    assert rank.handle(0.0, Staged(1, 4, 0)) == []
    rank.handle(0.0, Formed(2, None))
    assert rank.handle(0.0, RankStage(StagePlan(1, 5, 1, (1, 2), ()))) == []
    assert rank.num_stale == 2
    assert of(rank.handle(0.0, RankStage(StagePlan(2, 5, 1, (1, 2), ()))), Stage)


def test_pulls_and_freed_blocks_outlive_generations_but_not_the_process() -> None:
    rank = make_rank()
    rank.start(0.0)
    pull = RankDo(Pull("a", 0, LEASE, (3, 4)))
    assert rank.handle(0.0, pull) == []  # An order for its predecessor.
    assert rank.handle(0.0, RankDo(Freed((1,)))) == []
    rank.handle(0.0, form(1))
    assert rank.handle(0.0, pull) == [pull.effect]
    assert rank.handle(0.0, RankDo(Freed((1,)))) == [Freed((1,))]
    rank.handle(0.0, form(2))
    pulled = KvPulled("a", 0, None)
    assert rank.handle(0.0, pulled) == [Send("decode-0", RankAnswered(2, "e1", pulled))]


def test_it_reads_and_writes_the_disk_for_its_leader_in_any_generation() -> None:
    rank = make_rank()
    rank.start(0.0)
    load = RankDo(ReadBlocks(1, bytes(16), (DiskLocation(2, 3),), (4,)))
    store = RankDo(StoreBlocks(1, bytes(16), (0,), (5,)))
    assert rank.handle(0.0, load) + rank.handle(0.0, store) == []  # Orders for its predecessor.
    rank.handle(0.0, form(1))
    assert rank.handle(0.0, load) == [load.effect]
    assert rank.handle(0.0, store) == [store.effect]
    rank.handle(0.0, form(2))
    loaded, stored = BlocksRead(1, 1), BlocksStored(1, (None,))
    assert rank.handle(0.0, loaded) == [Send("decode-0", RankAnswered(2, "e1", loaded))]
    assert rank.handle(0.0, stored) == [Send("decode-0", RankAnswered(2, "e1", stored))]


def test_a_broken_connection_is_told_at_once() -> None:
    rank = formed_rank()
    assert rank.handle(0.01, RankProgress(5, True)) == []
    assert sent(rank.handle(0.02, RankProgress(6, False, (0,))), RankHeartbeat) == [
        RankHeartbeat(2, "e1", 1, 6, False, (0,))
    ]
    assert rank.handle(0.03, RankProgress(6, False, (0,))) == []
    rank.handle(0.03, step(0))
    failed: StepDone = done(0, error="PeerLost: rank 0: closed")
    assert sent(rank.handle(0.04, failed), RankDone)[0].lost == (0,)
    rank.handle(0.05, form(2))
    assert sent(rank.handle(0.5, Tick()), RankHeartbeat)[0].lost == ()


def test_a_new_leader_hears_what_it_holds_when_no_copy_of_the_old_ones_is_under_way() -> None:
    rank = formed_rank()
    rank.handle(0.1, RankDo(Freed((4,))))
    rank.handle(0.1, RankDo(Pull("a", 0, LEASE, (3, 4))))
    rank.handle(0.1, RankDo(StoreBlocks(7, b"n", (0,), (5,))))
    assert sent(rank.handle(0.11, RankWho("e1")), RankHeld) == []
    assert sent(rank.handle(0.12, KvPulled("a", 0, None)), RankHeld) == []
    (held,) = sent(rank.handle(0.13, BlocksStored(7, (None,))), RankHeld)
    assert (held.up.epoch, held.plan.formation, held.held.num_freed) == ("e1", 1, {4: 1})
    assert sent(rank.handle(0.14, Tick()), RankHeld) == []
    # The question is for the process that was here before.
    assert sent(rank.handle(0.15, RankWho("e0")), RankHeld) == []


@pytest.mark.parametrize("error", [None, "PeerLost: aborted"])
@pytest.mark.parametrize("is_void", [False, True])
@pytest.mark.parametrize("is_copied", [False, True])
def test_what_a_step_that_failed_was_to_fetch_is_held_by_nobody(
    error: str | None, *, is_void: bool, is_copied: bool
) -> None:
    """After a failed step the block has no name, as in the leader: only that leader knew that a step must
    still fetch the block.
    """
    rank = formed_rank()
    if is_copied:
        rank.handle(0.0, RankDo(Pull("a", 0, LEASE, (3, 4))))
        rank.handle(0.0, KvPulled("a", 0, None))
    else:
        rank.handle(0.0, RankDo(ReadBlocks(1, bytes(16), (DiskLocation(2, 3),), (4,))))
        rank.handle(0.0, BlocksRead(1, 1))
    rank.handle(0.0, RankDo(Named(NamedBlocks((4,), bytes(NAME_BYTES), NO_NAME), 2)))
    rank.handle(0.0, RankStep(1, PrefillPlan(0, (), fetches=(4,))))
    (held,) = sent(rank.handle(0.0, RankWho("e1")), RankHeld)
    assert not held.held.named.block_ids
    if is_void:
        rank.handle(0.0, form(2))
    rank.handle(0.0, done(0, error=error))
    (held,) = sent(rank.handle(0.0, RankWho("e1")), RankHeld)
    assert held.held.named.block_ids == (() if error else (4,))


def test_blocks_that_were_named_for_its_predecessor_are_none_of_its_own() -> None:
    """The new process's blocks are empty: a name would lead readers to KV that was never computed."""
    rank = make_rank()
    rank.start(0.0)
    named = RankDo(Named(NamedBlocks((6,), b"n" * NAME_BYTES, NO_NAME), 2))
    assert rank.handle(0.0, named) == []
    assert rank.num_stale == 1
    rank.handle(0.0, form(1))
    (held,) = sent(rank.handle(0.1, RankWho("e1")), RankHeld)
    assert held.held.named.block_ids == ()
    assert rank.handle(0.1, named) == []
    (held,) = sent(rank.handle(0.2, RankWho("e1")), RankHeld)
    assert held.held.named == named.effect.named


def test_one_that_was_never_led_only_says_that_it_is_up() -> None:
    rank = make_rank()
    rank.start(0.0)
    assert len(sent(rank.handle(0.1, RankWho("e1")), RankUp)) == 1
