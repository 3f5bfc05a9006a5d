"""Prompts, and the greedy tokens the plain single-request loop gives for them: what every way of
serving must equal.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache

import httpx
import torch

from evals.run import held_out_examples
from evals.tasks import TASKS, Example
from hadal.gateway.chat import read_chat_format
from hadal.gateway.openai import Turn
from hadal.gateway.vocabulary import read_vocabulary
from hadal.model.checkpoint import load_weights
from hadal.reference.model import generate
from hadal.runtime.resolve import model_folder
from tests.fresh import FULL

__all__ = [
    "FULL",
    "MAX_TOKENS",
    "Case",
    "complete_all",
    "differences",
    "everyday_cases",
    "make_cases",
]

MAX_TOKENS = 160
EVERYDAY_SEED, NUM_EVERYDAY = 7, 24


@dataclass(frozen=True)
class Case:
    """A prompt and its greedy continuation."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def everyday_cases(num_cases: int, seed: int) -> list[Case]:
    """So many of a seed of the file's own at full sizes; else the first of those that all files
    share, because the plain loop takes longer for them than most tests for all else.
    """
    if FULL:
        return make_cases(num_cases, seed)
    assert num_cases <= NUM_EVERYDAY
    return make_cases(NUM_EVERYDAY, EVERYDAY_SEED)[:num_cases]


def make_cases(num_cases: int, seed: int) -> list[Case]:
    """Held-out chat prompts of every task, each third one made long by the conversations before
    it.
    """
    return list(_cases(num_cases, seed))


@cache
def _cases(num_cases: int, seed: int) -> tuple[Case, ...]:
    folder = model_folder("")
    vocabulary = read_vocabulary(folder)
    chat = read_chat_format(folder, vocabulary)
    rng = random.Random(seed)
    examples = held_out_examples(-(-num_cases // len(TASKS)), seed)
    rng.shuffle(examples)
    torch.set_num_threads(1)  # Two threads wait for one another on a busy machine.
    weights = load_weights(folder)
    cases = []
    for number, example in enumerate(examples[:num_cases]):
        turns = [Turn(m["role"], m["content"]) for m in example.messages]
        if number % 3 == 0:
            turns = _long_past(rng, examples, rng.randint(2, 24)) + [
                t for t in turns if t.role != "system"
            ]
        prompt = chat.prompt(turns, max_tokens=weights.config.max_position_embeddings).ids
        output = generate(weights, prompt, MAX_TOKENS, weights.config.eos_token_ids)
        cases.append(Case(prompt, tuple(output)))
    return tuple(cases)


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
    while_running: Callable[[], Awaitable[None]] | None = None,
) -> list[tuple[int, ...]]:
    """Greedy tokens of every case through HTTP, `concurrency` in flight; `while_running` runs
    beside them.
    """
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency + 4)

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(case: Case) -> tuple[int, ...]:
            body = {
                "model": model,
                "prompt": list(case.prompt),
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
                "return_token_ids": True,
            }
            async with gate:
                reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            return tuple(reply.json()["choices"][0]["token_ids"])

        disturbance = asyncio.ensure_future(while_running()) if while_running is not None else None
        outputs = await asyncio.gather(*(one(case) for case in cases))
        if disturbance is not None:
            await disturbance
        return list(outputs)


def differences(cases: list[Case], outputs: list[tuple[int, ...]]) -> list[str]:
    """What differs, told so that it can be repeated."""
    return [
        f"case {number}: prompt of {len(case.prompt)} tokens, first difference at output"
        f" {next((i for i, (a, b) in enumerate(zip(case.output, output, strict=False)) if a != b), 'length')}"
        f" of {len(case.output)} / {len(output)}"
        for number, (case, output) in enumerate(zip(cases, outputs, strict=True))
        if case.output != output
    ]
