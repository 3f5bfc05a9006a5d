"""A unit's formations: formed, broken by a lost peer or an abort, formed again from the remaining
ranks, then complete again. In a formation, layers move their experts between two steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.mesh.mesh import MeshGroup
from hadal.core.placement import EMPTY, SPLIT_PARTS, Placement, spread, without
from hadal.core.plans import (
    FLIP,
    Chunk,
    DecodePlan,
    Formed,
    FormPlan,
    Join,
    LayerFlip,
    PrefillPlan,
    Sampling,
    Source,
    Staged,
    StagePlan,
    StepDone,
)
from hadal.kernels import library
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.experts import ExpertStore
from hadal.model.load import load_weights
from hadal.model.membership import Membership
from hadal.model.runner import ModelRunner
from hadal.reference.forward import generate
from hadal.reference.params import MlpWeights
from tests.fresh import fresh
from tests.unit.comm.groups import member, run_threads
from tests.unit.model.checkpoints import Peer
from tests.unit.model.test_deepseek import TOLERANCE, random_tokens
from tests.waiting import wait_until

GREEDY = Sampling(temperature=0.0)
NUM_RANKS = 3
DEADLINE_S = 3600.0
"""Deadline of an exchange: a test that waits for it hangs."""


class Listened(DeepseekV3):
    """A model that records its logits."""

    def head(self, hidden_TD: Tensor) -> Tensor:
        logits = super().head(hidden_TD)
        self.kept = [*getattr(self, "kept", []), logits.clone()]
        return logits


class Rank:
    """A rank's runner over a mesh."""

    def __init__(
        self, peer: Peer, number: int, epoch: str = "a", mode: str = "low_latency"
    ) -> None:
        config = peer.weights.config
        self.group = MeshGroup(number, f"{epoch}{number}", key=b"k" * 32, deadline_s=DEADLINE_S)
        comm = ExpertComm(
            self.group,
            hidden_size=config.hidden_size,
            top_k=config.num_experts_per_tok,
            dispatch_format="fp32",
            mode=mode,
            max_tokens=64,
        )
        nothing = np.empty((2, 0), np.int16)
        weights = load_weights(peer.folder, slot_to_expert_LS=nothing)
        self.model = Listened(weights, KvCache(config, 8), comm)
        self.store = ExpertStore(peer.folder, weights, nothing)
        self.model.cache.cache_PLSD.fill_(float("nan"))
        self.runner = ModelRunner(self.model, 2, Membership(number, self.group, comm, self.store))
        self.prompt = tuple(random_tokens(peer, 11 + 15 * number, seed=number))

    def form(self, ranks: list[Rank], formation: int, placement: Placement) -> Formed:
        members = tuple(member(rank.group) for rank in ranks)
        plan = FormPlan(
            formation,
            placement.num_ranks,
            members,
            placement.to_bytes(),
            placement.num_expert_slots,
            placement.weights_bytes(),
        )
        formed = self.runner.execute(plan)
        assert isinstance(formed, Formed)
        return formed

    def prefill(self, flips: tuple[LayerFlip, ...] = (), is_counted: bool = False) -> StepDone:
        chunk = Chunk("a", self.prompt, 0, (1,), GREEDY, 0)
        return self.step(PrefillPlan(0, (chunk,), flips=flips, is_counted=is_counted))

    def decode(
        self, token: int | None = None, flips: tuple[LayerFlip, ...] = (), is_counted: bool = False
    ) -> StepDone:
        """Decode one step. With `token`, the request joins in this step; without it, it continues."""
        join = () if token is None else (Join(0, (1,), len(self.prompt), token, 1, GREEDY),)
        return self.step(DecodePlan(1, (), join, (), flips=flips, is_counted=is_counted))

    def stage(
        self, ranks: Sequence[Rank], layer: int, stage_id: int, slot_to_expert_RS: np.ndarray
    ) -> Staged:
        """Stage the other ranks' experts. Expert 0 and experts that a source lacks are read from files."""

        def fetch(layer: int, source: Source, into: MlpWeights) -> bool:
            found = ranks[source.port - 1].store.expert(layer, source.expert)
            if found is not None:
                for part, held in zip(into.parts, found.parts, strict=True):
                    part.copy_(held)
            return found is not None

        # The source may own the expert, may lack it, or may have flipped already.
        sources = tuple(Source(expert, "a", 1 + expert % len(ranks)) for expert in range(1, 16))
        slots = tuple(slot_to_expert_RS[self.group.rank].tolist())
        return self.store.stage(StagePlan(1, stage_id, layer, slots, sources), fetch)

    def step(self, plan: PrefillPlan | DecodePlan) -> StepDone:
        done = self.runner.execute(plan)
        assert isinstance(done, StepDone)
        return done


