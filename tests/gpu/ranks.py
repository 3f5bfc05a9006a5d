"""Two ranks of a unit in processes of their own. They share one device and communicate through gloo."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.torch_group import TorchGroup
from hadal.core.placement import spread
from hadal.core.plans import Chunk, Member
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import Conversion, load_weights
from hadal.overlap.plan import SCHEDULES, Schedule
from hadal.runtime.resolve import model_folder

NUM_RANKS = 2
DEADLINE_S = 60.0
JOIN_TIMEOUT_S = 240.0
NUM_STEPS = 3


def run_ranks(
    folder: Path, device: str, dispatch_format: str, prompts: list[list[int]]
) -> dict[str, Tensor]:
    """Return "MODE SCHEDULE" -> logits [1 + NUM_STEPS, prompts, V]: of prefill, then of each decode step."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_main,
                args=(rank, folder, device, dispatch_format, prompts, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            assert pipe.poll(JOIN_TIMEOUT_S), "a rank hangs"
        halves = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send("leave")  # A rank that leaves ends the others' formation.
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    # Rank n % 2 has prompt n.
    return {
        name: torch.stack([half[name] for half in halves], 2).flatten(1, 2) for name in halves[0]
    }


def _main(
    rank: int,
    folder: Path,
    device: str,
    dispatch_format: str,
    prompts: list[list[int]],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    members = [Member(peer, f"e{peer}", "127.0.0.1", 0) for peer in range(NUM_RANKS)]
    group = TorchGroup(rank, backend="gloo", folder=folder, deadline_s=DEADLINE_S, device=device)
    try:
        group.form(1, members)
        results = {}
        for mode in ("normal", "low_latency"):
            model = _model(group, device, dispatch_format, mode)
            for name, schedule in SCHEDULES.items():
                results[f"{mode} {name}"] = _work(model, prompts[rank::NUM_RANKS], schedule)
        pipe.send(results)
        pipe.recv()
    finally:
        group.close()


def _model(group: TorchGroup, device: str, dispatch_format: str, mode: str) -> DeepseekV3:
    weights = load_weights(model_folder(""))
    config = weights.config
    num_layers = config.num_hidden_layers - config.first_k_dense_replace
    placement = spread(num_layers, config.n_routed_experts, NUM_RANKS, 16)
    weights = load_weights(
        model_folder(""),
        slot_to_expert_LS=placement.slot_to_expert_LRS[:, group.rank],
        held=Conversion(torch.float32, device),
    )
    comm = ExpertComm(
        group,
        hidden_size=config.hidden_size,
        top_k=config.num_experts_per_tok,
        dispatch_format=dispatch_format,
        mode=mode,
        max_tokens=256,
        device=device,
    )
    comm.install(placement)
    cache = KvCache(config, 16, device=device)
    cache.cache_PLSD.fill_(float("nan"))
    return DeepseekV3(weights, cache, comm)


def _work(model: DeepseekV3, prompts: list[list[int]], schedule: Schedule) -> Tensor:
    """Prefill two prompts, each cut between the micro-batches, then decode in two micro-batches.
    Return logits [1 + NUM_STEPS, 2, V] on the CPU.
    """
    assert len(prompts) == 2
    device = model.cache.cache_PLSD.device
    blocks = [(1, 2, 3), (4, 5, 6)]
    first = [
        Chunk(str(i), tuple(p[: len(p) // 3]), 0, blocks[i], None, 0) for i, p in enumerate(prompts)
    ]
    second = [
        Chunk(str(i), tuple(p[len(p) // 3 :]), len(p) // 3, blocks[i], None, 0)
        for i, p in enumerate(prompts)
    ]
    logits = [torch.cat(model.prefill_split([first, second], [[], [0, 1]], schedule))]
    table = torch.tensor(blocks, dtype=torch.int32, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    for step in range(NUM_STEPS):
        tokens = torch.tensor([p[step] for p in prompts], device=device)
        rows = [(tokens[i : i + 1], lengths[i : i + 1] + step, table[i : i + 1]) for i in range(2)]
        logits.append(torch.cat(model.decode_split(rows, schedule)))
    return torch.stack([part.cpu() for part in logits])
