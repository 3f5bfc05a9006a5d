"""Any body, however malformed, gets a reply or a refusal: never a 500, never a hang."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hadal.gateway.desk.service import ServedModel

from .malformed import CHAT_FIELDS, COMPLETION_FIELDS, MESSAGES_FIELDS, RESPONSES_FIELDS, bodies
from .world import World, spell, world

CHAT: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
}
COMPLETION: dict[str, Any] = {"model": "small", "prompt": "hi", "max_tokens": 2}
RESPONSE: dict[str, Any] = {"model": "small", "input": "hi", "max_output_tokens": 2}
BATCH = 10
"""Bodies per hypothesis example, which share one gateway."""
many = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
thousands = pytest.mark.slow("2,000 bodies and 200 gateways at the level more")


async def _throw(it: World, path: str, body: bytes) -> None:
    reply = await it.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code in (200, 400, 404), (reply.status_code, body)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert error["message"]
        own = {"message", "type"}
        assert set(error) == (own if "messages" in path else own | {"param", "code"})


def _throw_all(model: ServedModel, path: str, all_bodies: list[bytes]) -> None:
    async def run() -> None:
        async with world(model, spell(model, "a")) as it:
            for body in all_bodies:
                await _throw(it, path, body)
            await it.settle()

    asyncio.run(run())


@thousands
@many
@given(st.lists(bodies(CHAT, MESSAGES_FIELDS), min_size=BATCH, max_size=BATCH))
def test_messages(model: ServedModel, all_bodies: list[bytes]) -> None:
    _throw_all(model, "/v1/messages", all_bodies)
    _throw_all(model, "/v1/messages/count_tokens", all_bodies)


@thousands
@many
@given(st.lists(bodies(RESPONSE, RESPONSES_FIELDS), min_size=BATCH, max_size=BATCH))
def test_responses(model: ServedModel, all_bodies: list[bytes]) -> None:
    _throw_all(model, "/v1/responses", all_bodies)


@thousands
@many
@given(st.lists(bodies(CHAT, CHAT_FIELDS), min_size=BATCH, max_size=BATCH))
def test_chat(model: ServedModel, all_bodies: list[bytes]) -> None:
    _throw_all(model, "/v1/chat/completions", all_bodies)


@thousands
@many
@given(st.lists(bodies(COMPLETION, COMPLETION_FIELDS), min_size=BATCH, max_size=BATCH))
def test_completion(model: ServedModel, all_bodies: list[bytes]) -> None:
    _throw_all(model, "/v1/completions", all_bodies)


@pytest.mark.parametrize("half", [r"\ud800", r"\udc00 abc", r"\ud83d\ud83d\ude00"])
async def test_half_of_a_surrogate_pair_is_named(model: ServedModel, half: str) -> None:
    async with world(model, spell(model, "a")) as it:
        body = b'{"model": "small", "prompt": "%s"}' % half.encode()
        reply = await it.client.post("/v1/completions", content=body)
        assert reply.status_code == 400
        assert "half of a surrogate pair" in reply.json()["error"]["message"]
        whole = {"model": "small", "prompt": "\U0001f600"}
        assert (await it.client.post("/v1/completions", json=whole)).status_code == 200


async def test_headers(model: ServedModel) -> None:
    async with world(model, spell(model, "a")) as it:
        for kind, status in (
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("", 415),
            ("application/json", 400),
            ("application/json; charset=utf-8", 400),
            ("APPLICATION/JSON", 400),
            ("\xff", 415),
        ):
            reply = await it.client.post(
                "/v1/completions",
                content=b"{}",
                headers={"Content-Type": kind.encode("latin-1")},
            )
            assert reply.status_code == status, kind
        reply = await it.client.post(
            "/v1/completions", content=b"x", headers={"Content-Encoding": "br"}
        )
        assert (reply.status_code, "or no encoding" in reply.text) == (415, True)
        assert reply.headers["Accept-Encoding"] == "zstd, gzip"
        for length in (b"-1", b"x", b"99999999999999999999"):
            reply = await it.client.post(
                "/v1/completions",
                content=b"{}",
                headers={"Content-Type": "application/json", b"Content-Length": length},
            )
            assert reply.status_code == 400
