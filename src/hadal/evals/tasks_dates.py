"""Dates: some days after or before one, weekdays, months. A year is an ordinary one unless it is
named.
"""

import random

from hadal.evals.tasks_turn import Turn, vary
from hadal.evals.tasks_words import MONTH_DAYS, MONTHS, WEEKDAYS

_AFTER = (
    "What date is {n} days after {d}?",
    "What is the date {n} days after {d}?",
    "{n} days after {d}",
    "Which date comes {n} days after {d}?",
    "Today is {d}. What is the date in {n} days?",
    "{d} plus {n} days?",
    "If today is {d}, what date will it be in {n} days?",
    "Add {n} days to {d}.",
    "What day is {n} days from {d}?",
)
_BEFORE = (
    "What date is {n} days before {d}?",
    "What was the date {n} days before {d}?",
    "{n} days before {d}",
    "Today is {d}. What was the date {n} days ago?",
    "If today is {d}, what date was it {n} days ago?",
    "{d} minus {n} days?",
)
_WEEK_AFTER = (
    "What day of the week is {n} days after {w}?",
    "Today is {w}. What day is it in {n} days?",
    "{n} days after {w}?",
    "If today is {w}, what weekday will it be in {n} days?",
    "What weekday comes {n} days after {w}?",
    "It is {w}. Which day of the week is it {n} days from now?",
)
_WEEK_BEFORE = (
    "What day of the week is {n} days before {w}?",
    "Today is {w}. What day was it {n} days ago?",
    "{n} days before {w}?",
    "If today is {w}, what weekday was it {n} days ago?",
)
_DAYS_IN = (
    "How many days are in {m}?",
    "How many days does {m} have?",
    "Number of days in {m}?",
    "How long is {m} in days?",
    "How many days are there in the month of {m}?",
    "Tell me how many days {m} has.",
    "days in {m}",
)
_NEXT_MONTH = (
    "What month comes after {m}?",
    "Which month is after {m}?",
    "What is the month after {m}?",
    "Month after {m}?",
)
_LAST_MONTH = (
    "What month comes before {m}?",
    "Which month is before {m}?",
    "What is the month before {m}?",
)
_NEXT_DAY = (
    "What day comes after {w}?",
    "Which day is after {w}?",
    "If today is {w}, what day is tomorrow?",
    "Day after {w}?",
)
_LAST_DAY = (
    "What day comes before {w}?",
    "Which day is before {w}?",
    "If today is {w}, what day was yesterday?",
)


def reason_after(month: int, day: int, days: int) -> tuple[str, str]:
    """Add days, then take whole months off. Returns (reasoning, answer)."""
    total = day + days
    lines = [f"{MONTHS[month]} {day} + {days}", f"{day} + {days} = {total}"]
    while total > MONTH_DAYS[month]:
        size = MONTH_DAYS[month]
        lines.append(f"{MONTHS[month]} {size}, {total} - {size} = {total - size}")
        total -= size
        month = (month + 1) % 12
    answer = f"{MONTHS[month]} {total}"
    return "\n".join([*lines, answer]), answer


def reason_before(month: int, day: int, days: int) -> tuple[str, str]:
    """Take days off, adding the month before while there are too few. Returns (reasoning,
    answer).
    """
    lines = [f"{MONTHS[month]} {day} - {days}"]
    while day <= days:
        month = (month - 1) % 12
        size = MONTH_DAYS[month]
        lines.append(f"{MONTHS[month]} {size}, {day} + {size} = {day + size}")
        day += size
    answer = f"{MONTHS[month]} {day - days}"
    return "\n".join([*lines, f"{day} - {days} = {day - days}", answer]), answer


def reason_weekday(weekday: int, days: int, sign: int) -> tuple[str, str]:
    """Take whole weeks off the offset, then walk day by day. Returns (reasoning, answer)."""
    left, lines = days % 7, []
    if days >= 7:
        lines.append(f"{days} - {days - left} = {left}")
    walk = [f"{i} {WEEKDAYS[(weekday + sign * i) % 7]}" for i in range(left + 1)]
    return "\n".join([*lines, " ".join(walk)]), WEEKDAYS[(weekday + sign * left) % 7]


