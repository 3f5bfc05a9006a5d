"""The tasks the model that ships is taught and tested on: made from a seed, checked by exact
answer.

`sample` makes an example, `held_out` says on which side of the split it lies, `is_correct` judges a
reply. Used by the trainer (which skips every held-out example) and by `python -m evals` (which asks
only those). Pure: the random generator is passed in. Knows nothing of models, tokens or HTTP.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from evals.followup import followup
from evals.lists import letters, reverse, sort
from evals.numbers import arithmetic, dates
from evals.texts import reading, talk
from evals.words import Turn

_SINGLE: dict[str, Callable[[random.Random], Turn]] = {
    "arithmetic": arithmetic,
    "sort": sort,
    "reverse": reverse,
    "letters": letters,
    "dates": dates,
    "reading": reading,
    "talk": talk,
}
TASKS = (*_SINGLE, "followup")
_HELD_OUT_ONE_IN = 20
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are Hadal.",
    "Answer briefly.",
    "You are a helpful and friendly assistant.",
    "You are an AI assistant. Answer the user's questions.",
    "Be short and exact.",
    "Think first, then answer.",
)


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with a user's message, and the reply it should get.

    `messages` are OpenAI-style dicts without the last reply; earlier replies carry no reasoning.
    `key` names the content of the last question, whatever its wording, and is what the split
    hashes.
    """

    messages: tuple[dict[str, str], ...]
    reasoning: str
    answer: str
    task: str
    key: str


def sample(rng: random.Random, task: str) -> Example:
    """Return a random example of a task; one in ten has earlier, unrelated turns.

    Raises ValueError if the task is not one of TASKS.
    """
    if task == "followup":
        first, last = followup(rng)
        turns = [first, last]
    elif task in _SINGLE:
        turns = [_SINGLE[task](rng)]
    else:
        raise ValueError(f"no task {task!r}; choose one of {', '.join(TASKS)}")
    if rng.random() < 0.1:
        num_before = rng.choice((1, 1, 1, 2, 2, 3)) if rng.random() < 0.88 else rng.randint(4, 14)
        if rng.random() < 0.01:
            num_before = rng.randint(15, 40)
        turns = [_any_turn(rng) for _ in range(num_before)] + turns
    messages: list[dict[str, str]] = []
    if rng.random() < 0.06:
        messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    for turn in turns[:-1]:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    last = turns[-1]
    messages.append({"role": "user", "content": last.question})
    return Example(tuple(messages), last.reasoning, last.answer, task, f"{task}: {last.key}")


def held_out(example: Example) -> bool:
    """True for the one example in twenty that training never sees, whatever words it is asked
    in.
    """
    digest = hashlib.sha256(example.key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0


def sample_split(rng: random.Random, task: str, want_held_out: bool) -> Example:
    """Return an example from one side of the split."""
    while True:
        example = sample(rng, task)
        if held_out(example) == want_held_out:
            return example


def is_correct(example: Example, text: str) -> bool:
    """True if the reply, without any reasoning before it, is exactly the answer."""
    return text.rsplit("</think>", 1)[-1].strip() == example.answer


def _any_turn(rng: random.Random) -> Turn:
    return _SINGLE[rng.choice(tuple(_SINGLE))](rng)
