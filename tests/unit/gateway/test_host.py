"""The host between a real front and units that fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from hadal.core.config import LimitsConfig
from hadal.core.messages.generation import Generation
from hadal.core.messages.requests import Ticket
from hadal.core.messages.units import Drain, UnitDown, UnitReport, UnitUp
from hadal.core.plans import PrefillPlan, Sampling
from hadal.core.seams import Effect, Event, Execute
from hadal.gateway.desk.host import Host
from hadal.gateway.desk.service import ServedModel
from tests.waiting import wait_for

from .fake_units import MAX_REQUESTS, NUM_BLOCKS
from .world import Clock, World, spell, world

TEXT = "The answer is four. To add two numbers, write them below each other."
COMPLETION = {"model": "small", "prompt": "2 + 2?", "stream": True}


async def ask(it: World, **fields: Any) -> httpx.Response:
    return await it.client.post("/v1/completions", json=COMPLETION | fields)


def text_of(stream: str) -> str:
    lines = [
        line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: {")
    ]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


@pytest.mark.promise(
    "Each attempt on that unit goes to RETRYING, is prefilled elsewhere with the "
    "tokens already streamed, and its stream continues."
)
@pytest.mark.parametrize("unit", ["prefill-0", "decode-0"])
async def test_lost_unit_is_not_seen_in_the_stream(model: ServedModel, unit: str) -> None:
    """A unit dies in mid-stream and a new one starts: the stream goes on with every token once."""

    async def lose_it(it: World) -> None:
        await it.units.hold(6)
        it.units.let_go()
        it.units.prefilling.clear()
        if unit == "decode-0":
            it.units.decoding.clear()
        it.units.tell(UnitDown(unit, "killed"))
        role = unit.partition("-")[0]
        await wait_for(lambda: not it.gateway.link.snapshot().role_to_units[role], "it is missed")
        it.units.tell(UnitUp(unit, role, "second", NUM_BLOCKS, MAX_REQUESTS))

    async with world(model, spell(model, TEXT), step_s=0.002) as it:
        losing = asyncio.create_task(lose_it(it))
        reply = await ask(it)
        await losing
        assert text_of(reply.text) == TEXT
        await it.settle()
        if unit == "decode-0":
            # While no decode unit is up, the request may be prefilled more than once.
            assert [generation.attempt for generation in it.units.submitted][:2] == [0, 1]
            assert it.units.submitted[1].output


async def test_unit_that_never_comes_back(model: ServedModel) -> None:
    clock = Clock()
    limits = LimitsConfig(request_timeout_s=60.0)
    script = spell(model, "a", then_stop=False)
    async with world(model, script, limits=limits, now=clock) as it:
        asking = asyncio.create_task(ask(it, max_tokens=4000))
        await it.units.hold(1)
        it.units.decoding.clear()
        it.units.tell(UnitDown("decode-0", "killed"))
        await wait_for(lambda: not it.gateway.link.snapshot().can_serve, "it is missed")
        clock.now_s += 100
        reply = await asking
        # The stream has begun, so the error is an event, and the last one.
        last = reply.text.rstrip().rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "overloaded_error"
        await it.settle()


async def test_drain_message(model: ServedModel) -> None:
    async with world(model, spell(model, "a")) as it:
        it.units.tell(Drain())
        await it.gateway.link.wait_draining()
        assert (await ask(it)).status_code == 503


class _Broken:
    """Front that fails at the first message, or returns effects that no front may return."""

    def __init__(self, effects: list[Effect] | None) -> None:
        self.effects = effects

    def start(self, now_s: float) -> list[Effect]:
        return []

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        if self.effects is None:
            raise RuntimeError("a bug")
        return self.effects


class _OneMessage:
    """Wire on which one message arrives, then none."""

    def __init__(self) -> None:
        self.messages: list[Any] = [UnitReport("decode-0", "e", 1, 0, 0, 1, 0)]

    def send(self, to: str, message: Any) -> None:
        raise AssertionError("nothing is sent here")

    async def receive_async(self) -> list[Any]:
        if not self.messages:
            await asyncio.sleep(3600)
        messages, self.messages = self.messages, []
        return messages


@pytest.mark.parametrize(
    ("effects", "error"), [(None, RuntimeError), ([Execute((PrefillPlan(0, ()),))], TypeError)]
)
async def test_bug_of_the_front_ends_the_host(
    effects: list[Effect] | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await asyncio.create_task(Host(_Broken(effects), _OneMessage(), lambda: 0.0).run())


async def test_bug_at_a_request_ends_the_host_too() -> None:
    """The host ends at once, not at the next message: here none ever arrives."""
    wire = _OneMessage()
    wire.messages = []
    host = Host(_Broken(None), wire, lambda: 0.0)
    running = asyncio.create_task(host.run())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError):
        host.open([Generation("r", (1,), (), 1, (), 0, Sampling(), 0)], Ticket(True))
    with pytest.raises(RuntimeError):
        await running


@pytest.mark.parametrize("n", [1, 2])
async def test_choices_are_admitted_together_where_none_may_queue(
    model: ServedModel, n: int
) -> None:
    """The first choice takes capacity; the second choice of the same request is admitted anyway."""
    limits = LimitsConfig(max_queued=0)
    async with world(model, spell(model, "abc"), limits=limits) as it:
        reply = await it.chat(n=n)
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["choices"]) == n
        await it.settle()
