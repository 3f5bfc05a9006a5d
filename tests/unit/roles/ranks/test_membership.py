"""Test membership: first formation, losses of every kind, replacements, and outdated messages."""

from __future__ import annotations

from typing import Self

import numpy as np
import pytest

from hadal.core.errors import InvariantError
from hadal.core.messages.ranks import RankForm, RankFormed, RankHeartbeat, RankHeld, RankUp, RankWho
from hadal.core.messages.units import Sighting, Suspect, UnitDown
from hadal.core.placement import EMPTY, Placement, spread, without
from hadal.core.plans import Formed, FormPlan, Held, HeldKv, Member
from hadal.core.seams import Send
from hadal.policy.slow_hosts import SlowHost
from hadal.roles.ranks.membership import (
    FAILED_FORMS_MAX,
    FORM_TIMEOUT_S,
    NEWS_S,
    TAKEOVER_GRACE_S,
    UnitMembership,
)
from hadal.roles.ranks.processes import SILENT_S
from hadal.roles.ranks.states import UnitPhase

NUM_EXPERTS = 8


def up(rank: int, epoch: str = "", host: str = "h") -> RankUp:
    return RankUp("decode-0", rank, epoch or f"e{rank}", host, 7000 + rank, f"pool-{rank}")


class Driver:
    """UnitMembership, with ranks that answer when the test says so."""

    def __init__(self, num_ranks: int = 4, **options: float) -> None:
        self.num_ranks = num_ranks
        self.now_s = 0.0
        self.sent: list[Send] = []
        self.waits = self.is_stopped = False
        """State of suspected ranks at a sighting: without a processor; stopped."""
        placement = spread(2, NUM_EXPERTS, num_ranks)
        self.membership = UnitMembership(
            "decode-0", num_ranks, placement, rank_timeout_s=1.5, grace_s=10.0, **options
        )

    def all_up(self) -> None:
        for rank in range(self.num_ranks):
            self.membership.rank_up(self.now_s, up(rank))

    def take(self) -> tuple[dict[str, FormPlan], list[str]]:
        """Return what was sent since the last call: RankForms by name, and processes to kill."""
        sends, self.sent = self.sent + self.membership.take_sends(), []
        forms = {send.to: send.message.plan for send in sends if isinstance(send.message, RankForm)}
        return forms, [send.message.unit for send in sends if isinstance(send.message, UnitDown)]

    def answer(self, *but: int) -> None:
        """Let all members except the ranks `but` report that they formed."""
        for rank, epoch in list(self.membership.members.items()):
            if rank not in but:
                self.membership.formed(
                    self.now_s, RankFormed(rank, epoch, Formed(self.membership.formation, None))
                )

    def run(self) -> Self:
        self.all_up()
        self.answer()
        assert self.membership.phase is UnitPhase.RUNNING
        self.take()
        return self

    def heartbeat(self, *ranks: int, lost: tuple[int, ...] = ()) -> None:
        for rank in ranks:
            epoch = self.membership.members[rank]
            self.membership.heartbeat(
                self.now_s, RankHeartbeat(rank, epoch, self.membership.formation, 0, False, lost)
            )

    def pass_s(self, seconds: float, *beating: int, is_stepping: bool = False) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.1
            self.heartbeat(*(rank for rank in beating if rank in self.membership.members))
            self.membership.tick(self.now_s, is_stepping)
            self.look()
            assert self.membership.check() == []

    def look(self) -> None:
        """Let the supervisor answer each Suspect with a Sighting."""
        for send in self.membership.take_sends():
            if isinstance(send.message, Suspect):
                waited_s = self.now_s if self.waits else 0.0
                self.membership.sighted(
                    self.now_s, Sighting(send.message.process, waited_s, self.is_stopped)
                )
            else:
                self.sent.append(send)


