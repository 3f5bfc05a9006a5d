"""Second turns: questions that only make sense with the turn before them.

Each maker takes a random generator and returns the earlier turn and the one that refers to it.
"""

import random

from evals.lists import (
    a_word,
    count_turn,
    reason_count,
    reason_reverse,
    reason_reverse_word,
    reverse,
    sort,
)
from evals.numbers import (
    arithmetic,
    dates,
    number,
    operate,
    reason_after,
    reason_before,
    reason_weekday,
)
from evals.texts import ask, frame, make_text, name_turn
from evals.words import MONTHS, WEEKDAYS, Turn, vary

_FLIP = (
    "Now sort it the other way.",
    "Now the other way.",
    "Now reverse it.",
    "Reverse that list.",
    "And the other way round?",
    "Now in reverse order.",
    "Now backwards.",
    "Flip it.",
    "Now reverse that.",
    "Can you reverse it?",
    "The other way round please.",
)
_FIRST = (
    "What is the first one?",
    "Which one is first?",
    "What comes first?",
    "And the first one?",
)
_LAST = ("What is the last one?", "Which one is last?", "What comes last?", "And the last one?")
_OPS = {
    "+": (
        "Now add {b}.",
        "Add {b} to that.",
        "Plus {b}?",
        "And plus {b}?",
        "What if you add {b}?",
        "Add {b} more.",
        "Now add {b} to it.",
    ),
    "-": (
        "Now subtract {b}.",
        "Subtract {b} from that.",
        "Minus {b}?",
        "And minus {b}?",
        "Take away {b}.",
        "Now take {b} off.",
    ),
    "*": (
        "Now multiply by {b}.",
        "Times {b}?",
        "Multiply that by {b}.",
        "And times {b}?",
        "Now times {b}.",
    ),
}
_BACK = (
    "Now reverse it back.",
    "Reverse that again.",
    "And backwards again?",
    "Now reverse it.",
    "Turn it around again.",
    "And reversed?",
)
_OTHER_LETTER = (
    "And {c}?",
    "And the letter {c}?",
    "What about {c}?",
    "How many {c}?",
    "And how many {c}?",
)
_OTHER_WORD = ("And in {w}?", "What about {w}?", "And in the word {w}?", "How many in {w}?")
_LONG = (
    "How many letters does it have?",
    "How long is it?",
    "How many letters is that?",
    "How many letters?",
)
_LATER = (
    "And {n} days later?",
    "And {n} days after that?",
    "What about {n} days later?",
    "{n} days after that?",
    "Plus {n} more days?",
)
_EARLIER = (
    "And {n} days earlier?",
    "And {n} days before that?",
    "{n} days before that?",
    "What about {n} days earlier?",
)
_MY_NAME = (
    "What is my name?",
    "Who am I?",
    "Do you know my name?",
    "What's my name?",
    "Say my name.",
    "Do you remember my name?",
)


def _after_list(rng: random.Random) -> tuple[Turn, Turn]:
    first = sort(rng)
    while first.kind != "list":
        first = sort(rng)
    items = list(first.subject)
    kind = rng.random()
    if kind < 0.6:
        answer, reasoning = ", ".join(reversed(items)), reason_reverse(items)
        question = rng.choice(_FLIP)
    else:
        at_end = kind > 0.8
        answer = items[-1 if at_end else 0]
        reasoning = " ".join(f"{i} {item}" for i, item in enumerate(items, 1))
        question = rng.choice(_LAST if at_end else _FIRST)
    return first, Turn(vary(rng, question), reasoning, answer, f"{first.key} then {question}")


def _after_number(rng: random.Random) -> tuple[Turn, Turn]:
    first = arithmetic(rng)
    while first.answer.startswith("-") or len(first.answer) > 4:
        first = arithmetic(rng)
    op = rng.choice("++--*")
    a, b = int(first.answer), number(rng, 3)
    if op == "*":
        b = rng.randint(2, 9)
        while a > 999:
            first = arithmetic(rng)
            a = abs(int(first.answer))
    if op == "-":
        b = min(b, a)
    if first.answer.startswith("-"):
        return _after_number(rng)
    reasoning, answer = operate(op, a, b)
    question = vary(rng, rng.choice(_OPS[op]).format(b=b))
    return first, Turn(question, f"{a} {op} {b}\n{reasoning}", answer, f"{first.key} then {op} {b}")


def _after_word(rng: random.Random) -> tuple[Turn, Turn]:
    first = reverse(rng)
    while first.kind != "word":
        first = reverse(rng)
    word = first.answer
    if rng.random() < 0.6:
        question, reasoning, answer = rng.choice(_BACK), reason_reverse_word(word), word[::-1]
    else:
        question, reasoning, answer = rng.choice(_LONG), reason_count(word, word), str(len(word))
    return first, Turn(vary(rng, question), reasoning, answer, f"{first.key} then {question}")


def _after_count(rng: random.Random) -> tuple[Turn, Turn]:
    word = a_word(rng)
    first = count_turn(rng, word, word)
    letter = first.reasoning[0]
    if rng.random() < 0.5:
        letter = rng.choice(word)
        question = rng.choice(_OTHER_LETTER).format(c=letter)
    else:
        word = a_word(rng)
        question = rng.choice(_OTHER_WORD).format(w=word)
    reasoning = f"{letter}: {reason_count(word, letter)}"
    return first, Turn(
        question, reasoning, str(word.count(letter)), f"{first.key} then {letter} {word}"
    )


def _after_date(rng: random.Random) -> tuple[Turn, Turn]:
    first = dates(rng)
    while first.kind not in ("date", "weekday"):
        first = dates(rng)
    days, later = rng.randint(2, 20), rng.random() < 0.6
    question = vary(rng, rng.choice(_LATER if later else _EARLIER).format(n=days))
    if first.kind == "weekday":
        reasoning, answer = reason_weekday(WEEKDAYS.index(first.answer), days, 1 if later else -1)
    else:
        name, day = first.answer.split()
        reasoning, answer = (reason_after if later else reason_before)(
            MONTHS.index(name), int(day), days
        )
    return first, Turn(question, reasoning, answer, f"{first.key} then {later} {days}")


def _after_text(rng: random.Random) -> tuple[Turn, Turn]:
    pool, facts, text = make_text(rng, rng.randint(2, 4))
    question, reasoning, answer = ask(pool, facts)
    first = Turn(frame(rng, text, question), reasoning, answer, text)
    question, reasoning, answer = ask(pool, facts)
    if rng.random() < 0.4:
        question = "And " + question[0].lower() + question[1:]
    return first, Turn(question, reasoning, answer, f"{text} then {question}")


def _after_name(rng: random.Random) -> tuple[Turn, Turn]:
    first = name_turn(rng)
    name = first.subject[0]
    question = vary(rng, rng.choice(_MY_NAME))
    key = f"{first.key} then {question}"
    return first, Turn(question, f"The name is {name}.", f"Your name is {name}.", key)


_MAKERS = (
    _after_list,
    _after_number,
    _after_word,
    _after_count,
    _after_date,
    _after_text,
    _after_name,
)


def followup(rng: random.Random) -> tuple[Turn, Turn]:
    """Return an earlier turn and one that refers to it."""
    return rng.choice(_MAKERS)(rng)
