"""Reckoning: whole numbers, column by column with written carries, and days after or before a date.

Each line of the reasoning is one column: the sum, then the digits written so far. A year is an
ordinary one unless it is named.
"""

import random

from evals.words import COUNTED, MONTH_DAYS, MONTHS, NAMES, WEEKDAYS, Turn, vary

_ADD = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=?",
    "Add {a} and {b}.",
    "Add {a} to {b}.",
    "What is {a} plus {b}?",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
    "Compute {a}+{b}.",
    "What is the sum of {a} and {b}?",
    "Sum {a} and {b}.",
    "{a} plus {b}",
    "What do you get if you add {a} and {b}?",
    "Can you add {a} and {b}?",
    "What's {a} + {b}?",
    "Work out {a} + {b}.",
    "Solve {a} + {b}.",
    "{a} and {b} together?",
)
_SUB = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} =",
    "{a}-{b}=?",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "Calculate {a} - {b}.",
    "How much is {a} minus {b}?",
    "Compute {a}-{b}.",
    "Take {b} away from {a}.",
    "{a} minus {b}",
    "What's {a} - {b}?",
    "Work out {a} - {b}.",
    "Solve {a} - {b}.",
    "What is the difference between {a} and {b}?",
    "Can you subtract {b} from {a}?",
)
_MUL = (
    "What is {a} * {b}?",
    "{a} * {b}",
    "{a}*{b}",
    "{a} x {b}",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Calculate {a} * {b}.",
    "How much is {a} times {b}?",
    "{a} times {b}",
    "What's {a} x {b}?",
    "Compute {a}*{b}.",
    "What is the product of {a} and {b}?",
    "Multiply {a} and {b}.",
    "Work out {a} * {b}.",
    "{a} x {b} = ?",
)
_ASKS = (
    "What is {x}?",
    "what's {x}",
    "Calculate {x}",
    "{x}",
    "{x} =",
    "{x}=",
    "{x} = ?",
    "How much is {x}?",
    "Compute {x}.",
    "Work out {x}.",
    "Solve {x}",
    "Solve: {x}",
    "Tell me {x}.",
    "Evaluate {x}.",
    "{x}?",
    "Do you know {x}?",
    "Give me {x}.",
)
_FORMS = {
    "+": ("{a} + {b}", "{a}+{b}", "{a} plus {b}", "{a} +{b}", "the sum of {a} and {b}"),
    "-": ("{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} -{b}", "{a} take away {b}"),
    "*": (
        "{a} * {b}",
        "{a}*{b}",
        "{a} times {b}",
        "{a} x {b}",
        "{a}x{b}",
        "{a} × {b}",
        "{a} multiplied by {b}",
    ),
}
_STORY_ADD = (
    "{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?",
    "{n} had {a} {t}. Then {n} found {b} more. How many {t} are there now?",
    "{n} has {a} {t} and {m} has {b} {t}. How many {t} do they have together?",
    "There are {a} {t} in a box. {n} puts in {b} more. How many {t} are in the box?",
    "{n} has {a} {t}. {m} gives {n} {b} more. How many {t} does {n} have?",
    "{n} sees {a} {t} in the morning and {b} {t} in the evening. How many {t} is that?",
)
_STORY_SUB = (
    "{n} has {a} {t} and gives {b} to {m}. How many {t} does {n} have left?",
    "{n} had {a} {t}. {n} lost {b} of them. How many {t} are left?",
    "There are {a} {t} in a box. {n} takes {b} out. How many {t} are left in the box?",
    "{n} has {a} {t} and eats {b}. How many {t} are left?",
    "{n} has {a} {t}. {m} takes {b} of them. How many {t} does {n} have now?",
)
_STORY_MUL = (
    "{n} has {a} boxes with {b} {t} each. How many {t} does {n} have?",
    "There are {a} bags. Each bag has {b} {t}. How many {t} are there?",
)


def reason_add(a: int, b: int) -> str:
    """Write a + b out in columns, ones first."""
    x, y = str(a)[::-1], str(b)[::-1]
    lines, carry, done = [f"{' '.join(x)} + {' '.join(y)}"], 0, ""
    width = max(len(x), len(y))
    for i in range(width):
        p, q = int(x[i : i + 1] or 0), int(y[i : i + 1] or 0)
        total = p + q + carry
        done = (str(total) if i == width - 1 else str(total % 10)) + done
        lines.append(f"{p}+{q}{'+1' if carry else ''}={total}, {done}")
        carry = total // 10
    return "\n".join(lines)


