"""Drafts (speculative decoding) change when tokens come, never which: a server that drafts gives what
one without drafts gives, whatever is sampled, on ranks or without, killed, preempted, moved, from
memory and from disk. And drafts are as often right as they should be, however a prompt's KV came.
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

from hadal.model.cache import KvCache
from hadal.model.checkpoint import AS_STORED, load_weights
from hadal.model.deepseek import DeepseekV3
from hadal.model.mtp import MtpModule, right_drafts
from hadal.runtime.resolve import model_folder
from tests.dist.cached import wait_found
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases, make_cases
from tests.dist.serving import Server, StartServer, kill_at_work, metric
from tests.dist.test_ep_exactness import units
from tests.fresh import fresh
from tests.levels import LEVEL

FEW = LEVEL == "test"
NUM_SAMPLED = 1000 if FULL else 12 if FEW else 48
NUM_CASES, NUM_FRESH = (200, 50) if FULL else (8, 1) if FEW else (24, 8)
MORE = pytest.mark.more("another way to serve; one rank is in `make test`")
TIMEOUT_S = 300.0
CONCURRENCY = 24
POINT = 0.01
"""How far the share of right drafts may be from the offline measure."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Fixed prompts and fresh ones; the fresh seed is printed when a test fails."""
    seed = fresh().randrange(2**31)
    print(f"fresh prompts: seed {seed}")
    return everyday_cases(NUM_CASES - NUM_FRESH, seed=7) + make_cases(NUM_FRESH, seed=seed)


def sampled(number: int, rng: random.Random, prompts: list[Case]) -> dict[str, Any]:
    """A request of its own seed; which fields it has is drawn."""
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


async def ask_all(
    server: Server,
    bodies: list[dict[str, Any]],
    while_running: Callable[[], Awaitable[None]] | None = None,
) -> list[Any]:
    """The choices of every request."""
    gate, model = asyncio.Semaphore(CONCURRENCY), server.model
    limits = httpx.Limits(max_connections=CONCURRENCY + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits) as client:

        async def one(body: dict[str, Any]) -> Any:
            async with gate:
                reply = await client.post("/v1/completions", json={"model": model, **body})
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"]

        beside = asyncio.ensure_future(while_running()) if while_running is not None else None
        answers = await asyncio.gather(*(one(body) for body in bodies))
        if beside is not None:
            await beside
        return list(answers)


def what_came(choices: Any) -> Any:
    """Of every choice its tokens, text and end."""
    return [(choice["token_ids"], choice["text"], choice["finish_reason"]) for choice in choices]


def logprobs_of(choices: Any) -> list[float]:
    found = ((choice.get("logprobs") or {}).get("token_logprobs") or () for choice in choices)
    return [value for values in found for value in values]


def share_right(server: Server) -> float:
    return metric(server, "hadal_drafts_accepted_total", 'place="1"') / metric(
        server, "hadal_drafts_tried_total", 'place="1"'
    )


