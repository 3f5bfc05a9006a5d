"""The endpoints through ASGI, with a real front and host, and units that compute nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from typing import Any

import httpx
import pytest

from hadal.core.config import LimitsConfig
from hadal.core.messages.units import UnitDown
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.bodies import Bodies
from hadal.gateway.edge.intake import Patience
from hadal.gateway.text.vocabulary import Vocabulary

from .scenes import TEXT, error_of, events, scene
from .world import CHAT


@pytest.mark.promise("Paths without /v1 work as well.")
@pytest.mark.parametrize("prefix", ["", "/v1", "/beta"])
async def test_chat(model: ServedModel, prefix: str) -> None:
    async with scene(model) as it:
        reply = await it.client.post(f"{prefix}/chat/completions", json=CHAT)
        body = reply.json()
        assert reply.status_code == 200
        assert body["object"] == "chat.completion"
        assert body["model"] == "small"
        choice = body["choices"][0]
        assert choice["message"] == {
            "role": "assistant",
            "content": "The answer is 4. 🙂",
            "reasoning_content": "Easy.",
            "refusal": None,
        }
        assert choice["finish_reason"] == "stop"
        usage = body["usage"]
        generation = it.units.submitted[0]
        ids = model.vocabulary.encode_controlled(TEXT)
        assert usage["prompt_tokens"] == len(generation.prompt) == usage["prompt_cache_miss_tokens"]
        assert usage["completion_tokens"] == len(ids) + 1
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert (
            usage["completion_tokens_details"]["reasoning_tokens"]
            == ids.index(model.vocabulary.control_ids["</think>"]) + 1
        )
        assert (
            usage["prompt_cache_hit_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == 0
        )


async def test_choices_have_seeds_of_their_own(model: ServedModel) -> None:
    async with scene(model) as it:
        reply = await it.chat(n=3, seed=7)
        assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1, 2]
        assert [generation.sampling.seed for generation in it.units.submitted] == [7, 8, 9]
        await it.chat(n=2)
        await it.chat()
        seeds = [generation.sampling.seed for generation in it.units.submitted[3:]]
        assert seeds[1] == seeds[0] + 1
        assert seeds[2] not in seeds[:2]


async def test_max_tokens_and_ignore_eos(model: ServedModel) -> None:
    async with scene(model, text="a", then_stop=False) as it:
        body = {**CHAT, "max_completion_tokens": 40, "ignore_eos": True}
        reply = (await it.client.post("/v1/chat/completions", json=body)).json()
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 40


async def test_chat_logprobs(model: ServedModel) -> None:
    async with scene(model) as it:
        body = {**CHAT, "logprobs": True, "top_logprobs": 2}
        whole = (await it.client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        entries = whole["logprobs"]["content"]
        assert (
            b"".join(bytes(entry["bytes"]) for entry in entries).decode().lstrip("\n")
            == whole["message"]["content"]
        )
        assert all(
            entry["logprob"] == -0.25 and len(entry["top_logprobs"]) == 2 for entry in entries
        )
        chunks = events(await it.client.post("/v1/chat/completions", json={**body, "stream": True}))
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [
            e for logprobs in streamed if logprobs for e in logprobs["content"] or ()
        ] == entries
        reasoning = [e for logprobs in streamed if logprobs for e in logprobs["reasoning_content"]]
        assert reasoning == whole["logprobs"]["reasoning_content"]
        assert all(logprobs.keys() == whole["logprobs"].keys() for logprobs in streamed if logprobs)
        assert whole["logprobs"]["refusal"] is None


async def test_completion(model: ServedModel) -> None:
    async with scene(model) as it:
        body = {"model": "small", "prompt": "2 + 2 =", "echo": True}
        reply = (await it.client.post("/v1/completions", json=body)).json()
        assert reply["object"] == "text_completion"
        assert reply["choices"][0]["text"] == "2 + 2 =" + TEXT
        chunks = events(await it.client.post("/v1/completions", json={**body, "stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "2 + 2 =" + TEXT
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_completion_logprobs(model: ServedModel) -> None:
    async with scene(model) as it:
        body = {"model": "small", "prompt": "2 + 2 =", "logprobs": 1}
        choice = (await it.client.post("/v1/completions", json=body)).json()["choices"][0]
        logprobs = choice["logprobs"]
        assert (
            len(logprobs["tokens"])
            == len(logprobs["token_logprobs"])
            == len(logprobs["top_logprobs"])
        )
        assert logprobs["text_offset"][0] == 0
        at = logprobs["tokens"].index("The") if "The" in logprobs["tokens"] else 1
        assert choice["text"][logprobs["text_offset"][at] :].startswith(logprobs["tokens"][at])


async def test_a_completion_of_no_tokens_is_its_prompt(model: ServedModel) -> None:
    """OpenAI's description allows this, as it allows `best_of` 0. No unit is involved."""
    async with scene(model) as it:
        body = {
            "model": "small",
            "prompt": ["2 + 2 =", "a"],
            "echo": True,
            "max_tokens": 0,
            "best_of": 0,
        }
        reply = (await it.client.post("/v1/completions", json=body)).json()
        assert [(choice["text"], choice["finish_reason"]) for choice in reply["choices"]] == [
            ("2 + 2 =", "length"),
            ("a", "length"),
        ]
        assert reply["usage"]["completion_tokens"] == 0
        chunks = events(await it.client.post("/v1/completions", json={**body, "stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "2 + 2 =a"
        assert it.units.submitted == []
        assert (
            'hadal_usage_prompt_tokens_total{cache="miss"} 0.0'
            in (await it.client.get("/metrics")).text
        )


async def test_more_tokens_than_the_context_holds_are_refused(model: ServedModel) -> None:
    async with scene(model) as it:
        for field in ("max_tokens", "max_completion_tokens"):
            error = error_of(
                await it.client.post("/v1/chat/completions", json={**CHAT, field: 4096}),
                400,
                "context_length_exceeded",
            )
            assert error["param"] == field
            assert error["message"].startswith(
                "This model's maximum context length is 4096 tokens. However, you"
            )


async def test_prompts_in_every_form(model: ServedModel) -> None:
    async with scene(model) as it:
        for prompt, num_choices in (("a", 2), (["a", "b"], 4), ([5, 6, 7], 2), ([[5, 6], [7]], 4)):
            body = {"model": "small", "prompt": prompt, "n": 2, "seed": 1}
            reply = (await it.client.post("/v1/completions", json=body)).json()
            assert [choice["index"] for choice in reply["choices"]] == list(range(num_choices))
        assert it.units.submitted[-1].prompt == (7,)
        assert [generation.sampling.seed for generation in it.units.submitted[-4:]] == [1, 2, 1, 2]


async def test_models(model: ServedModel) -> None:
    async with scene(model) as it:
        listed = (await it.client.get("/v1/models")).json()
        assert [entry["id"] for entry in listed["data"]] == ["small"]
        assert (await it.client.get("/models/small")).json() == listed["data"][0]
        error_of(await it.client.get("/v1/models/other"), 404, "model_not_found")


async def test_no_such_place(model: ServedModel) -> None:
    async with scene(model) as it:
        error_of(await it.client.get("/v1/nothing"), 404, "not_found")
        reply = await it.client.get("/v1/chat/completions")
        error_of(reply, 405, "method_not_allowed")
        assert "POST" in reply.headers["allow"]
        error_of(
            await it.chat(model="other"),
            404,
            "model_not_found",
        )


@pytest.mark.promise("A key is sent as Authorization: Bearer KEY or x-api-key: KEY.")
async def test_keys(model: ServedModel) -> None:
    async with scene(model, keys=("kéy", "other")) as it:
        for header in (None, "Bearer wrong", "Basic kéy", "Bearer", "kéy"):
            headers = {} if header is None else {"Authorization": header.encode()}
            for reply in (
                await it.chat(headers=headers),
                await it.client.get("/v1/models", headers=headers),
            ):
                error_of(reply, 401)
                assert reply.headers["www-authenticate"].startswith("Bearer")
        good = {"Authorization": "Bearer kéy".encode()}
        assert (await it.chat(headers=good)).status_code == 200
        assert (await it.client.get("/health")).status_code == 200


async def test_limits(model: ServedModel) -> None:
    async with scene(
        model,
        limits=LimitsConfig(
            max_body_bytes=20000, max_prompt_tokens=500, max_output_tokens=100, max_n=2
        ),
    ) as it:

        def chat(**fields: Any) -> Awaitable[httpx.Response]:
            return it.chat(**fields)

        long = [{"role": "user", "content": "abc " * 3000}]
        error_of(await chat(messages=long), 400, "context_length_exceeded")
        assert error_of(await chat(n=3), 400)["param"] == "n"
        assert error_of(await chat(max_tokens=101), 400)["param"] == "max_tokens"
        error_of(
            await chat(messages=[{"role": "user", "content": "a" * 30000}]), 413, "body_too_large"
        )


@pytest.mark.parametrize("num_chunks", [1, 1000])
async def test_body_without_length(model: ServedModel, num_chunks: int) -> None:
    async with scene(model, limits=LimitsConfig(max_body_bytes=20000)) as it:

        async def chunks() -> Any:
            for _ in range(num_chunks):
                yield b" " * (40_000 // num_chunks)

        headers = {"Content-Type": "application/json"}
        error_of(
            await it.client.post("/v1/chat/completions", content=chunks(), headers=headers), 413
        )


async def test_slow_body(model: ServedModel) -> None:
    async with scene(model, patience=Patience(body_s=0.05)) as it:

        async def chunks() -> Any:
            yield b"{"
            await asyncio.sleep(60)

        reply = await it.client.post(
            "/v1/chat/completions", content=chunks(), headers={"Content-Type": "application/json"}
        )
        error_of(reply, 408)


@pytest.mark.promise(
    "admits all texts of a request together, or refuses them with 429 or 503 and a time to retry"
)
async def test_too_many_requests(model: ServedModel) -> None:
    async with scene(model, limits=LimitsConfig(max_running=1, max_queued=1)) as it:
        it.units.go.clear()
        running = [asyncio.create_task(it.chat()) for _ in range(2)]
        while len(it.gateway.intake.permits) < 2:
            await asyncio.sleep(0)
        reply = await it.chat()
        error_of(reply, 429)
        assert int(reply.headers["retry-after"]) >= 1
        it.units.go.set()
        assert [(await task).status_code for task in running] == [200, 200]


async def test_permits_are_generations(model: ServedModel) -> None:
    """A request without enough permits is refused whole, before any part of it begins."""
    async with scene(model, limits=LimitsConfig(max_queued=16), keys=("one", "two")) as it:
        it.units.go.clear()
        body = {"model": "small", "prompt": ["a", "b", "c"], "n": 8, "max_tokens": 3}
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        asked = [
            asyncio.create_task(it.client.post("/v1/completions", json=body, headers=one))
            for _ in range(3)
        ]
        while it.gateway.link.num_open < 72:
            await asyncio.sleep(0)
        reply = await it.client.post("/v1/completions", json={**body, "n": 6}, headers=one)
        error_of(reply, 429, "overloaded")
        assert "this tenant" in reply.json()["error"]["message"]
        totals = it.gateway.link.snapshot().totals
        # Each prompt is a begin token and a letter.
        assert (totals.refused, totals.tokens_refused) == (18, 18 * 2)
        assert it.gateway.link.num_open == 72
        other = asyncio.create_task(
            it.client.post("/v1/completions", json={**body, "prompt": "a"}, headers=two)
        )
        while it.gateway.link.num_open < 80:
            await asyncio.sleep(0)
        it.units.go.set()
        assert [(await task).status_code for task in (*asked, other)] == [200] * 4


async def test_to_go_ahead_of_others_is_a_right(model: ServedModel) -> None:
    async with scene(model, keys=("one", "two priority")) as it:
        for key, priority, status in (
            ("one", 0, 200),
            ("one", -1, 200),
            ("one", 1, 403),
            ("two", 4, 200),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            reply = await it.chat(headers=headers, priority=priority)
            assert reply.status_code == status, (key, priority)
            if status == 403:
                assert error_of(reply, 403, "priority_not_allowed")["param"] == "priority"


async def test_bodies_that_do_not_come_take_no_place(model: ServedModel) -> None:
    """A stalled body displaces only the oldest body of its own tenant; other tenants are answered."""
    async with scene(
        model, keys=("one", "two"), limits=LimitsConfig(max_running=1, max_queued=1)
    ) as it:
        it.gateway.intake.bodies = Bodies(4)
        gone = asyncio.Event()

        async def chunks() -> Any:
            yield b"{"
            await gone.wait()

        headers = {"Content-Type": "application/json", "Authorization": "Bearer one"}
        slow = [
            asyncio.create_task(
                it.client.post("/v1/completions", content=chunks(), headers=headers)
            )
            for _ in range(6)
        ]
        error_of(await slow[0], 429, "too_many_bodies")
        error_of(await slow[1], 429, "too_many_bodies")
        assert (len(it.gateway.intake.bodies), len(it.gateway.intake.permits)) == (4, 0)
        for _ in range(3):
            reply = await it.chat(headers={"Authorization": "Bearer two"})
            assert reply.status_code == 200
        gone.set()
        for task in slow[2:5]:
            error_of(await task, 400)  # Not JSON.
        assert len(it.gateway.intake.bodies) == 0


@pytest.mark.promise(
    "admits all texts of a request together, or refuses them with 429 or 503 and a time to retry"
)
async def test_no_units(model: ServedModel) -> None:
    async with scene(model) as it:
        it.units.tell(UnitDown("decode-0", "killed"))
        while it.gateway.link.snapshot().can_serve:
            await asyncio.sleep(0)
        reply = await it.chat()
        error_of(reply, 503, "no_units")
        assert "retry-after" in reply.headers
        health = await it.client.get("/health")
        assert health.status_code == 503
        assert health.json()["units_up"] == {"prefill": 1, "decode": 0}
        assert (health.json()["status"], health.json()["model"]) == ("starting", model.name)


async def test_failures_are_counted_from_none(model: ServedModel) -> None:
    """A counter that first appears with a failure shows no increase, so all start at 0."""
    async with scene(model) as it:
        text = (await it.client.get("/metrics")).text
        for endpoint in ("chat", "completions", "messages", "responses"):
            for status in ("200", "500", "503", "504"):
                said = f'hadal_requests_total{{endpoint="{endpoint}",status="{status}"}} 0.0'
                assert said in text


async def test_metrics(model: ServedModel) -> None:
    async with scene(model) as it:
        usage = (await it.chat()).json()["usage"]
        await it.client.post("/v1/completions", json={})
        text = (await it.client.get("/metrics")).text
        assert 'hadal_requests_total{endpoint="chat",status="200"} 1.0' in text
        assert 'hadal_requests_total{endpoint="completions",status="400"} 1.0' in text
        assert f"hadal_prompt_tokens_total {float(usage['prompt_tokens'])}" in text
        assert f"hadal_output_tokens_total {float(usage['completion_tokens'])}" in text
        assert "hadal_time_to_first_token_seconds_count 1.0" in text
        assert 'hadal_units_up{role="decode"} 1.0' in text
        assert 'hadal_kv_blocks_used{unit="decode-0"} 3.0' in text
        assert 'hadal_step_ms{unit="decode-0"} 2.5' in text
        assert 'hadal_overhead_ms{unit="decode-0"} 0.25' in text


async def test_long_prompts_do_not_stop_the_loop(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, threads = Vocabulary.encode_shielded, list[threading.Thread]()

    def noted(vocabulary: Vocabulary, text: str, shield: str) -> Any:
        if len(text) > 1000:
            threads.append(threading.current_thread())
        return encode(vocabulary, text, shield)

    monkeypatch.setattr(Vocabulary, "encode_shielded", noted)
    async with scene(model) as it:
        # Short enough to be tokenised at all, and still longer than the context.
        body = {**CHAT, "messages": [{"role": "user", "content": "some words " * 10_000}]}
        reply = await it.client.post("/v1/chat/completions", json=body)
        error_of(reply, 400, "context_length_exceeded")
    assert threads
    assert threading.main_thread() not in threads
