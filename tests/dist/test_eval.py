"""The model that ships answers what its card claims: held-out prompts, asked through the API.

It was trained by an earlier commit's code (train/README.md), whose generators are gone. So it is
asked what they held out, kept in shipped_questions.jsonl: 25 prompts of each of its tasks, drawn by
`held_out_examples(25, seed=2026)` at commit d7172ce. A model of the present code is asked what
`held_out_examples` draws now.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

from evals.run import ask_all
from evals.tasks import Example
from tests.dist.serving import Server

QUESTIONS = Path(__file__).with_name("shipped_questions.jsonl")
TASKS = ("arithmetic", "sort", "reverse", "letters", "dates", "reading", "talk", "followup")
"""What models/hadal-tiny/README.md claims."""
NUM_PROMPTS = 200
MIN_EXACT = 0.90


def shipped_examples() -> list[Example]:
    rows = map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines())
    return [Example(tuple(r["messages"]), "", r["answer"], r["task"], ()) for r in rows]


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
