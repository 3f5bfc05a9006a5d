"""Tenants share no KV, and nothing visible to one depends on another's requests; public blocks are
shared.

Hits, or the time that they save, would reveal another tenant's requests. Block names are salted by
tenant. A prompt in another tenant's cache is thus no hit and makes exactly the work of a new
prompt: the counts of both are equal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx
import pytest

from hadal.core.cache import MEMORY_HIT_TOKENS, MISS_TOKENS, NAME_BYTES, STORED_BLOCKS, split
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.gateway.desk.salts import salt_of
from hadal.kv.names import PUBLIC, extend
from tests.dist.cached import cache_fields, settle
from tests.dist.chats import Answer, ChatMaker, talk, wrong
from tests.dist.conftest import starting
from tests.dist.keyed import header, model_of
from tests.dist.oracle import Case
from tests.dist.segments import names_on_disk
from tests.dist.serving import Server
from tests.fresh import fresh
from tests.waiting import PATIENCE_S

ALICE, BOB = "alice-key", "bob-key"
NUM_TOKENS = 200
"""Tokens of a prompt: three blocks, and a remainder that is always computed."""
HIT_TOKENS = 192
MAX_TOKENS = 24
"""Tokens of an answer: too few to fill a block."""


@pytest.fixture(scope="module")
def maker() -> ChatMaker:
    return ChatMaker(fresh().randrange(2**31))


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hadal-c-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def server(cache: Path) -> Iterator[Server]:
    """Start a server with a disk cache and two tenants."""
    with starting() as start:
        yield start(
            environment={"HADAL_API_KEYS": f"{ALICE} operator,{BOB}"}, **cache_fields(cache)
        )


def answer_of(server: Server, key: str, case: Case) -> Answer:
    """Return the one answer to a tenant, after checking its tokens."""
    model = model_of(server, ALICE)
    [[answer]] = talk(server.url, model, [[case]], key=key, max_tokens=MAX_TOKENS)
    assert wrong([[case]], [[answer]]) == []
    return answer


def work_of(server: Server, key: str, case: Case) -> tuple[int, dict[str, int]]:
    """Return the cached tokens reported to a tenant, and all counts of the units for its request."""
    before = settle(server, ALICE)
    answer = answer_of(server, key, case)
    after = settle(server, ALICE)
    return answer.hit, {name: count - before[name] for name, count in after.items()}


@pytest.mark.promise(
    "No tenant can read another's cache, or detect its content by timing, except for "
    "what both made public."
)
@pytest.mark.promise("Each API key is a tenant that shares nothing with others")
def test_a_tenant_finds_nothing_of_anothers_and_makes_the_work_of_a_new_prompt(
    server: Server, cache: Path, maker: ChatMaker
) -> None:
    asked, new = (maker.answer(maker.prompt(NUM_TOKENS), MAX_TOKENS) for _ in range(2))
    hit, of_alice = work_of(server, ALICE, asked)
    assert hit == 0
    names_of_alice = names_on_disk(cache)
    assert len(names_of_alice) >= HIT_TOKENS // BLOCK_TOKENS
    assert work_of(server, BOB, asked) == work_of(server, BOB, new) == (0, of_alice), (
        "what another tenant has asked can be told from what nobody has"
    )
    assert of_alice[MISS_TOKENS] == NUM_TOKENS
    assert of_alice[STORED_BLOCKS] == len(names_of_alice)
    assert len(names_on_disk(cache)) == 3 * len(names_of_alice), (
        "two tenants' blocks of one text are twice as many blocks"
    )
    # Each tenant finds its own blocks, so the counts above would show a hit.
    for key in (ALICE, BOB):
        hit, found = work_of(server, key, asked)
        assert hit == found[MEMORY_HIT_TOKENS] == HIT_TOKENS
        assert found[MISS_TOKENS] == NUM_TOKENS - HIT_TOKENS


def test_names_of_tenants_have_nothing_in_common() -> None:
    """One prompt's names are different for all salts, in whole and in the halves that summaries store."""
    prompt = Random(3).choices(range(2000), k=640)
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
    """Send a chat; return the reply's usage."""
    body = {
        "model": model_of(server, ALICE),
        "temperature": 0,
        "max_tokens": 8,
        "cache_salt": cache_salt,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
    }
    url = f"{server.url}/v1/chat/completions"
    reply = httpx.post(url, json=body, headers=header(key), timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    usage: dict[str, int] = reply.json()["usage"]
    return usage


@pytest.mark.promise(
    '"cache_salt": "public" shares the KV of a chat\'s leading system messages, in '
    "whole blocks, with all tenants that send the same messages and the same field"
)
def test_a_public_system_prompt_is_shared(server: Server) -> None:
    """Blocks of the system prompt are shared; blocks of the user's message are not."""
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
    # Without the field, only the tenant itself finds its blocks.
    private = chat(server, BOB, system, question, None)
    assert private["prompt_cache_hit_tokens"] == 0
    assert chat(server, BOB, system, question, None)["prompt_cache_hit_tokens"] > 0
    assert chat(server, ALICE, system, question, None)["prompt_cache_hit_tokens"] == 0
