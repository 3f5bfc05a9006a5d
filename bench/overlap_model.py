"""One rank of a real model in FP32: the ops of model/block in the order in which model/execute runs them;
tokens travel through comm/.

The weights are random, so the output means nothing. The gate, its uneven routing, the messages and their cost
are real. Every layer, also the last, is a MoE layer and runs on all tokens, so that all layers cost the same. A
switch between the model and its group allows measuring compute and link apart:

    both      all messages travel
    compute   no message travels: the rank gets its own message back at once, in place of a peer's. Sizes and work are
              real, because every rank holds the same number of experts; the computed values are nonsense.

The sizes of the sent messages are recorded, so that the same exchanges can be replayed without computing.

Shapes: T tokens of a micro-batch, D hidden.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.group import Exchange, Group, Interval
from hadal.comm.layout import MessageLayout
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig, parse_model_config
from hadal.core.placement import spread
from hadal.core.plans import Chunk, Member, Waited
from hadal.model.batch import prefill_batch
from hadal.model.block import OPS, MicroBatch
from hadal.model.cache import KvCache
from hadal.model.execute import Recorder, execute
from hadal.overlap.plan import DISPATCH_START, parse
from hadal.reference.params import (
    AttentionWeights,
    Experts,
    LayerWeights,
    Matrix,
    MlpWeights,
    MoeWeights,
)
from hadal.reference.rope import cos_sin_table

Sizes = dict[int, int]
"""Peer -> bytes."""


class _Echo:
    """An exchange that returns the rank's own messages as if its peers had sent them."""

    def __init__(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None) -> None:
        now_s = time.perf_counter()
        self.interval = Interval(now_s, now_s)
        self._received = dict(sends)
        if recvs is not None:
            for peer, data in sends.items():
                recvs[peer][: len(data)].copy_(data)
                self._received[peer] = recvs[peer][: len(data)]

    def wait(self) -> dict[int, Tensor]:
        return self._received


class SwitchGroup:
    """A Group that wraps another Group and can switch its exchanges off."""

    def __init__(self, inner: Group) -> None:
        self._inner = inner
        self.is_live = True
        self.sizes: list[Sizes] = []
        """Sizes of every exchange since the list was last cleared."""

    @property
    def rank(self) -> int:
        return self._inner.rank

    @rank.setter
    def rank(self, value: int) -> None:
        raise AttributeError("a rank keeps its number.")

    @property
    def members(self) -> tuple[int, ...]:
        return self._inner.members

    @members.setter
    def members(self, value: tuple[int, ...]) -> None:
        raise AttributeError("form() makes members.")

    def form(self, formation: int, members: Sequence[Member]) -> None:
        self._inner.form(formation, members)

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None = None
    ) -> Exchange:
        self.sizes.append({peer: data.numel() for peer, data in sends.items()})
        return self._inner.exchange(sends, recvs) if self.is_live else _Echo(sends, recvs)

    def abort(self) -> None:
        self._inner.abort()

    def lost(self) -> tuple[int, ...]:
        return self._inner.lost()

    def take_waits(self) -> Waited:
        return self._inner.take_waits()

    def close(self) -> None:
        self._inner.close()


def replay(group: Group, sizes: Sequence[Sizes]) -> list[float]:
    """Send the recorded numbers of bytes, one exchange after the other. Return the seconds of each
    exchange on the link.
    """
    most = max(max(exchange.values()) for exchange in sizes)
    data = torch.zeros(most, dtype=torch.uint8)
    seconds = []
    for exchange in sizes:
        under_way = group.exchange({peer: data[:num_bytes] for peer, num_bytes in exchange.items()})
        under_way.wait()
        seconds.append(under_way.interval.end_s - under_way.interval.start_s)
    return seconds


PROMPT_TOKENS = 2 * BLOCK_TOKENS
VOCAB_SIZE = 512


