"""Test the leader of many ranks: effects go to ranks, results are merged, formations void steps."""

from __future__ import annotations

from typing import Self

import pytest

from hadal.core.errors import InvariantError
from hadal.core.messages.pools import Freed, Pull
from hadal.core.messages.questions import Audit, AuditRequest
from hadal.core.messages.ranks import (
    RankAnswered,
    RankDo,
    RankDone,
    RankForm,
    RankFormed,
    RankHeartbeat,
    RankStep,
    RankUp,
)
from hadal.core.messages.units import Cancel, KvLease, UnitDown, UnitReport, UnitUp
from hadal.core.placement import spread
from hadal.core.plans import Chunk, DecodePlan, Formed, KvPulled, PrefillPlan, StepDone
from hadal.core.seams import Effect, Event, Execute, RankReset, Send, Tick, WakeAt
from hadal.roles.experts.experts import ExpertBalancer
from hadal.roles.experts.gain import ExpertTerms
from hadal.roles.ranks.membership import UnitMembership
from hadal.roles.ranks.ranks import RankedLeader
from hadal.roles.ranks.states import UnitPhase
from tests.unit.roles.driving import of, sent

LEASE = KvLease("pool", (1, 2), (0, 0), 100)
NUM_SLOTS = 8


class InnerLeader:
    """Leader that records its events and answers with the effects that the test put into `answers`."""

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.answers: list[Effect] = []

    def start(self, now_s: float) -> list[Effect]:
        return [Send("front", UnitUp("decode-0", "decode", "e", 30, 24)), WakeAt(now_s + 7.0)]

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        if not isinstance(event, Tick):
            self.heard.append(event)
        answers, self.answers = self.answers, []
        return answers


class Driver:
    """Leader of many ranks with its inner leader. With `terms`, experts are balanced."""

    def __init__(self, num_ranks: int = 3, terms: ExpertTerms | None = None) -> None:
        self.inner = InnerLeader()
        membership = UnitMembership(
            "decode-0", num_ranks, spread(1, 12, num_ranks), rank_timeout_s=1.5
        )
        experts = (
            None
            if terms is None
            else ExpertBalancer(membership.placement, (0,) * num_ranks, terms=terms)
        )
        self.leader = RankedLeader(
            "decode-0",
            self.inner,
            membership,
            num_slots=NUM_SLOTS,
            step_timeout_s=15.0,
            experts=experts,
            growing_s=lambda: 1e-3,
        )
        self.now_s = 0.0
        self.leader.start(0.0)

    def handle(self, event: Event) -> list[Effect]:
        effects = self.leader.handle(self.now_s, event)
        assert self.leader.check() == []
        return effects

    def up(self, rank: int, epoch: str = "") -> list[Effect]:
        return self.handle(
            RankUp("decode-0", rank, epoch or f"e{rank}", "h", 1, f"pool-{rank}", 7000 + rank)
        )

    def formed(self) -> list[Effect]:
        effects: list[Effect] = []
        membership = self.leader.membership
        for rank, epoch in list(membership.members.items()):
            effects += self.handle(RankFormed(rank, epoch, Formed(membership.formation, None)))
        return effects

    def run(self) -> Self:
        for rank in range(self.leader.membership.num_ranks):
            self.up(rank)
        self.formed()
        self.inner.heard.clear()
        return self

    def execute(self, step_id: int) -> list[Effect]:
        """Let the inner leader plan a step."""
        plans = tuple(
            DecodePlan(step_id, (), (), ((rank, 0, 5),))
            for rank in range(self.leader.membership.num_ranks)
        )
        self.inner.answers = [Execute(plans)]
        effects = self.handle(Cancel("x", 0))
        self.inner.heard.pop()
        return effects

    def done(
        self, rank: int, step_id: int, *, error: str | None = None, lost: tuple[int, ...] = ()
    ) -> list[Effect]:
        done = StepDone(step_id, (1,), (10 + rank,), {}, 0.01 * (rank + 1), error)
        membership = self.leader.membership
        return self.handle(
            RankDone(rank, membership.members[rank], membership.formation, done, lost)
        )

    def pass_s(self, seconds: float, *beating: int) -> list[Effect]:
        effects: list[Effect] = []
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.1
            for rank in beating:
                epoch = self.leader.membership.members[rank]
                effects += self.handle(
                    RankHeartbeat(rank, epoch, self.leader.membership.formation, 0, False)
                )
            effects += self.handle(Tick())
        return effects

    def heard(self, kind: type) -> list[Event]:
        return [event for event in self.inner.heard if isinstance(event, kind)]


