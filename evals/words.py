"""Building blocks of the tasks: words, and a question with its written-out reasoning and its
answer.

Every word of these lists becomes one token of the shipped model, so its spelling has to be learned;
any other word is read letter by letter. The lists are in words.yaml. Independent of the tasks.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

from evals.frames import Words, load

WORDS = load("words", dict[str, Words])
NAMES, PLACES, THINGS, COUNTED = (WORDS[k] for k in ("names", "places", "things", "counted"))
COLOURS, ANIMALS, CITIES = (WORDS[k] for k in ("colours", "animals", "cities"))
JOBS, FOODS = WORDS["jobs"], WORDS["foods"]
MONTHS, WEEKDAYS = WORDS["months"], WORDS["weekdays"]
ALL_LOWER: tuple[str, ...] = tuple(sorted({*WORDS["plain"], *ANIMALS, *THINGS, *COLOURS, *PLACES}))

MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


_LISTED = frozenset(
    word.lower()
    for words in (ALL_LOWER, NAMES, COUNTED, CITIES, JOBS, FOODS, MONTHS, WEEKDAYS)
    for word in words
)
_PIECE = re.compile(r"[^\W\d_]+|\n+|\S")


def num_pieces(text: str) -> float:
    """Estimate the number of tokens of a text, within a tenth: 1 for a digit, a sign or a word of
    these lists; 1.5 for any other word, because most are in the vocabulary and some are spelled; 1
    per byte of other scripts.
    """
    return sum(_size(piece) for piece in _PIECE.findall(text))


def _size(piece: str) -> float:
    if not piece.isascii():
        return len(piece.encode())
    return 1 if len(piece) < 3 or piece.lower() in _LISTED else 1.5


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's question, and the expected reasoning and answer.

    `key` is the content that must not occur in training if the turn is held out: the operands, the
    list, the text, but not the wording. Equal contents have equal keys in all tasks; several contents
    have a line each. `subject` is the content that a later turn may refer to ("now sort it ...").
    """

    question: str
    reasoning: str
    answer: str
    key: str
    kind: str = ""
    subject: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Calls that the model should make instead of answering."""
    before: tuple[dict[str, Any], ...] = ()
    """Calls and their results between the question and the expected reply."""
    forced: str = ""
    """"any", or a tool's name: the reply must begin with a call (`tool_choice`)."""
    schema: dict[str, Any] | None = None
    """Schema that the answer, a JSON object, must follow (`response_format`)."""


_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou]|8|1[18]\b)")


def with_articles(text: str) -> str:
    """Return the text with "an" for every "a" before a vowel, an 8, an 11 or an 18."""
    return _ARTICLE.sub(r"\1n ", text)


def join_list(rng: random.Random, items: list[str], word: str = "and") -> str:
    """Return a list as users write it: with commas, with `word` before the last item, with spaces only, or in
    rarer ways.
    """
    style = rng.random()
    if style < 0.5:
        return ", ".join(items)
    if style < 0.6:
        return " ".join(items)
    if style < 0.86:
        comma = "," if len(items) > 2 and rng.random() < 0.3 else ""
        return ", ".join(items[:-1]) + f"{comma} {word} {items[-1]}"
    if style < 0.9:
        return ",".join(items)
    if style < 0.94:
        return "[" + ", ".join(items) + "]"
    return (" - ", "; ", " / ", "\n")[rng.randrange(4)].join(items)


def jumble(rng: random.Random, size: int) -> str:
    """Return `size` words without meaning, from a small set of different ones. To copy them, the
    model must use their places in the text, not the likely next word.
    """
    words = rng.sample((*ALL_LOWER, *NAMES, *COUNTED, *THINGS), 2 + size // 2)
    words += rng.sample(WORDS["small"], rng.randint(1, 3))
    for i in range(len(words)):
        if rng.random() < 0.2:
            made_up = rng.random() < 0.7
            words[i] = random_letters(rng, 2, 6) if made_up else str(rng.randint(0, 999))
    return " ".join(rng.choice(words) for _ in range(size))


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
