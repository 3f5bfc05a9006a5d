"""A rank's experts: after any placements and flips the slots equal a fresh load."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hadal.core.errors import CheckpointError, InvariantError
from hadal.core.placement import EMPTY, Placement, spread, without
from hadal.core.plans import LayerFlip, Source, Staged, StagePlan
from hadal.kernels import weights as kernel_weights
from hadal.model.experts import ExpertStore
from hadal.model.load import load_weights
from hadal.reference.params import Experts, Matrix, MlpWeights, ModelWeights
from tests.fresh import fresh
from tests.unit.model.checkpoints import Peer
from tests.waiting import DEADLINE_S, join


def check_slots(weights: ModelWeights, slot_to_expert_LS: np.ndarray, whole: ModelWeights) -> None:
    moe_layers = [layer.moe for layer in weights.layers if layer.moe is not None]
    all_layers = [layer.moe for layer in whole.layers if layer.moe is not None]
    assert len(moe_layers) == len(slot_to_expert_LS)
    for moe, everything, slots in zip(moe_layers, all_layers, slot_to_expert_LS, strict=True):
        assert len(moe.experts) == len(slots)
        for slot, expert in enumerate(slots.tolist()):
            if expert == EMPTY:
                assert moe.experts.slots[slot] is None
            else:
                assert is_same(moe.experts[slot], everything.experts[expert])
        assert torch.equal(moe.router.values, everything.router.values)


def is_same(one: MlpWeights, other: MlpWeights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))


def rank_slots(placement: Placement, rank: int) -> np.ndarray:
    return placement.slot_to_expert_LRS[:, rank]


@pytest.mark.promise(
    "A rank loads its replicas, attention, the shared expert, embedding and head, nothing else."
)
@pytest.mark.parametrize("name", ["plain", "deep"])
def test_only_a_ranks_slots_are_read(peers: dict[str, Peer], name: str) -> None:
    peer = peers[name]
    num_layers = sum(layer.moe is not None for layer in peer.weights.layers)
    placement = spread(num_layers, peer.weights.config.n_routed_experts, 4, 8)
    for rank in range(4):
        slot_to_expert_LS = rank_slots(placement, rank)
        check_slots(
            load_weights(peer.folder, slot_to_expert_LS=slot_to_expert_LS),
            slot_to_expert_LS,
            peer.weights,
        )
    nothing = load_weights(peer.folder, slot_to_expert_LS=np.empty((num_layers, 0), np.int16))
    check_slots(nothing, np.empty((num_layers, 0), np.int16), peer.weights)


def test_placements_come_and_go(plain: Peer) -> None:
    """Install a spread, lose a rank, lose another, get one back: only new experts are read."""
    num_layers, num_experts = 2, plain.weights.config.n_routed_experts
    first = spread(num_layers, num_experts, 4, 4)
    weights = load_weights(plain.folder, slot_to_expert_LS=np.empty((num_layers, 0), np.int16))
    store = ExpertStore(plain.folder, weights, np.empty((num_layers, 0), np.int16))
    held: list[set[int]] = [set() for _ in range(num_layers)]
    for placement in (
        first,
        first,
        without(first, {2}),
        without(first, {1, 2}),
        without(first, {3}),
        first,
    ):
        slot_to_expert_LS = rank_slots(placement, 0)
        weights, num_read = store.install(weights, slot_to_expert_LS, 1)
        check_slots(weights, slot_to_expert_LS, plain.weights)
        now = [set(slots.tolist()) - {EMPTY} for slots in slot_to_expert_LS]
        assert num_read == sum(len(new - old) for new, old in zip(now, held, strict=True))
        held = now
    assert held != [set()] * num_layers


def test_any_slots(plain: Peer) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    num_experts = plain.weights.config.n_routed_experts
    weights = load_weights(plain.folder, slot_to_expert_LS=np.empty((2, 0), np.int16))
    store = ExpertStore(plain.folder, weights, np.empty((2, 0), np.int16))
    for _ in range(6):
        num_expert_slots = int(rng.integers(0, num_experts))
        slot_to_expert_LS = np.stack(
            [rng.permutation(num_experts)[:num_expert_slots] for _ in range(2)]
        ).astype(np.int16)
        slot_to_expert_LS[rng.random(slot_to_expert_LS.shape) < 0.2] = EMPTY
        weights, _ = store.install(weights, slot_to_expert_LS, 1)
        check_slots(weights, slot_to_expert_LS, plain.weights)


def test_layers_that_stay_cost_nothing(plain: Peer) -> None:
    slot_to_expert_LS = np.array([[1, 2], [3, 4]], np.int16)
    weights = load_weights(plain.folder, slot_to_expert_LS=slot_to_expert_LS)
    store = ExpertStore(plain.folder, weights, slot_to_expert_LS)
    changed, num_read = store.install(weights, np.array([[1, 2], [4, 5]], np.int16), 1)
    assert num_read == 1
    assert changed.layers[1].moe is weights.layers[1].moe
    assert changed.layers[0] is weights.layers[0]


def test_errors(plain: Peer) -> None:
    weights = load_weights(plain.folder, slot_to_expert_LS=np.empty((2, 0), np.int16))
    store = ExpertStore(plain.folder, weights, np.empty((2, 0), np.int16))
    with pytest.raises(ValueError, match="3 MoE layers"):
        store.install(weights, np.zeros((3, 1), np.int16), 1)
    with pytest.raises(CheckpointError, match=r"experts\.99"):
        store.install(weights, np.full((2, 1), 99, np.int16), 1)
    assert store.install(weights, np.zeros((2, 1), np.int16), 1)[1] == 2


def flip_of(slots: Sequence[int], stage_id: int, layer: int = 0) -> LayerFlip:
    """Return a flip for rank 1 of two; rank 0 has no experts."""
    return LayerFlip(layer, stage_id, np.array([[EMPTY] * len(slots), slots], np.int16).tobytes())


def nobody(layer: int, source: Source, into: MlpWeights) -> bool:
    return False


class Half:
    """A rank with experts 0 to 7 of every layer; the first of two formations is installed."""

    def __init__(self, peer: Peer, folder: Path | None = None) -> None:
        self.whole = peer.weights
        self.slot_to_expert_LS = np.tile(np.arange(8, dtype=np.int16), (2, 1))
        self.weights = load_weights(peer.folder, slot_to_expert_LS=self.slot_to_expert_LS)
        self.store = ExpertStore(folder or peer.folder, self.weights, self.slot_to_expert_LS)
        self.weights, num_read = self.store.install(self.weights, self.slot_to_expert_LS, 1)
        assert num_read == 0

    def stage(
        self, slots: Sequence[int], stage_id: int, layer: int = 0, formation: int = 1
    ) -> Staged:
        """Stage slots: odd experts have another rank as their source, even ones have no source."""
        self.asked: list[tuple[int, int]] = []
        plan = StagePlan(
            formation,
            stage_id,
            layer,
            tuple(slots),
            tuple(Source(e, "a", 5) for e in slots if e % 2),
        )
        return self.store.stage(plan, self.give)

    def give(self, layer: int, source: Source, into: MlpWeights) -> bool:
        """Copy an expert, as a peer does. Expert 9 is not found, and its copy is invalid."""
        self.asked.append((layer, source.expert))
        moe = self.whole.layers[1 + layer].moe
        assert moe is not None
        for part, held in zip(into.parts, moe.experts[source.expert].parts, strict=True):
            part.copy_(held)
        if source.expert == 9:
            into.up.values.fill_(float("nan"))
        return source.expert != 9

    def flip(self, slots: Sequence[int], stage_id: int, layer: int = 0) -> None:
        self.weights = self.store.flip(self.weights, flip_of(slots, stage_id, layer), 1)
        self.slot_to_expert_LS[layer] = slots

    def check(self) -> None:
        check_slots(self.weights, self.slot_to_expert_LS, self.whole)
        for layer, slots in enumerate(self.slot_to_expert_LS.tolist()):
            moe = self.whole.layers[1 + layer].moe
            assert moe is not None
            for expert in range(16):
                found = self.store.expert(layer, expert)
                assert (found is not None) == (expert in slots)
                if found is not None:
                    assert is_same(found, moe.experts[expert])


def test_a_layer_is_staged_and_flipped(plain: Peer) -> None:
    """Stage a layer: own experts stay, others are fetched or read; old ones serve until the flip."""
    half = Half(plain)
    before, new = half.weights, [7, 11, 9, EMPTY, 2, 12, 13, 3]
    staged = half.stage(new, 1)
    assert (staged.error, staged.num_received, staged.num_read) == (None, 2, 2)
    assert half.asked == [(0, 11), (0, 9), (0, 13)], "only what is not held"
    half.check()
    half.flip(new, 1)
    half.check()
    assert half.weights.layers[2] is before.layers[2], "the other layer is as it was"
    # The flip wrote nothing in place.
    check_slots(before, np.tile(np.arange(8, dtype=np.int16), (2, 1)), half.whole)
    again = half.weights
    half.flip(new, 99)
    assert half.weights is again, "the same slots need no stage: a new split alone"


def test_no_step_describes_experts(plain: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that experts are described to kernels at the start and when staged, never in a step."""
    half = Half(plain)

    def experts() -> list[Experts]:
        return [layer.moe.experts for layer in half.weights.layers if layer.moe is not None]

    made: list[object] = []
    structure_of = kernel_weights._structure_of

    def spy(weight: Matrix | MlpWeights | Experts) -> object:
        made.append(weight)
        return structure_of(weight)

    monkeypatch.setattr(kernel_weights, "_structure_of", spy)
    assert kernel_weights.takes(*experts())
    assert made == []
    new = [7, 11, 9, EMPTY, 2, 12, 13, 3]
    assert half.stage(new, 1).error is None
    assert sum(isinstance(weight, MlpWeights) for weight in made) == 4, "11, 9, 12 and 13"
    made.clear()
    half.flip(new, 1)
    assert kernel_weights.takes(*experts())
    assert made == []