def test_the_first_generation_waits_for_everybody() -> None:
    driver = Driver()
    for rank in range(3):
        driver.membership.rank_up(0.0, up(rank))
    assert driver.take() == ({}, [])
    driver.membership.rank_up(0.0, up(3))
    forms, _ = driver.take()
    assert sorted(forms) == [f"decode-0.{rank}" for rank in range(4)]
    plan = forms["decode-0.1"]
    assert (plan.formation, plan.num_ranks) == (1, 4)
    assert [member.epoch for member in plan.members] == ["e0", "e1", "e2", "e3"]
    found = Placement.from_bytes(plan.slot_to_expert, NUM_EXPERTS, 4, plan.num_expert_slots).check()
    assert found == []
    driver.answer(3)
    assert driver.membership.phase is UnitPhase.FORMING
    driver.answer()
    assert driver.membership.phase is UnitPhase.RUNNING
    assert driver.membership.notes[-1] == "formation 1 done in 0.000 s with ranks 0, 1, 2, 3"


def test_after_the_grace_it_forms_with_those_that_are_there() -> None:
    driver = Driver()
    for _ in range(110):
        driver.now_s += 0.1
        for rank in (0, 2):
            driver.membership.rank_up(driver.now_s, up(rank))
        driver.membership.tick(driver.now_s, False)
    forms, _ = driver.take()
    assert sorted(forms) == ["decode-0.0", "decode-0.2"]
    plan = forms["decode-0.0"]
    placement = Placement.from_bytes(plan.slot_to_expert, NUM_EXPERTS, 4, plan.num_expert_slots)
    assert placement.check() == []
    assert (placement.slot_to_expert_LRS[:, [1, 3]] == EMPTY).all()


@pytest.mark.promise(
    "The end of a process is detected immediately; without requests no block has an owner."
)
def test_a_death_is_answered_at_once() -> None:
    driver = Driver().run()
    driver.membership.unit_down(5.0, UnitDown("decode-0.2", "killed"))
    forms, killed = driver.take()
    assert (sorted(forms), killed) == (["decode-0.0", "decode-0.1", "decode-0.3"], [])
    assert driver.membership.formation == 2
    driver.answer()
    assert driver.membership.phase is UnitPhase.RUNNING
    assert driver.membership.check() == []


def test_a_death_while_forming_starts_the_next_generation() -> None:
    driver = Driver().run()
    driver.membership.unit_down(5.0, UnitDown("decode-0.2", "killed"))
    driver.answer(3)
    driver.membership.unit_down(5.1, UnitDown("decode-0.3", "killed"))
    forms, _ = driver.take()
    assert forms["decode-0.0"].formation == 3
    driver.membership.formed(5.2, RankFormed(0, "e0", Formed(2, None)))  # Late.
    assert driver.membership.phase is UnitPhase.FORMING
    driver.answer()
    assert list(driver.membership.members) == [0, 1]
    assert driver.membership.phase is UnitPhase.RUNNING


def test_a_silent_rank_is_dropped_and_killed() -> None:
    driver = Driver().run()
    driver.pass_s(1.4, 0, 1, 2)
    assert driver.take() == ({}, [])
    driver.pass_s(0.2, 0, 1, 2)
    forms, killed = driver.take()
    assert (sorted(forms), killed) == (["decode-0.0", "decode-0.1", "decode-0.2"], ["decode-0.3"])
    driver.answer()
    driver.pass_s(2.2, 0, 1, 2)
    assert driver.take() == ({}, ["decode-0.3"])  # Repeated, as the process has not ended.
    driver.membership.unit_down(driver.now_s, UnitDown("decode-0.3", "killed"))
    driver.pass_s(3.0, 0, 1, 2)
    assert driver.take() == ({}, [])


@pytest.mark.parametrize("is_stepping", [True, False])
def test_a_rank_stuck_in_one_op_is_dropped_if_a_step_runs(is_stepping: bool) -> None:
    driver = Driver().run()
    for _ in range(20):
        driver.now_s += 0.1
        driver.heartbeat(0, 1, 2)
        driver.membership.heartbeat(driver.now_s, RankHeartbeat(3, "e3", 1, 17, True))
        driver.membership.tick(driver.now_s, is_stepping)
        driver.look()
    assert driver.take()[1] == (["decode-0.3"] if is_stepping else [])