@functools.cache
def expected_share(cases: tuple[Case, ...]) -> float:
    """The offline measure, of the drafts that one a step checks: behind a right one the next is not
    made.
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


IN_TEST = {"one rank, 2": {"decode": {"drafts": 2}}}
IN_MORE: dict[str, dict[str, Any]] = {
    "one rank, auto": {"decode": {"drafts": "auto"}},
    "ep2": {"prefill": units(2), "decode": {**units(2), "drafts": 1}},
    "ep4 in halves": {
        "prefill": units(2, 0, "prefill_dual"),
        "decode": {**units(4, 0, "decode_five"), "drafts": 2},
    },
}
IN_ALL = {f"one rank, {number}": {"decode": {"drafts": number}} for number in (1, 3)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        *IN_TEST,
        *(pytest.param(name, marks=MORE) for name in IN_MORE),
        *(pytest.param(name, marks=pytest.mark.full) for name in IN_ALL),
    ],
)
def test_sampled_requests_get_the_same_tokens(
    borrow: StartServer, cases: list[Case], name: str
) -> None:
    seed = fresh().randrange(2**31)
    print("requests: seed", seed)
    rng = random.Random(seed)
    bodies = [sampled(number, rng, cases) for number in range(NUM_SAMPLED)]
    expected = asyncio.run(ask_all(borrow(), bodies))
    server = borrow(**{**IN_TEST, **IN_MORE, **IN_ALL}[name])
    found = asyncio.run(ask_all(server, bodies))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        what = f"{name}: request {number} of seed {seed}: {bodies[number]}"
        assert what_came(ours) == what_came(theirs), what
        # Ranks add in another order than the fused step, and prompts are cut where others end.
        assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=1e-3), what
    assert metric(server, "hadal_drafts_accepted_total") > 0


@MORE
@pytest.mark.timeout(900)
@pytest.mark.parametrize("handover", ["shm", "tcp", "nixl"] if FULL else ["tcp"])
def test_a_hand_over_takes_the_module_s_kv_along(
    start_server: StartServer, cases: list[Case], handover: str
) -> None:
    server = start_server(handover=handover, chunk_tokens=48, decode={"drafts": 1})
    outputs = asyncio.run(complete_all(server.url, server.model, cases))
    assert differences(cases, outputs) == []
    assert share_right(server) == pytest.approx(expected_share(tuple(cases)), abs=POINT)


@MORE
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_units_that_are_killed(start_server: StartServer, cases: list[Case], victim: str) -> None:
    server = start_server(decode={"drafts": 2})

    async def kill() -> None:
        await kill_at_work(server, victim)

    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=16, while_running=kill)
    )
    assert differences(cases, outputs) == []
    assert metric(server, "hadal_retries_total") > 0


@MORE
@pytest.mark.slow("the ranks that are left join again")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("drafts", [1, 2])
def test_a_rank_that_is_killed(start_server: StartServer, cases: list[Case], drafts: int) -> None:
    server = start_server(prefill=units(2), decode={**units(4), "drafts": drafts})

    async def kill() -> None:
        await kill_at_work(server, "decode-0.2", num_steps=10)

    outputs = asyncio.run(
        complete_all(server.url, server.model, cases, concurrency=16, while_running=kill)
    )
    assert differences(cases, outputs) == []
    if drafts == 1:
        # Those that stayed joined again where they were. The offline measure is of one draft a
        # step: with two, the next first draft stands elsewhere in the text.
        assert share_right(server) == pytest.approx(expected_share(tuple(cases)), abs=2 * POINT)


@pytest.mark.promise("a disk cache without it is not found, and the other way round")
@MORE
@pytest.mark.slow("three servers, one after another")
@pytest.mark.timeout(900)
def test_a_prompt_found_in_memory_or_on_disk_drafts_as_well(
    start_server: StartServer, cases: list[Case], folder: Path
) -> None:
    long = [case for case in cases if len(case.prompt) > 140]
    assert long
    cache = {"folder": str(folder), "recompute": "off"}
    first = start_server(cache=cache, decode={"drafts": 1})
    for _ in range(2):
        outputs = asyncio.run(complete_all(first.url, first.model, long))
        assert differences(long, outputs) == []
    assert metric(first, "hadal_cache_hit_tokens_total", "memory") > 0
    shares = [share_right(first)]
    assert first.stop() == 0
    second = start_server(cache=cache, decode={"drafts": 1})
    wait_found(second, folder)
    outputs = asyncio.run(complete_all(second.url, second.model, long))
    assert differences(long, outputs) == []
    assert metric(second, "hadal_cache_hit_tokens_total", "disk") > 0
    shares.append(share_right(second))
    assert shares == pytest.approx([expected_share(tuple(long))] * 2, abs=POINT)
    second.stop()
    # What was kept has the module's layer: without drafts it is another format.
    third = start_server(cache=cache)
    outputs = asyncio.run(complete_all(third.url, third.model, long))
    assert differences(long, outputs) == []
    assert metric(third, "hadal_cache_hit_tokens_total", "disk") == 0