def test_a_flip_without_its_stage_is_refused(plain: Peer) -> None:
    half, new, other = Half(plain), [9, 1, 2, 3, 4, 5, 6, 7], [1, 10, 2, 3, 4, 5, 6, 7]
    flips = [(new, 1, 0)]
    assert half.stage(new, 1).error is None
    flips += [(new, 2, 0), (other, 1, 0), (new, 1, 1)]
    assert half.stage(other, 2).error is None
    for slots, stage_id, layer in (flips[0], *flips[2:]):
        with pytest.raises(InvariantError, match="stage"):
            half.store.flip(half.weights, flip_of(slots, stage_id, layer), 1)
    with pytest.raises(InvariantError, match="stage"):
        half.store.flip(half.weights, flip_of(new, 2), 1)
    for flip in (flip_of(new, 1, 2), flip_of(new, 1, -1), LayerFlip(0, 1, b"123456")):
        with pytest.raises(ValueError, match=r"layer|reshape"):
            half.store.flip(half.weights, flip, 1)
    half.check()
    half.flip(other, 2)
    half.check()


def test_a_stage_that_fails_says_so(plain: Peer, own_folder: Path) -> None:
    half = Half(plain, own_folder)
    new = [9, 1, 2, 3, 4, 5, 6, 7]
    assert "no experts [99]" in (half.stage([99, *new[1:]], 1).error or "")
    assert "7 slots" in (half.stage(new[1:], 1).error or "")
    assert "layer 5" in (half.stage(new, 1, layer=5).error or "")
    file = own_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    staged = half.stage(new, 2)
    assert "CheckpointError" in (staged.error or "")
    assert half.asked == [(0, 9)]
    with pytest.raises(InvariantError, match="stage 2"):
        half.flip(new, 2)
    half.check()
    # Experts from peers need no file.
    assert half.stage([11, *new[1:]], 3).error is None
    half.flip([11, *new[1:]], 3)
    half.check()


