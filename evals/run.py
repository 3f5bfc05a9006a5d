"""Ask a running server the held-out prompts of the tasks hadal-tiny claims, and count the exact
answers.

Knows the API and the tasks, nothing of the engine: it can be pointed at any OpenAI-compatible
server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from evals.tasks import TASKS, Example, held_out, is_correct, sample
from hadal.progress import Bar


@dataclass(frozen=True)
class Answer:
    """What the server said to one prompt. `error` is set where it failed to answer."""

    example: Example
    text: str
    num_tokens: int
    error: str | None = None

    @property
    def correct(self) -> bool:
        return self.error is None and is_correct(self.example, self.text)


def held_out_examples(num_per_task: int, seed: int, tasks: tuple[str, ...] = ()) -> list[Example]:
    """Draw prompts that training never saw, `num_per_task` of each task."""
    rng = random.Random(seed)
    examples: list[Example] = []
    for task in tasks or tuple(TASKS):
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
        seen: set[str] = set()
        for _ in range(num_per_task * 1000):
            if len(seen) == num_per_task:
                break
            example = sample(rng, task)
            key = repr(example.messages)
            if held_out(example) and key not in seen:
                seen.add(key)
                examples.append(example)
    return examples


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
    """Ask every prompt greedily, `concurrency` at a time; answers come back in the order of
    `examples`.
    """
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
    body = {
        "model": model,
        "messages": list(example.messages),
        "temperature": 0,
        "max_tokens": 1024,
    }
    try:
        reply = await client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return Answer(example, "", 0, f"{type(error).__name__}: {error}")
    if reply.status_code != 200:
        return Answer(example, "", 0, f"HTTP {reply.status_code}: {reply.text[:200]}")
    data = reply.json()
    message = data["choices"][0]["message"]
    return Answer(
        example,
        message.get("content") or "",
        data["usage"]["completion_tokens"],
    )


def table_of(answers: list[Answer]) -> Table:
    """The score per task and over all."""
    table = Table(title="held-out prompts, greedy, exact answers")
    for column in ("task", "prompts", "exact", "share", "mean tokens", "failed"):
        table.add_column(column, justify="left" if column == "task" else "right")
    tasks = list(dict.fromkeys(answer.example.task for answer in answers))
    for task in [*tasks, "all"]:
        rows = [a for a in answers if task in ("all", a.example.task)]
        exact = sum(a.correct for a in rows)
        failed = sum(a.error is not None for a in rows)
        mean_tokens = sum(a.num_tokens for a in rows) / max(len(rows), 1)
        table.add_row(
            task,
            str(len(rows)),
            str(exact),
            f"{100 * exact / max(len(rows), 1):.1f} %",
            f"{mean_tokens:.0f}",
            str(failed),
            end_section=task == tasks[-1],
        )
    return table


def run(
    base_url: str,
    *,
    num_per_task: int = 30,
    seed: int = 0,
    tasks: tuple[str, ...] = (),
    model: str = "",
    api_key: str = "",
    concurrency: int = 16,
    as_json: bool = False,
    show_wrong: int = 3,
) -> float:
    """Evaluate and print; returns the share of exact answers."""
    console = Console(stderr=as_json)
    examples = held_out_examples(num_per_task, seed, tasks)
    with Bar("evals", len(examples)) as bar:
        answers = asyncio.run(
            ask_all(
                base_url,
                examples,
                model=model,
                api_key=api_key,
                concurrency=concurrency,
                on_answer=lambda _: bar.update("prompts answered", advance=1),
            )
        )
    console.print(table_of(answers))
    wrong = [a for a in answers if not a.correct]
    for answer in wrong[:show_wrong]:
        question = answer.example.messages[-1]["content"]
        console.print(
            f"[red]wrong[/] {answer.example.task}: {question!r}\n  wanted"
            f" {answer.example.answer!r}, got {answer.text!r}"
            + (f" ({answer.error})" if answer.error else ""),
            markup=True,
        )
    share = 1 - len(wrong) / max(len(answers), 1)
    if as_json:
        rows = [
            {"task": a.example.task, "correct": a.correct, "tokens": a.num_tokens, "error": a.error}
            for a in answers
        ]
        print(msgspec.json.encode({"exact": share, "answers": rows}).decode())
    return share