def to(effects: list[Effect], kind: type) -> list[str]:
    """Return the receivers of messages of type `kind`, and of RankDo with an effect of this type."""
    sends = [e for e in effects if isinstance(e, Send)]
    what = [e.message.effect if isinstance(e.message, RankDo) else e.message for e in sends]
    return [e.to for e, one in zip(sends, what, strict=True) if isinstance(one, kind)]


def test_the_inner_leader_hears_of_the_first_generation_when_it_is_formed() -> None:
    driver = Driver()
    assert sent(driver.leader.start(0.0), UnitUp)
    effects = [*driver.up(0), *driver.up(1), *driver.up(2)]
    assert to(effects, RankForm) == ["decode-0.0", "decode-0.1", "decode-0.2"]
    assert driver.inner.heard == []
    driver.formed()
    found = driver.inner.heard
    assert found == [RankReset((), (0, 1, 2), pools=("pool-0", "pool-1", "pool-2"), formation=1)]
    assert driver.leader.take_notes() == ["formation 1 done in 0.000 s with ranks 0, 1, 2"]


def test_what_all_ranks_held_is_given_back_when_the_last_one_goes() -> None:
    driver = Driver(2).run()
    for rank in range(2):
        driver.handle(UnitDown(f"decode-0.{rank}", "killed"))
    assert driver.inner.heard == [RankReset((0, 1), (), pools=("", ""), formation=3)]
    driver.up(0, "new0")
    driver.up(1, "new1")
    driver.formed()
    found = driver.inner.heard[1:]
    assert found == [RankReset((), (0, 1), pools=("pool-0", "pool-1"), formation=4)]


def test_a_step_goes_to_every_rank_and_comes_back_as_one() -> None:
    driver = Driver().run()
    effects = driver.execute(0)
    assert to(effects, RankStep) == ["decode-0.0", "decode-0.1", "decode-0.2"]
    assert [message.plan.grown[0][0] for message in sent(effects, RankStep)] == [0, 1, 2]  # type: ignore[union-attr]
    driver.done(2, 0)
    driver.done(0, 0)
    driver.done(0, 0)
    assert driver.inner.heard == []
    driver.done(1, 0)
    assert driver.inner.heard == [StepDone(0, (1, 9, 17), (10, 11, 12), {}, 0.03)]
    assert driver.leader.num_stale == 1


def test_steps_are_heard_in_order() -> None:
    driver = Driver().run()
    driver.execute(0)
    driver.execute(1)
    for rank in (0, 1):
        driver.done(rank, 0)
        driver.done(rank, 1)
    driver.done(2, 0)
    driver.done(2, 1)
    assert [event.step_id for event in driver.inner.heard] == [0, 1]  # type: ignore[union-attr]


def test_prefill_keys_count_chunks_over_ranks_and_micro_batches() -> None:
    chunk = Chunk("a", (1,), 0, (1,), None, 0)
    plans = (
        PrefillPlan(3, (chunk, chunk), second=(chunk,)),
        PrefillPlan(3, ()),
        PrefillPlan(3, (chunk,)),
    )
    driver = Driver().run()
    driver.inner.answers = [Execute(plans)]
    driver.handle(Cancel("x", 0))
    driver.inner.heard.clear()
    for rank, keys in ((0, (2,)), (1, ()), (2, (0,))):
        done = StepDone(3, keys, (7,) * len(keys), {}, 0.01)
        driver.handle(RankDone(rank, f"e{rank}", 1, done))
    assert driver.inner.heard == [StepDone(3, (2, 3), (7, 7), {}, 0.01)]


