"""Facts that a gateway sends to the ledger: one at the end of each generation. It bills what was
streamed to the client, however the generation ended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from hadal.core.config import DECODE, PREFILL, Deployment, LedgerConfig, LimitsConfig, UnitsConfig
from hadal.core.facts import Fact, NodesFact, RequestFact, micros, sum_kv_tokens
from hadal.core.messages.units import Returned, UnitDown
from hadal.core.plans import NO_TOKEN
from hadal.gateway.desk.accounting import Accounting
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.host import Host
from hadal.gateway.desk.salts import EVERYONE, name_of, salt_of
from hadal.gateway.desk.service import ServedModel
from hadal.roles.front.unit import Unit
from hadal.runtime.ledger.writer import Kept, LedgerCounts
from hadal.stats.prices import price_list
from tests.waiting import wait_for

from .fake_units import Script
from .world import Clock, World, spell, world

PRICES = "0.1/0.2/0.3"


class List:
    """Stand-in for the ledger that keeps facts in lists."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.on_kept: Kept = lambda facts: None
        self.closed = False

    def add(self, fact: Fact) -> None:
        self.facts.append(fact)

    @property
    def counts(self) -> LedgerCounts:
        return LedgerCounts(num_added=len(self.requests))

    def close(self, timeout_s: float) -> None:
        self.closed = True

    @property
    def requests(self) -> list[RequestFact]:
        return [fact for fact in self.facts if isinstance(fact, RequestFact)]

    @property
    def nodes(self) -> list[NodesFact]:
        return [fact for fact in self.facts if isinstance(fact, NodesFact)]


@asynccontextmanager
async def booked(
    model: ServedModel, script: Script, **options: Any
) -> AsyncIterator[tuple[World, List]]:
    """Yield a world and the sink of its facts. At the end, wait until no request is open, and
    compare the facts with the metrics.
    """
    sink = List()
    deployment = Deployment(
        model="x", ledger=LedgerConfig(prices=PRICES), prefill=UnitsConfig(ranks=2)
    )
    async with world(model, script, has_ledger=True, **options) as it:
        gateway = it.gateway
        gateway.desk.accounting = Accounting(deployment, model.name, sink, dict, gateway.clock)
        yield it, sink
        await it.settle()
        assert len({fact.request_id for fact in sink.requests}) == len(sink.requests)
        assert counted(gateway) == sum(fact.tokens_out for fact in sink.requests)


def counted(gateway: Gateway) -> int:
    """Return the number of output tokens in a gateway's metrics."""
    [metric] = gateway.metrics.output.collect()
    return int(metric.samples[0].value)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "prompt": "hello there", "max_tokens": 7, **fields}


def ask(it: World, **fields: Any) -> Awaitable[httpx.Response]:
    return it.client.post("/v1/completions", json=body(**fields))


def check_sum(facts: list[RequestFact], usage: dict[str, Any]) -> None:
    """Check that the billed tokens equal the usage that the client received."""
    assert sum(fact.tokens_hit for fact in facts) == usage["prompt_cache_hit_tokens"]
    assert sum(fact.tokens_miss for fact in facts) == usage["prompt_cache_miss_tokens"]
    assert sum(fact.tokens_out for fact in facts) == usage["completion_tokens"]


@pytest.mark.promise(
    "A prompt is billed once it has its first token, and once for all its choices."
)
@pytest.mark.promise(
    "output tokens as usage counts them, or, if the client left, those handed to its "
    "connection until then"
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"prompt": ["one", "the other"], "n": 2}, {"stop": "c"}]
)
async def test_the_bill_is_the_usage(
    model: ServedModel, stream: bool, fields: dict[str, Any]
) -> None:
    """The prompt is sent twice; the second time, part of it is in the cache."""
    usages: list[dict[str, Any]] = []
    long_prompt = "word " * 200
    async with booked(model, spell(model, "abcdefghij")) as (it, sink):
        for _ in range(2):
            asked = body(stream=stream, **{"prompt": long_prompt, **fields})
            if stream:
                asked["stream_options"] = {"include_usage": True}
            reply = await it.client.post("/v1/completions", json=asked)
            assert reply.status_code == 200
            if stream:
                chunks = [
                    json.loads(line[6:])
                    for line in reply.text.splitlines()
                    if line.startswith("data: {")
                ]
                usages.append(next(chunk["usage"] for chunk in chunks if chunk.get("usage")))
            else:
                usages.append(reply.json()["usage"])
    facts = sink.requests
    half = len(facts) // 2
    assert half == fields.get("n", 1) * (2 if isinstance(fields.get("prompt"), list) else 1)
    for usage, part in zip(usages, (facts[:half], facts[half:]), strict=True):
        check_sum(part, usage)
    if "prompt" not in fields:
        assert usages[1]["prompt_cache_hit_tokens"] > 0, "the second bill has hits in it"
    prices = price_list(PRICES)
    for fact in facts:
        assert fact.end == ("stop" if "stop" in fields else "length")
        assert (fact.tenant, fact.model) == (EVERYONE, "small")
        assert (fact.prefill_unit, fact.decode_unit) == ("prefill-0", "decode-0")
        assert fact.first_token_s is not None
        assert fact.last_token_s is not None
        assert fact.received_s <= fact.first_token_s <= fact.last_token_s <= fact.completed_s
        assert fact.income_pico_usd == prices.charge(
            micros(fact.completed_s), fact.tokens_hit, fact.tokens_miss, fact.tokens_out
        )


