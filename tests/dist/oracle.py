"""Prompts and the greedy tokens that the plain single-request loop gives for them. Every way of
serving must give the same tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import torch

from evals.run import held_out_examples
from evals.tasks import TASKS, Example
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.gateway.text.asks import Turn
from hadal.gateway.text.chat import read_chat_format
from hadal.gateway.text.vocabulary import read_vocabulary
from hadal.model.load import load_weights
from hadal.reference.forward import generate
from hadal.reference.params import ModelWeights
from hadal.runtime.resolve import model_folder
from tests.fresh import ANSWERS
from tests.levels import FULL
from tests.waiting import PATIENCE_S

__all__ = [
    "FULL",
    "MAX_TOKENS",
    "Case",
    "bordering_cases",
    "complete_all",
    "differences",
    "everyday_cases",
    "make_cases",
    "plain_answer",
]

MAX_TOKENS = 160
EVERYDAY_SEED, NUM_EVERYDAY = 7, 24
BORDER = range(4, 64) if FULL else range(4, 46)
"""Range of a prompt's distance to the end of its last block, in tokens. Below 4, decode fills the
block too early to matter; few answers are long enough to fill most of a block.
"""


@dataclass(frozen=True)
class Case:
    """A prompt and its greedy continuation."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def everyday_cases(num_cases: int, seed: int) -> list[Case]:
    """Return cases of `seed` at full sizes, else the first cases of EVERYDAY_SEED. All files share
    these, because the plain loop's answers take longer than the rest of most tests.
    """
    if FULL:
        return make_cases(num_cases, seed)
    assert num_cases <= NUM_EVERYDAY
    return [_case(prompt) for prompt in _prompts(NUM_EVERYDAY, EVERYDAY_SEED)[:num_cases]]


def make_cases(num_cases: int, seed: int) -> list[Case]:
    """Return held-out chat prompts of every task. Earlier conversations make every third one long."""
    return [_case(prompt) for prompt in _prompts(num_cases, seed)]


def plain_answer(
    weights: ModelWeights, prompt: tuple[int, ...], max_tokens: int
) -> tuple[int, ...]:
    """Return the greedy tokens of the plain loop, which the processes of a test run share."""
    folder = os.environ.get(ANSWERS)
    if not folder:
        return tuple(generate(weights, prompt, max_tokens, weights.config.eos_token_ids))
    asked = hashlib.blake2b(repr((weights.config, prompt, max_tokens)).encode(), digest_size=16)
    asked.update(weights.embed.values.numpy().tobytes())
    path = Path(folder) / f"{asked.hexdigest()}.json"
    if not path.exists():
        output = generate(weights, prompt, max_tokens, weights.config.eos_token_ids)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(output))
        own.rename(path)  # The rename is atomic: a reader sees the whole file or none.
    return tuple(json.loads(path.read_text()))


def bordering_cases(num_prompts: int, seed: int) -> list[Case]:
    """Draw `num_prompts` prompts, and return cases for the prompts of at most two blocks with a
    distance in BORDER to the end of their last block.
    """
    return [
        _case(prompt)
        for prompt in _prompts(num_prompts, seed)
        if len(prompt) <= 2 * BLOCK_TOKENS and -len(prompt) % BLOCK_TOKENS in BORDER
    ]


@cache
def _case(prompt: tuple[int, ...]) -> Case:
    return Case(prompt, plain_answer(_weights(), prompt, MAX_TOKENS))


@cache
def _weights() -> ModelWeights:
    torch.set_num_threads(1)  # Two threads would wait for each other on a busy machine.
    return load_weights(model_folder(""))


@cache
def _prompts(num_cases: int, seed: int) -> list[tuple[int, ...]]:
    folder = model_folder("")
    chat = read_chat_format(folder, read_vocabulary(folder))
    longest = _weights().config.max_position_embeddings
    rng = random.Random(seed)
    examples = held_out_examples(-(-num_cases // len(TASKS)), seed)
    rng.shuffle(examples)
    prompts = []
    for number, example in enumerate(examples[:num_cases]):
        turns = [Turn(m["role"], m["content"]) for m in example.messages]
        if number % 3 == 0:
            turns = _long_past(rng, examples, rng.randint(2, 24)) + [
                t for t in turns if t.role != "system"
            ]
        prompts.append(chat.prompt(turns, max_tokens=longest).ids)
    return prompts


def _long_past(rng: random.Random, examples: list[Example], num_turns: int) -> list[Turn]:
    past = []
    for example in rng.choices(examples, k=num_turns):
        past += [Turn("user", example.messages[-1]["content"]), Turn("assistant", example.answer)]
    return past


async def complete_all(
    url: str,
    model: str,
    cases: list[Case],
    *,
    concurrency: int = 32,
    max_tokens: int = MAX_TOKENS,
    while_running: Callable[[], Awaitable[None]] | None = None,
) -> list[tuple[int, ...]]:
    """Return the greedy tokens of every case through HTTP, `concurrency` in flight, while
    `while_running` runs beside them.
    """
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency + 4)

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:

        async def one(case: Case) -> tuple[int, ...]:
            body = {
                "model": model,
                "prompt": list(case.prompt),
                "temperature": 0,
                "max_tokens": max_tokens,
                "return_token_ids": True,
            }
            async with gate:
                reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            return tuple(reply.json()["choices"][0]["token_ids"])

        async def disturb() -> None:
            if while_running is not None:
                await while_running()

        _, *outputs = await asyncio.gather(disturb(), *(one(case) for case in cases))
        return outputs


def differences(cases: list[Case], outputs: list[tuple[int, ...]]) -> list[str]:
    """Return a line per case that differs, with enough detail to repeat it."""
    return [
        f"case {number}: prompt of {len(case.prompt)} tokens, first difference at output"
        f" {next((i for i, (a, b) in enumerate(zip(case.output, output, strict=False)) if a != b), 'length')}"
        f" of {len(case.output)} / {len(output)}"
        for number, (case, output) in enumerate(zip(cases, outputs, strict=True))
        if case.output != output
    ]
