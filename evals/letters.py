"""Tasks on the letters of a word: reversing, counting, spelling, naming the n-th letter.

Each reasoning spells the word. The sentences are in letters.yaml.
"""

from evals.frames import Said, load
from evals.lists import reverse_list
from evals.wordings import Source, asked
from evals.words import ALL_LOWER, NAMES, Turn, random_letters

_SAID = load("letters", dict[str, Said])
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "last")
_SHORT_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "last")


def a_word(source: Source, high: int = 9) -> str:
    """Return a word to spell: mostly a plain one, often made-up letters."""
    kind = source.random()
    if kind < 0.55:
        return source.choice(ALL_LOWER)
    if kind > 0.96:
        word = source.choice((*ALL_LOWER, random_letters(source, 2, high)))
        return word.upper() if source.chance(0.5) else word.capitalize()
    return source.choice(NAMES).lower() if kind < 0.62 else random_letters(source, 2, high)


def _quote(source: Source, word: str) -> str:
    style = source.random()
    if style < 0.66:
        return word
    return f'"{word}"' if style < 0.84 else f"'{word}'"


def reason_count(word: str, wanted: str, said: str = "") -> str:
    """Return the reasoning: `said`, or else the wanted letters; then the spelled word with a running count
    after each wanted letter.
    """
    return f"count {said or wanted}: {_counted(word, wanted)}"


def reason_length(word: str) -> str:
    """Return the reasoning: the spelled word with a number after every letter."""
    return f"count letters: {_counted(word, word)}"


def _counted(word: str, wanted: str) -> str:
    parts, count = [], 0
    for letter in word:
        parts.append(letter)
        if letter in wanted:
            count += 1
            parts.append(str(count))
    return " ".join(parts)


def reason_reverse_word(word: str) -> str:
    """Return the reasoning: the word spelled forwards, then backwards."""
    return f"reverse: {' '.join(word)}\n{' '.join(word[::-1])}"


def reverse(source: Source) -> Turn:
    """Return a question to reverse a word or a list."""
    if source.chance(0.4):
        return reverse_list(source)
    word = a_word(source)
    said = asked(source, **_SAID["reverse"])
    question = said.format(w=_quote(source, word))
    back = word[::-1]
    return Turn(question, reason_reverse_word(word), back, f"reverse {word}", "word", (back,))


def letters(source: Source) -> Turn:
    """Return a question about the letters of a word; about half ask how often a letter occurs."""
    word = a_word(source, 10)
    shown = _quote(source, word)
    kind = source.choices(("count", "length", "spell", "vowels", "nth"), (50, 14, 9, 9, 16))[0]
    if kind == "count":
        return count_turn(source, word, shown)
    n, subject = "", kind
    if kind == "length":
        answer, reasoning = str(len(word)), reason_length(word)
    elif kind == "spell":
        answer, reasoning = "-".join(word), f"word: {' '.join(word)}"
    elif kind == "vowels":
        reasoning = reason_count(word, "aeiouAEIOU", "aeiou")
        answer = str(sum(letter in "aeiouAEIOU" for letter in word))
    else:
        place = source.choice([i for i in range(7) if i < len(word) or i == 6])
        answer = word[-1] if place == 6 else word[place]
        reasoning = f"letter {'last' if place == 6 else place + 1}: {_counted(word, word)}"
        n = (_SHORT_ORDINALS if source.chance(0.2) else _ORDINALS)[place]
        if place in (0, 6) and source.chance(0.5):
            subject = "last" if place else "first"
        kind = f"nth{place}"
    said = asked(source, **_SAID[subject])
    question = said.format(w=shown, n=n)
    return Turn(question, reasoning, answer, f"{kind} {word}", "letters", (word,))


def count_turn(source: Source, word: str, shown: str) -> Turn:
    """Return a question such as "how many c in word"; one in seven asks for a random letter, which may be absent."""
    word = word.lower()  # "How many r in Rare?" would have two answers.
    shown = shown.lower()
    letter = (
        source.choice(word) if source.chance(0.85) else source.choice("abcdefghijklmnopqrstuvwxyz")
    )
    mark = source.choice((f'"{letter}"', f"'{letter}'")) if source.chance(0.12) else letter
    said = asked(source, **_SAID["count"])
    question = said.format(c=mark, w=shown)
    reasoning = reason_count(word, letter)
    return Turn(
        question, reasoning, str(word.count(letter)), f"count {letter} {word}", "count", (word,)
    )
