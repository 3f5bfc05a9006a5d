"""Adding, subtracting and multiplying small whole numbers, column by column with written carries.

Each line of the reasoning is one column: the sum, then the digits written so far.
"""

import random

from hadal.evals.tasks_turn import Turn, vary
from hadal.evals.tasks_words import COUNTED, NAMES

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
