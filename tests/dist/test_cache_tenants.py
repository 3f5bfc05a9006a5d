"""Tenants share no KV, and the time of a reply does not tell what another one has asked; what is
public is shared.

The statistical test draws samples of three kinds in turn, in random order: a tenant's first request
for a prompt that another tenant has in the cache, one for a prompt nobody ever sent, and one for
what the tenant has in the cache itself. The first two must look alike, and the third must be told
apart from the second by the same test.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from hadal.core.cache import NAME_BYTES, split
from hadal.core.messages import BLOCK_TOKENS
from hadal.gateway.auth import salt_of
from hadal.kv.names import PUBLIC, extend
from tests.dist.cached import cache_fields, settle
from tests.dist.chats import Answer, ChatMaker, ask, client_for, talk, wrong
from tests.dist.keyed import model_of
from tests.dist.oracle import FULL, Case
from tests.dist.segments import names_on_disk
from tests.dist.serving import Server, StartServer
from tests.fresh import fresh

ALICE, BOB = "alice-key", "bob-key"
PROMPT_TOKENS = 1500 if FULL else 700
"""Long enough that computing it takes many times what a hit takes."""
NUM_SAMPLES = 120 if FULL else 16
"""Of each kind."""
OTHER_TOKENS = 200
"""Of what is asked in between."""
NUM_WARM = 2
"""Rounds before the samples."""
WRITTEN_S = 0.3
"""More than enough for a prompt's blocks to be on disk."""
ALARM_Z = 4.06
"""Two-sided 5e-5 under the null hypothesis: three comparisons give a false alarm in fewer than one
of 6 000 runs.
"""


@pytest.fixture(scope="module")
def maker() -> ChatMaker:
    return ChatMaker(fresh().randrange(2**31))


@pytest.fixture
def server(start_server: StartServer, folder: Path) -> Server:
    """With both tiers and two tenants."""
    return start_server("--api-key", ALICE, "--api-key", BOB, **cache_fields(folder))


def first_answer(server: Server, key: str, case: Case) -> Answer:
    [[answer]] = talk(server.url, model_of(server, ALICE), [[case]], key=key)
    assert wrong([[case]], [[answer]]) == []
    return answer


def test_tenants_share_no_block(server: Server, folder: Path, maker: ChatMaker) -> None:
    case = maker.answer(maker.prompt(200))
    assert first_answer(server, ALICE, case).hit == 0
    assert first_answer(server, ALICE, case).hit == 192
    settle(server, ALICE)
    of_alice = names_on_disk(folder)
    assert len(of_alice) >= 3
    assert first_answer(server, BOB, case).hit == 0, (
        "one tenant was served out of another one's cache"
    )
    assert first_answer(server, BOB, case).hit == 192
    settle(server, ALICE)
    of_bob = names_on_disk(folder) - of_alice
    assert len(of_bob) == len(of_alice), "two tenants' blocks of one text are twice as many blocks"
    assert first_answer(server, ALICE, case).hit == 192