def test_blame_alone_forms_again_with_everybody() -> None:
    driver = Driver().run()
    driver.membership.broke(0.0, 0, (3,))
    assert driver.membership.phase is UnitPhase.BROKEN
    driver.pass_s(NEWS_S + 0.1, 0, 1, 2, 3)
    forms, killed = driver.take()
    assert (len(forms), killed) == (4, [])
    driver.answer()
    assert driver.membership.phase is UnitPhase.RUNNING


def test_one_that_all_blame_and_that_is_silent_is_gone() -> None:
    driver = Driver().run()
    driver.heartbeat(0, 1, 2, lost=(3,))
    driver.pass_s(SILENT_S - 0.1, 0, 1, 2)
    assert driver.take() == ({}, [])
    driver.pass_s(0.4, 0, 1, 2)  # Two sightings of the rank come first.
    forms, killed = driver.take()
    assert (len(forms), killed) == (3, ["decode-0.3"])


def test_a_rank_without_a_processor_is_waited_for() -> None:
    driver = Driver().run()
    driver.waits = True
    driver.pass_s(20.0, 0, 1, 2)
    assert driver.take() == ({}, [])
    driver.waits = False
    driver.pass_s(1.6, 0, 1, 2, 3)
    driver.pass_s(1.6, 0, 1, 2)
    assert driver.take()[1] == ["decode-0.3"]


def test_others_are_not_believed_about_a_rank_without_a_processor() -> None:
    driver = Driver().run()
    driver.waits = True
    driver.heartbeat(0, 1, 2, lost=(3,))
    driver.pass_s(NEWS_S + 1.0, 0, 1, 2)
    forms, killed = driver.take()
    assert (len(forms), killed) == (4, [])


def test_all_ranks_silent_at_once_are_waited_for() -> None:
    driver = Driver().run()
    driver.pass_s(5.0)
    assert driver.take() == ({}, [])
    driver.pass_s(1.2)
    assert len(driver.take()[1]) == driver.num_ranks


def test_a_stopped_rank_is_not_excused_by_what_it_waited_for() -> None:
    driver = Driver().run()
    driver.waits = driver.is_stopped = True
    driver.pass_s(1.6, 0, 1, 2)
    assert driver.take()[1] == ["decode-0.3"]
    found = driver.membership.notes[-1]
    assert found == "rank 3 has sent no heartbeat for 1.5 s, stopped: the others go on without it"


def test_the_supervisors_word_ends_the_wait() -> None:
    driver = Driver().run()
    driver.membership.broke(0.0, 0, ())
    driver.membership.unit_down(0.01, UnitDown("decode-0.1", "killed"))
    assert sorted(driver.take()[0]) == ["decode-0.0", "decode-0.2", "decode-0.3"]


def test_a_rank_that_cannot_form_goes() -> None:
    driver = Driver()
    driver.all_up()
    driver.take()
    driver.membership.formed(0.0, RankFormed(1, "e1", Formed(1, "CheckpointError: no such tensor")))
    forms, killed = driver.take()
    assert (sorted(forms), killed) == (["decode-0.0", "decode-0.2", "decode-0.3"], ["decode-0.1"])


def test_one_that_nobody_reaches_goes_after_some_tries() -> None:
    driver = Driver()
    driver.all_up()
    for attempt in range(FAILED_FORMS_MAX):
        assert len(driver.take()[0]) == 4, attempt
        formation = driver.membership.formation
        for rank in range(3):
            failed = Formed(formation, "PeerLost: rank 3", (3,))
            driver.membership.formed(0.0, RankFormed(rank, f"e{rank}", failed))
        driver.membership.formed(
            0.0, RankFormed(3, "e3", Formed(formation, "PeerLost: rank 0, 1, 2", (0, 1)))
        )
    forms, killed = driver.take()
    assert (sorted(forms), killed) == (["decode-0.0", "decode-0.1", "decode-0.2"], ["decode-0.3"])


def test_one_that_never_answers_goes() -> None:
    driver = Driver()
    driver.all_up()
    driver.answer(2)
    driver.take()
    driver.pass_s(FORM_TIMEOUT_S + 0.2, 0, 1, 2, 3)
    forms, killed = driver.take()
    assert (len(forms), killed) == (3, ["decode-0.2"])


