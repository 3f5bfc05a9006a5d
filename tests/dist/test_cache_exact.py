"""The KV cache changes when a token arrives, never which one: greedy answers equal the plain
loop's, wherever KV came from.

Tested: cache off, in memory, on disk, both, after restarts, under eviction, with every KV transport,
for one rank and for two; most cases only at `HADAL_LEVEL=all`. The cache must also be used: the
cached tokens in a reply's usage equal the found blocks and the sums of the metrics.
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
    STORED_BLOCKS,
)
from tests.dist.cached import cache_fields, counts, num_on_disk, settle, wait_found
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
from tests.dist.serving import Server, StartServer, metric
from tests.fresh import fresh
from tests.levels import LEVEL
from tests.needs import leave_out

FEW = LEVEL == "test"
NUM_CHATS, NUM_FRESH, NUM_TURNS = (75, 15, 4) if FULL else (3, 1, 3) if FEW else (6, 2, 4)
"""Chats, chats among them with a fresh seed, and turns per chat."""
NUM_PAIRS = 4 if FULL else 2


@dataclass(frozen=True)
class Setup:
    """One way to serve."""

    memory: bool = True
    disk: bool = True
    disk_mb: int = 256
    is_storm: bool = False
    """True if capacity is too small for the load, so that blocks are evicted."""
    fields: dict[str, Any] = field(default_factory=dict)


def ranks(number: int) -> dict[str, Any]:
    """Return fields of [prefill] or [decode]."""
    return {"ranks": number, "kv_memory_mb": 32, "max_requests": 16}


TWO_RANKS = {"prefill": ranks(2), "decode": ranks(2), "chunk_tokens": 64}
FEW_BLOCKS = {"kv_blocks": 1 + 14, "kv_memory_mb": 0}
STORM = {"prefill": FEW_BLOCKS, "decode": FEW_BLOCKS}
SETUPS = {
    "both_small_chunks": Setup(fields={"chunk_tokens": 64}),
    "storm": Setup(disk_mb=1, is_storm=True, fields=STORM),
    "tcp_two_ranks": Setup(fields={"handover": "tcp", **TWO_RANKS}),
    "off": Setup(memory=False, disk=False),
    "memory": Setup(disk=False),
    "disk": Setup(memory=False),
    "both": Setup(),
    "shm": Setup(fields={"handover": "shm", "chunk_tokens": 64}),
    "tcp": Setup(fields={"handover": "tcp", "chunk_tokens": 64}),
    "nixl": Setup(fields={"handover": "nixl", "chunk_tokens": 64}),
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
            "prefill": {**ranks(2), **FEW_BLOCKS},
            "decode": {**ranks(2), **FEW_BLOCKS},
            "chunk_tokens": 64,
        },
    ),
}
IN_TEST, IN_MORE = "both_small_chunks", ("storm", "tcp_two_ranks")


def setups() -> list[Any]:
    """Return all ways to serve, with the marks of their levels."""
    more = pytest.mark.more("evictions, TCP and ranks; one rank with both places is in `make test`")
    marks = {IN_TEST: (), **dict.fromkeys(IN_MORE, more)}
    return [pytest.param(name, marks=marks.get(name, pytest.mark.full)) for name in SETUPS]


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    """Return fixed and fresh chats; the fresh seed is printed if a test fails."""
    seed = fresh().randrange(2**31)
    print(f"fresh chats: seed {seed}")
    own = ChatMaker(seed).chats(NUM_FRESH, NUM_TURNS)
    return everyday_chats(NUM_CHATS - NUM_FRESH, seed=7, num_turns=NUM_TURNS) + own


def possible(chats: list[Chat]) -> int:
    """Return the prompt tokens that a cache finds if it has the blocks of all these chats' prompts."""
    named = Named()
    for chat in chats:
        for case in chat:
            named.add(case.prompt)
    return sum(named.hit(case.prompt) for chat in chats for case in chat)


def on_disk(server: Server, folder: Path, chats: list[Chat]) -> int:
    """Return the tokens of all prompts found if every block on disk can be found."""
    return num_on_disk(server, folder, (case.prompt for chat in chats for case in chat))


def check_books(server: Server, rounds: list[list[list[Answer]]]) -> None:
    """Assert that usage and metrics agree. Skipped after retries, since units count attempts."""
    seen = settle(server)
    answers = [
        answer for round_answers in rounds for replies in round_answers for answer in replies
    ]
    if not metric(server, "hadal_retries_total"):
        found = sum(answer.hit for answer in answers)
        assert seen[MEMORY_HIT_TOKENS] + seen[DISK_HIT_TOKENS] == found
        assert seen[MISS_TOKENS] == sum(answer.miss for answer in answers)


