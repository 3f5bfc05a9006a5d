"""Ask a running server held-out prompts of the tasks that hadal-tiny was taught, and count the exact
answers.

Depends on the API and the tasks, not on the engine: it works with any OpenAI-compatible server.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from rich.table import Table

from evals.tasks import ALL_TASKS, SIDES, TASKS, Example, held_out, is_correct, sample, side

_DRAFTS = re.compile(r"^hadal_drafts_(tried|accepted)(?:_total)?\{([^}]*)\} (\S+)$", re.MULTILINE)
_PLACE = re.compile(r'place="([^"]*)"')


@dataclass(frozen=True)
class Answer:
    """A server's reply to one prompt. `error` is set if the request failed."""

    example: Example
    text: str
    num_tokens: int
    error: str | None = None
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    ended: bool = True
    """False if the reply reached its token limit."""

    @property
    def correct(self) -> bool:
        return self.error is None and is_correct(self.example, self.text, self.calls)

    def as_json(self) -> dict[str, Any]:
        """Return the answer and its verdict as a dictionary for JSON."""
        return {
            "task": self.example.task,
            "side": side(self.example),
            "correct": self.correct,
            "ended": self.ended,
            "tokens": self.num_tokens,
            "error": self.error,
        }


def held_out_examples(num_per_task: int, seed: int, tasks: tuple[str, ...] = ()) -> list[Example]:
    """Draw prompts that training never saw, `num_per_task` of each task. The default tasks are
    chats of plain texts, which every model supports. Raises ValueError for an unknown task.
    """
    rng = random.Random(seed)
    examples: list[Example] = []
    for task in tasks or tuple(TASKS):
        if task not in ALL_TASKS:
            raise ValueError(f"unknown task {task!r}; known: {', '.join(ALL_TASKS)}")
        seen: set[str] = set()
        for _ in range(num_per_task * 1000):
            if len(seen) == num_per_task:
                break
            example = sample(rng, task)
            key = repr(example.messages)
            is_asked = bool(tasks) or _is_plain(example)
            if held_out(example) and is_asked and key not in seen:
                seen.add(key)
                examples.append(example)
    return examples


def _is_plain(example: Example) -> bool:
    """Return True if no tools are offered and none were called earlier."""
    return not example.tools and all(m["role"] != "tool" for m in example.messages)


async def ask_all(
    base_url: str,
    examples: list[Example],
    *,
    model: str = "",
    api_key: str = "",
    concurrency: int = 16,
    timeout_s: float = 300.0,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> list[Answer]:
    """Ask every prompt greedily, `concurrency` at a time; return answers in order of `examples`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout_s) as client:
        name = model or await _first_model(client)

        async def ask(example: Example) -> Answer:
            async with gate:
                answer = await _ask(client, name, example)
            on_answer(answer)
            return answer

        return list(await asyncio.gather(*(ask(example) for example in examples)))


async def _first_model(client: httpx.AsyncClient) -> str:
    reply = await client.get("/v1/models")
    reply.raise_for_status()
    return str(reply.json()["data"][0]["id"])


async def _ask(client: httpx.AsyncClient, model: str, example: Example) -> Answer:
    body = request_body(model, example)
    try:
        reply = await client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return Answer(example, "", 0, f"{type(error).__name__}: {error}")
    if reply.status_code != 200:
        return Answer(example, "", 0, f"HTTP {reply.status_code}: {reply.text[:200]}")
    data = reply.json()
    choice = data["choices"][0]
    message = choice["message"]
    try:
        calls = tuple(
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
    except ValueError:
        calls = (("arguments that are no JSON", {}),)
    return Answer(
        example,
        message.get("content") or "",
        data["usage"]["completion_tokens"],
        calls=calls,
        ended=choice["finish_reason"] != "length",
    )


def request_body(model: str, example: Example) -> dict[str, Any]:
    """Return the request, with its tools and the required format of its answer."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(example.messages),
        "temperature": 0,
        "max_tokens": 1024 if example.task != "long" else 150,
    }
    if example.tools:
        body["tools"] = list(example.tools)
    if example.forced:
        named = {"type": "function", "function": {"name": example.forced}}
        body["tool_choice"] = "required" if example.forced == "any" else named
    if example.schema is not None:
        is_any = "properties" not in example.schema
        body["response_format"] = (
            {"type": "json_object"}
            if is_any
            else {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": example.schema, "strict": True},
            }
        )
    return body


def drafts_of(base_url: str, api_key: str) -> dict[str, float]:
    """Return the number of drafts that the server has tried and accepted, by position in a step; empty
    if it does not report them.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        text = httpx.get(f"{base_url}/metrics", headers=headers, timeout=10).text
    except httpx.HTTPError:
        return {}
    totals: dict[str, float] = {}
    for kind, labels, value in _DRAFTS.findall(text):
        place = _PLACE.search(labels)
        name = f"{kind} {place[1] if place else ''}"
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def drafts_said(before: dict[str, float], after: dict[str, float]) -> str:
    """Return the share of drafts accepted between two readings, by position in a step, as text; "" if none."""
    said = []
    for name in sorted(after):
        kind, _, place = name.partition(" ")
        tried = after[name] - before.get(name, 0.0)
        if kind == "tried" and tried > 0:
            taken = f"accepted {place}"
            share = (after.get(taken, 0.0) - before.get(taken, 0.0)) / tried
            said.append(f"draft {place}: {share:.3f} of {tried:.0f}")
    return ", ".join(said)


def _share(rows: list[Answer]) -> str:
    return f"{100 * sum(a.correct for a in rows) / len(rows):.1f} %" if rows else "-"


def table_of(answers: list[Answer]) -> Table:
    """Return a table of scores per task and over all tasks. The column `frames` counts only examples with a
    held-out frame.
    """
    table = Table(title="held-out prompts, greedy, exact answers")
    for column in (
        "task",
        "prompts",
        "exact",
        "share",
        "frames",
        "mean tokens",
        "endless",
        "failed",
    ):
        table.add_column(column, justify="left" if column == "task" else "right")
    tasks = list(dict.fromkeys(answer.example.task for answer in answers))
    for task in [*tasks, "all"]:
        rows = [a for a in answers if task in ("all", a.example.task)]
        mean_tokens = sum(a.num_tokens for a in rows) / max(len(rows), 1)
        table.add_row(
            task,
            str(len(rows)),
            str(sum(a.correct for a in rows)),
            _share(rows),
            _share([a for a in rows if side(a.example) == SIDES[0]]),
            f"{mean_tokens:.0f}",
            str(sum(not a.ended for a in rows)),
            str(sum(a.error is not None for a in rows)),
            end_section=task == tasks[-1],
        )
    return table


def wrong_said(answer: Answer) -> str:
    """Return the prompt, the expected and the actual reply of a wrong answer, as text."""
    example = answer.example
    said = (
        f" {example.task}: {example.messages[-1]['content']!r}\n  wanted"
        f" {example.calls or example.answer!r}, got {answer.calls or answer.text!r}"
    )
    return said + (f" ({answer.error})" if answer.error else "")
