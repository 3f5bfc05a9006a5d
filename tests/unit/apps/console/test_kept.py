"""Conversations that a browser stores, read by a page."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from nicegui import Client

from hadal.apps.console.conversation import Conversation, to_json
from hadal.apps.console.kept import KeptChats


class SlowBrowser:
    """Browser that answers when the test sets `answer`: with a conversation, or with an error."""

    def __init__(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()

    async def run_javascript(self, code: str, *, timeout: float) -> Any:
        return await self.answer


@pytest.mark.parametrize("comes", [True, False])
async def test_who_asks_while_a_conversation_is_opened_learns_whether_it_came(comes: bool) -> None:
    browser = SlowBrowser()
    kept = KeptChats(cast("Client", browser))
    found: list[Conversation | None] = []
    opening = asyncio.create_task(kept.open("a", found.append))
    await asyncio.sleep(0)
    opened = asyncio.create_task(kept.opened())
    await asyncio.sleep(0)
    assert not opened.done()
    if comes:
        text = to_json(Conversation("a", "sum"))
        browser.answer.set_result((text, len(text), True))
        await opening
    else:
        browser.answer.set_exception(TimeoutError())
        with pytest.raises(TimeoutError):
            await opening
    assert await opened is comes
    assert [one.title for one in found if one] == ["sum"] * comes
    assert await kept.opened(), "what comes next is not its fault"
