"""A rank's experts: after any row of placements its slots hold exactly what loading from nothing would give."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hadal.core.errors import CheckpointError
from hadal.core.placement import EMPTY, Placement, spread, without
from hadal.model.experts import ExpertStore
from hadal.model.weights import load_weights
from hadal.reference.params import ModelWeights
from tests.unit.model.checkpoints import Peer


def check_slots(weights: ModelWeights, slots_LS: np.ndarray, whole: ModelWeights) -> None:
    moe_layers = [layer.moe for layer in weights.layers if layer.moe is not None]
    all_layers = [layer.moe for layer in whole.layers if layer.moe is not None]
    assert len(moe_layers) == len(slots_LS)
    for moe, everything, slots in zip(moe_layers, all_layers, slots_LS, strict=True):
        assert moe.gate_up_E.shape[0] == moe.down_E.shape[0] == len(slots)
        for slot, expert in enumerate(slots.tolist()):
            if expert != EMPTY:
                assert torch.equal(moe.gate_up_E[slot], everything.gate_up_E[expert])
                assert torch.equal(moe.down_E[slot], everything.down_E[expert])
        assert torch.equal(moe.router_ED, everything.router_ED)


def rank_slots(placement: Placement, rank: int) -> np.ndarray:
    return placement.slot_to_expert_LRS[:, rank]


@pytest.mark.parametrize("name", ["plain", "deep"])
def test_only_a_ranks_slots_are_read(peers: dict[str, Peer], name: str) -> None:
    peer = peers[name]
    num_layers = sum(layer.moe is not None for layer in peer.weights.layers)
    placement = spread(num_layers, peer.weights.config.n_routed_experts, 4, 8)
    for rank in range(4):
        slots_LS = rank_slots(placement, rank)
        check_slots(load_weights(peer.folder, slots_LS=slots_LS), slots_LS, peer.weights)
    nothing = load_weights(peer.folder, slots_LS=np.empty((num_layers, 0), np.int16))
    check_slots(nothing, np.empty((num_layers, 0), np.int16), peer.weights)


def test_placements_come_and_go(plain: Peer) -> None:
    """Spread, a rank lost, another lost, one back: only what is new is read."""
    num_layers, num_experts = 2, plain.weights.config.n_routed_experts
    first = spread(num_layers, num_experts, 4, 4)
    weights = load_weights(plain.folder, slots_LS=np.empty((num_layers, 0), np.int16))
    store = ExpertStore(plain.folder, num_layers)
    held: list[set[int]] = [set() for _ in range(num_layers)]
    for placement in (first, first, without(first, {2}), without(first, {1, 2}), without(first, {3}), first):
        slots_LS = rank_slots(placement, 0)
        weights, num_read = store.install(weights, slots_LS)
        check_slots(weights, slots_LS, plain.weights)
        now = [set(slots.tolist()) - {EMPTY} for slots in slots_LS]
        assert num_read == sum(len(new - old) for new, old in zip(now, held, strict=True))
        held = now
    assert held != [set()] * num_layers


def test_any_slots(plain: Peer) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    num_experts = plain.weights.config.n_routed_experts
    weights = load_weights(plain.folder, slots_LS=np.empty((2, 0), np.int16))
    store = ExpertStore(plain.folder, 2)
    for _ in range(6):
        num_slots = int(rng.integers(0, num_experts))
        slots_LS = np.stack([rng.permutation(num_experts)[:num_slots] for _ in range(2)]).astype(np.int16)
        slots_LS[rng.random(slots_LS.shape) < 0.2] = EMPTY
        weights, _ = store.install(weights, slots_LS)
        check_slots(weights, slots_LS, plain.weights)


def test_layers_that_stay_cost_nothing(plain: Peer) -> None:
    slots_LS = np.array([[1, 2], [3, 4]], np.int16)
    weights = load_weights(plain.folder, slots_LS=slots_LS)
    changed, num_read = ExpertStore(plain.folder, 2, slots_LS).install(weights, np.array([[1, 2], [4, 5]], np.int16))
    assert num_read == 1
    assert changed.layers[1].moe is weights.layers[1].moe
    assert changed.layers[0] is weights.layers[0]


def test_errors(plain: Peer) -> None:
    store = ExpertStore(plain.folder, 2)
    weights = load_weights(plain.folder, slots_LS=np.empty((2, 0), np.int16))
    with pytest.raises(ValueError, match="3 MoE layers"):
        store.install(weights, np.zeros((3, 1), np.int16))
    with pytest.raises(CheckpointError, match=r"experts\.99"):
        store.install(weights, np.full((2, 1), 99, np.int16))
    assert store.install(weights, np.zeros((2, 1), np.int16))[1] == 2
