"""The shipped model answers held-out prompts through the API as accurately as its card claims."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from evals.run import ask_all, held_out_examples
from evals.tasks import ALL_TASKS
from tests.dist.serving import Server

NUM_PER_TASK = 16
MIN_EXACT = 0.90


@pytest.mark.more("a hundred answers of all tasks")
@pytest.mark.slow("a hundred answers of all tasks")
def test_at_least_nine_in_ten_answers_are_exact(server: Server) -> None:
    examples = held_out_examples(NUM_PER_TASK, 2026, ALL_TASKS)
    assert Counter(e.task for e in examples) == dict.fromkeys(ALL_TASKS, NUM_PER_TASK)
    answers = asyncio.run(ask_all(server.url, examples, concurrency=32))
    assert [a.error for a in answers if a.error] == []
    assert [a.example.messages[-1]["content"] for a in answers if not a.ended] == []
    wrong = [
        (a.example.messages[-1]["content"], a.example.calls or a.example.answer, a.calls or a.text)
        for a in answers
        if not a.correct
    ]
    assert 1 - len(wrong) / len(answers) >= MIN_EXACT, wrong
