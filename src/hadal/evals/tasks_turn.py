"""One question with its written-out reasoning and its answer, and the small variations of wording
users make.

Knows nothing of any particular task.
"""

import random
from dataclasses import dataclass

_OPENERS = (
    "Please ",
    "please ",
    "Hey, ",
    "Hi! ",
    "Can you help? ",
    "OK, ",
    "Now ",
    "Quick question: ",
    "So, ",
)
_CLOSERS = (" Please.", " Thanks.", " please", " Thank you!", " Can you do that?")


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's question and what the model should think and answer.

    `key` is the content that must not be seen in training when the turn is held out: the operands,
    the list, the text; not the wording. `subject` is what a later turn may refer to ("now sort it
    the other way").
    """

    question: str
    reasoning: str
    answer: str
    key: str
    kind: str = ""
    subject: tuple[str, ...] = ()


def vary(rng: random.Random, text: str) -> str:
    """Return the question as another person might type it: case, ending, a polite word."""
    if rng.random() < 0.12:
        text = rng.choice(_OPENERS) + _lower_first(text)
    elif rng.random() < 0.2:
        text = _lower_first(text)
    if rng.random() < 0.12 and text[-1] in ".?":
        text = text[:-1]
    elif rng.random() < 0.06 and text[-1] in ".?":
        text += rng.choice(_CLOSERS)
    return text


def join_list(rng: random.Random, items: list[str]) -> str:
    """Write a list the way users do: commas, commas and `and`, or bare spaces."""
    style = rng.random()
    if style < 0.7:
        return ", ".join(items)
    if style < 0.8:
        return " ".join(items)
    if style < 0.9:
        return ", ".join(items[:-1]) + " and " + items[-1]
    return ",".join(items) if style < 0.95 else "[" + ", ".join(items) + "]"


def random_letters(rng: random.Random, low: int, high: int) -> str:
    """Return a made-up word; every other letter is often a vowel so that some read like words."""
    size = rng.randint(low, high)
    if rng.random() < 0.5:
        return "".join(rng.choice("aeiou" if i % 2 else "bcdfghjklmnprstvwz") for i in range(size))
    pool = (
        "abcdefghijklmnopqrstuvwxyz"
        if rng.random() < 0.6
        else rng.sample("abcdefghijklmnopqrstuvwxyz", 4)
    )
    return "".join(rng.choice(pool) for _ in range(size))


def _lower_first(text: str) -> str:
    # "I" and names stay as they are; only an ordinary first word loses its capital.
    first = text.split(" ", 1)[0]
    if first.isalpha() and first[1:].islower() and len(first) > 2:
        return text[0].lower() + text[1:]
    return text
