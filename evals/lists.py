"""Lists and the letters of a word: sorting, the largest and the smallest, reversing, counting,
spelling, naming the n-th.

Sorting is written as picking one item at a time with the rest copied, so each line needs only the
line above it; letters always begin with the word spelled.
"""

import random

from evals.words import ALL_LOWER, NAMES, Turn, join_list, random_letters, vary

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


# Letters of a word.

_REVERSE = (
    "Reverse the word {w}.",
    "Reverse {w}",
    "Write {w} backwards.",
    "Spell {w} backwards.",
    "What is {w} backwards?",
    "Reverse the letters of {w}.",
    "reverse: {w}",
    "What is {w} reversed?",
    "Turn the word {w} around.",
    "Can you reverse the word {w}?",
    "Reverse the string {w}",
    "Say {w} in reverse.",
    "{w} backwards",
    "{w} reversed?",
    "How do you write {w} in reverse?",
)
_COUNT = (
    "How many {c} in {w}?",
    "How many {c}s are in {w}?",
    "How many times does {c} appear in {w}?",
    "Count the {c}s in {w}.",
    "Count the letter {c} in {w}.",
    "How many letters {c} are in {w}?",
    "How many times is the letter {c} in {w}?",
    "How often does the letter {c} occur in {w}?",
    "How many {c}'s are there in the word {w}?",
    "count {c} in {w}",
    "How many {c}'s in {w}?",
    "Tell me how many {c}'s there are in {w}.",
    "In {w}, how many times is there a {c}?",
)
_LENGTH = (
    "How many letters are in {w}?",
    "How long is the word {w}?",
    "Count the letters in {w}.",
    "How many letters does {w} have?",
    "What is the length of {w}?",
)
_SPELL = (
    "Spell {w}.",
    "How do you spell {w}?",
    "Spell the word {w}.",
    "Can you spell {w}?",
    "Spell out {w}.",
)
_VOWELS = (
    "How many vowels are in {w}?",
    "Count the vowels in {w}.",
    "How many vowels does the word {w} have?",
)
_NTH = (
    "What is the {n} letter of {w}?",
    "What is the {n} letter in {w}?",
    "Give me the {n} letter of the word {w}.",
    "Which letter is the {n} in {w}?",
)
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "last")


def a_word(rng: random.Random, high: int = 9) -> str:
    """Return a word to spell: mostly a plain one, often made-up letters."""
    kind = rng.random()
    if kind < 0.55:
        return rng.choice(ALL_LOWER)
    if kind > 0.96:
        word = rng.choice((*ALL_LOWER, random_letters(rng, 2, high)))
        return word.upper() if rng.random() < 0.5 else word.capitalize()
    return rng.choice(NAMES).lower() if kind < 0.62 else random_letters(rng, 2, high)


def _quote(rng: random.Random, word: str) -> str:
    style = rng.random()
    if style < 0.7:
        return word
    return f'"{word}"' if style < 0.88 else f"'{word}'"


def reason_count(word: str, wanted: str) -> str:
    """Spell the word with a running count behind every letter that is wanted."""
    parts, count = [], 0
    for letter in word:
        parts.append(letter)
        if letter in wanted:
            count += 1
            parts.append(str(count))
    return " ".join(parts)


def reason_reverse_word(word: str) -> str:
    """Spell the word, then spell it backwards."""
    return f"{' '.join(word)}\n{' '.join(word[::-1])}"


def reverse(rng: random.Random) -> Turn:
    """Return a word or a list to turn round."""
    if rng.random() < 0.4:
        return reverse_list(rng)
    word = a_word(rng)
    question = vary(rng, rng.choice(_REVERSE).format(w=_quote(rng, word)))
    back = word[::-1]
    return Turn(question, reason_reverse_word(word), back, f"reverse {word}", "word", (back,))


def letters(rng: random.Random) -> Turn:
    """Return a question about the letters of a word; most ask how often one letter is in it."""
    word = a_word(rng, 10)
    shown = _quote(rng, word)
    kind = rng.choices(("count", "length", "spell", "vowels", "nth"), (60, 14, 8, 8, 10))[0]
    if kind == "count":
        return count_turn(rng, word, shown)
    if kind == "length":
        answer, reasoning = str(len(word)), reason_count(word, word)
        question = rng.choice(_LENGTH).format(w=shown)
    elif kind == "spell":
        answer, reasoning = "-".join(word), " ".join(word)
        question = rng.choice(_SPELL).format(w=shown)
    elif kind == "vowels":
        reasoning = reason_count(word, "aeiouAEIOU")
        answer = str(sum(letter in "aeiouAEIOU" for letter in word))
        question = rng.choice(_VOWELS).format(w=shown)
    else:
        place = rng.choice([i for i in range(7) if i < len(word) or i == 6])
        reasoning, answer = reason_count(word, word), word[-1] if place == 6 else word[place]
        question = rng.choice(_NTH).format(w=shown, n=_ORDINALS[place])
        kind = f"nth{place}"
    return Turn(vary(rng, question), reasoning, answer, f"{kind} {word}", "letters", (word,))


def count_turn(rng: random.Random, word: str, shown: str) -> Turn:
    """Return `how many c in word`; one in seven asks for a letter that need not be there."""
    word = word.lower()  # "How many r in Rare?" would have two answers.
    shown = shown.lower()
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    mark = f'"{letter}"' if rng.random() < 0.12 else letter
    question = vary(rng, rng.choice(_COUNT).format(c=mark, w=shown))
    reasoning = f"{letter}: {reason_count(word, letter)}"
    return Turn(
        question, reasoning, str(word.count(letter)), f"count {letter} {word}", "count", (word,)
    )