@pytest.mark.promise(
    "With scores, max_tokens: 0 draws one token that is neither shown nor charged."
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_is_only_scored_is_billed_as_prompt(
    model: ServedModel, stream: bool
) -> None:
    async with booked(model, spell(model, "a")) as (it, sink):
        asked = body(prompt=["one", "and more"], echo=True, logprobs=1, max_tokens=0, stream=stream)
        assert (await it.client.post("/v1/completions", json=asked)).status_code == 200
    facts = sink.requests
    assert [fact.end for fact in facts] == ["length"] * 2
    assert all(fact.tokens_miss > 0 and fact.income_pico_usd > 0 for fact in facts)
    assert {(fact.tokens_hit, fact.tokens_out, fact.first_token_s) for fact in facts} == {
        (0, 0, None)
    }


async def test_kv_lengths_are_those_of_every_token(model: ServedModel) -> None:
    async with booked(model, spell(model, "abcdefghij")) as (it, sink):
        reply = await ask(it, n=2)
        usage = reply.json()["usage"]
        num_prompt, num_output = usage["prompt_tokens"], usage["completion_tokens"] // 2
        assert [fact.kv_tokens for fact in sink.requests] == [
            sum_kv_tokens(num_prompt, num_output)
        ] * 2


@pytest.mark.promise(
    "output tokens as usage counts them, or, if the client left, those handed to its "
    "connection until then"
)
async def test_a_client_that_leaves_pays_for_what_was_streamed(model: ServedModel) -> None:
    """The fact counts the tokens that were streamed until the client left."""
    seen: list[bytes] = []
    async with booked(model, spell(model, "abcdefghij", then_stop=False), step_s=0.001) as (
        it,
        sink,
    ):
        leave = asyncio.Event()
        asked = body(stream=True, max_tokens=4000, logprobs=0)
        sent = iter([{"type": "http.request", "body": json.dumps(asked).encode()}])

        async def receive() -> dict[str, Any]:
            if (message := next(sent, None)) is not None:
                return message
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            seen.append(message.get("body", b""))
            if b"".join(seen).count(b"data: ") > 6:
                leave.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        await it.app(scope, receive, send)
    [fact] = sink.requests
    chunks = [
        json.loads(line[6:]) for line in b"".join(seen).split(b"\n") if line.startswith(b"data: {")
    ]
    streamed = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert fact.end == "cancelled"
    assert 0 < fact.tokens_out == len(streamed)
    assert fact.tokens_in > 0
    assert (fact.prefill_unit, fact.decode_unit) == ("prefill-0", "decode-0"), (
        "known although nobody took the end"
    )


@pytest.mark.promise(
    "Each generation (text request, or one choice of it) has one fact, written when "
    "its HTTP request has ended, however it ended."
)
async def test_refusals_bill_nothing_and_are_counted(model: ServedModel) -> None:
    async with booked(
        model, spell(model, "abc"), limits=LimitsConfig(max_running=1, max_queued=1)
    ) as (it, sink):
        it.units.go.clear()
        asked = [asyncio.create_task(ask(it)) for _ in range(2)]
        while len(it.gateway.intake.permits) < 2:
            await asyncio.sleep(0.001)
        refused = await ask(it)
        assert refused.status_code == 429
        it.units.go.set()
        assert [(await one).status_code for one in asked] == [200, 200]
        it.gateway.link.drain()
        assert (await ask(it)).status_code == 503
    facts = sink.requests
    ends = [fact.end for fact in facts]
    assert sorted(ends) == ["429", "503", "stop", "stop"]
    for fact in facts:
        assert fact.is_billed is (fact.end == "stop")


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": 7},
        {"model": "other"},
        {"max_tokens": -1},
        {"prompt": "word " * 5000, "max_tokens": 1},
    ],
)
async def test_what_never_was_a_generation_is_no_fact(
    model: ServedModel, wrong: dict[str, Any]
) -> None:
    async with booked(model, spell(model, "abc")) as (it, sink):
        assert 400 <= (await ask(it, **wrong)).status_code < 500
    assert sink.requests == []


@pytest.mark.promise(
    "A tenant is an API key. Its name is the one in the keys file; a key without a "
    "name there gets t- and ten hex digits, which are a hash of a hash of the key."
)
async def test_tenants_have_names_that_are_no_secret(model: ServedModel) -> None:
    async with booked(model, spell(model, "abc"), keys=("key-one", "key-two")) as (it, sink):
        for key in ("key-one", "key-two", "key-one"):
            headers = {"authorization": f"Bearer {key}"}
            assert (
                await it.client.post("/v1/completions", json=body(), headers=headers)
            ).status_code == 200
        assert (await ask(it)).status_code == 401
        one, two = (tenant.name for tenant in it.gateway.tenancy.keys.tenants)
        assert (one, two) == (name_of(salt_of(b"key-one")), name_of(salt_of(b"key-two")))
        tenants = [fact.tenant for fact in sink.requests]
        assert tenants == [one, two, one]
        for tenant, key in ((one, b"key-one"), (two, b"key-two")):
            assert key.decode() not in tenant
            assert tenant.removeprefix("t-") not in salt_of(key).hex()


