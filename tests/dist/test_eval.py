"""The model that ships answers what its card claims: held-out prompts, asked through the API."""

from __future__ import annotations

import asyncio
from collections import Counter

from evals.run import ask_all
from tests.dist.serving import Server
from tests.dist.shipped import TASKS, shipped_examples

NUM_PROMPTS = 200
MIN_EXACT = 0.90


def test_at_least_nine_in_ten_answers_are_exact(server: Server) -> None:
    examples = shipped_examples()
    assert Counter(e.task for e in examples) == dict.fromkeys(TASKS, NUM_PROMPTS // len(TASKS))
    answers = asyncio.run(ask_all(server.url, examples, concurrency=32))
    assert [a.error for a in answers if a.error] == []
    # The text itself: no other answer counts that `is_correct` would let pass.
    wrong = [
        (a.example.messages[-1]["content"], a.example.answer, a.text)
        for a in answers
        if a.text.strip() != a.example.answer
    ]
    assert 1 - len(wrong) / len(answers) >= MIN_EXACT, wrong
