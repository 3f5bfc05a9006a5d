"""Arithmetic tasks: whole numbers, column by column with written carries.

Each line of the reasoning is one column: the sum, then the digits written so far. The sentences are
in numbers.yaml.
"""

import re
from collections.abc import Sequence

from evals.frames import Said, load
from evals.wordings import Source, asked
from evals.words import COUNTED, NAMES, Turn

SUMS = load("numbers", dict[str, Said])
_ONE = {
    ("+", 1): "one_more",
    ("-", 1): "one_less",
    ("*", 2): "double",
    ("*", 3): "triple",
    ("*", 12): "dozen",
    ("/", 2): "half",
    ("/", 4): "quarter",
}
_SMALL, _TENS = SUMS["words"]["small"], SUMS["words"]["tens"]


def say(source: Source, value: int) -> str:
    """Return a number below 10,000 in words."""
    if value < 20:
        return _SMALL[value]
    if value < 100:
        rest = value % 10
        return _TENS[value // 10 - 2] + (source.choice("--- ") + _SMALL[rest] if rest else "")
    size, unit = (100, "hundred") if value < 1000 else (1000, "thousand")
    head, rest = value // size, value % size
    first = "a" if head == 1 and source.chance(0.2) else say(source, head)
    if not rest:
        return f"{first} {unit}"
    joined = " and " if rest < 100 and source.chance(0.6) else " "
    return f"{first} {unit}{joined}{say(source, rest)}"


def shown(source: Source, values: list[int], share: float = 0.14) -> tuple[list[str], str]:
    """Return numbers as people write them, and the reasoning that turns words into digits."""
    if not source.chance(share):
        return [str(value) for value in values], ""
    texts = [
        say(source, value) if value < 1000 and source.chance(0.75) else str(value)
        for value in values
    ]
    pairs = zip(texts, values, strict=True)
    read = [f"{text} = {value}" for text, value in pairs if text != str(value)]
    return texts, ", ".join(read) + "\n" if read else ""


def reason_add(a: int, b: int) -> str:
    """Return the reasoning for a + b in columns, ones first."""
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
    """Return the reasoning for a - b in columns, ones first; if a < b, the two are swapped."""
    if a < b:
        return f"-({b} - {a})\n" + reason_subtract(b, a)
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
    """Return the reasoning for a * b: one digit times a number in columns; two digits as tens and
    ones, with their products added.
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


def reason_divide(a: int, b: int) -> str:
    """Return the reasoning for a / b from left to right, for one digit b that divides a."""
    lines, left, done = [], 0, ""
    for digit in str(a):
        part = left * 10 + int(digit)
        done += str(part // b)
        lines.append(f"{part}/{b}={part // b}, {part}-{part // b * b}={part % b}, {done}")
        left = part % b
    return "\n".join([*lines, str(int(done))])


def number(source: Source, num_digits_max: int) -> int:
    """Return a number of 1 to `num_digits_max` digits; each length has an equal chance."""
    size = source.randint(1, num_digits_max)
    return source.randint(0 if size == 1 else 10 ** (size - 1), 10**size - 1)


def operate(op: str, a: int, b: int) -> tuple[str, str]:
    """Return (reasoning, answer) of `a op b`: first the expression, then the computation."""
    if op == "+":
        reasoning, answer = reason_add(a, b), a + b
    elif op == "-":
        reasoning, answer = reason_subtract(a, b), a - b
    elif op == "/":
        reasoning, answer = reason_divide(a, b), a // b
    else:
        reasoning, answer = reason_multiply(a, b), a * b
    return f"{a} {op} {b}\n{reasoning}", str(answer)


def arithmetic(source: Source) -> Turn:
    """Return a question for a sum, a difference, a product or a quotient, plain or as a story."""
    op = source.choices("+-*/", (8, 8, 7, 2))[0]
    if source.chance(0.07):
        return _one(source)
    if op == "+" and source.chance(0.1):
        return _three(source)
    story = source.chance(0.34)
    a, b = _operands(source, op, story)
    (x, y), read = shown(source, [a, b])
    n, m = source.sample(NAMES, 2)
    stories = SUMS[op]["stories"]
    said = asked(source, questions=stories) if story else sum_asked(source, op, bare(op))
    if op == "-" and a < b and not any(form in said for form in ("{a} -", "{a}-", "{a} minus")):
        a, b, x, y = b, a, y, x  # A remainder, or a gap between two numbers, is never negative.
    if read:
        said = _spaced(said)
    question = said.format(a=x, b=y, n=n, m=m, t=source.choice(COUNTED))
    reasoning, answer = operate(op, a, b)
    return Turn(question, f"sum: {read}{reasoning}", answer, f"{a}{op}{b}", "number", (answer,))


def bare(op: str) -> list[str]:
    """Return the frames of a sum without a sentence around it."""
    return [frame.replace("{s}", op) for frame in SUMS["bare"]["whole"]]


def sum_asked(source: Source, op: str, whole: Sequence[str]) -> str:
    """Return the wording of a question for `{a} op {b}`."""
    said = SUMS[op]
    nouns = (*said["signs"], *said["nouns"])
    return asked(
        source, nouns=nouns, orders=said["orders"], questions=said["questions"], whole=whole
    )


def _spaced(said: str) -> str:
    """Return the wording with spaces around signs, which numbers written in words need."""
    return re.sub(r"\}([-+*/x:])(?=\{)", r"} \1 ", said)


def _operands(source: Source, op: str, story: bool) -> tuple[int, int]:
    if op == "/":
        b = source.randint(2, 9)
        return b * source.randint(1, 99 if story else 200), b
    if op == "*":
        if source.chance(0.25):
            return source.randint(10, 99), source.randint(10, 30)
        a, b = number(source, 3), source.randint(1 if story else 0, 9)
        return (b, a) if source.chance(0.4) else (a, b)
    digits = source.choice((2, 2, 3, 3, 4))
    a, b = number(source, digits), number(source, digits)
    if source.chance(0.2):
        b = number(source, 2)
    if op == "-" and a < b and (story or source.chance(0.85)):
        a, b = b, a
    return a, b


def _one(source: Source) -> Turn:
    """Return a question about one number, such as its double, its half or the next number."""
    op, b = source.choice(tuple(_ONE))
    a = number(source, 2 if b == 12 else 3)
    if op == "/":
        a *= b
    a = max(a, b)
    (x,), read = shown(source, [a])
    question = asked(source, **SUMS[_ONE[op, b]]).format(a=x)
    reasoning, answer = operate(op, a, b)
    return Turn(question, f"sum: {read}{reasoning}", answer, f"{a}{op}{b}", "number", (answer,))


def _three(source: Source) -> Turn:
    a, b, c = number(source, 2), number(source, 2), number(source, 2)
    (x, y, z), read = shown(source, [a, b, c])
    said = asked(source, **SUMS["three"])
    question = (_spaced(said) if read else said).format(a=x, b=y, c=z)
    reasoning = f"sum: {read}{a} + {b} + {c}\n{reason_add(a, b)}\n{reason_add(a + b, c)}"
    answer = str(a + b + c)
    return Turn(question, reasoning, answer, f"{a}+{b}+{c}", "number", (answer,))
