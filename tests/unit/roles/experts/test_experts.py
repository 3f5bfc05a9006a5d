"""Test live expert balancing by hand: which moves pay, in which order, and what follows a failure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hadal.core.balance import EXPERTS
from hadal.core.messages.questions import Trace, TracedStep
from hadal.core.messages.units import UnitReport
from hadal.core.placement import Placement, spread, spread_by_node
from hadal.core.plans import DecodePlan, Staged, StepDone
from hadal.roles.experts.experts import ExpertBalancer
from hadal.roles.experts.install import Installation, InstallState
from hadal.roles.unit.report import with_ranks
from tests.unit.roles.expert_unit import (
    EVEN,
    GROWING_S,
    HOT,
    NUM_EXPERTS,
    NUM_RANKS,
    SKEWED,
    TERMS,
    Unit,
    plain,
    replicated,
)

COUNTED = replace(TERMS, count_every_steps=1, num_intervals=8)
"""Terms that count every step."""


def test_even_loads_move_nothing() -> None:
    unit = Unit(plain(), [EVEN], noise=0.05)
    assert unit.run(200) == {}
    assert unit.flips == []


@pytest.mark.promise(
    "A new split of tokens over the existing replicas moves nothing; a new placement "
    "moves few replicas."
)
def test_a_new_split_comes_first_and_needs_no_weights() -> None:
    unit = Unit(replicated(), [HOT])
    unit.step(10)
    assert unit.think() == {}
    installing = unit.experts.installer.installing
    assert installing is not None
    assert installing.state is InstallState.READY
    before = unit.experts.placement
    unit.step()
    assert (len(unit.flips), unit.experts.installer.installing) == (1, None)
    assert unit.flips[0].slot_to_expert == before.to_bytes()
    assert unit.flips[0].weights != b""
    assert (
        unit.experts.moves.num_layers_flipped,
        unit.experts.moves.num_replicas_moved,
    ) == (1, 0)
    assert unit.experts.placement.to_bytes() == before.to_bytes()
    assert unit.experts.placement.weights_bytes() == unit.held.weights_bytes() != b""


def test_replicas_move_where_no_split_helps() -> None:
    unit = Unit(plain(), [SKEWED])
    plans = unit.run()
    assert plans
    assert all(
        source.port == 7000 + other
        for plan in plans.values()
        for source in plan.sources
        for other in range(4)
        if source.expert % 4 == other
    )
    unit.stage(plans)
    unit.step()
    assert (
        unit.experts.moves.num_layers_flipped,
        unit.experts.moves.num_replicas_moved,
    ) == (1, 2)
    unit.step(40)
    # The best balance of two experts per rank: a hot one (300) beside a light one (50).
    assert unit.experts.counts.window.balance()[EXPERTS] == pytest.approx(275 / 350, abs=0.02)
    load = with_ranks(
        UnitReport("u", "e", 1, 0, 0, 1, 0, balance={"kv": 0.5}), 1, (0,), unit.experts.figures()
    )
    assert load.balance.keys() == {"kv", "experts", "experts_worst"}
    assert (load.num_replicas_moved, load.num_layers_flipped) == (2, 1)


@pytest.mark.parametrize("growing_s", [0.0, 1e-6])
def test_what_costs_no_time_is_left_alone(growing_s: float) -> None:
    unit = Unit(plain(), [SKEWED])
    for _ in range(60):
        unit.step()
        assert unit.experts.plan(unit.now_s, growing_s) == {}
    assert unit.experts.installer.installing is None


@pytest.mark.promise(
    "the plan must gain more than noise, and more over the next steps than moving costs"
)
def test_moves_that_cost_more_than_they_save_are_not_made() -> None:
    assert Unit(plain(), [SKEWED], terms=replace(TERMS, replica_s=100.0)).run() == {}


def installing_under(
    experts: ExpertBalancer, loads_E: NDArray[np.int64], growing_s: float
) -> Installation:
    """Return the installation after twenty steps; one layer, one replica of each expert."""
    placement, num_ranks = experts.placement, experts.placement.num_ranks
    experts.began(1, placement, {rank: ("h", 7000 + rank) for rank in range(num_ranks)})
    counts_RS = loads_E[placement.slot_to_expert_LRS[0]].astype(np.int64)
    for step_id in range(20):
        experts.planned(step_id, (DecodePlan(step_id, (), (), ()),) * num_ranks)
        experts.done(
            step_id,
            {
                rank: StepDone(
                    step_id, (), (), {}, 0.01, expert_slot_counts=counts_RS[rank].tobytes()
                )
                for rank in range(num_ranks)
            },
        )
        experts.plan(0.0, growing_s)
    assert experts.installer.installing is not None
    return experts.installer.installing


def test_where_many_moves_do_not_pay_few_may() -> None:
    """Rank 0 has all hot experts: each trade lowers its load, and the first trades lower it most."""
    num_ranks, num_experts = 8, 64
    loads = np.full(num_experts, 100)
    loads[::num_ranks] = [900, 800, 700, 600, 500, 400, 300, 100]
    found = {}
    for replica_s in (1e-4, 0.0725):
        terms = replace(COUNTED, replica_s=replica_s, target=1.0)
        experts = ExpertBalancer(spread(1, num_experts, num_ranks), (0,) * num_ranks, terms=terms)
        found[replica_s] = installing_under(experts, loads, GROWING_S / 10).num_moved
    assert found[0.0725] == 4 < found[1e-4], found


@pytest.mark.promise(
    "a group's experts start on one node and leave it only as far as balance demands"
)
@pytest.mark.parametrize("num_groups", [2, 0])
def test_groups_stay_on_their_node_where_balance_allows(num_groups: int) -> None:
    """Rank 0 is hot. The lightest rank is on the other node, but rank 1, on its node, is light enough."""
    placement = spread_by_node(1, NUM_EXPERTS, NUM_RANKS, 0, 2)
    loads = np.array([300, 110, 300, 110, 300, 100, 200, 100])
    terms = replace(COUNTED, target=0.9)
    experts = ExpertBalancer(placement, (0, 0, 1, 1), terms=terms, num_groups=num_groups)
    slot_to_expert_RS = installing_under(experts, loads, GROWING_S).slot_to_expert_RS
    is_at_home = all(
        int(expert) // 4 == rank // 2
        for rank in range(NUM_RANKS)
        for expert in slot_to_expert_RS[rank]
    )
    assert is_at_home == (num_groups == 2)


def test_a_flip_is_counted_under_the_placement_that_it_made() -> None:
    unit = Unit(plain(), [SKEWED], terms=replace(TERMS, count_every_steps=1))
    unit.stage(unit.run())
    for _ in range(2):
        unit.step()
        even, odd = unit.experts.counts.window.halves(0)
        assert (even if (unit.experts.counts.window.number - 1) % 2 == 0 else odd)[
            -1
        ].tolist() == SKEWED
    assert len(unit.flips) == 1


@pytest.mark.promise(
    "the plan must gain more than noise, and more over the next steps than moving costs"
)
def test_noise_moves_nothing() -> None:
    """Each interval another expert is hot by chance; over the window no expert is."""
    unit = Unit(plain(), [[10] * NUM_EXPERTS], noise=1.0)
    num_tries = sum(
        bool(unit.run(1)) or unit.experts.installer.installing is not None for _ in range(300)
    )
    assert num_tries == 0


def test_too_few_tokens_are_no_reason() -> None:
    few = Unit(plain(), [SKEWED])
    few.loads /= 400
    assert few.run() == {}
    few.loads *= 400
    assert few.run() != {}


def test_not_while_a_rank_is_missing_and_not_when_off() -> None:
    assert Unit(plain(), [SKEWED], num_addresses=3).run() == {}
    unit = Unit(plain(), [SKEWED], is_planning=False)
    assert unit.run() == {}
    assert unit.experts.counts.window.balance()[EXPERTS] == pytest.approx(275 / 600)


def test_the_worst_layer_is_first_and_one_at_a_time() -> None:
    unit = Unit(plain(3), [EVEN, [200, 100, 100, 100, 200, 100, 100, 50], SKEWED])
    plans = unit.run()
    assert {plan.layer for plan in plans.values()} == {2}
    unit.step(20)
    assert unit.think() == {}, "one is under way"
    unit.stage(plans)
    unit.step()
    assert {plan.layer for plan in unit.run().values()} == {1}


def test_a_flip_waits_for_the_next_plan_and_counts_when_all_did_it() -> None:
    unit = Unit(plain(), [SKEWED])
    unit.stage(unit.run())
    unit.now_s += 1000.0
    unit.experts.tick(unit.now_s)  # All is staged: no deadline applies while the unit idles.
    before = unit.experts.placement
    sent = unit.send()
    assert sent[1][0].flips
    later = unit.send()
    assert later[1][0].flips == ()
    assert unit.experts.placement is before
    assert unit.done(*sent)
    assert unit.experts.placement.to_bytes() == unit.held.to_bytes() != before.to_bytes()
    assert not unit.done(*later)


@pytest.mark.parametrize("what", ["the step", "the flip", "staging"])
def test_one_hiccup_does_not_end_balancing(what: str) -> None:
    """One bad measurement of what is measured only while layers move must not stop all later moves."""
    unit = Unit(plain(), [SKEWED])
    plans = unit.run()
    for rank, plan in plans.items():
        took_s = 20.0 if what == "staging" else 0.01
        unit.experts.staged(
            0.0, rank, Staged(1, plan.stage_id, plan.layer, None, len(plan.sources), 0, took_s)
        )
    pause_s = 1.0 if what == "the flip" else 1e-4
    assert unit.done(*unit.send(), elapsed_s=0.01 if what == "staging" else 1.0, pause_s=pause_s)
    for _ in range(40):  # Use up all other moves that pay under this load.
        unit.stage(unit.run(1))
    unit.loads[:] = 60
    unit.loads[0, unit.experts.placement.slot_to_expert_LRS[0, 0]] = 300
    assert unit.run(100) != {}, "nothing moves after a change of regime"


class Unchecked(Placement):
    """Placement that raises on a full check, as a check takes longer than a step may wait."""

    def check(self) -> list[str]:
        raise AssertionError("nobody asked")


def test_no_step_waits_for_a_look_at_the_whole_placement() -> None:
    unit = Unit(plain(), [SKEWED])
    unit.stage(unit.run())
    placement = Unchecked(NUM_EXPERTS, unit.experts.placement.slot_to_expert_LRS)
    experts = unit.experts
    experts.installer.placement = placement
    plans = experts.planned(
        unit.step_id + 1, (DecodePlan(unit.step_id + 1, (), (), ()),) * NUM_RANKS
    )
    parts = {
        rank: StepDone(
            unit.step_id + 1,
            (),
            (),
            {},
            0.01,
            expert_slot_counts=bytes(unit.counts[:, rank].size * 8),
        )
        for rank in range(NUM_RANKS)
    }
    assert len(plans[0].flips) == 1
    assert experts.done(unit.step_id + 1, parts)
    assert isinstance(experts.placement, Unchecked)
    experts.began(2, placement, {})
    with pytest.raises(AssertionError, match="nobody asked"):
        experts.check()


@pytest.mark.promise(
    "A failed or late stage leaves the old placement in force, as does a new formation"
)
@pytest.mark.parametrize("state", list(InstallState))
def test_a_new_generation_abandons_it(state: InstallState) -> None:
    unit = Unit(plain(), [SKEWED])
    plans = unit.run()
    before = unit.experts.placement
    if state is not InstallState.STAGING:
        unit.stage(plans)
    if state is InstallState.FLIPPING:
        unit.send()
    assert unit.experts.installer.installing is not None
    assert unit.experts.installer.installing.state is state
    unit.experts.ended()
    assert (unit.experts.placement, unit.experts.moves.num_abandoned) == (before, 1)
    assert unit.experts.check() == []
    plan = plans[min(plans)]
    assert not unit.experts.staged(0.0, min(plans), Staged(1, plan.stage_id, plan.layer))
    assert unit.run() == {}, "nothing while it forms"
    unit.held, unit.counts[:] = before, 0
    unit.experts.began(2, before, {rank: ("h", 7000 + rank) for rank in range(4)})
    again = unit.run(100)
    assert {each.formation for each in again.values()} == {2}
    assert min(each.stage_id for each in again.values()) > plan.stage_id


@pytest.mark.promise(
    "A failed or late stage leaves the old placement in force, as does a new formation"
)
def test_an_error_abandons_it_and_the_next_try_waits_longer_each_time() -> None:
    unit = Unit(plain(), [SKEWED])
    waited_s = []
    for _ in range(3):
        plans = unit.run()
        assert plans
        unit.stage(plans, "CheckpointError: no")
        assert unit.experts.installer.installing is None
        failed_s = unit.now_s
        while not (plans := unit.run(1)):
            unit.now_s += 0.5
        waited_s.append(unit.now_s - failed_s)
        unit.stage(plans, "again")
        unit.now_s += 1000.0
    assert waited_s == [10.5, 40.5, 160.5], "and a half, for splits are tried before moves"
    assert unit.experts.moves.num_replicas_moved == 0
    assert any(
        "rank 0: CheckpointError: no; nothing is staged for 10 s" in note
        for note in unit.experts.notes
    )


def test_staging_has_a_deadline_that_a_pause_of_the_leader_moves() -> None:
    unit = Unit(plain(), [SKEWED])
    plans = unit.run()
    unit.experts.forgive(3.0)
    unit.experts.tick(7.9)
    assert unit.experts.installer.installing is not None
    unit.experts.tick(8.0)
    assert unit.experts.installer.installing is None
    late = ", ".join(map(str, sorted(plans)))
    assert any(f"rank {late} did not stage within 5 s" in note for note in unit.experts.notes)


def test_traced_steps_are_counted_and_tell_their_balance() -> None:
    unit = Unit(plain(), [SKEWED])
    ids = []
    for _ in range(3):
        sent = unit.send(is_traced=True)
        assert all(plan.is_counted for plan in sent[1])
        unit.done(*sent)
        ids.append(sent[0])
    steps = tuple(
        TracedStep(step_id, "sequential", 1, 5, (), {"kv": 0.5}) for step_id in (*ids, 99)
    )
    trace = unit.experts.traced(Trace("u", 1, steps))
    for step in trace.steps[:3]:
        measured = pytest.approx(275 / 600)
        assert step.balance == {"kv": 0.5, "experts": measured, "experts_worst": measured}
    assert trace.steps[3].balance == {"kv": 0.5}


def test_tracing_does_not_change_what_is_decided() -> None:
    """Traced steps are counted earlier and more often, but intervals end at the same steps."""
    traced, plain_one = Unit(plain(), [SKEWED]), Unit(plain(), [SKEWED])
    for number in range(20):
        traced.done(*traced.send(is_traced=number % 3 != 1))
        plain_one.done(*plain_one.send())
        assert len(traced.experts.counts.window) == len(plain_one.experts.counts.window)
    assert (traced.experts.counts.window.summed() == plain_one.experts.counts.window.summed()).all()
    assert len(traced.experts.counts.window) > 1


def test_counts_of_another_size_are_told_once() -> None:
    unit = Unit(plain(), [SKEWED])
    for step_id in range(1, 9):
        unit.experts.planned(step_id, (DecodePlan(step_id, (), (), ()),) * 4)
        unit.experts.done(
            step_id,
            {
                rank: StepDone(step_id, (), (), {}, 0.01, expert_slot_counts=b"12")
                for rank in range(4)
            },
        )
    assert list(unit.experts.notes) == ["rank 0 sent 2 bytes of counts for (1, 4, 2) slots"]
    assert len(unit.experts.counts.window) == 0
