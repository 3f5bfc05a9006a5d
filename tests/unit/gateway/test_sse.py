"""Streams: what is in them, and what happens when a client leaves, stands still or has to wait."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hadal.core.config import LimitsConfig
from hadal.gateway.http import Patience
from hadal.gateway.service import ServedModel

from .scenes import CHAT, error_of, events, play
from .world import World


def test_chat_stream(model: ServedModel) -> None:
    async def scene(it: World) -> None:
        chunks = events(await it.client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Easy."
        assert "".join(delta.get("content", "") for delta in deltas) == "The answer is 4. 🙂"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
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
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(reply))
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
        assert await it.gateway.host.wait_idle(1)

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
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b"",
            "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        task = asyncio.create_task(it.app(scope, receive, send))
        while len(it.units.decoding) < n:
            await asyncio.sleep(0.001)
        left.set()
        async with asyncio.timeout(1):
            await task
        assert bool(sent) == stream
        await it.settle(1)
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
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b"",
            "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        async with asyncio.timeout(2):
            await it.app(scope, receive, send)
        await it.settle(1)
        assert it.units.cancelled

    play(model, scene, then_stop=False, step_s=0.001, patience=Patience(send_s=0.05))


def test_keep_alive(model: ServedModel) -> None:
    async def scene(it: World) -> None:
        it.units.go.clear()
        asyncio.get_running_loop().call_later(0.2, it.units.go.set)
        reply = await it.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert reply.text.startswith(": keep-alive\n\n")
        assert reply.text.count(": keep-alive\n\n") >= 2
        assert events(reply)[-1]["choices"][0]["finish_reason"] == "stop"

    play(model, scene, patience=Patience(keep_alive_s=0.05))


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_takes_too_long(model: ServedModel, stream: bool) -> None:
    async def scene(it: World) -> None:
        reply = await it.client.post("/v1/chat/completions", json={**CHAT, "stream": stream, "max_tokens": 3000})
        if stream:
            assert reply.status_code == 200
            last = reply.text.rstrip().rpartition("\n\n")[2]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        else:
            error_of(reply, 504, "request_timeout")

    play(model, scene, then_stop=False, step_s=0.01, limits=LimitsConfig(request_timeout_s=0.2))