def test_pulls_and_freed_blocks_go_to_their_rank() -> None:
    driver = Driver().run()
    driver.inner.answers = [Freed((3,), rank=2), Pull("a", 0, LEASE, (4, 5), rank=1)]
    effects = driver.handle(Cancel("x", 0))
    assert effects[:2] == [
        Send("decode-0.2", RankDo(Freed((3,), rank=2))),
        Send("decode-0.1", RankDo(Pull("a", 0, LEASE, (4, 5), rank=1))),
    ]
    pulled = KvPulled("a", 0, None)
    driver.handle(RankAnswered(2, "e2", pulled))  # Rank 2 was not asked for this pull.
    driver.handle(RankAnswered(1, "e0", pulled))  # Another process of rank 1 was asked.
    assert driver.heard(KvPulled) == []
    driver.handle(RankAnswered(1, "e1", pulled))
    driver.handle(RankAnswered(1, "e1", pulled))
    assert driver.heard(KvPulled) == [pulled]


def test_a_lost_rank_voids_the_steps_and_its_pulls() -> None:
    driver = Driver().run()
    driver.execute(0)
    driver.inner.answers = [Pull("a", 0, LEASE, (4,), rank=1), Pull("b", 0, LEASE, (4,), rank=2)]
    driver.handle(Cancel("x", 0))
    driver.inner.heard.clear()
    driver.done(0, 0)
    effects = driver.handle(UnitDown("decode-0.1", "killed"))
    assert to(effects, RankForm) == ["decode-0.0", "decode-0.2"]
    driver.handle(RankDone(2, "e2", 1, StepDone(0, (), (), {}, 0.0)))  # From the formation before.
    driver.handle(RankAnswered(1, "e1", KvPulled("a", 0, None)))
    driver.handle(RankAnswered(2, "e2", KvPulled("b", 0, None)))
    assert to(driver.execute(1), RankStep) == []  # Void: the inner leader will plan the step again.
    driver.formed()
    assert driver.inner.heard == [
        KvPulled("a", 0, None),
        KvPulled("b", 0, None),
        RankReset((1,), (), pools=("pool-0", "", "pool-2"), formation=2),
    ]
    assert to(driver.execute(1), RankStep) == ["decode-0.0", "decode-0.2"]
    driver.done(0, 1)
    driver.done(2, 1)
    assert driver.inner.heard[-1] == StepDone(1, (1, 17), (10, 12), {}, 0.03)


def test_a_dead_rank_is_not_counted_while_the_others_form_anew() -> None:
    driver = Driver().run()
    load = UnitReport("decode-0", "e", 30, 0, 0, 24, 0, num_ranks=3)
    driver.handle(UnitDown("decode-0.1", "killed"))
    # The inner leader still counts the dead rank: it gets RankReset once the others have formed.
    driver.inner.answers = [Send("front", load)]
    (seen,) = sent(driver.handle(Cancel("x", 0)), UnitReport)
    assert (seen.num_ranks, seen.absent) == (2, (1,))


def test_nothing_is_sent_to_a_rank_that_the_inner_leader_does_not_know_is_another() -> None:
    driver = Driver().run()
    driver.up(1, "new")
    driver.inner.answers = [
        Freed((3,), rank=1),
        Pull("a", 0, LEASE, (4,), rank=1),
        Freed((3,), rank=0),
    ]
    effects = driver.handle(Cancel("x", 0))
    assert to(effects, Freed) == ["decode-0.0"]
    assert to(effects, Pull) == []
    driver.formed()
    assert driver.heard(RankReset) == [
        RankReset((1,), (1,), pools=("pool-0", "pool-1", "pool-2"), formation=2)
    ]
    driver.handle(RankAnswered(1, "new", KvPulled("a", 0, None)))
    assert driver.heard(KvPulled) == []