@pytest.fixture
def ranks(plain: Peer) -> Iterator[list[Rank]]:
    made = [Rank(plain, number) for number in range(NUM_RANKS)]
    yield made
    for rank in made:
        rank.runner.close()


def form(ranks: list[Rank], formation: int, placement: Placement) -> list[Formed]:
    formed: list[Formed] = run_threads(
        [lambda r=r: r.form(ranks, formation, placement) for r in ranks]
    )
    assert [f.error for f in formed] == [None] * len(ranks)
    return formed


def serve(peer: Peer, ranks: list[Rank]) -> None:
    """Check each rank's prompt: three tokens, equal to the plain loop's."""

    def one(rank: Rank) -> list[int]:
        tokens = list(rank.prefill().tokens)
        tokens += rank.decode(tokens[0]).tokens
        return [*tokens, *rank.decode().tokens]

    outputs = run_threads([lambda r=r: one(r) for r in ranks])
    assert outputs == [generate(peer.weights, rank.prompt, 3) for rank in ranks]


def whole(peer: Peer) -> Placement:
    return spread(2, peer.weights.config.n_routed_experts, NUM_RANKS, 2)


@pytest.mark.promise(
    "The survivors load again the experts that have no replica left. Requests on the "
    "survivors keep their KV and are rolled back to the last delivered token."
)
def test_a_rank_goes_and_comes_back(plain: Peer, ranks: list[Rank]) -> None:
    placement = whole(plain)
    assert [formed.num_loaded for formed in form(ranks, 1, placement)] == [12, 12, 12]
    serve(plain, ranks)
    ranks[1].runner.close()
    left = [ranks[0], ranks[2]]
    for done in run_threads([lambda r=r: r.decode() for r in left]):
        assert "PeerLost" in (done.error or "")
    assert [rank.runner.lost for rank in left] == [(1,), (1,)]
    smaller = without(placement, {1})
    num_loaded = [formed.num_loaded for formed in form(left, 2, smaller)]
    assert sum(num_loaded) == sum(len(set(range(16)) - held) for held in held_by(placement, (0, 2)))
    assert [rank.runner.lost for rank in left] == [(), ()]
    serve(plain, left)
    ranks[1] = Rank(plain, 1, "b")
    assert [formed.num_loaded for formed in form(ranks, 3, placement)] == [0, 12, 0]
    serve(plain, ranks)


def held_by(placement: Placement, ranks: tuple[int, ...]) -> list[set[int]]:
    return [set(layer[list(ranks)].flatten().tolist()) for layer in placement.slot_to_expert_LRS]


def test_nothing_runs_outside_a_generation(plain: Peer, ranks: list[Rank]) -> None:
    assert "is over" in (ranks[0].prefill().error or "")
    placement = whole(plain)
    form(ranks, 1, placement)
    ranks[0].runner.abort()
    assert "is over" in (ranks[0].decode().error or "")
    # The other ranks find out by themselves; no message reports it.
    for rank in ranks[1:]:
        assert rank.decode(3).error is not None
    form(ranks, 2, placement)
    serve(plain, ranks)


def test_abort_wakes_a_step_that_waits(plain: Peer, ranks: list[Rank]) -> None:
    form(ranks, 1, whole(plain))

    def abort() -> None:
        runner = ranks[0].runner
        wait_until(
            lambda: runner.num_ops >= 14 and not runner.is_computing,
            "it stands in a layer with experts",
        )
        runner.abort()

    done, _ = run_threads([ranks[0].prefill, abort])
    assert done.error is not None


def test_an_error_on_one_rank_ends_the_step_on_all(plain: Peer, ranks: list[Rank]) -> None:
    form(ranks, 1, whole(plain))
    bad = PrefillPlan(0, (Chunk("a", (plain.vocab_size + 7,), 0, (1,), GREEDY, 0),))
    done = run_threads([lambda: ranks[0].step(bad), ranks[1].prefill, ranks[2].prefill])
    assert all(one.error is not None for one in done)
    form(ranks, 2, whole(plain))
    serve(plain, ranks)


def test_a_placement_that_cannot_be(plain: Peer, ranks: list[Rank]) -> None:
    placement = whole(plain)
    holes = Placement(placement.num_experts, placement.slot_to_expert_LRS[:, :, :4])
    formed = run_threads([lambda r=r: r.form(ranks, 1, holes) for r in ranks])
    assert all(one.error is not None for one in formed)
    assert any("no replica" in (one.error or "") for one in formed), "the first to see it says why"
    form(ranks, 2, placement)
    serve(plain, ranks)


