"""Drafts (speculative decoding) change when tokens arrive, never which: a server with drafts
answers like one without. Tested for all kinds of sampling, on one rank and on several, and after
kills. The share of right drafts is as expected, wherever a prompt's KV came from.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadal.core.config import Deployment, UnitsConfig
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import AS_STORED, load_weights
from hadal.model.mtp import MtpModule, right_drafts
from hadal.runtime.resolve import model_folder, resolve
from tests.dist.cached import settle, total, wait_found
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases, make_cases
from tests.dist.serving import Server, StartServer, kill_at_work, metric
from tests.dist.test_ep_exactness import units
from tests.fresh import fresh
from tests.levels import LEVEL
from tests.waiting import PATIENCE_S

FEW = LEVEL == "test"
NUM_SAMPLED = 1000 if FULL else 12 if FEW else 48
NUM_CASES, NUM_FRESH = (200, 50) if FULL else (8, 1) if FEW else (24, 8)
MORE = pytest.mark.more("another way to serve; one rank is in `make test`")
SLOW = pytest.mark.slow("steps in halves on six ranks")
CONCURRENCY = 24
POINT = 0.01
"""Largest difference between a server's share of right drafts and `expected_share`."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Return fixed and fresh prompts; the fresh seed is printed if a test fails."""
    seed = fresh().randrange(2**31)
    print(f"fresh prompts: seed {seed}")
    return everyday_cases(NUM_CASES - NUM_FRESH, seed=7) + make_cases(NUM_FRESH, seed=seed)


def sampled(number: int, rng: random.Random, prompts: list[Case]) -> dict[str, Any]:
    """Return a request with `number` as its seed and randomly chosen fields."""
    body: dict[str, Any] = {
        "prompt": list(rng.choice(prompts).prompt),
        "max_tokens": rng.choice([1, 2, 3, 17, 40, 90]),
        "seed": number,
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.3]),
        "return_token_ids": True,
    }
    choices: dict[str, list[Any]] = {
        "top_p": [0.5, 0.9, 0.99],
        "top_k": [1, 5, 40],
        "min_p": [0.01, 0.1],
        "presence_penalty": [-0.5, 0.8],
        "frequency_penalty": [-0.3, 0.6],
        "repetition_penalty": [1.1, 1.4],
        "logit_bias": [{"300": 5, "301": -100}, {"45": 3.5}],
        "min_tokens": [1, 5],
        "logprobs": [0, 2, 5],
        "stop": ["=", ["3\n", "42"]],
        "n": [2],
    }
    for name, values in choices.items():
        if rng.random() < 0.25:
            body[name] = rng.choice(values)
    body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    return body


async def ask_all(server: Server, bodies: list[dict[str, Any]]) -> list[Any]:
    """Return the choices of every request."""
    gate, model = asyncio.Semaphore(CONCURRENCY), server.model
    limits = httpx.Limits(max_connections=CONCURRENCY + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits) as client:

        async def one(body: dict[str, Any]) -> Any:
            async with gate:
                reply = await client.post("/v1/completions", json={"model": model, **body})
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"]

        return list(await asyncio.gather(*(one(body) for body in bodies)))


def what_came(choices: Any) -> Any:
    """Return tokens, text and finish reason of every choice."""
    return [(choice["token_ids"], choice["text"], choice["finish_reason"]) for choice in choices]


def logprobs_of(choices: Any) -> list[float]:
    found = ((choice.get("logprobs") or {}).get("token_logprobs") or () for choice in choices)
    return [value for values in found for value in values]


def first_drafts(server: Server) -> tuple[int, int]:
    """Return how many first drafts of a step were right, and how many were made."""
    settle(server)
    accepted, tried = (
        total(server, f"hadal_drafts_{what}_total", 'place="1"') for what in ("accepted", "tried")
    )
    return accepted, tried


Strike = Callable[[], Awaitable[None]]


def check_greedy(server: Server, cases: list[Case], strike: Strike | None = None) -> None:
    """Assert that greedy answers equal the plain loop's while `strike` runs."""
    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=16, while_running=strike)
    )
    assert differences(cases, outputs) == []


def share_right(server: Server, cases: list[Case], strike: Strike | None = None) -> float:
    """Check greedy answers; return the share of right drafts in them."""
    accepted_before, tried_before = first_drafts(server)
    check_greedy(server, cases, strike)
    accepted, tried = first_drafts(server)
    return (accepted - accepted_before) / (tried - tried_before)


