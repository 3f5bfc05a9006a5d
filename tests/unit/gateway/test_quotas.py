"""Quotas over HTTP: 429, rate-limit headers (on success too), and keys added and removed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from hadal.core.errors import ConfigError
from hadal.core.messages.generation import RateLimits
from hadal.gateway.desk.auth import Keys
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.errors import limit_headers, span
from hadal.gateway.edge.intake import Patience
from hadal.stats.prices import R1, Rates

from .world import Clock, World, spell, world

BODY = {"model": "small", "prompt": [5] * 10, "max_tokens": 3, "ignore_eos": True}


async def ask(of: World, key: str = "a", **fields: object) -> httpx.Response:
    return await of.client.post(
        "/v1/completions", json=BODY | fields, headers={"authorization": f"Bearer {key}"}
    )


@pytest.mark.promise(
    "All replies have x-ratelimit-limit-requests, -remaining-requests, -reset-requests and the same of tokens"
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_reply_of_a_tenant_with_a_quota_says_what_is_left(
    model: ServedModel, stream: bool
) -> None:
    keys = ("a requests=4 tokens_per_minute=6000", "b")
    script = spell(model, "abc", then_stop=False)
    async with world(model, script, keys=keys, now=Clock()) as of:
        of.gateway.tenancy.take(of.gateway.tenancy.keys)
        reply = await ask(of, stream=stream)
        assert reply.status_code == 200
        assert reply.headers["x-ratelimit-limit-requests"] == "4"
        assert reply.headers["x-ratelimit-remaining-requests"] == "3"
        assert reply.headers["x-ratelimit-limit-tokens"] == "6000"
        assert 5985 <= int(reply.headers["x-ratelimit-remaining-tokens"]) <= 5990
        assert reply.headers["x-ratelimit-reset-requests"] == "1s"
        assert reply.headers["x-ratelimit-reset-tokens"].endswith("ms")
        assert "retry-after" not in reply.headers
        assert not any("ratelimit" in name for name in (await ask(of, "b")).headers)
        await of.settle()


@pytest.mark.promise(
    "The front (router) checks quotas over all gateways, and a request above one gets "
    "429 with retry-after."
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 3}),
    ],
)
async def test_quotas_hold_in_every_format(
    model: ServedModel, path: str, fields: dict[str, Any], stream: bool
) -> None:
    keys = ("a requests=1 tokens_per_minute=6000", "b")
    script = spell(model, "</think>abc", then_stop=False)
    async with world(model, script, keys=keys, step_s=0.002) as of:
        of.gateway.tenancy.take(of.gateway.tenancy.keys)
        long = asyncio.create_task(ask(of, stream=True, max_tokens=40))
        await of.units.hold(5)
        body = {"model": "small", "stream": stream, **fields}
        refused = await of.client.post(path, json=body, headers={"x-api-key": "a"})
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (refused.json().get("type") == "error") == (path == "/v1/messages")
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["retry-after"] == "1"
        other = await of.client.post(path, json=body, headers={"x-api-key": "b"})
        assert other.status_code == 200
        of.units.let_go()
        await long
        served = await of.client.post(path, json=body, headers={"x-api-key": "a"})
        assert served.status_code == 200
        assert served.headers["x-ratelimit-limit-tokens"] == "6000"
        await of.settle()


@pytest.mark.promise(
    "The front (router) checks quotas over all gateways, and a request above one gets "
    "429 with retry-after."
)
async def test_more_than_it_may_have_is_a_429_for_it_alone(model: ServedModel) -> None:
    keys = ("a requests=2", "b")
    script = spell(model, "abc", then_stop=False)
    patience = Patience(keep_alive_s=0.01)
    async with world(model, script, keys=keys, patience=patience, step_s=0.002) as of:
        of.gateway.tenancy.take(of.gateway.tenancy.keys)
        long = asyncio.create_task(ask(of, n=2, stream=True, max_tokens=40))
        await of.units.hold(5)
        refused = await ask(of)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask(of, "b")).status_code == 200
        of.units.let_go()
        reply = await long
        assert reply.headers["x-ratelimit-limit-requests"] == "2"
        assert reply.text.endswith("data: [DONE]\n\n")
        await of.settle()
        never = await ask(of, n=3)
        assert (never.status_code, never.json()["error"]["code"]) == (400, "request_too_large")
        assert "lower n" in never.json()["error"]["message"]
        assert "retry-after" not in never.headers
        assert (await ask(of, n=2)).status_code == 200
        assert of.gateway.link.snapshot().totals.refused == 0, "no more units are wanted for that"


@pytest.mark.promise(
    "Until they are read, the tenant gets 503. Without a ledger, a budget is an error."
)
async def test_keys_come_and_go_and_models_are_their_own(model: ServedModel) -> None:
    async with world(model, spell(model, "abc"), keys=("a", "b")) as of:
        assert (await ask(of)).status_code == 200
        of.gateway.tenancy.take(Keys(("b", "c model=other"), is_closed=True))
        assert (await ask(of)).status_code == 401
        refused = await ask(of, "c")
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            404,
            "model_not_found",
        )
        header = {"authorization": "Bearer c"}
        assert (await of.client.get("/v1/models", headers=header)).json()["data"] == []
        assert (await of.client.get("/v1/models/small", headers=header)).status_code == 404
        of.gateway.tenancy.take(Keys(is_closed=True))
        assert (await ask(of, "b")).status_code == 401, "no key is not every key"
        with pytest.raises(ConfigError, match="needs a ledger"):
            of.gateway.tenancy.take(Keys(("b dollars_per_day=1",)))
        await of.settle()


async def test_the_front_hears_of_a_clock_that_was_set(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(model, spell(model, "abc"), keys=("a requests=1",)) as of:
        said: list[float] = []
        now = of.gateway.clock.now
        clock = GatewayClock(now, lambda: now() + ahead_s)
        monkeypatch.setattr(of.gateway.tenancy, "_clock", clock)
        of.gateway.link.set_quotas = lambda unix_s, quotas: said.append(unix_s)  # type: ignore
        ahead_s = 100.0
        of.gateway.tenancy.take(of.gateway.tenancy.keys)
        of.gateway.tenancy.keep_time()
        assert len(said) == 1
        ahead_s = 102.0
        of.gateway.tenancy.keep_time()
        of.gateway.tenancy.keep_time()
        assert len(said) == 2


@pytest.mark.promise(
    "All replies have x-ratelimit-limit-requests, -remaining-requests, -reset-requests and the same of tokens"
)
def test_headers_are_as_openai_writes_them() -> None:
    times = [(0.0, "0ms"), (0.02, "20ms"), (1.0, "1s"), (1.25, "1.25s"), (360.0, "6m0s")]
    assert [span(seconds) for seconds, _ in times] == [text for _, text in times]
    assert limit_headers(None) == {} == limit_headers(RateLimits())
    assert limit_headers(RateLimits(tokens=5, tokens_left=2, tokens_reset_s=61.5)) == {
        "x-ratelimit-limit-tokens": "5",
        "x-ratelimit-remaining-tokens": "2",
        "x-ratelimit-reset-tokens": "1m1s",
    }


def test_the_most_that_a_generation_can_cost_is_at_no_discount() -> None:
    assert R1.most(10, 3) == Rates(140_000, 550_000, 2_190_000).charge(0, 10, 3)