def test_a_new_generation_drops_what_is_staged(plain: Peer) -> None:
    """Check three stages (done before, done after, begun after a new formation): none can be flipped."""
    half, new = Half(plain), [9, 1, 2, 3, 4, 5, 6, 11]
    begun, may_go_on = threading.Event(), threading.Event()
    results: list[Staged] = []

    def slow(layer: int, source: Source, into: MlpWeights) -> bool:
        begun.set()
        assert may_go_on.wait(DEADLINE_S)
        return half.give(layer, source, into)

    assert half.stage(new, 1).error is None
    # The last expert is the slow one: no later fetch could notice the new formation.
    plan = StagePlan(1, 2, 1, tuple(new), (Source(11, "a", 5),))
    thread = threading.Thread(
        target=lambda: results.append(half.store.stage(plan, slow)), daemon=True
    )
    thread.start()
    assert begun.wait(DEADLINE_S)
    half.weights, _ = half.store.install(half.weights, half.slot_to_expert_LS, 2)
    may_go_on.set()
    join(thread)
    assert "formation 1" in (results[0].error or "")
    assert "formation 1" in (half.stage(new, 3).error or "")
    for stage_id, layer in ((1, 0), (2, 1), (3, 0)):
        with pytest.raises(InvariantError, match="stage"):
            half.flip(new, stage_id, layer)
    half.check()
    assert half.stage(new, 4, formation=2).error is None
    half.flip(new, 4)
    half.check()


