"""Letters of a word: reversing, counting, spelling, naming the n-th. Always by spelling the word
first.
"""

import random

from hadal.evals.tasks_order import reverse_list
from hadal.evals.tasks_turn import Turn, random_letters, vary
from hadal.evals.tasks_words import ALL_LOWER, NAMES

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
