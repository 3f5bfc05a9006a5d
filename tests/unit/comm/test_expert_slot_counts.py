"""Tokens per expert slot, counted at dispatch: equal to a count by hand, also after a flip."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.installed import ExpertSlotCounts
from hadal.core.placement import SPLIT_PARTS, Placement, spread
from hadal.kernels import library
from tests.fresh import fresh
from tests.needs import leave_out
from tests.unit.comm.queues import in_threads, queue_groups
from tests.unit.comm.test_expert_comm import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    MODES,
    TOKENS,
    TOP_K,
    Scene,
    cuts,
    make,
    scene,
)

SEEDS = [1, fresh().randrange(1 << 30)]
NUM_ROUNDS = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["kernels", "plain"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(library, "load", lambda: None)
    elif library.load() is None:
        leave_out("no kernels", "apt-get install g++")


def by_hand(
    tokens: Scene, shares: dict[int, slice], placement: Placement, layer: int
) -> np.ndarray:
    """Return [R, S] counts of all ranks' tokens in one layer, two micro-batches each, pair by pair."""
    counts = np.zeros((placement.num_ranks, placement.num_expert_slots), np.int64)
    expert_slots_EM, turns_E = placement.replicas(layer)
    for rank, own in shares.items():
        half = (own.start + own.stop) // 2
        for part in (range(own.start, half), range(half, own.stop)):
            for row, token in enumerate(part):
                for expert in tokens.ids_TK[token].tolist():
                    slot = expert_slots_EM[expert, (row + layer + rank) % turns_E[expert]]
                    counts[
                        slot // placement.num_expert_slots, slot % placement.num_expert_slots
                    ] += 1
    return counts


def serve(comm: ExpertComm, tokens: Scene, own: slice, layer: int) -> None:
    half = (own.start + own.stop) // 2
    parts = [slice(own.start, half), slice(half, own.stop)]
    handles = [comm.dispatch(tokens.x_TD[part], tokens.ids_TK[part], layer) for part in parts]
    for handle in handles:
        received = handle.finish_dispatch()
        handle.start_combine(received.x_ND[received.row_M])
    for handle, part in zip(handles, parts, strict=True):
        handle.finish_combine(tokens.weights_TK[part])


