"""What the model that ships was taught and never saw, for tests of what it says and how it drafts.

It was trained by an earlier commit's code (train/README.md), whose generators are gone. So their
held-out prompts are kept in shipped_questions.jsonl: 25 of each of its tasks, drawn by
`held_out_examples(25, seed=2026)` at commit d7172ce. What `evals.run` draws now is foreign to it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from evals.tasks import Example

QUESTIONS = Path(__file__).with_name("shipped_questions.jsonl")
TASKS = ("arithmetic", "sort", "reverse", "letters", "dates", "reading", "talk", "followup")
"""What models/hadal-tiny/README.md claims."""


def shipped_examples() -> list[Example]:
    """All 200, task by task."""
    rows = map(json.loads, QUESTIONS.read_text(encoding="utf-8").splitlines())
    return [Example(tuple(r["messages"]), "", r["answer"], r["task"], ()) for r in rows]


def examples_of(task: str) -> list[Example]:
    """All 25 of a task."""
    return [example for example in shipped_examples() if example.task == task]


def drawn_examples(num_per_task: int, seed: int) -> list[Example]:
    """So many of each task, or all if there are fewer."""
    rng = random.Random(seed)
    by_task = map(examples_of, TASKS)
    return [e for of in by_task for e in rng.sample(of, min(num_per_task, len(of)))]
