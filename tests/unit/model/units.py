"""A unit of several ranks as models in threads of one process, and a small workload for it."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.group import Group
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.placement import Placement, spread
from hadal.core.plans import Chunk
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import load_weights
from hadal.overlap.plan import Schedule
from tests.unit.comm.queues import in_threads, queue_groups
from tests.unit.model.checkpoints import Peer

MAX_TOKENS = 256
NUM_STEPS = 3


def num_moe_layers(peer: Peer) -> int:
    return sum(layer.moe is not None for layer in peer.weights.layers)


def rank_model(
    peer: Peer,
    group: Group | None,
    placement: Placement,
    dispatch_format: str,
    mode: str,
    num_blocks: int = 40,
) -> DeepseekV3:
    config = peer.weights.config
    comm = ExpertComm(
        group,
        hidden_size=config.hidden_size,
        top_k=config.num_experts_per_tok,
        dispatch_format=dispatch_format,
        mode=mode,
        max_tokens=MAX_TOKENS,
    )
    comm.install(placement)
    rank = 0 if group is None else group.rank
    weights = load_weights(peer.folder, slot_to_expert_LS=placement.slot_to_expert_LRS[:, rank])
    cache = KvCache(config, num_blocks)
    cache.cache_PLSD.fill_(float("nan"))
    return DeepseekV3(weights, cache, comm)


def work(
    model: DeepseekV3, prompts: dict[int, list[int]], schedule: Schedule, num_micro_batches: int
) -> list[Tensor]:
    """Prefill the prompts in one step, then decode NUM_STEPS greedily; return every step's logits.
    With two micro-batches the middle prompt is split. All ranks of a unit call this together, also
    without prompts.
    """
    numbers = sorted(prompts)
    width = -(-(max(map(len, prompts.values()), default=1) + NUM_STEPS) // BLOCK_TOKENS)
    blocks = {n: tuple(range(1 + i * width, 1 + (i + 1) * width)) for i, n in enumerate(numbers)}
    parts: list[list[Chunk]] = [[] for _ in range(num_micro_batches)]
    for at, n in enumerate(numbers):
        half, length = len(numbers) // 2, len(prompts[n])
        cut = length if at < half or num_micro_batches == 1 else 0 if at > half else length // 2
        for part, (start, end) in zip(parts, itertools.pairwise((0, cut, length)), strict=False):
            if start < end:
                used = blocks[n][: -(-end // BLOCK_TOKENS)]
                parts[part is not parts[0]].append(
                    Chunk(str(n), tuple(prompts[n][start:end]), start, used, None, 0)
                )
    wanted = [
        [
            i
            for i, c in enumerate(part)
            if c.start + len(c.tokens) == len(prompts[int(c.request_id)])
        ]
        for part in parts
    ]
    logits = [torch.cat(model.prefill_split(parts, wanted, schedule))]
    table = torch.tensor([blocks[n] for n in numbers], dtype=torch.int32).view(len(numbers), width)
    lengths = torch.tensor([len(prompts[n]) for n in numbers], dtype=torch.int64)
    for step in range(NUM_STEPS):
        tokens = logits[-1].argmax(-1) if numbers else torch.zeros(0, dtype=torch.int64)
        cut = len(numbers) // 2 if num_micro_batches == 2 else len(numbers)
        slices = (slice(0, cut), slice(cut, None))[:num_micro_batches]
        rows = [(tokens[s], (lengths + step)[s], table[s]) for s in slices]
        logits.append(torch.cat(model.decode_split(rows, schedule)))
    return logits


def unit_logits(
    peer: Peer,
    num_ranks: int,
    prompts: list[list[int]],
    schedule: Schedule,
    *,
    num_micro_batches: int = 2,
    num_redundant: int = 0,
    dispatch_format: str = "fp32",
    mode: str = "normal",
    seed: int = 0,
) -> Tensor:
    """Return logits [steps, prompts, V] over a unit's ranks; a single rank has a comm, too."""
    placement = spread(
        num_moe_layers(peer), peer.weights.config.n_routed_experts, num_ranks, num_redundant
    )
    groups = queue_groups(range(num_ranks), seed) if num_ranks > 1 else {0: None}

    def one(rank: int) -> list[Tensor]:
        torch.set_num_threads(1)
        mine = {n: prompts[n] for n in range(len(prompts)) if n % num_ranks == rank}
        return work(
            rank_model(peer, groups[rank], placement, dispatch_format, mode),
            mine,
            schedule,
            num_micro_batches,
        )

    per_rank = in_threads(one, range(num_ranks))
    return torch.stack(
        [
            torch.stack(
                [per_rank[n % num_ranks][step][n // num_ranks] for n in range(len(prompts))]
            )
            for step in range(NUM_STEPS + 1)
        ]
    )