def test_names_of_tenants_have_nothing_in_common(maker: ChatMaker) -> None:
    """Not one, whatever the texts: neither the whole names nor the halves that summaries keep."""
    prompt = maker.prompt(640)
    chains = [
        extend(b"root", b"", prompt, salt)
        for salt in (salt_of(b"a"), salt_of(b"b"), salt_of(b""), PUBLIC)
    ]
    names = [
        name[:half]
        for chain in chains
        for name in split(chain)
        for half in (NAME_BYTES, NAME_BYTES // 2)
    ]
    assert len(set(names)) == len(names) == 4 * 2 * 10


def chat(
    server: Server, key: str, system: str, question: str, cache_salt: str | None
) -> dict[str, int]:
    """Ask; returns the usage."""
    body = {
        "model": model_of(server, ALICE),
        "temperature": 0,
        "max_tokens": 8,
        "cache_salt": cache_salt,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
    }
    headers = {"Authorization": f"Bearer {key}"}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    usage: dict[str, int] = reply.json()["usage"]
    return usage


def test_a_public_system_prompt_is_shared(server: Server, maker: ChatMaker) -> None:
    """Its blocks, and none of what the user says."""
    system = " ".join(f"Rule {number}: be short and exact." for number in range(40))
    question = "What is 12 + 30? " * 20
    first = chat(server, ALICE, system, question, "public")
    assert first["prompt_cache_hit_tokens"] == 0
    second = chat(server, BOB, system, question, "public")
    shared = second["prompt_cache_hit_tokens"]
    assert shared >= BLOCK_TOKENS
    assert shared < second["prompt_tokens"] - 2 * BLOCK_TOKENS, "what the user said was shared, too"
    other = chat(server, BOB, system, "What is 1 + 1? " * 20, "public")
    assert other["prompt_cache_hit_tokens"] == shared
    # Who does not say so shares nothing, with himself apart.
    private = chat(server, BOB, system, question, None)
    assert private["prompt_cache_hit_tokens"] == 0
    assert chat(server, BOB, system, question, None)["prompt_cache_hit_tokens"] > 0
    assert chat(server, ALICE, system, question, None)["prompt_cache_hit_tokens"] == 0


def rank_sum_z(first: Sequence[float], second: Sequence[float]) -> float:
    """Mann-Whitney's statistic of two samples, as a standard normal value; above 0 if `first` has
    the larger values.

    Ties share their ranks; with times of a nanosecond there are too few of them to correct the
    variance for.
    """
    ordered = sorted((*first, *second))
    value_to_ranks: dict[float, list[int]] = {}
    for rank, value in enumerate(ordered, 1):
        value_to_ranks.setdefault(value, []).append(rank)
    num, other = len(first), len(second)
    ranks = sum(statistics.fmean(value_to_ranks[value]) for value in first)
    mean, variance = num * (num + other + 1) / 2, num * other * (num + other + 1) / 12
    return (ranks - mean) / math.sqrt(variance)


async def sample(
    server: Server, maker: ChatMaker, rng: random.Random, num: int
) -> dict[str, list[float]]:
    """Seconds of requests by kind, `num` of each, one at a time."""
    model, num_own_hits = model_of(server, ALICE), 0
    seconds: dict[str, list[float]] = {"foreign": [], "unseen": [], "own": []}
    async with client_for(server.url, 1, ALICE) as alice, client_for(server.url, 1, BOB) as bob:
        for number in range(NUM_WARM + num):
            kind_to_prompt = {kind: maker.prompt(PROMPT_TOKENS) for kind in seconds}
            await ask(alice, model, Case(kind_to_prompt["foreign"], ()), max_tokens=1)
            await ask(bob, model, Case(kind_to_prompt["own"], ()), max_tokens=1)
            # Something else in between, so that whatever is asked first is not asked right after
            # its prompt was cached, and time to write it.
            await ask(bob, model, Case(maker.prompt(OTHER_TOKENS), ()), max_tokens=1)
            await asyncio.sleep(WRITTEN_S)
            for kind in rng.sample(sorted(seconds), len(seconds)):
                await asyncio.sleep(0.02)
                start_s = time.perf_counter()
                answer = await ask(bob, model, Case(kind_to_prompt[kind], ()), max_tokens=1)
                took_s = time.perf_counter() - start_s
                assert kind == "own" or answer.hit == 0
                if number >= NUM_WARM:
                    seconds[kind].append(took_s)
                    num_own_hits += kind == "own" and answer.hit > 0
    assert num_own_hits >= 0.9 * num, "a tenant does not find its own prompts"
    return seconds


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "disk"])
def test_time_does_not_tell(
    start_server: StartServer, folder: Path, maker: ChatMaker, memory: bool
) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    fields = {
        "prefill": {"kv_memory_mb": 256},
        **cache_fields(folder, memory=memory, disk_mb=2048),
    }
    server = start_server("--api-key", ALICE, "--api-key", BOB, **fields)
    seconds = asyncio.run(sample(server, maker, random.Random(seed), NUM_SAMPLES))
    for kind, values in seconds.items():
        print(f"{kind}: median {1e3 * statistics.median(values):.1f} ms of {len(values)}")
    alike, unlike = (
        rank_sum_z(seconds["foreign"], seconds["unseen"]),
        rank_sum_z(seconds["unseen"], seconds["own"]),
    )
    print(f"z of foreign beside unseen: {alike:.2f}; of unseen beside own: {unlike:.2f}")
    assert unlike > ALARM_Z, "the test does not even see a hit; it shows nothing"
    assert abs(alike) < ALARM_Z, "the time of a reply tells what another tenant has asked"


def test_the_statistic() -> None:
    """Against its definition: how often a value of one sample exceeds one of the other; and it
    keeps its alarm rate.
    """
    rng = random.Random(5)
    first, second = [rng.random() for _ in range(30)], [rng.random() + 0.2 for _ in range(40)]
    num_larger = sum(a > b for a in first for b in second)
    expected = (num_larger - 600) / math.sqrt(30 * 40 * 71 / 12)
    assert rank_sum_z(first, second) == pytest.approx(expected)
    zs = [
        rank_sum_z([rng.random() for _ in range(40)], [rng.random() for _ in range(40)])
        for _ in range(2000)
    ]
    assert statistics.pstdev(zs) == pytest.approx(1.0, abs=0.06)
    assert max(map(abs, zs)) < ALARM_Z
    assert rank_sum_z([1.0] * NUM_SAMPLES, [0.0] * NUM_SAMPLES) > ALARM_Z