@pytest.mark.promise("Its successor joins between two steps and takes its share back.")
def test_a_replacement_joins_when_no_step_is_in_flight() -> None:
    driver = Driver().run()
    driver.membership.unit_down(5.0, UnitDown("decode-0.2", "killed"))
    driver.answer()
    driver.take()
    driver.now_s = 6.0
    driver.membership.rank_up(6.0, up(2, "new"))
    assert driver.membership.phase is UnitPhase.DRAINING
    assert driver.take() == ({}, [])
    driver.membership.form(6.0)  # The leader's steps are done.
    forms, _ = driver.take()
    assert len(forms) == 4
    assert forms["decode-0.2"].members[2].epoch == "new"
    assert forms["decode-0.0"].num_expert_slots == NUM_EXPERTS // 4
    driver.membership.formed(6.0, RankFormed(2, "e2", Formed(3, None)))  # From the dead process.
    driver.answer(2)
    assert driver.membership.phase is UnitPhase.FORMING


def test_a_drain_has_a_deadline() -> None:
    driver = Driver().run()
    driver.membership.unit_down(0.0, UnitDown("decode-0.2", "killed"))
    driver.answer()
    driver.take()
    for _ in range(52):
        driver.now_s += 0.1
        driver.heartbeat(0, 1, 3)
        driver.membership.rank_up(driver.now_s, up(2, "new"))
        driver.membership.tick(driver.now_s, False)
    assert len(driver.take()[0]) == 4


def test_a_successor_heard_before_the_death_takes_its_place() -> None:
    driver = Driver().run()
    driver.membership.rank_up(5.0, up(2, "new"))
    forms, _ = driver.take()
    assert forms["decode-0.0"].members[2].epoch == "new"
    driver.membership.unit_down(5.1, UnitDown("decode-0.2", "killed"))  # Predecessor's death, late.
    driver.answer()
    assert driver.membership.phase is UnitPhase.RUNNING
    driver.membership.unit_down(5.2, UnitDown("decode-0.2", "killed"))
    assert list(driver.membership.members) == [0, 1, 3]


def test_the_dead_do_not_come_back() -> None:
    driver = Driver().run()
    driver.membership.unit_down(5.0, UnitDown("decode-0.2", "killed"))
    driver.answer()
    driver.take()
    driver.membership.rank_up(5.1, up(2))  # The message was under way.
    assert driver.membership.phase is UnitPhase.RUNNING
    driver.membership.rank_up(9.0, up(2))  # The rank lives: it must be replaced.
    assert driver.take() == ({}, ["decode-0.2"])


def test_without_any_rank_it_waits_for_new_ones() -> None:
    driver = Driver(2).run()
    for rank in range(2):
        driver.membership.unit_down(5.0, UnitDown(f"decode-0.{rank}", "killed"))
    assert driver.membership.phase is UnitPhase.WAITING
    assert driver.membership.check() == []
    driver.take()
    for rank in range(2):
        driver.membership.rank_up(6.0, up(rank, f"new{rank}"))
    assert len(driver.take()[0]) == 2
    driver.answer()
    assert driver.membership.phase is UnitPhase.RUNNING


def test_one_that_froze_before_it_was_heard_is_killed() -> None:
    driver = Driver()
    others = (0, 1, 2)

    def pass_s(seconds: float) -> list[str]:
        """Let the ranks `others` report and send heartbeats; return the processes to kill."""
        for _ in range(round(seconds)):
            for rank in others:
                driver.membership.rank_up(driver.now_s, up(rank))
            driver.pass_s(1.0, *others)
        return driver.take()[1]

    assert pass_s(9.0) == []
    driver.membership.forgive(100.0)  # The leader itself did not run: the grace is extended.
    driver.now_s += 100.0
    assert pass_s(3.0) == ["decode-0.3"]
    driver.answer()
    assert driver.membership.phase is UnitPhase.RUNNING
    assert pass_s(6.0) == [], "it is not asked for again at once"
    driver.membership.unit_down(driver.now_s, UnitDown("decode-0.3", "killed"))
    assert pass_s(9.0) == [], "its successor has the whole grace"
    assert pass_s(3.0) == ["decode-0.3"]


