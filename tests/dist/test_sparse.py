"""A small DeepSeek-V3.2 with prompts longer than its sparse attention covers. Every greedy token equals the
reference loop's: with one rank and many, small chunks, cached blocks, preemption and blocks from disk.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hadal.core.cache import DISK_HIT_TOKENS, MEMORY_HIT_TOKENS
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.kernels import library
from hadal.model.load import load_weights
from hadal.reference.forward import generate
from hadal.reference.params import Matrix, ModelWeights
from tests.dist import gate
from tests.dist.cached import cache_fields, settle, wait_found
from tests.dist.oracle import FULL, Case, complete_all, differences
from tests.dist.serving import Server, StartServer, metric
from tests.needs import leave_out
from tests.unit.gateway.test_tiktoken import some_tokens, write_folder
from tests.unit.model.test_family import quantise, write_checkpoint
from tests.waiting import wait_for

pytestmark = pytest.mark.more("tests of the model hold sparse attention, parted and cached")
MAX_TOKENS = 32
LENGTHS = (30, 50, 112, 230, 118, 300)
LENGTHS = (*LENGTHS, 100, 180, 40, 105) if FULL else LENGTHS
"""Prompt lengths in tokens, all above index_topk (16); all but the first fill a block while answering."""
NOISE = 1e-5
NUM_NOISY = 3
NUM_GROWING, NUM_BLOCKS = 30, 4
WIDE = {
    "prefill": {"ranks": 2, "kv_memory_mb": 32, "min_split_tokens": 2},
    "decode": {"ranks": 4, "kv_memory_mb": 32, "max_requests": 8, "min_split_tokens": 2},
}


@pytest.fixture(scope="module")
def folder_of_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("v32"))
    # V3.2's repository has no chat template, and a server needs one.
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    num_tokens = len(some_tokens())
    write_checkpoint(folder, "DeepSeek-V3.2", vocab_size=num_tokens + 20, eos_token_id=num_tokens)
    quantise(folder, pow2=True)
    return folder


@pytest.fixture(scope="module")
def cases(folder_of_model: Path) -> list[Case]:
    torch.set_num_threads(1)
    weights = load_weights(folder_of_model)
    assert weights.config.index_topk == 16
    return list(clear_cases(weights))


def clear_cases(weights: ModelWeights) -> Iterator[Case]:
    """Yield a prompt of each length with an answer that does not depend on last bits. In a random model
    two scores (of positions, experts or tokens) are sometimes almost equal. A prompt is therefore used
    only if noisy weights, with noise above the kernels' rounding, give the same answer.
    """
    rng = random.Random(5)
    embed_VD = weights.embed.values
    generator = torch.Generator().manual_seed(6)
    noisy = [
        replace(
            weights,
            embed=Matrix(embed_VD * (1 + NOISE * torch.randn(embed_VD.shape, generator=generator))),
        )
        for _ in range(NUM_NOISY)
    ]
    for length in LENGTHS:
        while True:
            prompt = tuple(rng.randrange(weights.config.vocab_size) for _ in range(length))
            ends = weights.config.eos_token_ids
            output = generate(weights, prompt, MAX_TOKENS, ends)
            if all(generate(other, prompt, MAX_TOKENS, ends) == output for other in noisy):
                yield Case(prompt, tuple(output))
                break


def ask(server: Server, cases: list[Case]) -> list[tuple[int, ...]]:
    return asyncio.run(complete_all(server.url, server.model, cases, max_tokens=MAX_TOKENS))


def wrong(server: Server, cases: list[Case]) -> list[str]:
    return differences(cases, ask(server, cases))


@pytest.mark.slow("the reference loop answers four times each, and a server starts again")
def test_one_rank_with_small_chunks_cached_blocks_and_the_disk(
    start_server: StartServer, folder_of_model: Path, cases: list[Case], folder: Path
) -> None:
    fields = {"model": str(folder_of_model), "chunk_tokens": 48, **cache_fields(folder)}
    server = start_server(**fields)
    assert wrong(server, cases) == []
    assert wrong(server, cases) == []
    assert settle(server)[MEMORY_HIT_TOKENS] > 0
    assert server.stop() == 0
    server = start_server(**fields)
    wait_found(server, folder)
    assert wrong(server, cases) == []
    assert settle(server)[DISK_HIT_TOKENS] > 0


def test_many_ranks_and_hand_over_by_tcp(
    borrow: StartServer, folder_of_model: Path, cases: list[Case]
) -> None:
    server = borrow(model=str(folder_of_model), **WIDE, chunk_tokens=64, handover="tcp")
    assert wrong(server, cases) == []
    assert wrong(server, cases) == []


@pytest.mark.full  # `make test-more` checks another model (test_ep_exactness).
def test_rounded_inputs_give_the_same_tokens_at_every_width(
    borrow: StartServer, folder_of_model: Path, cases: list[Case]
) -> None:
    if library.load() is None:
        leave_out(
            "our kernels are not here, and torch's products promise it not", "apt-get install g++"
        )
    outputs = []
    for widths in ({}, WIDE):
        server = borrow(model=str(folder_of_model), **widths, chunk_tokens=64, compute="fp8")
        outputs.append(ask(server, cases))
    assert outputs[0] == outputs[1]
    assert differences(cases, outputs[0]), "nothing was rounded"


def test_preemption(borrow: StartServer, folder_of_model: Path, cases: list[Case]) -> None:
    growing = [
        case
        for case in cases
        if len(case.prompt) // BLOCK_TOKENS < (len(case.prompt) + MAX_TOKENS) // BLOCK_TOKENS
        and len(case.prompt) < 2 * BLOCK_TOKENS
    ]
    growing *= -(-NUM_GROWING // len(growing))
    server = borrow(
        model=str(folder_of_model), decode={"kv_blocks": 1 + NUM_BLOCKS, "kv_memory_mb": 0}
    )

    before = metric(server, "hadal_preemptions_total")

    def was_preempted() -> bool:
        return metric(server, "hadal_preemptions_total") > before

    async def fill() -> None:
        server.gate.hold(gate.DECODE)
        await wait_for(
            lambda: metric(server, "hadal_generations_now", 'state="decoding"') > 1,
            "two are decoded, and both need a block more",
        )
        await wait_for(server.gate.stepping(gate.DECODE, was_preempted), "one is put back")
        server.gate.open()

    outputs = asyncio.run(
        complete_all(server.url, server.model, growing, max_tokens=MAX_TOKENS, while_running=fill)
    )
    assert differences(growing, outputs) == []
