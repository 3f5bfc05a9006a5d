"""Test the leader of many ranks with its expert balancer: messages, a new formation's placement."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.core.messages.questions import Trace, TracedStep
from hadal.core.messages.ranks import RankDone, RankForm, RankStage, RankStaged, RankStep
from hadal.core.messages.units import Cancel, UnitDown, UnitReport
from hadal.core.placement import without
from hadal.core.plans import LayerFlip, Staged, StepDone
from hadal.core.seams import Effect, Send, Tick, WakeAt
from hadal.roles.experts.gain import ExpertTerms
from hadal.roles.ranks.states import UnitPhase
from tests.unit.roles.driving import of, sent
from tests.unit.roles.ranks.test_ranks import Driver, to

TERMS = ExpertTerms(
    count_every_steps=1,
    num_intervals=8,
    num_intervals_min=4,
    plan_every_steps=1,
    stage_timeout_s=5.0,
)


class Skewed(Driver):
    """Three ranks of four slots; rank 0 receives most tokens, its first two experts equally many."""

    def __init__(self) -> None:
        super().__init__(3, TERMS)
        self.next_id = 0
        self.flips: list[LayerFlip] = []

    def send(self) -> list[Effect]:
        effects = self.execute(self.next_id)
        self.flips += sent(effects, RankStep)[0].plan.flips
        self.next_id += 1
        return effects

    def step(self, *, but: tuple[int, ...] = ()) -> None:
        self.send()
        for rank in {0, 1, 2} - set(but):
            self.counted(rank, self.next_id - 1)

    def counted(self, rank: int, step_id: int) -> list[Effect]:
        counts = np.array([200, 200, 50, 50] if rank == 0 else [50, 50, 50, 50], np.int64)
        done = StepDone(step_id, (), (), {}, 0.01, expert_slot_counts=counts.tobytes())
        membership = self.leader.membership
        return self.handle(RankDone(rank, membership.members[rank], membership.formation, done))

    def until_staging(self) -> dict[str, RankStage]:
        for _ in range(20):
            self.step()
            effects = self.handle(Tick())
            stages = {
                e.to: e.message
                for e in effects
                if isinstance(e, Send) and isinstance(e.message, RankStage)
            }
            if stages:
                return stages
        raise AssertionError("nothing is staged")

    def staged(
        self, rank: int, epoch: str = "", formation: int = 1, error: str | None = None
    ) -> list[Effect]:
        install = self.leader.experts.installer.installing
        staged = Staged(formation, install.stage_id if install else 1, 0, error, 1, 0, 0.01)
        return self.handle(RankStaged(rank, epoch or f"e{rank}", staged))


def staging() -> tuple[Skewed, dict[str, RankStage]]:
    driver = Skewed().run()
    return driver, driver.until_staging()


def test_a_layer_is_staged_flipped_and_formed_with() -> None:
    driver, stages = staging()
    ranks = [int(name[-1]) for name in stages]
    assert 0 in ranks
    for stage in stages.values():
        assert {source.port for source in stage.plan.sources} <= {7000, 7001, 7002}
    before = driver.leader.membership.placement
    num_stale = driver.leader.num_stale
    driver.staged(ranks[0], "another")
    driver.staged(ranks[0], formation=7)
    assert driver.leader.num_stale == num_stale + 2
    for rank in ranks:
        assert driver.flips == []
        driver.step()
        driver.staged(rank)
    driver.send()
    assert len(driver.flips) == 1
    for rank in range(3):
        assert driver.leader.membership.placement is before
        driver.counted(rank, driver.next_id - 1)
    after = driver.leader.membership.placement
    assert after.slot_to_expert_LRS.tobytes() == driver.flips[0].slot_to_expert != before.to_bytes()
    plan = sent(driver.handle(UnitDown("decode-0.1", "killed")), RankForm)[0].plan
    left = without(after, [1])
    assert (plan.slot_to_expert, plan.weights) == (left.to_bytes(), left.weights_bytes())


@pytest.mark.parametrize("moment", ["staging", "staged", "in flight"])
def test_a_loss_leaves_the_placement_that_all_had(moment: str) -> None:
    driver, stages = staging()
    before = driver.leader.membership.placement
    if moment != "staging":
        for name in stages:
            driver.staged(int(name[-1]))
    if moment == "in flight":
        driver.step(but=(1,))
        assert len(driver.flips) == 1
    effects = driver.handle(UnitDown("decode-0.1", "killed"))
    assert sent(effects, RankForm)[0].plan.slot_to_expert == without(before, [1]).to_bytes()
    assert driver.leader.experts.installer.installing is None
    driver.formed()
    driver.up(1, "new")
    driver.handle(Tick())
    driver.formed()
    assert driver.leader.membership.placement.to_bytes() == before.to_bytes()
    assert driver.leader.membership.phase is UnitPhase.RUNNING
    driver.staged(0)
    driver.flips.clear()
    driver.step()
    assert driver.flips == []


def test_nothing_is_planned_beside_what_steps_wait_for() -> None:
    driver = Skewed().run()
    for _ in range(3):
        driver.step()
    driver.send()
    for rank in (0, 1):
        driver.counted(rank, driver.next_id - 1)
    effects = driver.counted(2, driver.next_id - 1)
    assert to(effects, RankStage) == []
    assert of(effects, WakeAt) == [WakeAt(driver.now_s)], "but right after it"


def test_loads_tell_of_experts_and_counts_do_not_reach_the_inner_leader() -> None:
    driver = Skewed().run()
    driver.step()
    assert all(event.expert_slot_counts == b"" for event in driver.heard(StepDone))  # type: ignore[union-attr]
    driver.inner.answers = [Send("front", UnitReport("decode-0", "e", 1, 0, 0, 1, 0))]
    load = sent(driver.handle(Cancel("x", 0)), UnitReport)[0]
    found = load.balance
    assert found == {"experts": pytest.approx(300 / 500), "experts_worst": pytest.approx(300 / 500)}
    driver.inner.answers = [
        Send("front", Trace("decode-0", 1, (TracedStep(0, "sequential", 1, 1, ()),)))
    ]
    # The step was not traced.
    assert sent(driver.handle(Cancel("x", 0)), Trace)[0].steps[0].balance == {}
