"""Two gateways: requests go to the one without the front, while a real front ends and restarts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from hadal.core.config import Deployment, LimitsConfig
from hadal.core.messages.base import FRONT, SUPERVISOR
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.gateways import Delivered, GatewayHeartbeat
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.messages.requests import Quota, Ticket
from hadal.core.messages.units import Drain, Returned, UnitDown
from hadal.core.plans import Sampling
from hadal.gateway.app import make_app
from hadal.gateway.desk import far_host, reply
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.far_host import ATTEMPTS_OF_A_FRONT, FarHost, _ticket_of
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.host import Host
from hadal.gateway.desk.link import FrontLink
from hadal.gateway.desk.salts import EVERYONE
from hadal.gateway.desk.service import ServedModel, Service
from hadal.roles.front.front import Front
from hadal.roles.front.names import FrontNames
from hadal.roles.reasons import QUEUE_FULL
from tests.waiting import DEADLINE_S, unix_now, wait_for

from .fake_units import UNIT_TIMEOUT_S, FakeUnits, Script
from .parts import gateway_with
from .test_host import text_of
from .world import spell

NAME = "gateway-1"
TEXT = "The answer is four. To add two numbers, write them below each other."
COMPLETION = {
    "model": "small",
    "prompt": "2 + 2? " * 40,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class _Units(FakeUnits):
    """Units of one run of the front, and its wire: messages to the other gateway go to `far`."""

    def __init__(self, script: Script, step_s: float, far: _FarWire) -> None:
        super().__init__(script, step_s)
        self.far = far

    def send(self, to: str, message: AnyMessage) -> None:
        if to == NAME:
            self.far.put(message)
        else:
            super().send(to, message)


class _FarWire:
    """Wire of the gateway without the front. Messages to a missing front are lost."""

    def __init__(self) -> None:
        self.front: _Units | None = None
        self.lost: set[type[AnyMessage]] = set()
        self.num_lost = 0
        self._inbox: asyncio.Queue[AnyMessage] = asyncio.Queue()

    def put(self, message: AnyMessage) -> None:
        if type(message) in self.lost:
            self.num_lost += 1
        else:
            self._inbox.put_nowait(message)

    def send(self, to: str, message: AnyMessage) -> None:
        if to == FRONT and self.front is not None:
            self.front.tell(message)
        else:
            assert to in (FRONT, SUPERVISOR)

    async def receive_async(self) -> list[AnyMessage]:
        return [await self._inbox.get()]


@dataclass
class Pair:
    """The gateway without the front, its client, and the current run of the front."""

    model: ServedModel
    script: Script
    limits: LimitsConfig
    step_s: float
    now: Callable[[], float] = time.monotonic
    wire: _FarWire = field(default_factory=_FarWire)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    num_lives: int = 0

    def __post_init__(self) -> None:
        self.deployment = Deployment(model="x", limits=self.limits, unit_timeout_s=UNIT_TIMEOUT_S)
        self.names = FrontNames(self.deployment.cache, "f0")
        self.far = FarHost(NAME, self.wire, self.now, self.names)
        self.far_gateway = self.gateway(self.far, NAME)
        transport = httpx.ASGITransport(make_app(self.far_gateway))
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=DEADLINE_S
        )

    def gateway(self, link: FrontLink, name: str) -> Gateway:
        names = self.front.names if link.has_front else self.names
        return gateway_with(
            link,
            Service(self.model, self.limits, names),
            self.deployment,
            GatewayClock(self.now),
            label=name,
            was_ready=True,
        )

    async def ask(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=COMPLETION | fields)

    def start_front(self) -> None:
        """Start a new front, with the next epoch."""
        self.num_lives += 1
        epoch = f"epoch {self.num_lives}"
        self.units = _Units(self.script, self.step_s, self.wire)
        self.front = Front(
            self.deployment, epoch=epoch, max_context=self.model.context_tokens, fingerprint="f0"
        )
        self.host = Host(self.front, self.units, self.now, epoch=epoch, others=(NAME,))
        self.front_gateway = self.gateway(self.host, "gateway")
        make_app(self.front_gateway)
        self.wire.front = self.units
        self.tasks = [
            asyncio.create_task(work)
            for work in (self.host.run(), self.units.run(), self._heartbeat())
        ]

    async def kill_front(self) -> None:
        self.wire.front = None
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.front_gateway.service.close()

    async def _heartbeat(self) -> None:
        while True:
            self.host.heartbeat(1)
            self.far.heartbeat(2)
            await asyncio.sleep(0.02)

    async def opened(self, num: int = 1) -> None:
        """Wait until `num` generations are open in the gateway without the front."""
        await wait_for(lambda: self.far.num_open == num, f"{num} generations are open")

    async def settle(self) -> None:
        await wait_for(
            lambda: not (self.units.num_held or self.host.num_open or self.far.num_open),
            "nothing is open, and the units hold nothing",
        )


@asynccontextmanager
async def pair(
    model: ServedModel,
    script: Script,
    *,
    limits: LimitsConfig | None = None,
    step_s: float = 0.0,
    starts: bool = True,
    now: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Pair]:
    it = Pair(model, script, limits or LimitsConfig(), step_s, now)
    serving = asyncio.create_task(it.far.run())
    try:
        if starts:
            it.start_front()
        yield it
    finally:
        serving.cancel()
        if it.num_lives:
            await it.kill_front()
        await it.client.aclose()
        it.far_gateway.service.close()
        assert serving.cancelled() or not serving.done() or serving.exception() is None


def usage_of(stream: str) -> dict[str, Any]:
    events = [
        json.loads(line.removeprefix("data: "))
        for line in stream.split("\n\n")
        if line.startswith("data: {")
    ]
    [usage] = [event["usage"] for event in events if event.get("usage")]
    assert isinstance(usage, dict)
    return usage


async def test_a_reply_is_the_same_through_a_gateway_without_the_front(model: ServedModel) -> None:
    async with pair(model, spell(model, TEXT)) as it:
        for num_choices in (1, 3):
            reply = await it.ask(stream=False, n=num_choices)
            assert [choice["text"] for choice in reply.json()["choices"]] == [TEXT] * num_choices
        await it.settle()
        assert it.front.totals.finished == 4


async def test_prompts_are_named_as_the_front_would_place_them(model: ServedModel) -> None:
    """The gateway without the front learns a new fingerprint from the front."""
    async with pair(model, spell(model, TEXT)) as it:

        def hears() -> bool:
            it.front.names.fingerprint = "f1"  # Set per poll: units that come up reset it.
            return it.names.fingerprint == "f1"

        await wait_for(hears, "it hears of the weights")


@pytest.mark.promise(
    "its own streams end, no other; if it had the front, its successor finds the open "
    "requests of the other gateways"
)
@pytest.mark.promise(
    "They send their open requests to the next front, with the tokens delivered, and "
    "those streams continue."
)
async def test_a_stream_goes_on_under_the_next_front(model: ServedModel) -> None:
    async with pair(model, spell(model, TEXT), step_s=0.002) as it:
        # The retry under the next front finds the prompt in the cache again; usage counts it once.
        await it.ask()
        names = it.units.names
        asking = asyncio.create_task(it.ask())
        await it.units.hold(5)
        await it.kill_front()
        it.start_front()
        it.units.names = names
        reply = await asking
        assert text_of(reply.text) == TEXT
        [generation] = it.units.submitted
        assert 0 < len(generation.output) < len(model.vocabulary.encode_controlled(TEXT))
        usage = usage_of(reply.text)
        assert usage["prompt_cache_hit_tokens"] <= usage["prompt_tokens"]
        assert usage["prompt_cache_hit_tokens"] > 0
        await it.settle()


async def test_requests_wait_for_a_front(model: ServedModel) -> None:
    async with pair(model, spell(model, TEXT), starts=False) as it:
        asking = [asyncio.create_task(it.ask()) for _ in range(3)]
        await it.opened(3)
        it.start_front()
        assert [text_of((await reply).text) for reply in asking] == [TEXT] * 3
        assert it.front.totals.submitted == 3


async def test_what_no_front_let_in_is_asked_for_quotas_by_the_next(model: ServedModel) -> None:
    async with pair(model, spell(model, TEXT)) as it:
        assert text_of((await it.ask()).text) == TEXT
        await it.kill_front()
        asking = asyncio.create_task(it.ask())
        await it.opened()
        it.start_front()
        it.host.set_quotas(unix_now(), (Quota(EVERYONE, tokens_per_minute=1),))
        assert (await asking).status_code == 400, "the prompt alone is more"
        assert it.units.submitted == []
        await it.kill_front()
        asking = asyncio.create_task(it.ask())
        await it.opened()
        it.start_front()
        assert text_of((await asking).text) == TEXT
        # A later front numbers attempts from ATTEMPTS_OF_A_FRONT on, so messages of units about the
        # old front's attempts do not match.
        assert [one.attempt for one in it.units.submitted] == [ATTEMPTS_OF_A_FRONT]


async def test_choices_of_one_request_go_on_together(model: ServedModel) -> None:
    """A front admits all choices or none, so one choice with a token shows that all were
    admitted.
    """
    async with pair(model, spell(model, TEXT), starts=False) as it:
        made = [
            Generation(name, (1, 2), (), 9, (), 0, Sampling(), 0, tenant=EVERYONE)
            for name in ("one", "two")
        ]
        mailbox = it.far.open(made, Ticket(most_pico_usd=(3, 4)))
        first, second = it.far._sent["one"], it.far._sent["two"]
        assert _ticket_of([first, second]) == Ticket(False, (3, 4)), "no front was there"
        first.output.append(7)
        first.again(0.0)
        assert _ticket_of([first, second]) == Ticket(True, (3, 4))
        it.far.close(mailbox, lambda: None)


async def test_a_front_s_attempts_are_its_own(model: ServedModel) -> None:
    """A unit may still run attempts of the last front, which had retried. If the next front reused
    their numbers, the unit's messages about the old attempt would count for the new one, and the
    unit would drop the new attempt as a duplicate.
    """
    async with pair(model, spell(model, TEXT)) as it:
        it.units.go.clear()
        asking = asyncio.create_task(it.ask())
        for number in range(2):
            await wait_for(lambda n=number: len(it.units.submitted) > n, "it is submitted")
            last = it.units.submitted[-1]
            it.units.prefilling.clear()
            it.units.tell(Returned("prefill-0", last.request_id, last.attempt, QUEUE_FULL))
        await wait_for(lambda: len(it.units.submitted) == 3, "it is submitted once more")
        before = [one.attempt for one in it.units.submitted]
        await it.kill_front()
        it.start_front()
        assert text_of((await asking).text) == TEXT
        after = [one.attempt for one in it.units.submitted]
        assert len(before) == len({*before}) == 3
        assert after
        assert not {*before} & {*after}


async def held(it: Pair) -> None:
    """Wait until the units are up, and keep them from working."""
    it.units.go.clear()
    await wait_for(lambda: it.far.snapshot().can_serve, "the units are up")


async def test_requests_that_come_together_are_let_in_one_after_the_other(
    model: ServedModel,
) -> None:
    """All generations of a request are admitted or none, also if two requests arrive together."""
    async with pair(model, spell(model, TEXT)) as it:
        await held(it)
        it.host.set_quotas(unix_now(), (Quota(EVERYONE, requests=6),))
        asking = [asyncio.create_task(it.ask(n=4)) for _ in range(2)]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        assert [(await reply).status_code for reply in done] == [429]
        assert len(it.units.submitted) == 4
        it.units.go.set()
        assert sorted([(await reply).status_code for reply in asking]) == [200, 429]
        await it.settle()


async def test_one_that_is_refused_is_told_why_as_if_it_had_come_alone(model: ServedModel) -> None:
    # The clock stands still, so that the quota does not refill meanwhile.
    async with pair(model, spell(model, TEXT), now=lambda: 1000.0) as it:
        await held(it)
        num_tokens = len(model.vocabulary.encode_plain(str(COMPLETION["prompt"])))
        quota = Quota(EVERYONE, tokens_per_minute=num_tokens * 3 // 2)
        it.host.set_quotas(unix_now(), (quota,))
        asking = [asyncio.create_task(it.ask()) for _ in range(2)]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        [reply] = [task.result() for task in done]
        assert reply.status_code == 429
        assert 19 <= int(reply.headers["retry-after"]) <= 21, "half a prompt's tokens are there"
        left = int(reply.headers["x-ratelimit-remaining-tokens"])
        assert abs(left - num_tokens // 2) <= 1
        it.units.go.set()
        await asyncio.gather(*asking)
        await it.settle()


async def test_one_without_a_front_for_too_long_is_told(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "_GRACE_S", 0.1)
    async with pair(
        model, spell(model, TEXT), limits=LimitsConfig(request_timeout_s=0.2), starts=False
    ) as it:
        assert (await it.ask(stream=False, stream_options=None)).status_code == 504


async def test_a_front_with_no_room_answers_as_to_its_own(model: ServedModel) -> None:
    limits = LimitsConfig(max_running=1, max_queued=1)
    async with pair(model, spell(model, TEXT), limits=limits) as it:
        await held(it)
        reply = await it.ask(n=4)
        assert reply.status_code == 429
        assert "Retry-After" in reply.headers
        assert (it.front.totals.refused, it.front.totals.tokens_refused > 400) == (4, True)
        it.units.go.set()
        await it.settle()


async def test_a_client_that_leaves_frees_what_it_holds_and_is_written_down_with_its_units(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(model, spell(model, "abc", then_stop=False), step_s=0.002) as it:
        work = await it.far_gateway.service.completion(
            json.dumps({**COMPLETION, "max_tokens": 1000}).encode(),
            "r",
            it.far_gateway.tenancy.keys.check(None),
        )
        mailbox = it.far.open([choice.generation for choice in work.choices], Ticket())
        await it.units.hold(5)
        closed = asyncio.Event()
        it.far.close(mailbox, closed.set)
        await closed.wait()
        [closing] = mailbox.closings.values()
        assert (closing.prefill_unit, closing.decode_unit) == ("prefill-0", "decode-0")
        await it.settle()
        # No front answers: the request is recorded anyway after _CLOSING_S.
        monkeypatch.setattr(far_host, "_CLOSING_S", 0.1)
        mailbox = it.far.open([choice.generation for choice in work.choices], Ticket())
        await it.kill_front()
        closed.clear()
        it.far.close(mailbox, closed.set)
        await closed.wait()
        assert it.far.num_open == 0
        # This process ends before a front answers.
        monkeypatch.setattr(far_host, "_CLOSING_S", 60.0)
        mailbox = it.far.open([choice.generation for choice in work.choices], Ticket())
        closed.clear()
        it.far.close(mailbox, closed.set)
        assert not closed.is_set()
        it.far.end()
        assert closed.is_set()
        it.start_front()


async def test_what_cannot_be_written_down_ends_no_other_stream(model: ServedModel) -> None:
    async with pair(model, spell(model, "abc", then_stop=False), step_s=0.002) as it:
        key = it.far_gateway.tenancy.keys.check(None)
        asked = json.dumps({**COMPLETION, "max_tokens": 1000}).encode()
        work = await it.far_gateway.service.completion(asked, "r", key)
        mailbox = it.far.open([choice.generation for choice in work.choices], Ticket())
        await it.units.hold(5)

        def write() -> None:
            raise ValueError("nobody thought of this")

        it.far.close(mailbox, write)
        await it.settle()
        it.units.let_go()
        reply = await it.ask()
        assert reply.status_code == 200


@pytest.mark.promise(
    "its own streams end, no other; if it had the front, its successor finds the open "
    "requests of the other gateways"
)
async def test_the_end_of_a_gateway_is_the_end_of_its_generations(model: ServedModel) -> None:
    async with pair(model, spell(model, "abc", then_stop=False), step_s=0.002) as it:
        asking = asyncio.create_task(it.ask(max_tokens=1000))
        await it.units.hold(5)
        it.units.tell(Drain())
        assert not await it.host.wait_idle(0.1)
        it.units.tell(UnitDown(NAME, "killed"))
        it.units.tell(GatewayHeartbeat(NAME, 2))  # Sent before its end, received after.
        assert await it.host.wait_idle(DEADLINE_S)
        await wait_for(lambda: not it.units.has_said, "all of it is heard")
        assert it.host.gateways == ("gateway",)
        it.units.tell(GatewayHeartbeat(NAME, 3))
        await wait_for(lambda: it.host.gateways == ("gateway", NAME), "the next one is there")
        assert not await it.host.wait_idle(0.1)
        assert it.front.totals.cancelled == 1
        asking.cancel()


async def test_tokens_of_nobody_are_stopped_at_their_source(model: ServedModel) -> None:
    """Units decode requests of an earlier process of the gateway; the front did not learn that this
    process had ended.
    """
    async with pair(model, spell(model, "abc", then_stop=False), step_s=0.002) as it:
        asking = asyncio.create_task(it.ask(max_tokens=1000))
        await it.units.hold(5)
        it.far._sent.clear()
        it.units.let_go()
        await wait_for(lambda: not it.units.num_held, "it is stopped")
        assert it.units.cancelled
        asking.cancel()


async def test_a_lost_token_ends_its_stream_with_a_word(model: ServedModel) -> None:
    async with pair(model, spell(model, TEXT), step_s=0.01) as it:
        asking = asyncio.create_task(it.ask())
        await it.units.hold(5)
        it.wire.lost = {Delivered}
        it.units.held_at = 8
        await wait_for(lambda: it.wire.num_lost, "a token is lost")
        it.wire.lost = set()
        it.units.let_go()
        assert "tokens were lost between processes" in (await asking).text.lower()
        await it.settle()


async def test_what_the_front_s_process_knows_is_asked_of_it(model: ServedModel) -> None:
    async with pair(model, spell(model, TEXT)) as it:
        num_tokens = usage_of((await it.ask()).text)["completion_tokens"]
        await wait_for(lambda: len(it.host.gateways) > 1, "the front knows of it")
        text = (await it.client.get("/metrics")).text
        assert f'hadal_output_tokens_total{{gateway="gateway-1"}} {num_tokens:.1f}\n' in text
        assert (
            'hadal_requests_total{endpoint="completions",gateway="gateway-1",status="200"} 1.0'
            in text
        )
        assert text.count("# TYPE hadal_requests_total counter") == 1
        assert (await it.client.get("/health")).json()["status"] == "ready"
        trace = await it.client.get("/trace", params={"unit": "decode-7"})
        assert trace.status_code == 404
        assert "decode-7" in trace.json()["error"]["message"]
        await it.kill_front()
        asking = asyncio.create_task(it.client.get("/audit"))
        await wait_for(lambda: it.far.pages._asked._open, "it has asked")
        it.start_front()
        assert (await asking).status_code == 503


async def test_a_delivery_for_a_generation_that_is_not_open_is_no_news(model: ServedModel) -> None:
    async with pair(model, spell(model, TEXT)) as it:
        it.wire.put(Delivered((Deliver("nobody", (), final=True),)))
        assert text_of((await it.ask()).text) == TEXT


async def test_each_gateway_knows_which_are_there(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(model, spell(model, TEXT)) as it:
        both = ("gateway", NAME)
        await wait_for(lambda: it.far.gateways == it.host.gateways == both, "both are there")
        await it.kill_front()
        monkeypatch.setattr(far_host, "_SILENT_S", 0.2)
        await wait_for(lambda: it.far.gateways == (NAME,), "the front is missed")
        it.start_front()