@functools.cache
def expected_share(cases: tuple[Case, ...]) -> float:
    """Return the share of right drafts, computed without a server. It counts only drafts that a step
    with one draft checks: after a right draft the next position has none.
    """
    weights = load_weights(model_folder(""), held=AS_STORED, with_mtp=True)
    config = weights.config
    cache = KvCache(config, 70, num_layers=config.num_hidden_layers + 1)
    module = MtpModule(DeepseekV3(weights, cache))
    tried = right = 0
    for case in cases:
        first = len(case.prompt) + 2
        text = [*case.prompt, *case.output]
        if len(text) <= first:
            continue
        is_right = right_drafts(module, text, first).tolist()
        at = 0
        while at < len(is_right):
            tried += 1
            right += is_right[at]
            at += 1 + is_right[at]
    return right / tried


TWO_DRAFTS: dict[str, Any] = {"decode": {"drafts": 2}}
HALVES: dict[str, Any] = {
    "prefill": units(2, 0, "prefill_dual"),
    "decode": {**units(4, 0, "decode_five"), "drafts": 2},
}
IN_ALL = {
    **{f"one rank, {drafts}": {"decode": {"drafts": drafts}} for drafts in (1, 3, "auto")},
    "ep2": {"prefill": units(2), "decode": {**units(2), "drafts": 1}},
}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(TWO_DRAFTS, id="one rank, 2"),
        pytest.param(HALVES, id="ep4 in halves", marks=(MORE, SLOW)),
        *(pytest.param(fields, id=name, marks=pytest.mark.full) for name, fields in IN_ALL.items()),
    ],
)
def test_sampled_requests_get_the_same_tokens(
    borrow: StartServer, mortal: StartServer, cases: list[Case], fields: dict[str, Any]
) -> None:
    seed = fresh().randrange(2**31)
    print("requests: seed", seed)
    rng = random.Random(seed)
    bodies = [sampled(number, rng, cases) for number in range(NUM_SAMPLED)]
    expected = asyncio.run(ask_all(borrow(), bodies))
    server = mortal(**fields)
    pids = server.pids()
    found = asyncio.run(ask_all(server, bodies))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        what = f"request {number} of seed {seed}: {bodies[number]}"
        assert what_came(ours) == what_came(theirs), what
        # Several ranks add in another order than one rank's fused step, and cut prompts elsewhere.
        assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=1e-3), what
    assert metric(server, "hadal_drafts_accepted_total") > 0
    assert server.pids() == pids


@MORE
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_units_that_are_killed(mortal: StartServer, cases: list[Case], victim: str) -> None:
    server = mortal(**TWO_DRAFTS)
    num_retries = metric(server, "hadal_retries_total")

    async def kill() -> None:
        await kill_at_work(server, victim)

    check_greedy(server, cases, kill)
    assert metric(server, "hadal_retries_total") > num_retries


@MORE
@pytest.mark.slow("the ranks that are left join again")
def test_a_rank_that_is_killed(mortal: StartServer, cases: list[Case]) -> None:
    server = mortal(**HALVES)

    async def kill() -> None:
        await kill_at_work(server, "decode-0.2", num_steps=10)

    undisturbed = share_right(server, cases)
    # The surviving ranks form a unit again and continue their requests where they were.
    assert share_right(server, cases, kill) == pytest.approx(undisturbed, abs=2 * POINT)


@MORE
@pytest.mark.slow("two servers, one after the other")
@pytest.mark.parametrize("handover", ["shm", "tcp", "nixl"] if FULL else ["tcp"])
def test_drafts_are_as_often_right_however_a_prompts_kv_came(
    start_server: StartServer, cases: list[Case], folder: Path, handover: str
) -> None:
    long = [case for case in cases if len(case.prompt) > 140]
    assert long
    fields = {"cache": {"folder": str(folder), "recompute": "off"}, "decode": {"drafts": 1}}
    server = start_server(handover=handover, chunk_tokens=48, **fields)
    for place, those in ((handover, cases), ("memory", long), ("disk", long)):
        if place == "disk":
            assert server.stop() == 0
            server = start_server(**fields)
            wait_found(server, folder)
        share = share_right(server, those)
        assert share == pytest.approx(expected_share(tuple(those)), abs=POINT), place
        if place != handover:
            assert metric(server, "hadal_cache_hit_tokens_total", place) > 0


@pytest.mark.promise(
    "a server with that layer does not find a disk cache without it, nor the reverse"
)
def test_blocks_that_have_the_modules_layer_are_others_than_those_without() -> None:
    drafting, plain = (
        resolve(Deployment(device="cpu", decode=UnitsConfig(drafts=drafts))).fingerprint
        for drafts in (1, 0)
    )
    assert drafting != plain
