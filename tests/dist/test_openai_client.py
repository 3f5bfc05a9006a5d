"""The official client drives every endpoint and every error of a running server."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from typing import Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.dist import gate
from tests.dist.serving import Server, StartServer, metric
from tests.waiting import DEADLINE_S, join, wait_for, wait_until

FEW = pytest.mark.more("one case of each stands in `make test`, all of them in tests/unit/gateway")
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
LONG = {"ignore_eos": True}
NOW = "hadal_generations_now"


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as made:
        yield made


@pytest.fixture
def model(server: Server) -> str:
    return server.model


def client_of(server: Server, **options: object) -> OpenAI:
    return OpenAI(
        **{
            "base_url": f"{server.url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": DEADLINE_S,
            **options,
        }
    )


def is_empty(server: Server) -> bool:
    """Return whether the front has no generation and no unit has a used block."""
    return metric(server, NOW) == 0 == metric(server, "hadal_kv_blocks_used")


def test_models(client: OpenAI, model: str) -> None:
    assert [entry.id for entry in client.models.list()] == [model]
    assert client.models.retrieve(model).owned_by == "hadal"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


@pytest.mark.promise(
    'Any OpenAI client with base_url="http://127.0.0.1:8000/v1" works with the '
    "server; Anthropic's clients use the URL without /v1."
)
def test_chat(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=20, extra_body=LONG
    )
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.message.content or choice.message.reasoning_content  # type: ignore[attr-defined]
    usage = reply.usage
    assert usage is not None
    assert usage.completion_tokens == 20
    assert usage.total_tokens == usage.prompt_tokens + 20
    assert usage.prompt_cache_miss_tokens + usage.prompt_cache_hit_tokens == usage.prompt_tokens  # type: ignore[attr-defined]


def test_chat_stream_is_the_whole_reply(client: OpenAI, model: str) -> None:
    asked = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": LONG,
    }
    whole = client.chat.completions.create(**asked)
    reasoning, content, finish, usage = "", "", None, None
    for chunk in client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
    message = whole.choices[0].message
    assert (reasoning, content) == (getattr(message, "reasoning_content", ""), message.content)
    assert finish == whole.choices[0].finish_reason
    assert usage == whole.usage


@pytest.mark.promise("Paths without /v1 work as well.")
@FEW
def test_base_url_without_v1(server: Server, model: str) -> None:
    with client_of(server, base_url=server.url) as client:
        reply = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=2)
        assert reply.usage is not None
        assert reply.usage.completion_tokens <= 2


def test_seed_and_choices(client: OpenAI, model: str) -> None:
    def texts(seed: int | None, n: int) -> list[str]:
        reply = client.completions.create(
            model=model,
            prompt="once",
            max_tokens=24,
            temperature=1.5,
            seed=seed,
            n=n,
            extra_body=LONG,
        )
        assert [choice.index for choice in reply.choices] == list(range(n))
        return [choice.text for choice in reply.choices]

    first = texts(7, 3)
    assert texts(7, 3) == first
    assert texts(8, 2) == first[1:]  # Choice i is drawn with seed + i.
    assert len(set(first)) == 3
    assert texts(None, 2) != texts(None, 2)


def test_stop(client: OpenAI, model: str) -> None:
    asked = {
        "model": model,
        "prompt": "once",
        "max_tokens": 60,
        "temperature": 0,
        "extra_body": LONG,
    }
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    reply = client.completions.create(**asked, stop=[stop])
    assert reply.choices[0].text == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    streamed = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(**asked, stop=stop, stream=True)
        if chunk.choices
    )
    assert streamed == reply.choices[0].text


@FEW
def test_chat_logprobs(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
        extra_body=LONG,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    entries = [entry.model_dump() for entry in logprobs.content or ()] + list(
        getattr(logprobs, "reasoning_content", None) or ()
    )
    assert len(entries) == 12
    for entry in entries:
        best = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(best) == 4
        assert best == sorted(best, reverse=True)
        assert entry["logprob"] == pytest.approx(best[0])  # Greedy.


class Verdict(BaseModel):
    """Type that an answer is parsed into."""

    colour: Literal["red", "green"]
    sure: bool
    marks: list[Literal[1, 2]] = Field(max_length=3)


def test_an_answer_is_parsed_into_a_model(client: OpenAI, model: str) -> None:
    reply = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Is grass green?"}],
        response_format=Verdict,
        temperature=0,
        max_tokens=400,
        extra_body={"thinking": False},
    )
    assert isinstance(reply.choices[0].message.parsed, Verdict)


def test_a_bad_request(client: OpenAI, model: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=model, messages=MESSAGES, stream=stream, temperature=3
            )
        assert caught.value.param == "temperature"
        assert "temperature" in str(caught.value)


def test_many_at_once(server: Server, model: str) -> None:
    """The asynchronous client: concurrent streams and whole replies get the same texts as alone."""

    async def run() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
        ) as client:

            async def ask(number: int) -> str:
                asked = {
                    "model": model,
                    "prompt": f"once {number % 4}",
                    "max_tokens": 20 + number % 4,
                    "temperature": 0,
                    "extra_body": LONG,
                }
                if number % 2:
                    return (await client.completions.create(**asked)).choices[0].text
                return "".join(
                    [
                        chunk.choices[0].text
                        async for chunk in await client.completions.create(**asked, stream=True)
                    ]
                )

            return list(await asyncio.gather(*(ask(number) for number in range(24))))

    texts = asyncio.run(run())
    with client_of(server) as client:
        for number in range(4):
            alone = client.completions.create(
                model=model,
                prompt=f"once {number}",
                max_tokens=20 + number,
                temperature=0,
                extra_body=LONG,
            )
            assert {texts[i] for i in range(number, 24, 4)} == {alone.choices[0].text}


@pytest.mark.promise("Both units free its blocks within a second.")
@pytest.mark.parametrize("stream", [pytest.param(False, marks=FEW), True])
def test_client_that_leaves_frees_its_blocks(server: Server, model: str, stream: bool) -> None:
    """No block stays used after a client leaves while its three choices are held."""
    server.gate.hold(gate.DECODE, after=3)
    wait_until(lambda: is_empty(server), "the server is idle")

    async def leave() -> None:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            asking = asyncio.create_task(
                client.chat.completions.create(
                    model=model,
                    messages=MESSAGES,
                    max_tokens=4000,
                    n=3,
                    stream=stream,
                    extra_body=LONG,
                )
            )
            await wait_for(lambda: metric(server, "hadal_kv_blocks_used"), "it has blocks")
            if stream:
                chunks = await asking
                await anext(aiter(chunks))
                await chunks.close()
            else:
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking

    asyncio.run(leave())
    server.gate.open()
    wait_until(lambda: is_empty(server), "the blocks of the request are free")


@pytest.mark.more("it ends its server; tests/unit/gateway has each of it")
def test_overload_keep_alive_and_drain(start_server: StartServer) -> None:
    """One request runs, one waits with keep-alives, the third is refused. After SIGTERM the first
    two finish.
    """
    server = start_server(limits={"max_running": 1, "max_queued": 1}, keep_alive_s=0.1)
    model, url = server.model, f"{server.url}/v1/chat/completions"
    body = {"model": model, "messages": MESSAGES, "stream": True, "max_tokens": 30, **LONG}
    texts = ["", ""]

    def read(number: int) -> None:
        with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as reply:
            for piece in reply.iter_text():
                texts[number] += piece

    first, second = (threading.Thread(target=read, args=(number,)) for number in range(2))
    server.gate.hold(gate.DECODE, after=3)
    first.start()
    wait_until(lambda: metric(server, NOW, 'state="decoding"') == 1, "the first runs")
    second.start()
    wait_until(lambda: metric(server, NOW, 'state="queued"') == 1, "the second waits")
    wait_until(lambda: texts[1].count(": keep-alive\n\n") >= 2, "its connection is kept alive")
    with client_of(server) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=model, messages=MESSAGES)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503, "it drains")
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model=model, messages=MESSAGES)
        assert refused.value.status_code == 503
        assert "retry-after" in refused.value.response.headers
    server.gate.open()
    join(first, second)
    assert server.process.wait(DEADLINE_S) == 0
    assert texts[1].startswith(": keep-alive\n\n")
    for text in texts:
        events = [
            line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")
        ]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