def test_strangers_are_not_heard() -> None:
    driver = Driver().run()
    driver.membership.rank_up(0.0, up(7))
    driver.membership.unit_down(0.0, UnitDown("decode-1.0", "killed"))
    driver.membership.unit_down(0.0, UnitDown("decode-0", "killed"))
    driver.membership.heartbeat(0.0, RankHeartbeat(9, "e9", 1, 0, False))
    driver.membership.formed(0.0, RankFormed(-1, "e", Formed(1, None)))
    assert driver.membership.phase is UnitPhase.RUNNING
    assert driver.membership.num_stale >= 5


def test_an_adopted_placement_is_formed_with_from_then_on() -> None:
    driver = Driver().run()
    before = driver.membership.placement
    slots = before.slot_to_expert_LRS[1, ::-1].copy()
    adopted = before.with_layer(1, slots, np.ones(slots.shape, np.uint8))
    driver.membership.adopt(adopted)
    driver.membership.unit_down(5.0, UnitDown("decode-0.2", "killed"))
    plan = driver.take()[0]["decode-0.0"]
    left = without(adopted, [2])
    assert (plan.slot_to_expert, plan.weights) == (left.to_bytes(), b"")
    assert driver.membership.placement.to_bytes() == left.to_bytes()
    driver.answer()
    with pytest.raises(InvariantError, match="adopted"):
        driver.membership.adopt(before)
    driver.membership.rank_up(6.0, up(2, "new"))
    driver.membership.form(6.0)
    plan = driver.take()[0]["decode-0.2"]
    assert (plan.slot_to_expert, plan.weights) == (adopted.to_bytes(), adopted.weights_bytes())
    assert plan.weights


def test_a_placement_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="for 2 ranks"):
        UnitMembership("decode-0", 4, spread(1, 4, 2))


def held(rank: int, formation: int, placement: Placement, num_members: int = 4) -> RankHeld:
    members = tuple(Member(other, f"e{other}", "h", 7000 + other) for other in range(num_members))
    plan = FormPlan(
        formation,
        4,
        members,
        placement.to_bytes(),
        placement.num_expert_slots,
        placement.weights_bytes(),
    )
    return RankHeld(up(rank), plan, Held((HeldKv(70 + rank, (3,), 9, 9),), {}))


def test_a_new_leader_asks_who_beats_and_forms_above_what_they_had_with_their_placement() -> None:
    driver = Driver()
    driver.membership.heartbeat(0.0, RankHeartbeat(1, "e1", 5, 0, False))
    assert driver.membership.take_sends() == [Send("decode-0.1", RankWho("e1"))]
    rolled = Placement(
        NUM_EXPERTS, np.roll(spread(2, NUM_EXPERTS, 4).slot_to_expert_LRS, 1, axis=1)
    )
    for rank, formation in ((0, 5), (1, 6), (2, 6), (3, 5)):
        driver.membership.rank_held(0.1, held(rank, formation, rolled))
    forms, _ = driver.take()
    assert {plan.formation for plan in forms.values()} == {7}
    assert {plan.slot_to_expert for plan in forms.values()} == {rolled.to_bytes()}
    driver.answer()
    assert driver.membership.phase is UnitPhase.RUNNING
    found = driver.membership.take_held(2)
    assert found is not None
    assert [kv.attempt_id for kv in found.kv] == [72]
    assert driver.membership.take_held(2) is None


def test_ranks_that_died_with_their_leader_are_not_waited_for() -> None:
    driver = Driver()
    reduced = without(spread(2, NUM_EXPERTS, 4), [3])
    for rank in range(3):
        driver.membership.rank_held(0.0, held(rank, 5, reduced, num_members=3))
    driver.pass_s(TAKEOVER_GRACE_S - 0.1, 0, 1, 2)
    assert driver.take() == ({}, [])
    for rank in range(3):
        # A rank may answer twice.
        driver.membership.rank_held(driver.now_s, held(rank, 5, reduced, num_members=3))
    driver.pass_s(0.2, 0, 1, 2)
    forms, _ = driver.take()
    assert sorted(forms) == ["decode-0.0", "decode-0.1", "decode-0.2"]
    assert {plan.formation for plan in forms.values()} == {6}


