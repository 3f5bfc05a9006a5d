"""Streams: what is in them, and what happens when a client leaves, stands still or has to wait."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from hadal.core.config import LimitsConfig
from hadal.gateway.http import Patience
from hadal.gateway.replies import KEEP_ALIVE
from hadal.gateway.service import ServedModel
from tests.waiting import DEADLINE_S, wait_for

from .scenes import CHAT, error_of, events, play, sent_by_replies
from .world import Clock, World


def test_chat_stream(model: ServedModel) -> None:
    async def scene(it: World) -> None:
        chunks = events(await it.client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        assert chunks[0]["choices"][0]["delta"] == {
            "role": "assistant",
            "content": "",
            "reasoning_content": None,
        }
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta["reasoning_content"] or "" for delta in deltas) == "Easy."
        assert "".join(delta["content"] for delta in deltas) == "The answer is 4. 🙂"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (
            len(chunks) - 1
        ) + ["stop"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert all("usage" not in chunk for chunk in chunks)

    play(model, scene)


def test_stream_with_usage(model: ServedModel) -> None:
    async def scene(it: World) -> None:
        whole = (await it.client.post("/v1/chat/completions", json=CHAT)).json()
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(await it.client.post("/v1/chat/completions", json=body))
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]

    play(model, scene)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_generation(model: ServedModel, stream: bool) -> None:
    async def scene(it: World) -> None:
        body = {**CHAT, "stop": ["is 4"], "stream": stream, "max_tokens": 3000}
        reply = await it.client.post("/v1/chat/completions", json=body)
        if stream:
            text = "".join(
                chunk["choices"][0]["delta"].get("content", "") for chunk in events(reply)
            )
        else:
            text = reply.json()["choices"][0]["message"]["content"]
        assert text == "The answer "
        await it.settle()
        assert it.units.cancelled

    play(model, scene, then_stop=False)


def test_drain(model: ServedModel) -> None:
    async def scene(it: World) -> None:
        it.units.go.clear()
        running = asyncio.create_task(it.client.post("/v1/chat/completions", json=CHAT))
        while not it.gateway.host.num_open:
            await asyncio.sleep(0)
        it.gateway.host.drain()
        reply = await it.client.post("/v1/chat/completions", json=CHAT)
        error_of(reply, 503, "draining")
        assert "retry-after" in reply.headers
        assert (await it.client.get("/health")).status_code == 503
        assert not await it.gateway.host.wait_idle(0.01)
        it.units.go.set()
        assert (await running).json()["choices"][0]["finish_reason"] == "stop"
        assert await it.gateway.host.wait_idle(DEADLINE_S)

    play(model, scene)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_client_that_leaves(model: ServedModel, stream: bool, n: int) -> None:
    """By ASGI itself: a disconnect in the middle of a generation that would go on for long."""

    async def scene(it: World) -> None:
        body = json.dumps({**CHAT, "stream": stream, "n": n, "max_tokens": 3000}).encode()
        left = asyncio.Event()
        sent: list[Any] = []
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if requests:
                return requests.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "query_string": b"",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
        }
        task = asyncio.create_task(it.app(scope, receive, send))
        await wait_for(lambda: len(it.units.decoding) == n, "all are decoded")
        left.set()
        await task
        assert bool(sent) == stream
        await it.settle()
        assert len(set(it.units.cancelled)) == n

    play(model, scene, then_stop=False, step_s=0.002)


def test_client_that_does_not_read(model: ServedModel) -> None:
    async def scene(it: World) -> None:
        body = json.dumps({**CHAT, "stream": True, "max_tokens": 3000}).encode()
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if requests:
                return requests.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "query_string": b"",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
        }
        await it.app(scope, receive, send)
        await it.settle()
        assert it.units.cancelled

    play(model, scene, then_stop=False, step_s=0.001, patience=Patience(send_s=0.05))


def test_keep_alive(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = sent_by_replies(monkeypatch)

    async def scene(it: World) -> None:
        it.units.go.clear()
        asking = asyncio.create_task(
            it.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        )
        await wait_for(lambda: sent.count(KEEP_ALIVE) >= 2, "two were sent")
        it.units.go.set()
        reply = await asking
        assert reply.text.startswith(": keep-alive\n\n")
        assert reply.text.count(": keep-alive\n\n") >= 2
        assert events(reply)[-1]["choices"][0]["finish_reason"] == "stop"

    play(model, scene, patience=Patience(keep_alive_s=0.05))


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_takes_too_long(model: ServedModel, stream: bool) -> None:
    clock = Clock()

    async def scene(it: World) -> None:
        body = {**CHAT, "stream": stream, "max_tokens": 3000}
        asking = asyncio.create_task(it.client.post("/v1/chat/completions", json=body))
        await it.units.hold(5)
        clock.now_s += 1
        reply = await asking
        if stream:
            assert reply.status_code == 200
            last = reply.text.rstrip().rpartition("\n\n")[2]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        else:
            error_of(reply, 504, "request_timeout")

    limits = LimitsConfig(request_timeout_s=0.2)
    play(model, scene, then_stop=False, step_s=0.01, limits=limits, now=clock)


def chat(user: str, *, system: str = "abc " * 150, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "small", "messages": messages, "max_tokens": 3, **fields}


async def usage_of(
    it: World, path: str, body: dict[str, Any], *, stream: bool = False, key: str = ""
) -> dict[str, Any]:
    """What a reply says it used; the two ways of saying what was cached must agree."""
    if stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    reply = await it.client.post(f"/v1/{path}", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    usage = events(reply)[-1]["usage"] if stream else reply.json()["usage"]
    assert usage["prompt_cache_hit_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert (
        usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"]
        == usage["prompt_tokens"]
    )
    return usage


async def hits(it: World, body: dict[str, Any], **options: Any) -> int:
    return (await usage_of(it, "chat/completions", body, **options))["prompt_cache_hit_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_what_was_reused(model: ServedModel, stream: bool) -> None:
    async def scene(it: World) -> None:
        first = await usage_of(it, "chat/completions", chat("one"), stream=stream)
        again = await usage_of(it, "chat/completions", chat("one"), stream=stream)
        other = await usage_of(it, "chat/completions", chat("two " * 99), stream=stream)
        num_prompt = first["prompt_tokens"]
        assert num_prompt > 3 * 64
        assert first["prompt_cache_hit_tokens"] == 0
        assert again["prompt_cache_hit_tokens"] == (num_prompt - 1) // 64 * 64, (
            "all full blocks before the last token"
        )
        assert 128 <= other["prompt_cache_hit_tokens"] <= num_prompt < other["prompt_tokens"]
        samples = (await it.client.get("/metrics")).text
        for found in ("hit", "miss"):
            total = sum(usage[f"prompt_cache_{found}_tokens"] for usage in (first, again, other))
            assert f'hadal_usage_prompt_tokens_total{{cache="{found}"}} {float(total)}' in samples
            assert (
                f'hadal_answered_prompt_tokens_total{{cache="{found}"}} {float(total)}' in samples
            )

    play(model, scene)


@pytest.mark.promise(
    "A prompt is billed once it has its first token, and once for all its choices."
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_counts_once_and_several_add_up(model: ServedModel, stream: bool) -> None:
    ids = [[5 + (i * step) % 400 for i in range(200)] for step in (1, 3)]

    async def scene(it: World) -> None:
        body = {"model": "small", "prompt": ids, "max_tokens": 2, "n": 2}
        first = await usage_of(it, "completions", body, stream=stream)
        # A prompt's second choice may find what the first left behind: that is not the prompt's.
        assert (first["prompt_tokens"], first["prompt_cache_hit_tokens"]) == (400, 0)
        again = await usage_of(it, "completions", body, stream=stream)
        assert (again["prompt_tokens"], again["prompt_cache_hit_tokens"]) == (400, 2 * 192)
        assert again["completion_tokens"] == 4 * 2
        samples = (await it.client.get("/metrics")).text
        assert 'hadal_usage_prompt_tokens_total{cache="hit"} 384.0' in samples
        assert 'hadal_usage_prompt_tokens_total{cache="miss"} 416.0' in samples

    play(model, scene)


@pytest.mark.promise("A tenant neither reads nor times another's cache.")
@pytest.mark.promise("Each API key is a tenant that shares nothing with others")
@pytest.mark.promise(
    "cache_salt in a request (up to 256 characters, as vLLM's) keeps a tenant's own users"
    " apart as well"
)
def test_tenants_share_nothing_but_what_is_public(model: ServedModel) -> None:
    async def scene(it: World) -> None:
        assert await hits(it, chat("one"), key="k1") == 0
        assert await hits(it, chat("one"), key="k2") == 0, "the same prompt of another tenant"
        num_all = await hits(it, chat("one"), key="k2")
        assert num_all >= 128
        assert await hits(it, chat("one", cache_salt="ann"), key="k1") == 0
        assert await hits(it, chat("one", cache_salt="bob"), key="k1") == 0
        assert await hits(it, chat("one", cache_salt="ann"), key="k2") == 0
        assert await hits(it, chat("one", cache_salt="ann"), key="k1") == num_all
        assert await hits(it, chat("one " * 99, cache_salt="public"), key="k1") == 0
        shared = await hits(it, chat("one " * 99, cache_salt="public"), key="k2")
        num_system = len(
            model.vocabulary.encode_controlled("<｜begin▁of▁sentence｜>" + "abc " * 150)
        )
        assert shared == num_system // 64 * 64 > 0, (
            "the system message's full blocks, and none of the same question"
        )
        assert await hits(it, chat("one " * 99, cache_salt="public"), key="k2") > shared

    play(model, scene, keys=("k1", "k2"))


def test_no_key_is_in_what_the_units_are_sent(model: ServedModel) -> None:
    async def scene(it: World) -> None:
        await hits(it, chat("one", cache_salt="secret-user"), key="secret-key")
        (generation,) = it.units.submitted
        assert b"secret" not in msgspec.msgpack.encode(generation)

    play(model, scene, keys=("secret-key",))


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": "hi", "cache_salt": "public"}, "cache_salt"),
        ("completions", {"prompt": "hi", "cache_salt": ""}, "cache_salt"),
        ("chat/completions", {"messages": CHAT["messages"], "cache_salt": "s" * 257}, "cache_salt"),
        ("chat/completions", {"messages": CHAT["messages"], "cache_salt": ["s"]}, "cache_salt"),
    ],
)
def test_a_wrong_salt_is_refused(
    model: ServedModel, path: str, fields: dict[str, Any], param: str
) -> None:
    async def scene(it: World) -> None:
        reply = await it.client.post(f"/v1/{path}", json={"model": "small", **fields})
        assert error_of(reply, 400)["param"] == param

    play(model, scene)