def random_split(placement: Placement, seed: int) -> Placement:
    """Return a split: half of the experts give 3 parts to each replica but the first, which gets the rest."""
    slots = placement.slot_to_expert_LRS
    weights = np.ones(slots.shape, np.uint8)
    rng = np.random.default_rng(seed)
    for layer, experts in enumerate(slots):
        for expert in rng.permutation(placement.num_experts)[: placement.num_experts // 2].tolist():
            at = np.argwhere(experts == expert)
            parts = [SPLIT_PARTS - 3 * (len(at) - 1)] + [3] * (len(at) - 1)
            for (rank, slot), part in zip(at.tolist(), parts, strict=True):
                weights[layer, rank, slot] = part
    return Placement(placement.num_experts, slots, weights)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatch_format", ["fp32", "fp8"])
@pytest.mark.parametrize(("num_ranks", "redundant"), [(1, 0), (4, 8)])
def test_counts_are_those_made_by_hand(
    dispatch_format: str, mode: str, num_ranks: int, redundant: int, seed: int
) -> None:
    tokens = scene(seed)
    placement = random_split(spread(LAYERS, EXPERTS, num_ranks, redundant), seed)
    groups, shares = queue_groups(range(num_ranks), seed), dict(enumerate(cuts(num_ranks, seed)))

    def work(rank: int) -> tuple[np.ndarray, np.ndarray]:
        comm = make(groups[rank] if num_ranks > 1 else None, dispatch_format, mode, placement)
        for _ in range(NUM_ROUNDS):
            for layer in range(LAYERS):
                serve(comm, tokens, shares[rank], layer)
        first = comm.take_counts()
        assert first.dtype == torch.int64
        serve(comm, tokens, shares[rank], 1)
        return first.numpy(), comm.take_counts().numpy()

    counted = in_threads(work, range(num_ranks))
    wanted = np.stack([by_hand(tokens, shares, placement, layer) for layer in range(LAYERS)])
    first = np.stack([counted[rank][0] for rank in range(num_ranks)], axis=1)
    assert first.sum() == NUM_ROUNDS * LAYERS * TOKENS * TOP_K
    assert np.array_equal(first, NUM_ROUNDS * wanted), seed
    second = np.stack([counted[rank][1] for rank in range(num_ranks)], axis=1)
    wanted[0] = 0
    assert np.array_equal(second, wanted), "taking them clears them"


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("mode", MODES)
def test_a_new_split_moves_tokens_as_its_parts_say(mode: str) -> None:
    """Split expert 1, the target of all tokens, over two ranks: parts 12 and 4, then 4 and 12."""
    placement = spread(2, 4, 2, 4)
    num_tokens, groups = 2 * SPLIT_PARTS, queue_groups([0, 1])
    tokens = Scene(
        torch.randn(num_tokens, HIDDEN),
        torch.tensor([[1, 2, 3]]).repeat(num_tokens, 1),
        torch.ones(num_tokens, TOP_K),
        torch.ones(4, HIDDEN),
    )
    slot_to_expert_RS = placement.slot_to_expert_LRS[0]
    at = [int(np.flatnonzero(slots == 1)[0]) for slots in slot_to_expert_RS]

    def parts(first: int) -> np.ndarray:
        weights = np.ones(slot_to_expert_RS.shape, np.uint8)
        weights[0, at[0]], weights[1, at[1]] = first, SPLIT_PARTS - first
        return weights

    def work(rank: int) -> list[list[int]]:
        comm = make(groups[rank], "fp32", mode, placement)
        seen = []
        for first in (0, 12, 4):
            serve(comm, tokens, slice(0, num_tokens), 1)
            if first:
                comm.install_layer(0, placement.with_layer(0, slot_to_expert_RS, parts(first)))
            serve(comm, tokens, slice(0, num_tokens), 0)
            counts = comm.take_counts()
            seen.append([int(counts[0, at[rank]]), int(counts[1].sum())])
        return seen

    seen = in_threads(work, [0, 1])
    both = [[of_0[0], of_1[0]] for of_0, of_1 in zip(seen[0], seen[1], strict=True)]
    assert both == [[32, 32], [48, 16], [16, 48]]
    total = 2 * num_tokens * TOP_K
    assert [of_0[1] + of_1[1] for of_0, of_1 in zip(seen[0], seen[1], strict=True)] == [total] * 3


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_placed_anew_changes_no_bit_and_no_buffer(mode: str) -> None:
    """Fill rank 0's empty expert slots: more tokens arrive there than before, in the same buffers."""
    tokens, groups = scene(SEEDS[-1], num_experts=4), queue_groups([0, 1])
    slots = np.array([[[0, 1, -1, -1], [2, 3, -1, -1]]] * LAYERS, np.int16)
    before = Placement(4, slots)
    after = before.with_layer(1, np.array([[3, 2, 1, 0], [-1] * 4], np.int16), None)

    def work(rank: int) -> bool:
        comm = make(groups[rank], "fp8", mode, before)
        low_latency, results = comm._low_latency, []
        for placement in (before, after):
            if placement is after:
                comm.install_layer(1, after)
            held = torch.from_numpy(placement.slot_to_expert_LRS[1, rank].astype(np.int64))
            handle = comm.dispatch(tokens.x_TD, tokens.ids_TK, 1)
            received = handle.finish_dispatch()
            handle.start_combine(
                tokens.expert(held[received.expert_slot_M], received.x_ND[received.row_M])
            )
            results.append(handle.finish_combine(tokens.weights_TK))
        assert comm._low_latency is low_latency
        counts = comm.take_counts()
        assert counts[0].sum() == 0
        # Counts from before the flip are dropped.
        assert counts[1].sum() == (2 * TOKENS * TOP_K if rank == 0 else 0)
        return torch.equal(*results)

    assert all(in_threads(work, [0, 1]).values()), SEEDS[-1]


def test_a_layer_that_cannot_be_leaves_the_old_one() -> None:
    placement = spread(LAYERS, EXPERTS, 1)
    comm, tokens = make(None, "fp32", "normal", placement), scene(5)
    with pytest.raises(ValueError, match="2 layers with 16 slots"):
        comm.install_layer(2, placement)
    with pytest.raises(ValueError, match="2 layers with 16 slots"):
        comm.install_layer(0, Placement(EXPERTS, placement.slot_to_expert_LRS[:, :, :15]))
    holes = placement.slot_to_expert_LRS[0].copy()
    holes[0, 0] = holes[0, 1]
    with pytest.raises(ValueError, match="no replica"):
        comm.install_layer(0, placement.with_layer(0, holes, None))
    serve(comm, tokens, slice(0, TOKENS), 0)
    assert np.array_equal(
        comm.take_counts()[0, None], by_hand(tokens, {0: slice(0, TOKENS)}, placement, 0)
    )


def test_counts_are_taken_once_and_cleared_by_layer() -> None:
    counts = ExpertSlotCounts(2, 3, "cpu")
    counts.add(0, torch.tensor([2, 0, 2]))
    counts.add(1, torch.zeros(0, dtype=torch.int64))
    counts.rows_S[1].add_(torch.tensor([5, 0, 7]))  # As kernels do.
    counts.clear(0)
    counts.add(0, torch.tensor([1]))
    taken = counts.take()
    assert taken.tolist() == [[0, 1, 0], [5, 0, 7]]
    counts.add(0, torch.tensor([0]))
    assert taken.tolist() == [[0, 1, 0], [5, 0, 7]], "a copy, not a view"
    assert counts.take().tolist() == [[1, 0, 0], [0, 0, 0]]
