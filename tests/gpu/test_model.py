"""hadal-tiny on a GPU, in plain torch ops: the CPU's logits, and schedules that change no bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hadal.comm.expert_comm import ExpertComm
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.placement import spread
from hadal.core.plans import Chunk
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import Conversion, load_weights
from hadal.overlap.plan import SCHEDULES, SEQUENTIAL, Schedule
from hadal.reference.forward import forward, no_latents
from hadal.runtime.resolve import model_folder
from tests.gpu.ranks import run_ranks
from tests.needs import skip_unless

pytestmark = [
    pytest.mark.gpu,
    skip_unless(torch.cuda.is_available(), "no CUDA device", "a machine with an NVIDIA GPU"),
]

DEVICE = "cuda"
TOLERANCE = 2e-3
"""Largest difference of logits in FP32, TF32 off: sums in another order through five layers. Logits
spread over several units.
"""
NUM_STEPS = 3
LENGTHS = (5, 70, 131, 200)


@pytest.fixture(autouse=True)
def full_fp32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make_model(device: str, dispatch_format: str | None) -> DeepseekV3:
    weights = load_weights(model_folder(""), held=Conversion(torch.float32, device))
    config = weights.config
    comm = None
    if dispatch_format is not None:
        comm = ExpertComm(
            None,
            hidden_size=config.hidden_size,
            top_k=config.num_experts_per_tok,
            dispatch_format=dispatch_format,
            mode="normal",
            max_tokens=1024,
            device=device,
        )
        comm.install(
            spread(
                config.num_hidden_layers - config.first_k_dense_replace, config.n_routed_experts, 1
            )
        )
    cache = KvCache(config, 40, device=device)
    cache.cache_PLSD.fill_(float("nan"))
    return DeepseekV3(weights, cache, comm)


def work(model: DeepseekV3, schedule: Schedule, num_micro_batches: int, tokens: Tensor) -> Tensor:
    """Prefill four prompts, cut between the micro-batches, then decode given tokens; return all
    logits on the CPU.
    """
    device = model.cache.cache_PLSD.device
    width = -(-(max(LENGTHS) + NUM_STEPS) // BLOCK_TOKENS)
    blocks = [tuple(range(1 + i * width, 1 + (i + 1) * width)) for i in range(len(LENGTHS))]
    parts: list[list[Chunk]] = [[], []]
    wanted: list[list[int]] = [[], []]
    for i, length in enumerate(LENGTHS):
        cut = length if num_micro_batches == 1 else length * i // 3
        for part, (start, end) in enumerate(itertools.pairwise((0, cut, length))):
            if start < end:
                if end == length:
                    wanted[part].append(len(parts[part]))
                prompt = tuple(tokens[i, start:end].tolist())
                parts[part].append(
                    Chunk(str(i), prompt, start, blocks[i][: -(-end // BLOCK_TOKENS)], None, 0)
                )
    logits = [
        torch.cat(
            model.prefill_split(parts[:num_micro_batches], wanted[:num_micro_batches], schedule)
        )
    ]
    table = torch.tensor(blocks, dtype=torch.int32, device=device)
    for step in range(NUM_STEPS):
        fed = tokens[:, step].to(device)
        positions = torch.tensor(LENGTHS, device=device) + step
        cuts = (slice(0, 2), slice(2, 4)) if num_micro_batches == 2 else (slice(0, 4),)
        logits.append(
            torch.cat(
                model.decode_split([(fed[c], positions[c], table[c]) for c in cuts], schedule)
            )
        )
    return torch.stack([part.cpu() for part in logits])


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(
        3, 1500, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.parametrize("dispatch_format", [None, "fp32"])
def test_the_cpus_logits(tokens: Tensor, dispatch_format: str | None) -> None:
    ours = work(make_model(DEVICE, dispatch_format), SEQUENTIAL, 1, tokens)
    theirs = work(make_model("cpu", None), SEQUENTIAL, 1, tokens)
    assert theirs.std() > 0.3
    assert float((ours - theirs).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("dispatch_format", [None, "fp32", "fp8", "fp8_pow2"])
def test_overlapped_is_sequential_to_the_bit(tokens: Tensor, dispatch_format: str | None) -> None:
    model = make_model(DEVICE, dispatch_format)
    expected = work(model, SEQUENTIAL, 2, tokens)
    for schedule in SCHEDULES.values():
        assert torch.equal(work(model, schedule, 2, tokens), expected), schedule.name


@pytest.mark.parametrize("dispatch_format", ["fp32", "fp8"])
def test_two_ranks_share_the_device(tmp_path: Path, tokens: Tensor, dispatch_format: str) -> None:
    """Run two ranks through gloo: schedules and modes give the same bits, in FP32 the CPU's logits."""
    prompts = [tokens[i, :length].tolist() for i, length in enumerate((20, 70, 131, 150))]
    results = run_ranks(tmp_path, DEVICE, dispatch_format, prompts)
    expected = results["normal sequential"]
    for name, logits in results.items():
        assert torch.equal(logits, expected), name
    if dispatch_format == "fp32":
        weights = load_weights(model_folder(""))
        for i, prompt in enumerate(prompts):
            theirs, _ = forward(
                weights, torch.tensor(prompt + prompt[:NUM_STEPS]), no_latents(weights)
            )
            assert float((expected[:, i] - theirs[len(prompt) - 1 :]).abs().max()) <= TOLERANCE
