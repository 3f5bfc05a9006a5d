"""The KV cache changes when a token comes, never which: greedy answers are the plain loop's
wherever KV came from.

Off, in memory, on disk, both, after restarts, under eviction, by every hand-over, for one rank and
for two. And it is really used: what a reply's usage says was cached is what the blocks say, and
what the metrics add up to.
"""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hadal.core.cache import (
    DISK_HIT_TOKENS,
    EVICTED_BLOCKS,
    MEMORY_HIT_TOKENS,
    MISS_TOKENS,
    RECOMPUTED_TOKENS,
    STORED_BLOCKS,
)
from tests.dist.cached import audit, cache_fields, counts, settle
from tests.dist.chats import (
    Answer,
    Chat,
    ChatMaker,
    Named,
    everyday_chats,
    num_hit,
    talk,
    with_kv,
    wrong,
)
from tests.dist.oracle import FULL, Case
from tests.dist.serving import Server, StartServer
from tests.fresh import fresh

NUM_CHATS = 75 if FULL else 6
"""Of four turns."""
NUM_FRESH = 15 if FULL else 2
"""Of those, with a fresh seed."""
NUM_PAIRS = 4 if FULL else 2
MIN_DISK_SHARE = 0.8
"""Of what is on disk, that is found: the rest was skipped while the disk was behind."""


@dataclass(frozen=True)
class Setup:
    """A way to serve."""

    memory: bool = True
    disk: bool = True
    disk_mb: int = 256
    is_storm: bool = False
    """Too little room for what is asked."""
    fields: dict[str, Any] = field(default_factory=dict)


def ranks(number: int) -> dict[str, Any]:
    """Fields of [prefill] or [decode]."""
    return {"ranks": number, "kv_memory_mb": 32, "max_requests": 16}


TWO_RANKS = {"prefill": ranks(2), "decode": ranks(2), "chunk_tokens": 64}
STORM = {
    "prefill": {"kv_blocks": 1 + 14, "kv_memory_mb": 0},
    "decode": {"kv_blocks": 1 + 14, "kv_memory_mb": 0},
}
EVERYDAY = {
    "off": Setup(memory=False, disk=False),
    "memory": Setup(disk=False),
    "disk": Setup(memory=False),
    "both_small_chunks": Setup(fields={"chunk_tokens": 64}),
    "storm": Setup(disk_mb=1, is_storm=True, fields=STORM),
    "tcp_two_ranks": Setup(fields={"handover": "tcp", **TWO_RANKS}),
}
MORE = {
    "both": Setup(),
    "shm": Setup(fields={"handover": "shm", "chunk_tokens": 64}),
    "tcp": Setup(fields={"handover": "tcp", "chunk_tokens": 64}),
    "nixl": Setup(fields={"handover": "nixl", "chunk_tokens": 64}),
    "no_early_pull": Setup(fields={"early_pull": "off", "chunk_tokens": 64}),
    "memory_two_ranks": Setup(disk=False, fields=TWO_RANKS),
    "disk_two_ranks": Setup(memory=False, fields=TWO_RANKS),
    "nixl_two_ranks": Setup(fields={"handover": "nixl", **TWO_RANKS}),
    "two_units": Setup(
        fields={"prefill": {"units": 2}, "decode": {"units": 2}, "chunk_tokens": 64}
    ),
    "storm_in_memory": Setup(disk=False, is_storm=True, fields=STORM),
    "storm_on_disk": Setup(memory=False, disk_mb=1, is_storm=True, fields=STORM),
    "storm_two_ranks": Setup(
        disk_mb=1,
        is_storm=True,
        fields={
            "prefill": {**ranks(2), "kv_blocks": 1 + 14, "kv_memory_mb": 0},
            "decode": {**ranks(2), "kv_blocks": 1 + 14, "kv_memory_mb": 0},
            "chunk_tokens": 64,
        },
    ),
}
SETUPS = {**EVERYDAY, **MORE} if FULL else EVERYDAY


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    """Fixed chats and fresh ones; the fresh seed is printed when a test fails."""
    seed = fresh().randrange(2**31)
    print(f"fresh chats: seed {seed}")
    return everyday_chats(NUM_CHATS - NUM_FRESH, seed=7) + ChatMaker(seed).chats(NUM_FRESH)


def possible(chats: list[Chat]) -> int:
    """Tokens that can be hit if all of these were asked before."""
    named = Named()
    for chat in chats:
        for case in chat:
            named.add(case.prompt)
    return sum(named.hit(case.prompt) for chat in chats for case in chat)


