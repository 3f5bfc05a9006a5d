"""Streams: their content, and what happens when a client leaves, stalls or has to wait."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import msgspec
import pytest

from hadal.core.config import LimitsConfig
from hadal.gateway.api.reply import KEEP_ALIVE
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.intake import Patience
from tests.waiting import DEADLINE_S, wait_for

from .scenes import error_of, events, scene, sent_by_replies
from .world import CHAT, Clock, World


async def test_chat_stream(model: ServedModel) -> None:
    async with scene(model) as it:
        chunks = events(await it.chat(stream=True))
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


async def test_stream_with_usage(model: ServedModel) -> None:
    async with scene(model) as it:
        whole = (await it.chat()).json()
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(await it.client.post("/v1/chat/completions", json=body))
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_generation(model: ServedModel, stream: bool) -> None:
    async with scene(model, then_stop=False) as it:
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


async def test_drain(model: ServedModel) -> None:
    async with scene(model) as it:
        it.units.go.clear()
        running = asyncio.create_task(it.chat())
        while not it.gateway.link.num_open:
            await asyncio.sleep(0)
        it.gateway.link.drain()
        reply = await it.chat()
        error_of(reply, 503, "draining")
        assert "retry-after" in reply.headers
        assert (await it.client.get("/health")).status_code == 503
        assert not await it.gateway.link.wait_idle(0.01)
        it.units.go.set()
        assert (await running).json()["choices"][0]["finish_reason"] == "stop"
        assert await it.gateway.link.wait_idle(DEADLINE_S)


async def test_keep_alive(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = sent_by_replies(monkeypatch)
    async with scene(model, patience=Patience(keep_alive_s=0.05)) as it:
        it.units.go.clear()
        asking = asyncio.create_task(it.chat(stream=True))
        await wait_for(lambda: sent.count(KEEP_ALIVE) >= 2, "two were sent")
        it.units.go.set()
        reply = await asking
        assert reply.text.startswith(": keep-alive\n\n")
        assert reply.text.count(": keep-alive\n\n") >= 2
        assert events(reply)[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_takes_too_long(model: ServedModel, stream: bool) -> None:
    clock = Clock()
    limits = LimitsConfig(request_timeout_s=100.0)
    async with scene(model, then_stop=False, step_s=0.01, limits=limits, now=clock) as it:
        body = {**CHAT, "stream": stream, "max_tokens": 3000}
        asking = asyncio.create_task(it.client.post("/v1/chat/completions", json=body))
        await it.units.hold(5)
        while not asking.done():
            clock.now_s += 60
            await asyncio.sleep(0.01)
        reply = await asking
        if stream:
            assert reply.status_code == 200
            last = reply.text.rstrip().rpartition("\n\n")[2]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        else:
            error_of(reply, 504, "request_timeout")


def chat(user: str, *, system: str = "abc " * 150, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "small", "messages": messages, "max_tokens": 3, **fields}


async def usage_of(
    it: World, path: str, body: dict[str, Any], *, stream: bool = False, key: str = ""
) -> dict[str, Any]:
    """Return the usage of a reply. Its two fields for cached tokens must agree."""
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
async def test_usage_says_what_was_reused(model: ServedModel, stream: bool) -> None:
    async with scene(model) as it:
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


@pytest.mark.promise(
    "A prompt is billed once it has its first token, and once for all its choices."
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_counts_once_and_several_add_up(model: ServedModel, stream: bool) -> None:
    ids = [[5 + (i * step) % 400 for i in range(200)] for step in (1, 3)]
    async with scene(model) as it:
        body = {"model": "small", "prompt": ids, "max_tokens": 2, "n": 2}
        first = await usage_of(it, "completions", body, stream=stream)
        # A prompt's second choice may find KV of the first in the cache; usage does not count that.
        assert (first["prompt_tokens"], first["prompt_cache_hit_tokens"]) == (400, 0)
        again = await usage_of(it, "completions", body, stream=stream)
        assert (again["prompt_tokens"], again["prompt_cache_hit_tokens"]) == (400, 2 * 192)
        assert again["completion_tokens"] == 4 * 2
        samples = (await it.client.get("/metrics")).text
        assert 'hadal_usage_prompt_tokens_total{cache="hit"} 384.0' in samples
        assert 'hadal_usage_prompt_tokens_total{cache="miss"} 416.0' in samples


@pytest.mark.promise(
    "No tenant can read another's cache, or detect its content by timing, except for "
    "what both made public."
)
@pytest.mark.promise("Each API key is a tenant that shares nothing with others")
@pytest.mark.promise(
    "cache_salt in a request (up to 256 characters, as vLLM's) keeps a tenant's own users"
    " apart as well"
)
async def test_tenants_share_nothing_but_what_is_public(model: ServedModel) -> None:
    async with scene(model, keys=("k1", "k2")) as it:
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


async def test_no_key_is_in_what_the_units_are_sent(model: ServedModel) -> None:
    async with scene(model, keys=("secret-key",)) as it:
        await hits(it, chat("one", cache_salt="secret-user"), key="secret-key")
        (generation,) = it.units.submitted
        assert b"secret" not in msgspec.msgpack.encode(generation)


@pytest.mark.promise("puts the usage so far into each chunk")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_so_far_is_in_each_chunk(model: ServedModel, path: str) -> None:
    asked = CHAT if "chat" in path else {"model": "small", "prompt": "once"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with scene(model) as it:
        body = {**asked, "stream": True, "stream_options": options}
        *chunks, last = events(await it.client.post(path, json=body))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert 0 < counts[0] < counts[-1] == last["usage"]["completion_tokens"]
        assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks)
        assert last["choices"] == []
        alone = {**body, "stream_options": {"continuous_usage_stats": True}}
        chunks = events(await it.client.post(path, json=alone))
        assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.promise("gives the ids of the prompt (prompt_token_ids) and of the reply (token_ids)")
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": True}])
async def test_token_ids_of_a_chat(model: ServedModel, more: dict[str, Any]) -> None:
    async with scene(model) as it:
        body = {**CHAT, **more, "return_token_ids": True}
        whole = (await it.client.post("/v1/chat/completions", json=body)).json()
        asked = it.units.submitted[-1]
        chunks = events(await it.client.post("/v1/chat/completions", json={**body, "stream": True}))
        assert whole["prompt_token_ids"] == list(asked.prompt)
        assert chunks[0]["prompt_token_ids"] == list(asked.prompt)
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
        for choice in whole["choices"]:
            ids = choice["token_ids"]
            assert len(ids) * len(whole["choices"]) == whole["usage"]["completion_tokens"]
            parts = [chunk["choices"][0] for chunk in chunks]
            own = [part.get("token_ids", []) for part in parts if part["index"] == choice["index"]]
            assert list(itertools.chain(*own)) == ids
        assert "prompt_token_ids" not in (await it.chat()).json()


async def test_token_ids_of_texts(model: ServedModel) -> None:
    async with scene(model) as it:
        body = {"model": "small", "prompt": ["once", "twice"], "return_token_ids": True}
        whole = (await it.client.post("/v1/completions", json=body)).json()
        prompts = [list(one.prompt) for one in it.units.submitted[-2:]]
        chunks = events(await it.client.post("/v1/completions", json={**body, "stream": True}))
        for choice, prompt in zip(whole["choices"], prompts, strict=True):
            assert choice["prompt_token_ids"] == prompt
            parts = [chunk["choices"][0] for chunk in chunks]
            own = [part for part in parts if part["index"] == choice["index"]]
            assert [part["prompt_token_ids"] for part in own if "prompt_token_ids" in part] == [
                prompt
            ]
            said = itertools.chain(*(part.get("token_ids", []) for part in own))
            assert list(said) == choice["token_ids"]
