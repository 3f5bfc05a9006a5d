"""Answers of a running server: a whole reply, many replies at once, and streams that the gate stops
midway.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.dist import gate
from tests.dist.borders import beside_a_border
from tests.dist.serving import Server, metric
from tests.waiting import DEADLINE_S, PATIENCE_S, join, wait_until

PROMPT = "What is 12 + 30?"
CONCURRENCY = 24


def asked(server: Server, num_tokens: int, prompt: str = PROMPT) -> dict[str, Any]:
    """Return the body of a request for a greedy completion of a fixed length."""
    return {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def complete(server: Server, num_tokens: int, prompt: str = PROMPT) -> str:
    """Return the text of a greedy completion of `num_tokens` tokens."""
    body = asked(server, num_tokens, prompt)
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


async def ask_all(
    server: Server,
    path: str,
    bodies: list[dict[str, Any]],
    while_running: Callable[[], Awaitable[None]] | None = None,
) -> list[Any]:
    """Return the choices of each request, in order. Sends at most CONCURRENCY requests at a time,
    while `while_running` runs beside them.
    """
    free, model = asyncio.Semaphore(CONCURRENCY), server.model
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:

        async def one(body: dict[str, Any]) -> Any:
            async with free:
                reply = await client.post(path, json={"model": model, **body})
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"]

        beside = asyncio.ensure_future(while_running()) if while_running is not None else None
        answers = await asyncio.gather(*(one(body) for body in bodies))
        if beside is not None:
            await beside
        return list(answers)


def events_of(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed reply as they arrive."""
    if "model" not in body:
        body = {**body, "model": server.model}
    body = {**body, "stream": True}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=DEADLINE_S) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


@dataclass
class Asked:
    """Requests to one path, and a plain server's answers, which every kind of server must give."""

    path: str
    bodies: list[dict[str, Any]]
    what_came: Callable[[Any], Any]
    """Function: choices of a reply -> the part that must be equal on every kind of server."""
    folder: Path
    """Folder of the model."""
    answers: list[Any] = field(default_factory=list)
    """Choices of each request; empty until `ask` has run."""

    def ask(self, server: Server) -> None:
        self.answers = asyncio.run(ask_all(server, self.path, self.bodies))

    def assert_same(
        self, server: Server, while_running: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Assert that a server gives the stored answers. With `while_running`, KV may be
        recomputed, so an answer may differ where a draw lies beside a border (tests/dist/borders).
        """
        answers = asyncio.run(ask_all(server, self.path, self.bodies, while_running))
        for body, ours, theirs in zip(self.bodies, answers, self.answers, strict=True):
            if self.what_came(ours) == self.what_came(theirs):
                continue
            assert while_running is not None, body
            assert beside_a_border(self.folder, self.path, body, ours, theirs), body


class Streams:
    """Greedy completions of one prompt, streamed, each read by its own thread."""

    def __init__(self, server: Server, number: int, num_tokens: int) -> None:
        self.texts = [""] * number
        body = asked(server, num_tokens)
        self._events = functools.partial(events_of, server, "/v1/completions", body)
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._read, args=(index,), daemon=True)
            for index in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> list[str]:
        """Return all texts once they are complete. Raises the error of a reader thread."""
        join(*self._threads)
        if self._errors:
            raise self._errors[0]
        return self.texts

    def _read(self, index: int) -> None:
        try:
            for event in self._events():
                assert "error" not in event, event
                self.texts[index] += "".join(choice["text"] for choice in event["choices"])
        except BaseException as error:
            self._errors.append(error)


def under_way(
    server: Server, unit: str, num_tokens: int, number: int = 1, after: int = 5
) -> Streams:
    """Start streams and return them once `unit` works on all of them. The gate holds a prefill unit
    before its first step, and a decode unit at most `after` steps after all streams have begun.
    """
    is_prefill = unit.startswith("prefill")
    kind, state = (gate.PREFILL, "prefilling") if is_prefill else (gate.DECODE, "decoding")
    server.gate.hold(kind)
    streams = Streams(server, number, num_tokens)
    wait_until(
        lambda: metric(server, "hadal_generations_now", f'state="{state}"') == number,
        f"{number} answers are {state}",
    )
    if not is_prefill:
        # The first token comes from prefill. A second one shows that the stream is in the decode
        # batch.
        wait_until(lambda: all(streams.texts), "all answers have begun")
        begun = list(map(len, streams.texts))
        server.gate.hold(kind, after)
        wait_until(
            lambda: all(len(text) > num for text, num in zip(streams.texts, begun, strict=True)),
            "all answers stream",
        )
    return streams