async def test_a_lost_unit_is_a_retry_and_no_second_bill(model: ServedModel) -> None:
    async with booked(model, spell(model, "abc", then_stop=False), step_s=0.002) as (it, sink):
        asked = asyncio.create_task(ask(it, max_tokens=40))
        await it.units.hold(3)
        it.units.let_go()
        (request_id, attempt), _ = it.units.decoding.popitem()
        it.units.tell(Returned("decode-0", request_id, attempt, "preempted"))
        reply = await asked
        assert reply.status_code == 200
        check_sum(sink.requests, reply.json()["usage"])
    [fact] = sink.requests
    assert fact.num_retries == 1
    assert fact.tokens_out == 40


@pytest.mark.promise("hadal_output_tokens_total equals the ledger's output tokens, to the token")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("end", ["504", "422", "cancelled"])
async def test_tokens_of_a_request_that_ends_early_are_counted_as_they_are_billed(
    model: ServedModel, end: str, stream: bool
) -> None:
    """Each of the request's two choices has 5 output tokens when the request ends."""
    clock = Clock()
    script = spell(model, "abc", then_stop=False)
    async with booked(model, script, step_s=0.001, now=clock) as (it, sink):
        asking = asyncio.create_task(ask(it, n=2, max_tokens=100, stream=stream))
        await it.units.hold(5)
        await wait_for(lambda: counted(it.gateway) >= 10, "running choices are counted")
        if end == "422":
            for request_id, attempt in list(it.units.decoding):
                it.units.tell(Returned("decode-0", request_id, attempt, NO_TOKEN))
        elif end == "cancelled":
            asking.cancel()
        while end == "504" and not asking.done():
            clock.now_s += 100.0
            await asyncio.sleep(0.01)
        await asyncio.wait([asking])
        it.units.let_go()
    assert [fact.end for fact in sink.requests] == [end] * 2
    assert sum(fact.tokens_out for fact in sink.requests) == 10


class UnixClock:
    unix_s = 1000.0


def test_units_are_followed_from_their_coming_to_their_end() -> None:
    """Each run of a unit's process (epoch) is a fact of its own. A unit may fill a fraction of a
    node.
    """
    sink, clock, up = List(), UnixClock(), dict[str, Unit]()
    deployment = Deployment(
        model="x",
        device="cpu",
        prefill=UnitsConfig(ranks=2),
        decode=UnitsConfig(ranks=16, ranks_per_node=8),
        ledger=LedgerConfig(gpu_hour_usd=1.5),
    )
    accounting = Accounting(
        deployment, "small", sink, lambda: up, GatewayClock(lambda: 0.0, lambda: clock.unix_s)
    )

    def unit(name: str, role: str, epoch: str) -> Unit:
        return Unit(name, role, epoch, 1, 1, 1, 0.0)

    up["prefill-0"] = unit("prefill-0", PREFILL, "a")
    accounting.look()
    up["decode-0"], clock.unix_s = unit("decode-0", DECODE, "b"), 1010.0
    accounting.look()
    up["prefill-0"], clock.unix_s = unit("prefill-0", PREFILL, "c"), 1025.0
    accounting.look()
    del up["decode-0"]
    clock.unix_s = 1030.0
    accounting.end()
    assert sink.closed
    last = {(fact.unit, fact.epoch): fact for fact in sink.nodes}
    assert {key: (fact.from_s, fact.to_s) for key, fact in last.items()} == {
        ("prefill-0", "a"): (1000.0, 1025.0),
        ("decode-0", "b"): (1010.0, 1030.0),
        ("prefill-0", "c"): (1025.0, 1030.0),
    }
    decode = last["decode-0", "b"]
    assert (decode.role, decode.num_ranks, decode.ranks_per_node) == (DECODE, 16, 8)
    assert (decode.gpu, decode.gpu_hour_micro_usd, decode.model) == ("cpu", 1_500_000, "small")


async def test_the_host_tells_when_units_come_and_go(model: ServedModel) -> None:
    told: list[int] = []
    async with world(model, spell(model, "abc")) as it:
        link = it.gateway.link
        assert isinstance(link, Host)
        link.unit_listeners.append(
            lambda: told.append(sum(map(len, link.snapshot().role_to_units.values())))
        )
        it.units.tell(UnitDown("decode-0", "killed"))
        while not told:
            await asyncio.sleep(0.001)
    assert told[0] == 1


def test_prices_that_cannot_be_read_are_an_error() -> None:
    deployment = Deployment(model="x", ledger=LedgerConfig(prices="cheap"))
    with pytest.raises(ValueError, match="not a price list"):
        Accounting(deployment, "m", List(), dict, GatewayClock(lambda: 0.0, lambda: 0.0))
