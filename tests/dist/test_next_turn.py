"""The next turn finds all full blocks of the last answer in memory by default, and its tokens are
the plain loop's.

The servers are shared with other tests; a salt per chat separates its blocks from theirs.
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
"""Deployments by name; RANKED has two prefill ranks and four decode ranks."""


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    return everyday_chats(NUM_CHATS, seed=7, num_turns=NUM_TURNS)


@pytest.mark.promise("a chat's next turn computes only its new text")
@pytest.mark.parametrize(
    "name",
    [
        "ranks",
        pytest.param("one_rank", marks=pytest.mark.more("several ranks are one case")),
        pytest.param("tcp", marks=pytest.mark.more("hand-over by TCP")),
    ],
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
    """Run a chat's turns one by one, each after the blocks of the last one were copied."""

    async def turn(case: Case) -> Answer:
        async with client_for(server.url, 1) as client:
            return await ask(client, server.model, case, cache_salt=salt)

    answers = []
    for case in chat:
        answers.append(asyncio.run(turn(case)))
        settled(server)
    return answers


def settled(server: Server) -> None:
    """Settle twice: decode's reports before the first audit have reached prefill before the second."""
    settle(server)
    settle(server)


def possible(chat: Chat, *, is_answer_kept: bool = True) -> list[int]:
    """Return how many tokens of each turn's prompt are found if no block of the chat was lost."""
    named, found = Named(), []
    for case in chat:
        found.append(named.hit(case.prompt))
        named.add(with_kv(case) if is_answer_kept else case.prompt)
    return found
