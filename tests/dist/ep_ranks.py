"""Rank processes of test_ep_model: real runners over a mesh, driven in lockstep by a script that
every rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.group import Group
from hadal.comm.mesh.mesh import MeshGroup
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import read_model_config
from hadal.core.placement import Placement, spread
from hadal.core.plans import (
    Chunk,
    DecodePlan,
    Formed,
    FormPlan,
    Join,
    Member,
    OpTime,
    PrefillPlan,
    Sampling,
    StepDone,
)
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.execute import Recorder
from hadal.model.experts import ExpertStore
from hadal.model.load import load_weights
from hadal.model.membership import Membership
from hadal.model.runner import ModelRunner
from hadal.overlap.plan import SEQUENTIAL, Schedule
from hadal.reference.params import ModelWeights

GREEDY = Sampling(temperature=0.0)
CHUNK_TOKENS = 96
MAX_TOKENS = 2048
"""Largest number of tokens in a micro-batch."""


@dataclass(frozen=True)
class Way:
    """Settings of a unit. All except `dispatch_format` must change no token."""

    num_redundant: int = 0
    mode: str = "normal"
    schedule: str = "sequential"
    num_micro_batches: int = 2
    dispatch_format: str = "fp32"


@dataclass(frozen=True)
class Script:
    """Prompts and the number of tokens each gets. Rank n % num_ranks owns prompt n."""

    prompts: tuple[tuple[int, ...], ...]
    num_tokens: tuple[int, ...]

    def num_blocks(self) -> int:
        return 1 + sum(self.width(n) for n in range(len(self.prompts)))

    def width(self, number: int) -> int:
        return -(-(len(self.prompts[number]) + self.num_tokens[number]) // BLOCK_TOKENS)


@dataclass(frozen=True)
class Served:
    """Results of one rank for its prompts."""

    outputs: dict[int, list[int]]
    first_logits: dict[int, Tensor]
    """Prompt number -> logits after its last position, [V]."""
    decode_times: tuple[OpTime, ...]
    """Operation times of the last decode step."""
    num_loaded: int


class Listened(DeepseekV3):
    """Model that also stores its prefill logits in `kept`."""

    def __init__(
        self, weights: ModelWeights, cache: KvCache, comm: ExpertComm | None, kept: list[Tensor]
    ) -> None:
        super().__init__(weights, cache, comm)
        self._kept = kept

    def prefill_split(
        self,
        chunks: Sequence[Sequence[Chunk]],
        wanted: Sequence[Sequence[int]],
        schedule: Schedule = SEQUENTIAL,
        recorder: Recorder | None = None,
        **options: Any,
    ) -> list[Tensor]:
        self._kept[:] = super().prefill_split(chunks, wanted, schedule, recorder, **options)
        return self._kept


class Rank:
    """One rank: a runner, and just enough of a leader to drive it."""

    def __init__(
        self, folder: Path, group: Group | None, script: Script, num_ranks: int, way: Way
    ) -> None:
        config = read_model_config(folder)
        self.rank = 0 if group is None else group.rank
        self.script, self.way, self.num_ranks = script, way, num_ranks
        self._logits: list[Tensor] = []
        """Logits of the last prefill step, by micro-batch."""
        num_layers = config.num_hidden_layers - config.first_k_dense_replace
        self.placement = spread(num_layers, config.n_routed_experts, num_ranks, way.num_redundant)
        cache = KvCache(config, script.num_blocks())
        cache.cache_PLSD.fill_(float("nan"))
        max_slots = max(1, len(script.prompts))
        if group is None and way.dispatch_format == "fp32":
            self.model = Listened(load_weights(folder), cache, None, self._logits)
            self.runner = ModelRunner(self.model, max_slots)
            return
        comm = ExpertComm(
            group,
            hidden_size=config.hidden_size,
            top_k=config.num_experts_per_tok,
            dispatch_format=way.dispatch_format,
            mode=way.mode,
            max_tokens=MAX_TOKENS,
        )
        if group is None:
            comm.install(self.placement)
            self.model = Listened(load_weights(folder), cache, comm, self._logits)
            self.runner = ModelRunner(self.model, max_slots)
            return
        nothing = np.empty((num_layers, 0), np.int16)
        self.model = Listened(
            load_weights(folder, slot_to_expert_LS=nothing), cache, comm, self._logits
        )
        membership = Membership(
            self.rank, group, comm, ExpertStore(folder, self.model.weights, nothing)
        )
        self.runner = ModelRunner(self.model, max_slots, membership)

    def form(self, formation: int, members: tuple[Member, ...], placement: Placement) -> Formed:
        plan = FormPlan(
            formation, self.num_ranks, members, placement.to_bytes(), placement.num_expert_slots
        )
        formed = self.runner.execute(plan)
        assert isinstance(formed, Formed)
        return formed

    def serve(self, num_loaded: int = 0) -> Served:
        """Prefill all prompts, one chunk of each per step, then decode until all are done."""
        script, way = self.script, self.way
        mine = [n for n in range(len(script.prompts)) if n % self.num_ranks == self.rank]
        blocks, at = {}, 1
        for n in mine:
            blocks[n] = tuple(range(at, at + script.width(n)))
            at += script.width(n)
        outputs: dict[int, list[int]] = {n: [] for n in mine}
        first_logits: dict[int, Tensor] = {}
        for step in range(-(-max(map(len, script.prompts)) // CHUNK_TOKENS)):
            chunks, second = self._chunks(step, mine, blocks)
            plan = PrefillPlan(
                step, tuple(chunks), way.schedule, tuple(second), way.num_micro_batches
            )
            ending = [int(c.request_id) for c in (*chunks, *second) if c.sampling is not None]
            self._logits.clear()
            done = self._run(plan)
            for n, token in zip(ending, done.tokens, strict=True):
                outputs[n].append(token)
            first_logits.update(zip(ending, torch.cat(self._logits), strict=True))
        times = self._decode(mine, blocks, outputs)
        return Served(outputs, first_logits, times, num_loaded)

    def _chunks(
        self, step: int, mine: list[int], blocks: dict[int, tuple[int, ...]]
    ) -> tuple[list[Chunk], list[Chunk]]:
        """Return every prompt's next tokens for two micro-batches, cut within the prompts; the
        second is empty if `way` has only one.
        """
        chunks: list[Chunk] = []
        second: list[Chunk] = []
        for n in mine:
            prompt = self.script.prompts[n]
            start, end = step * CHUNK_TOKENS, min((step + 1) * CHUNK_TOKENS, len(prompt))
            cut = end if self.way.num_micro_batches == 1 else start + (end - start) * (n % 5) // 4
            for part, first, last in ((chunks, start, cut), (second, cut, end)):
                if first < last:
                    sampling = GREEDY if last == len(prompt) else None
                    used = blocks[n][: -(-last // BLOCK_TOKENS)]
                    part.append(Chunk(str(n), prompt[first:last], first, used, sampling, 0))
        return chunks, second

    def _decode(
        self, mine: list[int], blocks: dict[int, tuple[int, ...]], outputs: dict[int, list[int]]
    ) -> tuple[OpTime, ...]:
        script, way = self.script, self.way
        slot_of = {n: slot for slot, n in enumerate(mine)}
        number_of = dict(enumerate(mine))
        joins = [
            Join(slot_of[n], blocks[n], len(script.prompts[n]), outputs[n][0], 1, GREEDY)
            for n in mine
        ]
        running: list[int] = []
        times: tuple[OpTime, ...] = ()
        for step in range(1, max(script.num_tokens)):
            living = [n for n in mine if script.num_tokens[n] > step]
            leaves = tuple(slot_of[n] for n in running if n not in living)
            joined = (
                tuple(join for join in joins if number_of[join.slot] in living) if step == 1 else ()
            )
            second = (
                tuple(slot_of[n] for n in living if n % 2) if way.num_micro_batches == 2 else ()
            )
            done = self._run(
                DecodePlan(step, leaves, joined, (), way.schedule, second, way.num_micro_batches)
            )
            for slot, token in zip(done.keys, done.tokens, strict=True):
                outputs[number_of[slot]].append(token)
            running = living
            times = done.op_times
        return times

    def _run(self, plan: PrefillPlan | DecodePlan) -> StepDone:
        done = self.runner.execute(plan)
        assert isinstance(done, StepDone)
        assert done.error is None, done.error
        assert not done.failed
        return done


def everybody(group: Group, epoch: str, port: int) -> tuple[Member, ...]:
    """Exchange ports within a formed group and return its members."""
    peers = [peer for peer in group.members if peer != group.rank]
    told = torch.tensor([port], dtype=torch.int32).view(torch.uint8)
    ports = {
        peer: int(data.clone().view(torch.int32)[0])
        for peer, data in group.exchange(dict.fromkeys(peers, told)).wait().items()
    }
    ports[group.rank] = port
    return tuple(Member(rank, f"e{rank}", "127.0.0.1", ports[rank]) for rank in group.members)


def serve_ways(
    group: MeshGroup, folder: str, script: Script, ways: tuple[Way, ...]
) -> list[Served]:
    """Serve the script once in every way, each in a formation of its own. Runs on every rank of a
    formed group.
    """
    members = everybody(group, group.epoch, group.port)
    results = []
    for formation, way in enumerate(ways, 2):
        rank = Rank(Path(folder), group, script, len(members), way)
        formed = rank.form(formation, members, rank.placement)
        assert formed.error is None, formed.error
        results.append(rank.serve(formed.num_loaded))
    return results