def shuffled(placement: Placement, rng: random.Random) -> np.ndarray:
    """Return another layer of the same shape: expert ids permuted, slots shuffled."""
    names = rng.sample(range(16), 16)
    ranks_RS = [
        [names[e] if e != EMPTY else e for e in rank]
        for rank in placement.slot_to_expert_LRS[0].tolist()
    ]
    return np.array([rng.sample(slots, len(slots)) for slots in ranks_RS], np.int16)


def random_parts(slot_to_expert_RS: np.ndarray, rng: random.Random) -> np.ndarray:
    parts_RS = np.zeros(slot_to_expert_RS.shape, np.uint8)
    for expert in range(16):
        at = np.argwhere(slot_to_expert_RS == expert).tolist()
        cuts = sorted(rng.sample(range(1, SPLIT_PARTS), len(at) - 1))
        for (rank, slot), part in zip(at, np.diff([0, *cuts, SPLIT_PARTS]).tolist(), strict=True):
            parts_RS[rank, slot] = part
    return parts_RS


@pytest.mark.promise("Results do not depend on the placement, so tokens never change.")
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_flips_change_where_and_never_what(plain: Peer, num_ranks: int, mode: str) -> None:
    """Serve the same requests with layers that move between any two steps, and without: the logits
    have the same bits. A count covers all pairs since the last counted step; that of a flipped
    layer covers those since its flip.
    """
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    placement, num_steps = spread(2, 16, num_ranks, 4 * (num_ranks - 1) if num_ranks < 4 else 4), 7
    ranks = [Rank(plain, number, mode=mode) for number in range(num_ranks)]

    def one(rank: Rank, is_moving: bool) -> list[list[int]]:
        # The same draws on every rank, as if a leader had sent them.
        rng, staged, counted = random.Random(seed), {}, []
        held_RS, slot_to_expert_RS = list(placement.slot_to_expert_LRS), shuffled(placement, rng)
        if is_moving:
            assert rank.stage(ranks, 1, 50, slot_to_expert_RS).error is None
            held_RS[1] = slot_to_expert_RS
        last = rank.prefill((LayerFlip(1, 50, slot_to_expert_RS.tobytes()),) if is_moving else ())
        assert last.error is None
        for step in range(num_steps):
            flips, layer = (), rng.randrange(2)
            if step and staged:
                flips += (staged.popitem()[1],)
                held_RS[flips[0].layer] = np.frombuffer(flips[0].slot_to_expert, np.int16).reshape(
                    num_ranks, -1
                )
            if rng.random() < 0.5:  # A split alone, of current or just flipped slots.
                parts = random_parts(held_RS[layer], rng)
                flips += (LayerFlip(layer, 0, held_RS[layer].tobytes(), parts.tobytes()),)
            done = rank.decode(
                last.tokens[0] if not step else None, flips if is_moving else (), step % 3 == 2
            )
            assert done.error is None
            found = sum(t.count for t in done.op_times if t.op == FLIP)
            assert found == (len(flips) if is_moving else 0)
            if step % 3 == 2:
                counted.append(
                    np.frombuffer(done.expert_slot_counts, np.int64).reshape(2, -1).sum(1).tolist()
                )
            else:
                assert done.expert_slot_counts == b""
            slot_to_expert_RS = shuffled(placement, rng)
            staged = {layer: LayerFlip(layer, step, slot_to_expert_RS.tobytes())}
            if is_moving:
                assert rank.stage(ranks, layer, step, slot_to_expert_RS).error is None
        return counted

    results = []
    for formation, is_moving in enumerate((True, False), 1):
        form(ranks, formation, placement)
        for rank in ranks:
            rank.model.kept = []
        counted = run_threads([lambda r=r, m=is_moving: one(r, m) for r in ranks])
        results.append([torch.cat(rank.model.kept) for rank in ranks])
        if not is_moving:
            prompts = sum(len(rank.prompt) for rank in ranks)
            sums = np.sum(counted, axis=0) / 4  # Top 4.
            # Prefill's last layer needs one row.
            assert sums[0].tolist() == [prompts + 3 * num_ranks, 4 * num_ranks]
            assert sums[1].tolist() == [3 * num_ranks, 3 * num_ranks]
    for rank in ranks:
        rank.runner.close()
    for moved, still in zip(*results, strict=True):
        assert moved.shape == (1 + num_steps, plain.vocab_size)
        if library.load() is not None:
            assert torch.equal(moved, still), seed
        else:  # torch's matrix products depend on the batch.
            assert float((moved - still).abs().max()) <= TOLERANCE


