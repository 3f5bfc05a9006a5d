"""Generations of a unit: formed, broken by a lost peer or an abort, formed anew with what is left, and whole again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.mesh import MeshGroup
from hadal.core.placement import Placement, spread, without
from hadal.core.plans import Chunk, DecodePlan, Formed, FormPlan, Join, PrefillPlan, Sampling, StepDone
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.experts import ExpertStore
from hadal.model.membership import Membership
from hadal.model.runner import ModelRunner
from hadal.model.weights import load_weights
from hadal.reference.generate import generate
from tests.unit.comm.groups import member, run_threads
from tests.unit.model.checkpoints import Peer
from tests.unit.model.test_deepseek import random_tokens

GREEDY = Sampling(temperature=0.0)
NUM_RANKS = 3
DEADLINE_S = 20.0
SOON_S = 5.0


class Rank:
    """A rank's runner over a mesh."""

    def __init__(self, peer: Peer, number: int, epoch: str = "a") -> None:
        config = peer.weights.config
        self.group = MeshGroup(number, f"{epoch}{number}", deadline_s=DEADLINE_S)
        comm = ExpertComm(
            self.group, hidden_size=config.hidden_size, top_k=config.num_experts_per_tok, wire="fp32",
            mode="low_latency", max_tokens=64,
        )  # fmt: skip
        weights = load_weights(peer.folder, slots_LS=np.empty((2, 0), np.int16))
        model = DeepseekV3(weights, KvCache(config, 8), comm)
        model.cache.cache_PLSD.fill_(float("nan"))
        self.runner = ModelRunner(model, 2, Membership(number, self.group, comm, ExpertStore(peer.folder, 2)))
        self.prompt = tuple(random_tokens(peer, 11 + 20 * number, seed=number))

    def form(self, ranks: list[Rank], generation: int, placement: Placement) -> Formed:
        members = tuple(member(rank.group) for rank in ranks)
        formed = self.runner.execute(
            FormPlan(generation, NUM_RANKS, members, placement.to_bytes(), placement.num_slots)
        )
        assert isinstance(formed, Formed)
        return formed

    def prefill(self) -> StepDone:
        return self.step(PrefillPlan(0, (Chunk("a", self.prompt, 0, (1,), GREEDY, 0),)))

    def decode(self, token: int | None = None) -> StepDone:
        """`token`: it joins, else it goes on."""
        join = () if token is None else (Join(0, (1,), len(self.prompt), token, 1, GREEDY),)
        return self.step(DecodePlan(1, (), join, ()))

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


def form(ranks: list[Rank], generation: int, placement: Placement) -> list[Formed]:
    formed: list[Formed] = run_threads([lambda r=r: r.form(ranks, generation, placement) for r in ranks])
    assert [f.error for f in formed] == [None] * len(ranks)
    return formed


def serve(peer: Peer, ranks: list[Rank]) -> None:
    """Every rank's own prompt, three tokens."""
    def one(rank: Rank) -> list[int]:
        tokens = list(rank.prefill().tokens)
        tokens += rank.decode(tokens[0]).tokens
        return [*tokens, *rank.decode().tokens]

    outputs = run_threads([lambda r=r: one(r) for r in ranks])
    assert outputs == [generate(peer.weights, rank.prompt, 3) for rank in ranks]


def whole(peer: Peer) -> Placement:
    return spread(2, peer.weights.config.n_routed_experts, NUM_RANKS, 2)


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
    start_s = time.monotonic()
    assert "is over" in (ranks[0].decode().error or "")
    # The others learn of it, though nobody told them.
    for rank in ranks[1:]:
        assert rank.decode(3).error is not None
    assert time.monotonic() - start_s < SOON_S
    form(ranks, 2, placement)
    serve(plain, ranks)


def test_abort_wakes_a_step_that_waits(plain: Peer, ranks: list[Rank]) -> None:
    form(ranks, 1, whole(plain))

    def abort() -> None:
        limit_s = time.monotonic() + DEADLINE_S
        while ranks[0].runner.num_ops < 14 or ranks[0].runner.is_computing:  # It stands in a layer with experts.
            assert time.monotonic() < limit_s
            time.sleep(0.005)
        ranks[0].runner.abort()

    start_s = time.monotonic()
    done, _ = run_threads([ranks[0].prefill, abort])
    assert done.error is not None
    assert time.monotonic() - start_s < SOON_S


def test_an_error_on_one_rank_ends_the_step_on_all(plain: Peer, ranks: list[Rank]) -> None:
    form(ranks, 1, whole(plain))
    bad = PrefillPlan(0, (Chunk("a", (plain.vocab_size + 7,), 0, (1,), GREEDY, 0),))
    start_s = time.monotonic()
    done = run_threads([lambda: ranks[0].step(bad), ranks[1].prefill, ranks[2].prefill])
    assert all(one.error is not None for one in done)
    assert time.monotonic() - start_s < SOON_S
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