@dataclass(frozen=True)
class ModelCase:
    """A model to measure. `num_tokens` is per micro-batch and rank; a full batch is two micro-batches."""

    num_tokens: int = 256
    dispatch_format: str = "fp32"
    mode: str = "normal"
    num_layers: int = 6
    hidden_size: int = 512
    expert_size: int = 1024
    num_experts: int = 8
    top_k: int = 2
    num_heads: int = 8

    def config(self) -> ModelConfig:
        return parse_model_config(
            {
                "model_type": "deepseek_v3",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": self.hidden_size,
                "num_hidden_layers": self.num_layers,
                "first_k_dense_replace": 0,
                "intermediate_size": 64,
                "moe_intermediate_size": self.expert_size,
                "n_routed_experts": self.num_experts,
                "num_experts_per_tok": self.top_k,
                "n_group": 1,
                "topk_group": 1,
                "num_attention_heads": self.num_heads,
                "q_lora_rank": None,
                "kv_lora_rank": 128,
                "qk_nope_head_dim": 64,
                "qk_rope_head_dim": 32,
                "v_head_dim": 64,
                "max_position_embeddings": 2 * PROMPT_TOKENS,
            },
            "bench/overlap",
        )


class ModelRank:
    """A rank with its experts. Runs repeat one step and overwrite the KV with equal values."""

    def __init__(self, group: Group, case: ModelCase) -> None:
        self._group = SwitchGroup(group)
        self._config = case.config()
        num_ranks = len(group.members)
        placement = spread(case.num_layers, case.num_experts, num_ranks)
        held = placement.slot_to_expert_LRS[:, group.rank].tolist()
        self._layers = [
            _layer(self._config, index, held[index]) for index in range(case.num_layers)
        ]
        self._comm = ExpertComm(
            self._group,
            hidden_size=case.hidden_size,
            top_k=case.top_k,
            dispatch_format=case.dispatch_format,
            mode=case.mode,
            max_tokens=2 * case.num_tokens,
        )
        self._comm.install(placement)
        self._case = case
        self._expert_to_rank_LE = [
            _expert_to_rank(layer, case.num_experts) for layer in placement.slot_to_expert_LRS
        ]
        generator = torch.Generator().manual_seed(1000 + group.rank)
        num_prompts = 2 * case.num_tokens // PROMPT_TOKENS
        self._prompts = torch.randint(
            VOCAB_SIZE, (num_prompts, PROMPT_TOKENS), generator=generator
        ).tolist()
        self._embed_VD = torch.randn(
            VOCAB_SIZE, case.hidden_size, generator=torch.Generator().manual_seed(7)
        )
        self._cache = KvCache(self._config, 1 + num_prompts * (PROMPT_TOKENS // BLOCK_TOKENS))
        self._cos_sin = cos_sin_table(self._config)
        self._sizes: dict[int, list[Sizes]] = {}
        """Number of micro-batches -> sizes of the exchanges of one step."""
        self._chosen: list[tuple[int, Tensor]] = []
        """(layer, ids_TK) of each dispatch of the last run."""

    @torch.inference_mode()
    def run(self, question: dict[str, Any]) -> dict[str, Any]:
        """Run one step. `what` is "both", "compute" or "link"; "link" replays the exchanges of the
        last run with that number of micro-batches.

        Returns end_s. "both" and "compute" add CPU seconds, op times, bytes (counted, and by the formula) and
        a digest of the outputs; "link" adds the times of dispatches and combines on the link.
        """
        num_micro_batches = question["num_micro_batches"]
        if question["what"] == "link":
            sizes = self._sizes[num_micro_batches]
            _sleep_until(question["start_s"])
            seconds = replay(self._group, sizes)
            return {
                "end_s": time.perf_counter(),
                "dispatches_s": seconds[::2],
                "combines_s": seconds[1::2],
            }
        schedule = parse(*question["schedule"])
        self._group.is_live = question["what"] == "both"
        self._group.sizes = []
        self._chosen = []
        states = self._states(num_micro_batches)
        recorder = Recorder()
        _sleep_until(question["start_s"])
        before_s = time.process_time()
        execute(schedule, len(self._layers), states, self._run_op, recorder)
        end_s, execute_cpu_s = time.perf_counter(), time.process_time() - before_s
        if self._group.is_live and schedule.offset is None:
            # Without an offset, dispatches and combines alternate, so a replay can tell them apart.
            # A copy is kept, because a replay appends to the group's list.
            self._sizes[num_micro_batches] = list(self._group.sizes)
        num_bytes = [sum(sizes.values()) for sizes in self._group.sizes]
        self._group.is_live = True
        return {
            "end_s": end_s,
            "execute_cpu_s": execute_cpu_s,
            "ops": {time.op: (time.count, time.seconds) for time in recorder.op_times()},
            "num_bytes": sum(num_bytes),
            "formula_bytes": self._formula_bytes(),
            "digest": _digest(states),
        }

    def _formula_bytes(self) -> int:
        """Return the bytes of this rank's tokens on the link, both ways, from the chosen experts."""
        layout = MessageLayout(self._case.dispatch_format, self._case.hidden_size)
        peers = [peer for peer in self._group.members if peer != self._group.rank]
        total = 0
        for layer, ids_TK in self._chosen:
            ranks_TK = self._expert_to_rank_LE[layer][ids_TK]
            num_rows = [int((ranks_TK == peer).any(dim=1).sum()) for peer in peers]
            num_pairs = [int((ranks_TK == peer).sum()) for peer in peers]
            total += sum(layout.expected_bytes(self._case.mode, num_rows, num_pairs))
        return total

    def _states(self, num_micro_batches: int) -> list[MicroBatch]:
        num_prompts = len(self._prompts) // num_micro_batches
        blocks = PROMPT_TOKENS // BLOCK_TOKENS
        states = []
        for first in range(0, len(self._prompts), num_prompts):
            chunks = [
                Chunk(
                    f"{i}",
                    tuple(self._prompts[i]),
                    0,
                    tuple(range(1 + i * blocks, 1 + (i + 1) * blocks)),
                    None,
                    0,
                )
                for i in range(first, first + num_prompts)
            ]
            batch = prefill_batch(chunks, (), self._cache.cache_PLSD, self._cos_sin)
            states.append(
                MicroBatch(
                    batch, self._config, F.embedding(batch.tokens_T, self._embed_VD), self._comm
                )
            )
        return states

    def _run_op(self, state: MicroBatch, layer: int, op: str) -> Interval | None:
        if op == DISPATCH_START and state.ids_TK is not None:
            self._chosen.append((layer, state.ids_TK))
        return OPS[op](state, self._layers[layer], layer)


def _layer(config: ModelConfig, index: int, experts: list[int]) -> LayerWeights:
    """Return a layer's weights: equal on every rank, except for the rank's own experts."""
    generator = torch.Generator().manual_seed(index)
    c, dim = config, config.hidden_size

    def draw(*shape: int) -> Matrix:
        return Matrix(torch.randn(shape, generator=generator) * shape[-1] ** -0.5)

    def mlp(width: int) -> MlpWeights:
        return MlpWeights(draw(width, dim), draw(width, dim), draw(dim, width))

    heads = c.num_attention_heads
    attention = AttentionWeights(
        q_a=None,
        q_a_norm_Q=None,
        q_b=draw(heads * c.qk_head_dim, dim),
        kv_a=draw(c.latent_dim, dim),
        kv_a_norm_C=torch.ones(c.kv_lora_rank),
        kv_b=draw(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        o=draw(dim, heads * c.v_head_dim),
    )
    width = c.moe_intermediate_size
    router, shared = draw(c.n_routed_experts, dim), mlp(width)
    everywhere = [mlp(width) for _ in range(c.n_routed_experts)]
    held = Experts(tuple(everywhere[expert] for expert in experts))
    moe = MoeWeights(router, torch.zeros(c.n_routed_experts), held, shared)
    return LayerWeights(torch.ones(dim), attention, torch.ones(dim), None, moe)


def _expert_to_rank(slot_to_expert_RS: NDArray[np.int16], num_experts: int) -> Tensor:
    ranks = torch.empty(num_experts, dtype=torch.int64)
    for rank, experts in enumerate(slot_to_expert_RS.tolist()):
        ranks[experts] = rank
    return ranks


def _digest(states: list[MicroBatch]) -> str:
    """Return a digest of the bits of all tokens' last hidden states."""
    digest = hashlib.sha256()
    for state in states:
        digest.update(state.hidden_TD.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _sleep_until(when_s: float) -> None:
    time.sleep(max(0.0, when_s - time.perf_counter()))