def check_books(server: Server, rounds: list[list[list[Answer]]]) -> None:
    """Usage and metrics say the same. Only where no attempt was made twice: units count
    attempts.
    """
    seen = settle(server)
    answers = [
        answer for round_answers in rounds for replies in round_answers for answer in replies
    ]
    assert seen[MEMORY_HIT_TOKENS] + seen[DISK_HIT_TOKENS] == sum(answer.hit for answer in answers)
    assert seen[MISS_TOKENS] == sum(answer.miss for answer in answers)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SETUPS)
def test_answers_are_the_plain_loops(
    start_server: StartServer, chats: list[Chat], folder: Path, name: str
) -> None:
    setup = SETUPS[name]
    if setup.fields.get("handover") == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        pytest.skip("NIXL is not installed")
    cache = cache_fields(folder if setup.disk else None, memory=setup.memory, disk_mb=setup.disk_mb)
    server = start_server(**cache, **setup.fields)
    first = talk(server.url, server.model, chats)
    assert wrong(chats, first) == []
    before = settle(server)
    again = talk(server.url, server.model, chats)
    assert wrong(chats, again) == []
    shares = [num_hit(answers) / possible(chats) for answers in (first, again)]
    print(
        f"{name}: {shares[0]:.3f} of what all blocks would give in the first round, {shares[1]:.3f}"
        " in the second"
    )
    if not (setup.memory or setup.disk):
        assert num_hit(first) == num_hit(again) == 0
        assert {total for total, count in counts(server).items() if count} == {MISS_TOKENS}
        return
    assert num_hit(first) > 0
    assert num_hit(again) > 0
    if setup.is_storm:
        assert counts(server)[EVICTED_BLOCKS] > 0 or not setup.memory, (
            "there was room for all; this test shows nothing"
        )
    else:
        check_books(server, [first, again])
        # One pool has all that was ever said; with several a chat may go where less of it is.
        has_one_pool = setup.memory and "ranks" not in name and "units" not in name
        share = shares[1] + counts(server)[RECOMPUTED_TOKENS] / possible(chats)
        assert share >= (1.0 if has_one_pool else MIN_DISK_SHARE)
    audit(server)
    if setup.disk:
        assert before[STORED_BLOCKS] > 0
        check_restart(start_server, server, chats, cache, setup)


def check_restart(
    start_server: StartServer,
    server: Server,
    chats: list[Chat],
    cache: dict[str, Any],
    setup: Setup,
) -> None:
    """A new server finds on disk what the old one left there."""
    settle(server)
    assert server.stop() == 0
    server = start_server(**cache, **setup.fields)
    answers = talk(server.url, server.model, chats)
    assert wrong(chats, answers) == []
    seen = settle(server)
    assert seen[DISK_HIT_TOKENS] > 0
    share = (num_hit(answers) + seen[RECOMPUTED_TOKENS]) / possible(chats)
    print(f"after a restart: {share:.3f} of what all blocks would give was found, {seen}")
    assert setup.is_storm or share >= MIN_DISK_SHARE
    audit(server)


def grown(chats: list[Chat]) -> list[tuple[Case, Case]]:
    """Turns that filled a block with generated text, each with the next turn, which can find it."""
    found = []
    for chat in chats:
        for before, after in itertools.pairwise(chat):
            prompts, texts = Named(), Named()
            prompts.add(before.prompt)
            texts.add(with_kv(before))
            if texts.hit(after.prompt) > prompts.hit(after.prompt):
                found.append((before, after))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "disk"])
def test_the_next_turn_finds_the_answer(
    start_server: StartServer, chats: list[Chat], folder: Path, memory: bool
) -> None:
    """Blocks that decode filled reach the next turn through the disk."""
    pairs = grown(chats)[:NUM_PAIRS]
    assert pairs, "no chat has what this test is about"
    server = start_server(**cache_fields(folder, memory=memory))
    named = Named()
    for before, after in pairs:
        [[first]] = talk(server.url, server.model, [[before]])
        named.add(with_kv(before))
        settle(server)
        [[answer]] = talk(server.url, server.model, [[after]])
        assert wrong([[before, after]], [[first, answer]]) == []
        assert answer.hit == named.hit(after.prompt)
        named.add(with_kv(after))


def test_the_test_can_fail(chats: list[Chat]) -> None:
    """A changed token and a wrong count are seen."""
    answers = [[Answer(case.output, 0, len(case.prompt)) for case in chat] for chat in chats]
    assert wrong(chats, answers) == []
    case = chats[0][1]
    answers[0][1] = Answer((*case.output[:-1], case.output[-1] + 1), 0, len(case.prompt))
    answers[1][0] = Answer(chats[1][0].output, 32, len(chats[1][0].prompt))
    assert len(wrong(chats, answers)) == 3
