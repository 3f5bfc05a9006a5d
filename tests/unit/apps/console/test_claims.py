"""Claims on a conversation: one page at a time gets an answer in it."""

from __future__ import annotations

import asyncio

from hadal.apps.console.claims import Claims
from tests.waiting import DEADLINE_S

PAGE, OTHER = "page", "other"


async def test_only_the_page_that_gets_an_answer_may_ask() -> None:
    claims = Claims()
    claims.take("a", PAGE)
    assert [await claims.may_ask("a", page) for page in (PAGE, OTHER)] == [True, False]
    assert await claims.may_ask("b", OTHER)


async def test_an_answer_that_has_ended_is_waited_for() -> None:
    claims = Claims()
    claim = claims.take("a", PAGE)
    claim.is_over = True
    waiting = asyncio.create_task(claims.may_ask("a", OTHER))
    await asyncio.sleep(0)
    assert not waiting.done()
    claims.release("a", claim)
    assert await asyncio.wait_for(waiting, DEADLINE_S)


async def test_a_page_that_asks_again_keeps_others_out() -> None:
    claims = Claims()
    first = claims.take("a", PAGE)
    first.is_over = True
    waiting = asyncio.create_task(claims.may_ask("a", OTHER))
    await asyncio.sleep(0)
    claims.take("a", PAGE)
    claims.release("a", first)
    assert not await asyncio.wait_for(waiting, DEADLINE_S)