def test_a_step_that_lost_a_peer_is_not_heard_of() -> None:
    driver = Driver().run()
    driver.execute(0)
    driver.done(0, 0, error="PeerLost: rank 1: closed", lost=(1,))
    driver.done(1, 0)
    driver.done(2, 0, error="Aborted: formation 1 is over")
    assert driver.inner.heard == []
    assert to(driver.pass_s(1.2, 0, 1, 2), RankForm) == ["decode-0.0", "decode-0.1", "decode-0.2"]
    driver.formed()
    assert [type(event) for event in driver.inner.heard] == [RankReset]
    assert driver.inner.heard[0].lost == ()  # type: ignore[union-attr]


def test_a_step_that_failed_otherwise_is_heard_of_and_the_unit_forms_anew() -> None:
    driver = Driver().run()
    driver.execute(0)
    effects = driver.done(1, 0, error="RuntimeError: no")
    assert len(to(effects, RankForm)) == 3
    assert [event.error for event in driver.heard(StepDone)] == ["rank 1: RuntimeError: no"]  # type: ignore[union-attr]
    driver.formed()
    assert isinstance(driver.inner.heard[-1], RankReset)


def test_a_failure_waits_for_the_step_before() -> None:
    driver = Driver().run()
    driver.execute(0)
    driver.execute(1)
    driver.done(0, 0)
    driver.done(0, 1, error="RuntimeError: no")
    assert driver.inner.heard == []
    driver.done(1, 0)
    driver.done(2, 0)
    assert [(event.step_id, event.error is None) for event in driver.heard(StepDone)] == [  # type: ignore[union-attr]
        (0, True),
        (1, False),
    ]


def test_a_replacement_waits_for_the_steps_in_flight() -> None:
    driver = Driver().run()
    driver.handle(UnitDown("decode-0.1", "killed"))
    driver.formed()
    driver.execute(0)
    assert to(driver.up(1, "new"), RankForm) == []
    assert driver.leader.membership.phase is UnitPhase.DRAINING
    assert to(driver.execute(1), RankStep) == []
    driver.done(0, 0)
    assert len(to(driver.done(2, 0), RankForm)) == 3
    driver.formed()
    assert driver.inner.heard[-1] == RankReset(
        (), (1,), pools=("pool-0", "pool-1", "pool-2"), formation=3
    )
    assert len(to(driver.execute(1), RankStep)) == 3


def test_a_step_that_went_astray_is_broken_off() -> None:
    driver = Driver().run()
    driver.execute(0)
    assert to(driver.pass_s(14.5, 0, 1, 2), RankForm) == []
    assert len(to(driver.pass_s(1.0, 0, 1, 2), RankForm)) == 3


def test_a_pause_of_the_leader_is_nobodys_silence() -> None:
    driver = Driver().run()
    driver.pass_s(1.0, 0, 1, 2)
    driver.now_s += 30.0
    assert to(driver.handle(Tick()), UnitDown) == []
    assert to(driver.pass_s(1.2, 0, 1, 2), UnitDown) == []


def test_the_earlier_of_both_wake_ups_counts() -> None:
    driver = Driver().run()
    assert of(driver.handle(Tick()), WakeAt)[-1:] in ([], [WakeAt(0.1)])
    driver.now_s = 0.1
    driver.inner.answers = []
    assert of(driver.handle(Tick()), WakeAt) == [WakeAt(pytest.approx(0.2))]
    driver.inner.answers = [WakeAt(0.15)]
    assert of(driver.handle(Cancel("x", 0)), WakeAt) == [WakeAt(0.15)]


def test_the_audit_holds_the_books_problems_too() -> None:
    driver = Driver().run()
    driver.leader.membership.members[0] = "another"
    driver.inner.answers = [Send("front", Audit("decode-0", 1, 0, 0, ("a block",)))]
    audit = sent(driver.leader.handle(0.0, AuditRequest(1)), Audit)[0]
    assert audit.problems[0] == "a block"
    assert len(audit.problems) > 1


def test_a_leader_that_is_no_rank_takes_no_results() -> None:
    driver = Driver()
    with pytest.raises(InvariantError, match="without a rank"):
        driver.leader.handle(0.0, StepDone(0, (), (), {}, 0.0))
