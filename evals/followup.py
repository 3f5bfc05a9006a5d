"""Second turns: questions that need the turn before them.

Each maker takes a source of choices and returns the earlier turn and the turn that refers to it.
"""

from evals.dates import dates, reason_after, reason_before, reason_weekday, span
from evals.frames import Said, load
from evals.letters import (
    a_word,
    count_turn,
    reason_count,
    reason_length,
    reason_reverse_word,
    reverse,
)
from evals.lists import reason_reverse, sort
from evals.numbers import arithmetic, number, operate
from evals.smalltalk import name_turn
from evals.texts import ask, in_layout, make_text
from evals.wordings import Source, asked
from evals.words import MONTHS, WEEKDAYS, Turn

_SAID = load("followup", dict[str, Said])


def _after_list(source: Source) -> tuple[Turn, Turn]:
    first = source.until(lambda: sort(source), lambda turn: turn.kind == "list")
    items, said = list(first.subject), _SAID["list"]
    kind = source.random()
    if kind < 0.6:
        answer, reasoning = ", ".join(reversed(items)), reason_reverse(items)
        question, key = asked(source, whole=said["flip"]), f"reverse {items}"
    else:
        at_end = kind > 0.8
        answer = items[-1 if at_end else 0]
        numbered = " ".join(f"{i} {item}" for i, item in enumerate(items, 1))
        reasoning = f"order {'last' if at_end else 'first'}: {numbered}"
        question, key = asked(source, whole=said["last" if at_end else "first"]), first.key
    return first, Turn(question, reasoning, answer, key)


def _after_number(source: Source) -> tuple[Turn, Turn]:
    op = source.choice("++--*")
    most = 3 if op == "*" else 4
    first = source.until(
        lambda: arithmetic(source), lambda turn: turn.answer.isdigit() and len(turn.answer) <= most
    )
    a, b = int(first.answer), number(source, 3)
    if op == "*":
        b = 2 if source.chance(0.3) else source.randint(2, 9)
    if op == "-":
        b = min(b, a)
    reasoning, answer = operate(op, a, b)
    is_double = op == "*" and b == 2 and source.chance(0.7)
    question = asked(source, whole=_SAID["number"]["double" if is_double else op]).format(b=b)
    return first, Turn(question, f"sum: {reasoning}", answer, f"{a}{op}{b}")


def _after_word(source: Source) -> tuple[Turn, Turn]:
    first = source.until(lambda: reverse(source), lambda turn: turn.kind == "word")
    word = first.answer
    if source.random() < 0.6:
        question = asked(source, whole=_SAID["word"]["back"])
        return first, Turn(question, reason_reverse_word(word), word[::-1], f"reverse {word}")
    question = asked(source, whole=_SAID["word"]["length"])
    return first, Turn(question, reason_length(word), str(len(word)), f"length {word}")


def _after_count(source: Source) -> tuple[Turn, Turn]:
    word = a_word(source).lower()
    first = count_turn(source, word, word)
    letter = first.reasoning.removeprefix("count ")[0]
    if source.random() < 0.5:
        letter = source.choice(word)
        question = asked(source, whole=_SAID["word"]["other_letter"]).format(c=letter)
    else:
        word = a_word(source).lower()
        question = asked(source, whole=_SAID["word"]["other_word"]).format(w=word)
    reasoning = reason_count(word, letter)
    return first, Turn(question, reasoning, str(word.count(letter)), f"count {letter} {word}")


def _after_date(source: Source) -> tuple[Turn, Turn]:
    first = source.until(lambda: dates(source), lambda turn: turn.kind in ("date", "weekday"))
    days, later = source.randint(2, 20), source.random() < 0.6
    text, read = span(source, days)
    question = asked(source, whole=_SAID["date"]["later" if later else "earlier"]).format(n=text)
    if first.kind == "weekday":
        weekday, sign = WEEKDAYS.index(first.answer), 1 if later else -1
        reasoning, answer = reason_weekday(weekday, days, sign)
        key = f"weekday {weekday} {days} {sign}"
    else:
        name, day = first.answer.split()
        month = MONTHS.index(name)
        reasoning, answer = (reason_after if later else reason_before)(month, int(day), days)
        key = f"{'after' if later else 'before'} {month} {day} {days}"
    return first, Turn(question, f"{first.kind}: {read}{reasoning}", answer, key)


def _after_text(source: Source) -> tuple[Turn, Turn]:
    pool, facts, text = make_text(source, source.randint(2, 4))
    question, reasoning, answer = ask(pool, facts)
    first = Turn(in_layout(source, text, question), reasoning, answer, text)
    question, reasoning, answer = ask(pool, facts)
    if source.random() < 0.4:
        question = "And " + question[0].lower() + question[1:]
    return first, Turn(question, reasoning, answer, text)


def _after_name(source: Source) -> tuple[Turn, Turn]:
    first = name_turn(source)
    name = first.subject[0]
    question = asked(source, whole=_SAID["name"]["mine"])
    return first, Turn(question, f"The name is {name}.", f"Your name is {name}.", first.key)


_MAKERS = (
    _after_list,
    _after_number,
    _after_word,
    _after_count,
    _after_date,
    _after_text,
    _after_name,
)


def followup(source: Source) -> tuple[Turn, Turn]:
    """Return an earlier turn and one that refers to it."""
    return source.choice(_MAKERS)(source)
