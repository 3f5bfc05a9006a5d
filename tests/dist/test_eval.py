"""The model that ships answers what it claims: held-out prompts, asked through the API."""

from __future__ import annotations

import asyncio

from evals.run import ask_all, held_out_examples
from evals.tasks import TASKS
from tests.dist.serving import Server

NUM_PROMPTS = 200
MIN_EXACT = 0.90


def test_at_least_nine_in_ten_answers_are_exact(server: Server) -> None:
    examples = held_out_examples(NUM_PROMPTS // len(TASKS), seed=2026)
    answers = asyncio.run(ask_all(server.url, examples, concurrency=32))
    assert [a.error for a in answers if a.error] == []
    wrong = [
        (a.example.messages[-1]["content"], a.example.answer, a.text)
        for a in answers
        if not a.correct
    ]
    assert len(examples) >= NUM_PROMPTS - len(TASKS)
    assert 1 - len(wrong) / len(answers) >= MIN_EXACT, wrong
