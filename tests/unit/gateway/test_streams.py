"""Streams that run without tasks of their own: their pushes, timers and ends."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx
import pytest

from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.connection import GatewayProtocol
from hadal.gateway.edge.streams import Streams
from tests.waiting import DEADLINE_S, wait_for

from .scenes import events
from .serving import serving
from .world import CHAT, Clock, spell

WORDS = " ".join(str(number) for number in range(700))


class Counted:
    """Stream that counts the calls of its methods."""

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.num_pushes = self.num_late = 0

    def push(self) -> None:
        self.num_pushes += 1

    def late(self) -> None:
        self.num_late += 1


async def test_streams_are_pushed_in_one_go_and_not_after_they_left() -> None:
    streams = Streams(Clock())
    one, other = Counted(2000.0), Counted(2000.0)
    for stream in (one, other):
        streams.join(stream)
        streams.ready(stream)
    assert one.num_pushes == 0, "not while what it tells is being decided"
    streams.leave(other)
    await asyncio.sleep(0)
    assert (one.num_pushes, other.num_pushes) == (1, 0)


async def test_each_stream_is_late_at_its_own_time() -> None:
    """A stream is not late once its deadline has moved. The stream that is due first joined last."""
    clock = Clock(1000.0)
    streams = Streams(clock)
    late, moved, soon = Counted(1000.1), Counted(1000.05), Counted(1000.02)
    for stream in (late, moved, soon):
        streams.join(stream)
    moved.due_s = 1060.0
    clock.now_s = 1000.06
    await wait_for(lambda: soon.num_late, "the first is late")
    assert (soon.num_late, moved.num_late, late.num_late) == (1, 0, 0)
    clock.now_s = 1000.1
    await wait_for(lambda: late.num_late, "the last is late")
    assert (soon.num_late, moved.num_late, late.num_late) == (1, 0, 1)


def test_what_a_connection_refuses_is_sent_by_the_task(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third write is refused, as if the connection's buffer were full."""
    plain, num_writes = GatewayProtocol._write, itertools.count()

    def write(protocol: GatewayProtocol, cycle: Any, data: bytes) -> bool:
        return next(num_writes) % 3 != 0 and plain(protocol, cycle, data)

    monkeypatch.setattr(GatewayProtocol, "_write", write)
    with serving(model, spell(model, WORDS)) as gateway:
        body = {**CHAT, "stream": True, "max_tokens": 3900}
        reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=DEADLINE_S)
    deltas = [event["choices"][0]["delta"] for event in events(reply)]
    parts = [(each["reasoning_content"] or "") + (each["content"] or "") for each in deltas]
    assert "".join(parts) == WORDS
    assert next(num_writes) > 10
