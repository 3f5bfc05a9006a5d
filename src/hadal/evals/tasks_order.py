"""Sorting numbers and words, the largest and the smallest, and reversing lists.

Sorting is written as picking one item at a time with the rest copied, so each line needs
only the line above it.
"""

import random

from hadal.evals.tasks_turn import Turn, join_list, random_letters, vary
from hadal.evals.tasks_words import ALL_LOWER, NAMES

_UP = (
    "Sort these numbers: {x}",
    "Sort {x}",
    "Sort from smallest to largest: {x}",
    "Put these in ascending order: {x}",
    "Order these numbers from low to high: {x}",
    "Arrange {x} from smallest to largest.",
    "sort: {x}",
    "Sort the numbers {x} in ascending order.",
    "Please sort {x} from small to big.",
    "Can you sort {x}?",
    "Put {x} in order.",
    "Sort this list of numbers: {x}",
    "Rank {x} from lowest to highest.",
    "Sort {x} ascending",
    "sort {x} smallest first",
    "{x} - sort these.",
    "Sort the list {x}",
    "Sort this: {x}",
    "Order {x}",
    "{x} in order please",
)
_DOWN = (
    "Sort from largest to smallest: {x}",
    "Put these in descending order: {x}",
    "Sort {x} in descending order.",
    "Order these numbers from high to low: {x}",
    "Arrange {x} from largest to smallest.",
    "Sort {x} from big to small.",
    "Sort the numbers {x} backwards, largest first.",
    "Rank {x} from highest to lowest.",
    "sort descending: {x}",
    "sort {x} largest first",
    "Sort {x} descending",
    "Put {x} in order, biggest first.",
    "Sort this list backwards: {x}",
)
_WORDS_UP = (
    "Sort these words: {x}",
    "Sort alphabetically: {x}",
    "Put these words in alphabetical order: {x}",
    "Sort {x}",
    "Order the words {x} from A to Z.",
    "Alphabetize {x}",
    "Sort these words alphabetically: {x}",
    "sort: {x}",
    "Arrange these words in alphabetical order: {x}",
    "Can you sort the words {x}?",
    "Put {x} in order.",
    "Sort this: {x}",
    "Sort the list {x}",
    "{x} - sort these words.",
    "Order {x} alphabetically",
    "Sort {x} from A to Z",
)
_WORDS_DOWN = (
    "Sort these words in reverse alphabetical order: {x}",
    "Sort from Z to A: {x}",
    "Order the words {x} from Z to A.",
    "Sort {x} from Z to A.",
    "Put {x} in reverse alphabetical order.",
)
_MAX = (
    "Which number is the largest: {x}?",
    "What is the maximum of {x}?",
    "Find the biggest number: {x}",
    "Which is bigger: {x}?",
    "What is the largest of {x}?",
    "max of {x}",
)
_MIN = (
    "Which number is the smallest: {x}?",
    "What is the minimum of {x}?",
    "Find the smallest number: {x}",
    "Which is smaller: {x}?",
    "What is the smallest of {x}?",
    "min of {x}",
)
_REVERSE_LIST = (
    "Reverse this list: {x}",
    "Reverse the list {x}",
    "Put this list in reverse order: {x}",
    "Write {x} backwards.",
    "Reverse the order of these: {x}",
    "List these in the opposite order: {x}",
    "Turn this list around: {x}",
)
_REVERSE_SENTENCE = (
    "Reverse the order of the words: {x}",
    "Write these words in reverse order: {x}",
    "Reverse the words: {x}",
    "Say these words in the opposite order: {x}",
    "Reverse the word order of: {x}",
)


def reason_sort(items: list[str], ordered: list[str]) -> str:
    """Pick the next item, copy the rest; words first show their first letters."""
    lines = []
    if not items[0].isdigit():
        lines.append(", ".join(f"{word} {word[:2].lower()}" for word in items))
    rest = list(items)
    for item in ordered[:-1]:
        rest.remove(item)
        lines.append(f"{item} | {' '.join(rest)}")
    return "\n".join([*lines, ordered[-1]])


def reason_reverse(items: list[str]) -> str:
    """Number the items forwards, then copy them backwards."""
    numbered = [f"{i} {item}" for i, item in enumerate(items, 1)]
    return " ".join(numbered) + "\n" + " ".join(reversed(numbered))


def _numbers(rng: random.Random) -> list[str]:
    top = rng.choice((9, 99, 99, 99, 999))
    size = rng.choice((2, 3) if top == 999 else (2, 3, 3, 4))
    picked = [rng.randint(0, top) for _ in range(size)]
    if rng.random() < 0.9:
        picked = rng.sample(range(top + 1), size)
    return [str(value) for value in picked]


def sort(rng: random.Random) -> Turn:
    """Return a list to sort, or to find the largest or the smallest of."""
    words_asked = rng.random() < 0.4
    down = rng.random() < (0.1 if words_asked else 0.35)
    if words_asked:
        words = rng.sample(ALL_LOWER if rng.random() < 0.85 else NAMES, rng.choice((2, 2, 3)))
        ordered = sorted(words, key=str.lower, reverse=down)
        template = rng.choice(_WORDS_DOWN if down else _WORDS_UP)
        return _sorted_turn(rng, template, words, ordered, down)
    items = _numbers(rng)
    ordered = sorted(items, key=int, reverse=down)
    if rng.random() < 0.15:
        best, seen = items[0], [items[0]]
        for item in items[1:]:
            best = max(best, item, key=int) if down else min(best, item, key=int)
            seen.append(best)
        question = vary(rng, rng.choice(_MAX if down else _MIN).format(x=join_list(rng, items)))
        return Turn(question, ", ".join(seen), best, f"best{down} {items}", "number", (best,))
    return _sorted_turn(rng, rng.choice(_DOWN if down else _UP), items, ordered, down)


def _sorted_turn(
    rng: random.Random, template: str, items: list[str], ordered: list[str], down: bool
) -> Turn:
    question = vary(rng, template.format(x=join_list(rng, items)))
    reasoning, key = reason_sort(items, ordered), f"sort{down} {items}"
    return Turn(question, reasoning, ", ".join(ordered), key, "list", tuple(ordered))


def reverse_list(rng: random.Random) -> Turn:
    """Return a list or a row of words to turn round."""
    size = rng.randint(2, 5)
    style = rng.random()
    if style < 0.35:
        items = [str(rng.randint(0, 99)) for _ in range(size)]
    elif style < 0.8:
        items = rng.sample(ALL_LOWER, size)
    elif style < 0.9:
        items = rng.sample("abcdefghijklmnopqrstuvwxyz", size)
    else:
        items = [random_letters(rng, 2, 5) for _ in range(rng.randint(2, 4))]
    backwards = items[::-1]
    if style >= 0.35 and rng.random() < 0.35:
        question, answer = (
            rng.choice(_REVERSE_SENTENCE).format(x=" ".join(items)),
            " ".join(backwards),
        )
    else:
        question, answer = (
            rng.choice(_REVERSE_LIST).format(x=join_list(rng, items)),
            ", ".join(backwards),
        )
    reasoning = reason_reverse(items)
    return Turn(
        vary(rng, question), reasoning, answer, f"reverse {items}", "list", tuple(backwards)
    )