def test_one_that_is_held_for_dead_is_not_asked_who_it_is() -> None:
    driver = Driver().run()
    driver.membership.unit_down(5.0, UnitDown("decode-0.2", "killed"))
    driver.take()
    driver.membership.heartbeat(5.1, RankHeartbeat(2, "e2", 1, 0, False))
    assert driver.membership.take_sends() == []


def test_what_a_rank_held_goes_with_its_process() -> None:
    driver = Driver()
    driver.membership.rank_held(0.0, held(0, 5, spread(2, NUM_EXPERTS, 4)))
    driver.membership.rank_up(0.1, up(0, "new"))
    assert driver.membership.take_held(0) is None


def on_hosts(hosts: str, **options: float) -> Driver:
    """Return a running unit; each letter is the host of one rank."""
    driver = Driver(len(hosts), **options)
    for rank, host in enumerate(hosts):
        driver.membership.rank_up(0.0, up(rank, host=host))
    driver.answer()
    driver.take()
    return driver


def end_and_start(driver: Driver, rank: int, host: str, epoch: str) -> None:
    """Let the supervisor end a rank, and start it again on the same host."""
    driver.membership.unit_down(driver.now_s, UnitDown(f"decode-0.{rank}", "killed"))
    driver.membership.rank_up(driver.now_s, up(rank, epoch, host))


def test_a_host_that_rests_is_left_out_until_it_has_rested() -> None:
    driver = on_hosts("aabb", slow_host_rest_s=30.0)
    driver.membership.rest(0.0, SlowHost("b", 0.8))
    forms, killed = driver.take()
    assert (sorted(forms), sorted(killed)) == (
        ["decode-0.0", "decode-0.1"],
        ["decode-0.2", "decode-0.3"],
    )
    words = "is on b, for which the others wait 80% of the time; that host rests for 30 s"
    assert words in driver.membership.notes[-1]
    for rank in (2, 3):
        end_and_start(driver, rank, "b", f"later{rank}")
    driver.answer()
    while driver.now_s < 32.0:
        driver.pass_s(1.0, 0, 1)
        for rank in (2, 3):  # A new rank reports until a formation includes it.
            driver.membership.rank_up(driver.now_s, up(rank, f"later{rank}", "b"))
        is_rested = driver.now_s >= 30.0
        expected = UnitPhase.DRAINING if is_rested else UnitPhase.RUNNING
        assert driver.membership.phase is expected
    assert list(driver.membership.members) == [0, 1]
    driver.membership.form(driver.now_s)
    assert list(driver.membership.members) == [0, 1, 2, 3]


@pytest.mark.parametrize(("hosts", "rest_s"), [("aabb", 0.0), ("aaaa", 30.0)], ids=["off", "one"])
def test_a_unit_keeps_a_host_that_it_cannot_spare(hosts: str, rest_s: float) -> None:
    driver = on_hosts(hosts, slow_host_rest_s=rest_s)
    driver.membership.rest(0.0, SlowHost(hosts[-1], 0.8))
    assert driver.take() == ({}, [])


def test_hosts_rest_one_at_a_time() -> None:
    driver = on_hosts("abcd", slow_host_rest_s=30.0)
    driver.membership.rest(0.0, SlowHost("b", 0.8))
    driver.answer()
    driver.take()
    driver.membership.rest(1.0, SlowHost("c", 0.8))
    assert driver.take() == ({}, [])


def test_a_host_that_rests_is_better_than_none() -> None:
    """Once a rank of the resting host is used for want of others, the host's other ranks may join too."""
    driver = on_hosts("aabb", slow_host_rest_s=30.0)
    driver.membership.rest(0.0, SlowHost("b", 0.8))
    end_and_start(driver, 2, "b", "later2")
    driver.answer()
    gone = UnitDown("decode-0.0", "killed", with_it=("decode-0.1",))
    driver.membership.unit_down(1.0, gone)
    assert list(driver.membership.members) == [2]
    driver.answer()
    end_and_start(driver, 3, "b", "later3")
    assert driver.membership.phase is UnitPhase.DRAINING
