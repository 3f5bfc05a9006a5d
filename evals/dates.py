"""Calendar tasks: days after or before a date, weekdays, months and leap years.

A year has 365 days unless the question names the year. The sentences are in dates.yaml.
"""

from evals.frames import Said, load
from evals.numbers import say
from evals.wordings import Source, asked
from evals.words import MONTH_DAYS, MONTHS, NAMES, WEEKDAYS, Turn

_SAID = load("dates", dict[str, Said])


def reason_after(month: int, day: int, days: int) -> tuple[str, str]:
    """Add the days, then subtract whole months. Return (reasoning, answer)."""
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
    """Subtract the days; while the result is below 1, add the month before. Return (reasoning, answer)."""
    lines = [f"{MONTHS[month]} {day} - {days}"]
    while day <= days:
        month = (month - 1) % 12
        size = MONTH_DAYS[month]
        lines.append(f"{MONTHS[month]} {size}, {day} + {size} = {day + size}")
        day += size
    answer = f"{MONTHS[month]} {day - days}"
    return "\n".join([*lines, f"{day} - {days} = {day - days}", answer]), answer


def reason_weekday(weekday: int, days: int, sign: int) -> tuple[str, str]:
    """Remove whole weeks from the offset, then count day by day. Return (reasoning, answer)."""
    left, lines = days % 7, [f"{WEEKDAYS[weekday]} {'+' if sign > 0 else '-'} {days}"]
    if days >= 7:
        lines.append(f"{days} - {days - left} = {left}")
    walk = [f"{i} {WEEKDAYS[(weekday + sign * i) % 7]}" for i in range(left + 1)]
    return "\n".join([*lines, " ".join(walk)]), WEEKDAYS[(weekday + sign * left) % 7]


def span(source: Source, days: int) -> tuple[str, str]:
    """Return a number of days as people write it, and the reasoning that turns it into a number."""
    if days == 7 and source.chance(0.7):
        return source.choice(("one week", "a week", "1 week")), "7\n"
    if days == 14 and source.chance(0.7):
        return source.choice(("two weeks", "2 weeks", "a fortnight")), "14\n"
    if days in (21, 28) and source.chance(0.6):
        weeks = days // 7
        text = source.choice((f"{weeks} weeks", f"{say(source, weeks)} weeks"))
        return text, f"{weeks} * 7 = {days}\n"
    unit = "day" if days == 1 else "days"
    if source.chance(0.18):
        word = say(source, days)
        return f"{word} {unit}", f"{word} = {days}\n"
    return f"{days} {unit}", ""


def _days(source: Source, top: int) -> int:
    return source.choice((7, 7, 14, 21)) if source.chance(0.14) else source.randint(1, top)


def _leap(source: Source) -> Turn:
    year = source.randint(1980, 2060)
    leap = year % 4 == 0
    kind = source.randrange(3)
    said = asked(source, **_SAID[("leap_year", "february", "year")[kind]])
    short = year % 100
    verdict = "leap year" if leap else "not a leap year"
    reasoning = f"leap: {short} / 4 = {short // 4}, {short % 4} left\n{verdict}"
    answer = (("no", "yes"), ("28", "29"), ("365", "366"))[kind][leap]
    question = said.format(y=year)
    return Turn(question, reasoning, answer, f"leap {kind} {year}", "number", (answer,))


def _calendar(source: Source) -> Turn:
    """Return a question for a fact of the calendar, such as the month after May. There are few such facts, so
    only frames and wordings are held out.
    """
    month, weekday = source.randrange(12), source.randrange(7)
    kind = source.randrange(5)
    subject = ("days_in", "next_month", "last_month", "next_day", "last_day")[kind]
    answer = (
        str(MONTH_DAYS[month]),
        MONTHS[(month + 1) % 12],
        MONTHS[month - 1],
        WEEKDAYS[(weekday + 1) % 7],
        WEEKDAYS[weekday - 1],
    )[kind]
    name, day = MONTHS[month], WEEKDAYS[weekday]
    small = source.chance(0.2)
    said = asked(source, **_SAID[subject])
    question = said.format(m=name.lower() if small else name, w=day.lower() if small else day)
    sought = ("days in", "date after", "date before", "day after", "day before")[kind]
    reasoning = f"{sought} {name if kind < 3 else day}: {answer}"
    return Turn(question, reasoning, answer, "", "fact", (answer,))


def _show(source: Source, month: int, day: int) -> str:
    name = MONTHS[month].lower() if source.chance(0.12) else MONTHS[month]
    end = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    style = source.random()
    if style < 0.55:
        return f"{name} {day}"
    if style < 0.7:
        return f"{day} {name}"
    if style < 0.85:
        return f"{name} {day}{end}"
    return f"the {day}{end} of {name}"


def dates(source: Source) -> Turn:
    """Return a question about the calendar."""
    kind = source.choices(("after", "before", "week", "calendar", "leap"), (32, 20, 25, 18, 7))[0]
    if kind == "calendar":
        return _calendar(source)
    if kind == "leap":
        return _leap(source)
    sign = 1 if source.chance(0.6) else -1
    if kind == "week":
        return _weekday_turn(source, sign)
    month = source.randrange(12)
    day = source.randint(1, MONTH_DAYS[month])
    after = kind == "after"
    reason = reason_after if after else reason_before
    if source.chance(0.1):
        reasoning, answer = reason(month, day, 1)
        said = asked(source, **_SAID["tomorrow" if after else "yesterday"])
        text, read, days = "", "", 1
    else:
        days = _days(source, 30)
        text, read = span(source, days)
        said = asked(source, **_SAID[kind])
        reasoning, answer = reason(month, day, days)
    question = said.format(n=text, d=_show(source, month, day), w=source.choice(NAMES))
    return Turn(
        question,
        f"date: {read}{reasoning}",
        answer,
        f"{kind} {month} {day} {days}",
        "date",
        (answer,),
    )


def _weekday_turn(source: Source, sign: int) -> Turn:
    weekday, days = source.randrange(7), _days(source, 31)
    text, read = span(source, days)
    said = asked(source, **_SAID["weekday_after" if sign > 0 else "weekday_before"])
    shown_day = WEEKDAYS[weekday].lower() if source.chance(0.15) else WEEKDAYS[weekday]
    question = said.format(n=text, w=shown_day, p=source.choice(NAMES))
    reasoning, answer = reason_weekday(weekday, days, sign)
    key = f"weekday {weekday} {days} {sign}"
    return Turn(question, f"weekday: {read}{reasoning}", answer, key, "weekday", (answer,))