def _leap(rng: random.Random) -> Turn:
    year = rng.randint(1980, 2060)
    leap = year % 4 == 0
    template = rng.choice(
        (
            "How many days are in February {y}?",
            "How many days did February {y} have?",
            "Is {y} a leap year?",
            "Was {y} a leap year?",
            "How many days are in {y}?",
        )
    )
    short = year % 100
    verdict = "leap year" if leap else "not a leap year"
    reasoning = f"{short} / 4 = {short // 4}, {short % 4} left\n{verdict}"
    if "leap" in template:
        answer = "yes" if leap else "no"
    elif "February" in template:
        answer = "29" if leap else "28"
    else:
        answer = "366" if leap else "365"
    question = vary(rng, template.format(y=year))
    return Turn(question, reasoning, answer, question.lower(), "number", (answer,))


def _calendar(rng: random.Random) -> Turn:
    """A fact of the calendar. The facts are few, so here the wording is what is held out."""
    month, weekday = rng.randrange(12), rng.randrange(7)
    name, day = MONTHS[month], WEEKDAYS[weekday]
    kind = rng.randrange(5)
    if kind == 0:
        question, answer = rng.choice(_DAYS_IN).format(m=name), str(MONTH_DAYS[month])
    elif kind == 1:
        question, answer = rng.choice(_NEXT_MONTH).format(m=name), MONTHS[(month + 1) % 12]
    elif kind == 2:
        question, answer = rng.choice(_LAST_MONTH).format(m=name), MONTHS[(month - 1) % 12]
    elif kind == 3:
        question, answer = rng.choice(_NEXT_DAY).format(w=day), WEEKDAYS[(weekday + 1) % 7]
    else:
        question, answer = rng.choice(_LAST_DAY).format(w=day), WEEKDAYS[(weekday - 1) % 7]
    question = _lower(rng, vary(rng, question))
    reasoning = f"{name if kind < 3 else day}: {answer}"
    return Turn(question, reasoning, answer, question.lower(), "fact", (answer,))


def _lower(rng: random.Random, question: str) -> str:
    return question.lower() if rng.random() < 0.08 else question


def _tomorrow(rng: random.Random, month: int, day: int) -> Turn:
    later = rng.random() < 0.6
    reasoning, answer = (reason_after if later else reason_before)(month, day, 1)
    question = rng.choice(
        (
            "Today is {d}. What is the date tomorrow?",
            "If today is {d}, what date is tomorrow?",
            "What date comes after {d}?",
            "What is the day after {d}?",
            "Which date is after {d}?",
        )
        if later
        else (
            "Today is {d}. What was the date yesterday?",
            "If today is {d}, what date was yesterday?",
            "What date comes before {d}?",
            "What is the day before {d}?",
            "Which date is before {d}?",
        )
    )
    question = _lower(rng, vary(rng, question.format(d=_show(rng, month, day))))
    return Turn(
        question,
        reasoning,
        answer,
        f"{later} {month} {day} 1 {question.lower()}",
        "date",
        (answer,),
    )


def _show(rng: random.Random, month: int, day: int) -> str:
    style = rng.random()
    if style < 0.7:
        return f"{MONTHS[month]} {day}"
    if style < 0.85:
        return f"{day} {MONTHS[month]}"
    suffix = "th" if 10 < day % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{MONTHS[month]} {day}{suffix}"


def dates(rng: random.Random) -> Turn:
    """Return a question about the calendar."""
    kind = rng.choices(("after", "before", "week", "calendar", "leap"), (32, 18, 25, 18, 7))[0]
    if kind == "calendar":
        return _calendar(rng)
    if kind == "leap":
        return _leap(rng)
    sign = 1 if rng.random() < 0.65 else -1
    if kind == "week":
        weekday, days = rng.randrange(7), rng.randint(1, 31)
        question = rng.choice(_WEEK_AFTER if sign > 0 else _WEEK_BEFORE).format(
            n=days, w=WEEKDAYS[weekday]
        )
        reasoning, answer = reason_weekday(weekday, days, sign)
        question = _lower(
            rng, vary(rng, question.replace("1 days", "1 day") if days == 1 else question)
        )
        return Turn(question, reasoning, answer, question.lower(), "weekday", (answer,))
    month = rng.randrange(12)
    day, days = rng.randint(1, MONTH_DAYS[month]), rng.randint(1, 30)
    if rng.random() < 0.1:
        return _tomorrow(rng, month, day)
    template = rng.choice(_AFTER if kind == "after" else _BEFORE)
    reasoning, answer = (reason_after if kind == "after" else reason_before)(month, day, days)
    question = template.format(n=days, d=_show(rng, month, day))
    question = _lower(
        rng, vary(rng, question.replace("1 days", "1 day") if days == 1 else question)
    )
    return Turn(question, reasoning, answer, f"{kind} {month} {day} {days}", "date", (answer,))