@pytest.mark.promise(
    "With a cache folder, blocks that fill go to disk, so that the next turn finds them."
)
@pytest.mark.slow("rounds of chats, one of them after a restart")
@pytest.mark.parametrize("name", setups())
def test_answers_are_the_plain_loops(
    start_server: StartServer, chats: list[Chat], folder: Path, name: str
) -> None:
    setup = SETUPS[name]
    if setup.fields.get("handover") == "nixl" and importlib.util.find_spec("nixl_cu13") is None:
        leave_out("NIXL is not installed", "pip install nixl-cu13")
    cache = cache_fields(folder if setup.disk else None, memory=setup.memory, disk_mb=setup.disk_mb)
    server = start_server(**cache, **setup.fields)
    has_all = setup.disk and not setup.is_storm
    pairs = check_next_turns(server, folder, chats) if has_all else []
    first = talk(server.url, server.model, chats)
    assert wrong(chats, first) == []
    before = settle(server)
    if has_all:
        wait_found(server, folder)
    # Blocks that were not written (evicted first, or the disk fell behind) are not found.
    least = on_disk(server, folder, chats) if has_all else 0
    again = talk(server.url, server.model, chats)
    assert wrong(chats, again) == []
    print(f"{name}: {num_hit(first)} tokens found, then {num_hit(again)} of {possible(chats)}")
    if not (setup.memory or setup.disk):
        assert num_hit(first) == num_hit(again) == 0
        assert {total for total, count in counts(server).items() if count} == {MISS_TOKENS}
        return
    if setup.is_storm:
        assert settle(server)[EVICTED_BLOCKS] > 0 or not setup.memory, (
            "there was room for all; this test shows nothing"
        )
    else:
        check_books(server, [pairs, first, again])
        # One pool has every earlier token; with several, a chat may reach a unit with fewer of its
        # blocks.
        if setup.memory and "ranks" not in name and "units" not in name:
            assert num_hit(first) > 0
            least = possible(chats)
        assert num_hit(again) >= max(1, least)
    assert before[STORED_BLOCKS] > 0 or not setup.disk
    if setup.disk and (FULL or name == IN_TEST):
        assert server.stop() == 0
        check_restarted(start_server(**cache, **setup.fields), folder, chats, setup)


def check_next_turns(server: Server, folder: Path, chats: list[Chat]) -> list[list[Answer]]:
    """Assert that blocks filled by decode reach the next turn through the disk. Return the answers."""
    pairs = grown(chats)[:NUM_PAIRS]
    assert pairs, "no chat has what this test is about"
    named, answers = Named(), []
    for before, after in pairs:
        [[first]] = talk(server.url, server.model, [[before]])
        named.add(with_kv(before))
        settle(server)
        wait_found(server, folder)
        [[answer]] = talk(server.url, server.model, [[after]])
        answers.append([first, answer])
        assert answer.hit == named.hit(after.prompt)
        named.add(with_kv(after))
    assert wrong([list(pair) for pair in pairs], answers) == []
    return answers


def check_restarted(server: Server, folder: Path, chats: list[Chat], setup: Setup) -> None:
    """Assert that a new server finds the old one's blocks on disk."""
    wait_found(server, folder)
    least = 0 if setup.is_storm else max(1, on_disk(server, folder, chats))
    answers = talk(server.url, server.model, chats)
    assert wrong(chats, answers) == []
    seen = settle(server)
    print(f"after a restart: {num_hit(answers)} tokens found of {possible(chats)}, {seen}")
    assert num_hit(answers) >= least
    assert setup.is_storm or seen[DISK_HIT_TOKENS] > 0


def grown(chats: list[Chat]) -> list[tuple[Case, Case]]:
    """Return turns that filled a block with generated text, each with the next turn, which can find it."""
    found = []
    for chat in chats:
        for before, after in itertools.pairwise(chat):
            prompts, texts = Named(), Named()
            prompts.add(before.prompt)
            texts.add(with_kv(before))
            if texts.hit(after.prompt) > prompts.hit(after.prompt):
                found.append((before, after))
    return found


def test_the_test_can_fail(chats: list[Chat]) -> None:
    """A changed token and a wrong count are detected."""
    answers = [[Answer(case.output, 0, len(case.prompt)) for case in chat] for chat in chats]
    assert wrong(chats, answers) == []
    case = chats[0][1]
    answers[0][1] = Answer((*case.output[:-1], case.output[-1] + 1), 0, len(case.prompt))
    answers[1][0] = Answer(chats[1][0].output, 32, len(chats[1][0].prompt))
    assert len(wrong(chats, answers)) == 3