def test_a_placement_after_flips_copies_from_where_they_led(plain: Peer) -> None:
    half, new = Half(plain), [15, 14, 13, 12, 11, 10, 9, 8]
    assert half.stage(new, 1).error is None
    stale = half.weights
    half.flip(new, 1)
    # The flip's step failed: the model has the old weights. The next placement corrects that.
    half.weights, num_read = half.store.install(stale, half.slot_to_expert_LS, 2)
    assert num_read == 0
    half.check()
    half.slot_to_expert_LS[0] = [15, 14, 13, 12, 11, 10, 9, 0]
    half.weights, num_read = half.store.install(half.weights, half.slot_to_expert_LS, 3)
    assert num_read == 1
    half.check()


def test_what_is_given_up_does_not_pile_up(plain: Peer) -> None:
    """Drop unused stages. The memory plan has one staged layer beside the installed ones."""
    num_layers = 3
    layer = plain.weights.layers[1]
    weights = ModelWeights(
        **{**vars(plain.weights), "layers": (plain.weights.layers[0], *[layer] * num_layers)}
    )
    store = ExpertStore(plain.folder, weights)
    slots = (*range(1, 16), 0)
    for at in range(num_layers):
        assert store.stage(StagePlan(0, at + 1, at, slots, ()), nobody).error is None
    for at in range(num_layers - 1):
        with pytest.raises(InvariantError, match=f"stage {at + 1}; staged is None"):
            store.flip(weights, flip_of(slots, at + 1, at), 1)
    store.flip(weights, flip_of(slots, num_layers, num_layers - 1), 1)


def test_experts_are_read_while_layers_flip(plain: Peer) -> None:
    """Read experts from a thread, as another rank's fetch does, while layers flip."""
    half, seed = Half(plain), fresh().randrange(2**31)
    print(f"seed {seed}")
    rng, is_over = np.random.default_rng(seed), threading.Event()
    num_found, wrong = [0], []

    def look() -> None:
        moe = half.whole.layers[1].moe
        assert moe is not None
        while not is_over.is_set():
            for expert in range(16):
                found = half.store.expert(0, expert)
                if found is None:
                    continue
                num_found[0] += 1
                if not is_same(found, moe.experts[expert]):
                    wrong.append(expert)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    stage_id = 0
    # On busy cores forty flips may be over before the reader has begun.
    while thread.is_alive() and (stage_id < 40 or num_found[0] <= 100):
        stage_id += 1
        new = rng.permutation(16)[:8].tolist()
        assert half.stage(new, stage_id).error is None
        half.flip(new, stage_id)
    is_over.set()
    join(thread)
    assert num_found[0] > 100
    assert wrong == []
    half.check()
