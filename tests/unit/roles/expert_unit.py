"""Simulate ranks that obey the expert balancer: they route and count tokens, stage experts (copy them
ahead of use) and flip layers (use the staged experts).
"""

from __future__ import annotations

import numpy as np

from hadal.core.placement import Placement, flip_arrays, spread
from hadal.core.plans import (
    FLIP,
    DecodePlan,
    LayerFlip,
    OpTime,
    Staged,
    StagePlan,
    StepDone,
    StepPlan,
)
from hadal.roles.experts.experts import ExpertBalancer
from hadal.roles.experts.gain import ExpertTerms

NUM_EXPERTS, NUM_RANKS = 8, 4
TERMS = ExpertTerms(
    count_every_steps=2,
    num_intervals=12,
    num_intervals_min=4,
    plan_every_steps=1,
    moves_share=0.25,
    backoff_s=10.0,
    stage_timeout_s=5.0,
)
GROWING_S = 1e-3
EVEN = [100] * NUM_EXPERTS
HOT = [400, 100, 90, 100, 100, 90, 100, 100]
"""Loads by expert: on `replicated`, rank 0 has 390 and rank 3 has 250 if replicas share equally."""


class Unit:
    """Ranks that execute every step; `loads` are a step's tokens by layer and expert."""

    def __init__(
        self,
        placement: Placement,
        loads: list[list[int]],
        *,
        noise: float = 0.0,
        terms: ExpertTerms = TERMS,
        is_planning: bool = True,
        num_addresses: int = NUM_RANKS,
    ) -> None:
        self.experts = ExpertBalancer(
            placement, (0,) * NUM_RANKS, terms=terms, is_planning=is_planning
        )
        self.loads = np.array(loads, np.float64)
        self.noise = noise
        self.rng = np.random.default_rng(5)
        self.now_s = 0.0
        self.step_id = 0
        self.held = placement
        """Placement that the ranks currently have."""
        self.counts = np.zeros(placement.slot_to_expert_LRS.shape)
        self.flips: list[LayerFlip] = []
        addresses = {rank: ("h", 7000 + rank) for rank in range(num_addresses)}
        self.experts.began(1, placement, addresses)

    def send(self, *, is_traced: bool = False) -> tuple[int, tuple[StepPlan, ...]]:
        """Let the leader plan a step, and apply its flips at the ranks."""
        self.step_id += 1
        plans = self.experts.planned(
            self.step_id, (DecodePlan(self.step_id, (), (), (), is_traced=is_traced),) * 4
        )
        assert len({plan.flips for plan in plans}) == 1
        assert len(plans[0].flips) <= 1
        for flip in plans[0].flips:
            self.held = self.held.with_layer(
                flip.layer, *flip_arrays(flip, self.held.num_expert_slots)
            )
            assert self.held.check() == []
            self.counts[flip.layer] = 0
            self.flips.append(flip)
        self.deal()
        assert self.experts.check() == []
        return self.step_id, plans

    def deal(self) -> None:
        loads = self.loads * self.rng.lognormal(0.0, self.noise, self.loads.shape)
        for layer in range(self.held.num_layers):
            turns, counts = self.held.replicas(layer)
            for expert in range(NUM_EXPERTS):
                for slot in turns[expert, : counts[expert]].tolist():
                    self.counts[layer].reshape(-1)[slot] += loads[layer, expert] / counts[expert]

    def done(
        self,
        step_id: int,
        plans: tuple[StepPlan, ...],
        elapsed_s: float = 0.01,
        pause_s: float = 1e-4,
    ) -> bool:
        counts = self.counts.round().astype(np.int64)
        parts = {
            rank: StepDone(
                step_id,
                (),
                (),
                {},
                elapsed_s,
                op_times=(OpTime(FLIP, 1, pause_s),) if plans[0].flips else (),
                expert_slot_counts=counts[:, rank].tobytes() if plans[0].is_counted else b"",
            )
            for rank in range(NUM_RANKS)
        }
        if plans[0].is_counted:
            self.counts[:] = 0
        is_flipped = self.experts.done(step_id, parts)
        assert self.experts.check() == []
        return is_flipped

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.done(*self.send())

    def think(self) -> dict[int, StagePlan]:
        plans = self.experts.plan(self.now_s, GROWING_S)
        assert self.experts.check() == []
        return plans

    def run(self, number: int = 60) -> dict[int, StagePlan]:
        """Step until the leader plans to stage experts; return rank -> plan, or {} after `number`
        steps without such plans.
        """
        for _ in range(number):
            self.step()
            plans = self.think()
            if plans:
                return plans
        return {}

    def stage(self, plans: dict[int, StagePlan], error: str | None = None) -> None:
        for rank, plan in plans.items():
            staged = Staged(
                plan.formation, plan.stage_id, plan.layer, error, len(plan.sources), 0, 0.01
            )
            found = self.experts.staged(self.now_s, rank, staged)
            assert found == (error is None or rank == min(plans))
            assert self.experts.check() == []


def replicated() -> Placement:
    """Return a placement of one layer; experts 0 and 1 have second replicas on rank 3."""
    slots = np.array([[[0, 2, 4], [1, 3, 5], [6, 7, -1], [0, 1, -1]]], np.int16)
    return Placement(NUM_EXPERTS, slots)


def plain(num_layers: int = 1) -> Placement:
    """Return a placement of two slots on each of four ranks: experts 0 and 4 on rank 0, and so on."""
    return spread(num_layers, NUM_EXPERTS, NUM_RANKS)


SKEWED = [300, 100, 100, 50, 300, 100, 100, 50]
"""Loads by expert: on `plain`, rank 0 has both hot experts; trades with rank 3 level them."""