def test_a_flip_begins_its_layers_counts_anew(plain: Peer, ranks: list[Rank]) -> None:
    placement = whole(plain)
    form(ranks, 1, placement)
    tokens = [done.tokens[0] for done in run_threads([rank.prefill for rank in ranks])]
    slot_to_expert_RS = placement.slot_to_expert_LRS[1]
    flips = (
        LayerFlip(
            1,
            0,
            slot_to_expert_RS.tobytes(),
            random_parts(slot_to_expert_RS, random.Random(1)).tobytes(),
        ),
    )

    def one(number: int) -> np.ndarray:
        ranks[number].decode(tokens[number])
        done = ranks[number].decode(flips=flips, is_counted=True)
        assert done.error is None
        return np.frombuffer(done.expert_slot_counts, np.int64).reshape(2, -1)

    counts = np.stack(run_threads([lambda n=n: one(n) for n in range(NUM_RANKS)]))
    prompts = sum(len(rank.prompt) for rank in ranks)
    assert counts.sum((0, 2)).tolist() == [4 * (prompts + 2 * NUM_RANKS), 4 * NUM_RANKS]


def test_a_split_comes_with_the_placement_or_a_flip(plain: Peer, ranks: list[Rank]) -> None:
    placement = whole(plain)
    slot_to_expert_RS = placement.slot_to_expert_LRS[0]
    parts_RS = random_parts(slot_to_expert_RS, random.Random(5))

    def counts(
        formation: int, placement: Placement, flips: tuple[LayerFlip, ...] = ()
    ) -> np.ndarray:
        form(ranks, formation, placement)
        done = run_threads([lambda r=r: r.prefill(flips, is_counted=True) for r in ranks])
        return np.stack(
            [np.frombuffer(one.expert_slot_counts, np.int64).reshape(2, -1) for one in done]
        )

    split = counts(1, placement.with_layer(0, slot_to_expert_RS, parts_RS))
    even = counts(2, placement)
    flipped = counts(
        3, placement, (LayerFlip(0, 0, slot_to_expert_RS.tobytes(), parts_RS.tobytes()),)
    )
    assert np.array_equal(split, flipped)
    assert not np.array_equal(split[:, 0], even[:, 0])
    assert np.array_equal(split[:, 1], even[:, 1])


def test_a_flip_that_one_rank_did_not_stage_fails_the_step(plain: Peer, ranks: list[Rank]) -> None:
    placement, rng = whole(plain), random.Random(3)
    form(ranks, 1, placement)
    tokens = [done.tokens[0] for done in run_threads([rank.prefill for rank in ranks])]
    slot_to_expert_RS = shuffled(placement, rng)
    for rank in ranks[1:]:
        assert rank.stage(ranks, 0, 7, slot_to_expert_RS).error is None
    before, flip = ranks[0].model.weights, (LayerFlip(0, 7, slot_to_expert_RS.tobytes()),)
    done = run_threads([lambda n=n: ranks[n].decode(tokens[n], flip) for n in range(NUM_RANKS)])
    assert "stage 7" in (done[0].error or "")
    assert all(one.error is not None for one in done)
    assert ranks[0].model.weights is before
    # The next formation has its leader's placement, even if a rank had flipped.
    form(ranks, 2, placement)
    serve(plain, ranks)
    done = run_threads([lambda r=r: r.decode(flips=(LayerFlip(0, 1, b"12"),)) for r in ranks])
    assert all("ValueError" in (one.error or "") or "PeerLost" in (one.error or "") for one in done)
    form(ranks, 3, placement.with_layer(1, slot_to_expert_RS, random_parts(slot_to_expert_RS, rng)))
    serve(plain, ranks)


def test_a_rank_by_itself_does_not_flip(plain: Peer) -> None:
    runner = ModelRunner(DeepseekV3(plain.weights, KvCache(plain.weights.config, 8)), 2)
    done = runner.execute(DecodePlan(1, (), (), (), flips=(LayerFlip(0, 1, b""),)))
    assert isinstance(done, StepDone)
    assert "holds every expert" in (done.error or "")
    done = runner.execute(DecodePlan(2, (), (), (), is_counted=True))
    assert isinstance(done, StepDone)
    assert (done.error, done.expert_slot_counts) == (None, b"")
