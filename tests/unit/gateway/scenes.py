"""Helpers for tests of a whole gateway: start one, send requests, and read its replies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from hadal.gateway.desk.reply import Reply
from hadal.gateway.desk.service import ServedModel

from .world import World, spell, world

TEXT = "Easy.</think>\n\nThe answer is 4. 🙂"


@asynccontextmanager
async def scene(
    model: ServedModel, text: str = TEXT, *, then_stop: bool = True, **options: Any
) -> AsyncIterator[World]:
    """Yield a fresh world, and wait at the end of the block until no request is open in it."""
    async with world(model, spell(model, text, then_stop=then_stop), **options) as it:
        yield it
        await it.settle()


def sent_by_replies(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list to which each piece of every reply is added as soon as it is sent."""
    pieces: list[bytes] = []
    plain_send = Reply._send

    async def send(reply: Reply, to: Any, data: bytes, *, more: bool = True) -> None:
        await plain_send(reply, to, data, more=more)
        pieces.append(data)

    monkeypatch.setattr(Reply, "_send", send)
    return pieces


def events(reply: httpx.Response) -> list[Any]:
    """Return the JSON of a stream's events; the last must be [DONE]."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(reply: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    fields = reply.json()
    assert set(fields) == {"error"}
    error = fields["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if code is not None:
        assert error["code"] == code
    return error
