"""The next turn finds the last answer in memory, by default: all full blocks of it, and its tokens are the
plain loop's.

The servers are those that other tests use; a salt of its own keeps each chat apart from all they asked.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hadal.core.cache import MEMORY_HIT_TOKENS
from tests.dist.cached import counts, settle
from tests.dist.chats import Answer, Chat, Named, ask, client_for, everyday_chats, with_kv, wrong
from tests.dist.oracle import Case
from tests.dist.serving import RANKED, Server, StartServer
from tests.fresh import fresh

NUM_CHATS, NUM_TURNS = 3, 3
DEPLOYMENTS: dict[str, Any] = {"one_rank": {}, "ranks": RANKED, "tcp": {"handover": "tcp"}}
"""Ranks: two of prefill, four of decode."""


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    return everyday_chats(NUM_CHATS, seed=7, num_turns=NUM_TURNS)


@pytest.mark.promise("a chat's next turn computes what is new in it")
@pytest.mark.parametrize(
    "name", ["one_rank", "ranks", pytest.param("tcp", marks=pytest.mark.more("hand-over by TCP"))]
)
def test_the_next_turn_finds_the_last_answer(
    borrow: StartServer, chats: list[Chat], name: str
) -> None:
    server = borrow(**DEPLOYMENTS[name])
    settled(server)
    before = counts(server)
    answers = [hold(server, chat, f"next turn {fresh().getrandbits(64)}") for chat in chats]
    assert wrong(chats, answers) == []
    expected = [possible(chat) for chat in chats]
    assert [[answer.hit for answer in of_chat] for of_chat in answers] == expected
    assert sum(map(sum, expected)) > sum(
        sum(possible(chat, is_answer_kept=False)) for chat in chats
    )
    hit = sum(map(sum, expected))
    assert counts(server)[MEMORY_HIT_TOKENS] - before[MEMORY_HIT_TOKENS] == hit


def hold(server: Server, chat: Chat, salt: str) -> list[Answer]:
    """One turn after the other, each when all that the last one left has been copied."""

    async def turn(case: Case) -> Answer:
        async with client_for(server.url, 1) as client:
            return await ask(client, server.model, case, cache_salt=salt)

    answers = []
    for case in chat:
        answers.append(asyncio.run(turn(case)))
        settled(server)
    return answers


def settled(server: Server) -> None:
    """Twice: what decode said before it answered the first audit has reached prefill before the second."""
    settle(server)
    settle(server)


def possible(chat: Chat, *, is_answer_kept: bool = True) -> list[int]:
    """Return the tokens of each turn's prompt that are found if nothing of the chat was lost."""
    named, found = Named(), []
    for case in chat:
        found.append(named.hit(case.prompt))
        named.add(with_kv(case) if is_answer_kept else case.prompt)
    return found