def reason_subtract(a: int, b: int) -> str:
    """Write a - b out in columns, ones first; a smaller first number turns the two round."""
    if a < b:
        return f"{a} < {b}, -({b} - {a})\n" + reason_subtract(b, a)
    x, y = str(a)[::-1], str(b)[::-1]
    lines, borrow, done = [f"{' '.join(x)} - {' '.join(y)}"], 0, ""
    for i in range(len(x)):
        p, q = int(x[i]), int(y[i : i + 1] or 0)
        left = p - q - borrow
        tail = "-1" if borrow else ""
        if left < 0:
            line, borrow = f"{p}-{q}{tail}<0, {p + 10}-{q}{tail}={left + 10}", 1
            left += 10
        else:
            line, borrow = f"{p}-{q}{tail}={left}", 0
        done = str(left) + done
        lines.append(f"{line}, {done}")
    return "\n".join(lines)


def reason_multiply(a: int, b: int) -> str:
    """Write a * b out: one digit times a number in columns; two digits as tens and ones, then
    added.
    """
    if b > 9 and a <= 9:
        a, b = b, a
    if b > 9:
        tens, ones = a * (b // 10 * 10), a * (b % 10)
        parts = [f"{a} * {b // 10 * 10} + {a} * {b % 10}"]
        parts += [_columns(a, b // 10), f"{a}*{b // 10 * 10}={tens}"]
        parts += [_columns(a, b % 10), f"{a}*{b % 10}={ones}"]
        return "\n".join([*parts, reason_add(tens, ones)])
    return _columns(a, b)


def _columns(a: int, b: int) -> str:
    x = str(a)[::-1]
    lines, carry, done = [f"{' '.join(x)} * {b}"], 0, ""
    for i, digit in enumerate(x):
        total = int(digit) * b + carry
        done = (str(total) if i == len(x) - 1 else str(total % 10)) + done
        lines.append(f"{digit}*{b}{f'+{carry}' if carry else ''}={total}, {done}")
        carry = total // 10
    return "\n".join(lines)


def number(rng: random.Random, num_digits_max: int) -> int:
    """Return a number with an equal chance for each length."""
    size = rng.randint(1, num_digits_max)
    return rng.randint(0 if size == 1 else 10 ** (size - 1), 10**size - 1)


def operate(op: str, a: int, b: int) -> tuple[str, str]:
    """Return (reasoning, answer) of `a op b`."""
    if op == "+":
        return reason_add(a, b), str(a + b)
    if op == "-":
        return reason_subtract(a, b), str(a - b)
    return reason_multiply(a, b), str(a * b)


def arithmetic(rng: random.Random) -> Turn:
    """Return a sum, a difference or a product, plain or told as a story."""
    op = rng.choices("+-*", (4, 4, 3))[0]
    story = rng.random() < 0.15
    if op == "*":
        if rng.random() < 0.2:
            a, b = rng.randint(10, 99), rng.randint(10, 20)
        else:
            a, b = number(rng, 3), rng.randint(0, 9)
            if rng.random() < 0.4:
                a, b = b, a
    else:
        digits = rng.choice((2, 3, 4, 4))
        a, b = number(rng, digits), number(rng, digits)
        if op == "-" and a < b and (story or rng.random() < 0.75):
            a, b = b, a
        if op == "+" and not story and rng.random() < 0.08:
            return _three(rng)
    plain = {"+": _ADD, "-": _SUB, "*": _MUL}[op]
    told = {"+": _STORY_ADD, "-": _STORY_SUB, "*": _STORY_MUL}[op]
    n, m = rng.sample(NAMES, 2)
    template = rng.choice(told if story else plain)
    if not story and rng.random() < 0.4:
        template = rng.choice(_ASKS).format(x=rng.choice(_FORMS[op]))
    question = vary(rng, template.format(a=a, b=b, n=n, m=m, t=rng.choice(COUNTED)))
    if template.startswith("What is the difference") and a < b:
        a, b = b, a  # A difference between two numbers is never negative.
    reasoning, answer = operate(op, a, b)
    return Turn(question, reasoning, answer, f"{a}{op}{b}", "number", (answer,))


def _three(rng: random.Random) -> Turn:
    a, b, c = number(rng, 2), number(rng, 2), number(rng, 2)
    forms = (
        "What is {a} + {b} + {c}?",
        "{a}+{b}+{c}",
        "Add {a}, {b} and {c}.",
        "{a} + {b} + {c} =",
    )
    template = rng.choice(forms)
    reasoning = reason_add(a, b) + "\n" + reason_add(a + b, c)
    answer = str(a + b + c)
    question = vary(rng, template.format(a=a, b=b, c=c))
    return Turn(question, reasoning, answer, f"{a}+{b}+{c}", "number", (answer,))


# Dates, weekdays, months.

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
