"""Deliveries of several choices, taken together."""

from __future__ import annotations

import asyncio

from hadal.core.messages.generation import Closing, Deliver
from hadal.gateway.desk.mailbox import MAX_WAITING, Mailbox


def mailbox() -> Mailbox:
    made = Mailbox(asyncio.get_running_loop())
    made.open_ids.update({"a": 0, "b": 1})
    return made


async def test_all_that_came_is_taken_at_once() -> None:
    box = mailbox()
    first, second, last = Deliver("b", ()), Deliver("a", ()), Deliver("b", (), True)
    waiting = asyncio.create_task(box.take(5))
    await asyncio.sleep(0)
    for deliver in (first, second, last, Deliver("b", ()), Deliver("other", ())):
        box.put(deliver)  # Ignored: what follows a choice's last one, and other requests.
    assert await waiting == [(1, first), (0, second), (1, last)]
    assert box.open_ids == {"a": 0}


async def test_where_a_request_was_worked_on_is_known_although_nobody_takes_its_end() -> None:
    box = mailbox()
    closing = Closing("prefill-0", "decode-1", 2)
    del box.open_ids["a"]  # As Host.cancel does.
    box.put(Deliver("a", (), True, "cancelled", 499, closing=closing))
    assert box.closings == {"a": closing}
    assert await box.take(0.0) == []


async def test_waiting_ends() -> None:
    box = mailbox()
    assert await box.take(0.01) == []
    waiting = asyncio.create_task(box.take(5))
    await asyncio.sleep(0)
    box.leave()
    assert await waiting == []
    assert box.gone
    assert await box.take(5) == []


async def test_a_box_that_is_not_taken_from_is_full_by_its_choices() -> None:
    closed: list[Mailbox] = []
    for num_choices, most in ((1, MAX_WAITING), (8, MAX_WAITING), (64, 8 * MAX_WAITING)):
        closed.clear()
        box = Mailbox(
            asyncio.get_running_loop(),
            num_choices=num_choices,
            close=lambda full, then: closed.append(full),
        )
        box.open_ids["a"] = 0
        for _ in range(most - 1):
            box.put(Deliver("a", ()))
        assert not box.gone
        for _ in range(9):
            box.put(Deliver("a", ()))
        assert closed == [], "not while the front's effects are applied"
        await asyncio.sleep(0)
        assert box.gone
        assert closed == [box]
