"""Simulated experts: their placement, staged experts, and tokens per slot.

A step's tokens are drawn once for all ranks and dealt to replicas in turn, as live. Assertions fail
on a flip (a layer's change to its next placement) that was not staged, on ranks with different
placements in one step, and on a source without its expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hadal.core.placement import Placement, flip_arrays
from hadal.core.plans import FormPlan, LayerFlip, StagePlan, StepDone, StepPlan
from hadal.roles.experts.gain import ExpertTerms

NUM_EXPERTS = 12
NUM_LAYERS = 2
PORT = 7000
"""Port at which rank 0 serves its experts; rank r uses PORT + r."""
TERMS = ExpertTerms(
    count_every_steps=4,
    num_intervals=16,
    half_life=4.0,
    num_intervals_min=6,
    tokens_per_expert_min=8.0,
    stage_timeout_s=2.0,
    backoff_s=0.5,
    plan_every_steps=1,
    rest_intervals=16,
    moves_share=0.25,
    replica_s=0.001,
)
"""Terms for runs of some hundred steps of few tokens."""
GROWING_S = 0.001


def skewed(seed: int, tokens: float = 30.0) -> NDArray[np.float64]:
    """Return mean tokens of each expert per step [L, E]; the hottest has several times the mean."""
    weights = np.exp(np.random.default_rng(seed).normal(0.0, 0.8, (NUM_LAYERS, NUM_EXPERTS)))
    return np.asarray(tokens * NUM_EXPERTS * weights / weights.sum(axis=1, keepdims=True))


@dataclass
class Traffic:
    """Random expert loads of a unit's tokens, and their distribution over slots."""

    loads_LE: NDArray[np.float64]
    rng: np.random.Generator
    num_drawn: int = 0
    balance: list[float] = field(default_factory=list)
    """Balance of every step: mean over maximum of the ranks' tokens, averaged over layers."""
    known: Placement | None = None
    turns: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = field(default_factory=list)
    """Slots and number of replicas of each expert in the placement `known`, one entry per layer."""

    def deal(self, placement: Placement, num_members: int) -> NDArray[np.int64]:
        """Draw a step's tokens and deal them to replicas in turn; return tokens per slot [L, R, S]."""
        if placement is not self.known:
            self.known = placement
            self.turns = [placement.replicas(layer) for layer in range(placement.num_layers)]
        tokens_LE = self.rng.poisson(self.loads_LE)
        num_expert_slots = placement.num_ranks * placement.num_expert_slots
        dealt = np.empty((placement.num_layers, num_expert_slots), np.int64)
        for layer, (turns, counts) in enumerate(self.turns):
            experts = np.repeat(np.arange(NUM_EXPERTS), tokens_LE[layer])
            in_turn = (np.arange(len(experts)) + self.num_drawn) % counts[experts]
            dealt[layer] = np.bincount(turns[experts, in_turn], minlength=num_expert_slots)
        self.num_drawn += 1
        dealt = dealt.reshape(placement.slot_to_expert_LRS.shape)
        received = dealt.sum(axis=2)
        self.balance.append(
            float((received.sum(axis=1) / num_members / received.max(axis=1)).mean())
        )
        return dealt


@dataclass
class SimExperts:
    """Experts of one rank."""

    rank: int
    placement: Placement | None = None
    staged: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Layer -> (stage id, expert of each slot)."""
    counts_LS: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    num_flips: int = 0
    num_moved: int = 0
    """Number of replicas that flips brought to this rank."""

    def form(self, plan: FormPlan) -> None:
        self.placement = Placement.from_bytes(
            plan.slot_to_expert, NUM_EXPERTS, plan.num_ranks, plan.num_expert_slots, plan.weights
        )
        assert not self.placement.check(), self.placement.check()
        self.staged.clear()
        self.counts_LS = np.zeros((NUM_LAYERS, plan.num_expert_slots), np.int64)

    def stage(
        self, plan: StagePlan, holders: Callable[[int], SimExperts | None]
    ) -> tuple[int, int]:
        """Stage the layer's next experts; return numbers of replicas (from other ranks, from the checkpoint)."""
        assert self.placement is not None
        own = self.placement.slot_to_expert_LRS[plan.layer, self.rank].tolist()
        assert tuple(own) != plan.slot_to_expert, "a rank whose slots stay is sent nothing"
        missing = {expert for expert in plan.slot_to_expert if expert >= 0} - set(own)
        assert sorted(source.expert for source in plan.sources) == sorted(missing)
        num_received = 0
        for source in plan.sources:
            assert source.port, "every rank gives away what it holds"
            giver = holders(source.port - PORT)
            # Experts of a dead rank are read from the checkpoint.
            if giver is not None and giver.placement is not None:
                assert source.expert in giver.placement.slot_to_expert_LRS[plan.layer, giver.rank]
                num_received += 1
        self.staged[plan.layer] = (plan.stage_id, plan.slot_to_expert)
        return num_received, len(plan.sources) - num_received

    def flip(self, flip: LayerFlip) -> None:
        assert self.placement is not None
        before = self.placement.slot_to_expert_LRS
        slot_to_expert_RS, weights_RS = flip_arrays(flip, self.placement.num_expert_slots)
        if not np.array_equal(before[flip.layer, self.rank], slot_to_expert_RS[self.rank]):
            staged = self.staged.pop(flip.layer, None)
            self.num_moved += len(
                set(slot_to_expert_RS[self.rank].tolist())
                - set(before[flip.layer, self.rank].tolist())
            )
            assert staged == (flip.stage_id, tuple(slot_to_expert_RS[self.rank].tolist())), (
                f"{flip} and {staged} is staged"
            )
        self.placement = self.placement.with_layer(flip.layer, slot_to_expert_RS, weights_RS)
        assert not self.placement.check(), self.placement.check()
        self.counts_LS[flip.layer] = 0
        self.num_flips += 1

    def digest(self) -> tuple[bytes, bytes]:
        """Return placement and weights as bytes, which must be equal on all ranks of a step."""
        assert self.placement is not None
        return self.placement.to_bytes(), self.placement.weights_bytes()

    def received(self, dealt_LRS: NDArray[np.int64]) -> None:
        self.counts_LS += dealt_LRS[:, self.rank]

    def counted(self, plan: StepPlan, done: StepDone) -> bytes:
        """Return the token counts to send with a step's result, and reset them."""
        if not plan.is_counted or done.error is not None:
            return b""
        counts = self.counts_LS.tobytes()
        self.counts_LS[:] = 0
        return counts
