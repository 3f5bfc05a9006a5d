"""List tasks: sorting, finding the largest or smallest item, reversing.

The reasoning of a sort picks one item per line and copies the rest, so each line needs only the
line above. The sentences are in lists.yaml.
"""

from evals.frames import Said, load
from evals.wordings import Source, asked
from evals.words import ALL_LOWER, NAMES, Turn, join_list, random_letters

_SAID = load("lists", dict[str, Said])


def reason_sort(items: list[str], ordered: list[str]) -> str:
    """Return the reasoning: each line picks the next item and copies the rest of the line above.
    Every item has a space before it, because at the start of a line it would be another token.
    Numbers are written with three digits; words are preceded by a line with the alphabet positions
    of their first letters. So each item can be compared independently of the others.
    """
    lines = []
    if items[0].isdigit():
        ordered, items = _three_digits(ordered), _three_digits(items)
    else:
        places = [" ".join(map(_place, word[:3].lower())) for word in items]
        lines.append(", ".join(f"{w} {p}" for w, p in zip(items, places, strict=True)))
    rest = list(items)
    lines.append(f"| {' '.join(rest)}")
    for item in ordered[:-1]:
        rest.remove(item)
        lines.append(f"- {item} | {' '.join(rest)}")
    return "\n".join([*lines, f"- {ordered[-1]}"])


def _three_digits(numbers: list[str]) -> list[str]:
    return [number.zfill(3) for number in numbers]


def _place(letter: str) -> str:
    return f"{letter}{ord(letter) - 96:02}" if "a" <= letter <= "z" else letter


def reason_reverse(items: list[str]) -> str:
    """Return the reasoning: the items numbered forwards, then copied backwards."""
    numbered = [f"{i} {item}" for i, item in enumerate(items, 1)]
    return f"order: {' '.join(numbered)}\n{' '.join(reversed(numbered))}"


def _numbers(source: Source) -> list[str]:
    top = source.choice((9, 20, 99, 99, 99, 999))
    size = source.choice((2, 3, 3) if top == 999 else (2, 3, 3, 3, 4, 4, 5))
    picked = [source.randint(0, top) for _ in range(size)]
    if source.chance(0.93):
        picked = source.sample(range(top + 1), size)
    return [str(value) for value in picked]


def sort(source: Source) -> Turn:
    """Return a question to sort a list, or a question for the largest or smallest item of a list."""
    if source.chance(0.07):
        return _first_word(source)
    words_asked = source.chance(0.4)
    down = source.chance(0.15 if words_asked else 0.38)
    plain = not down and source.chance(0.3)
    if words_asked:
        words = _words(source)
        ordered = sorted(words, key=str.lower, reverse=down)
        what = source.choice(("words", "words", "names", "items"))
        return _sorted_turn(source, plain, ("za" if down else "az", what), words, ordered, down)
    items = _numbers(source)
    ordered = sorted(items, key=int, reverse=down)
    if source.chance(0.2):
        best, seen = items[0], [items[0]]
        for item in items[1:]:
            best = max(best, item, key=int) if down else min(best, item, key=int)
            seen.append(best)
        said = asked(source, **_SAID["largest" if down else "smallest"])
        question = said.format(x=join_list(source, items, "or" if "bigger" in said else "and"))
        # First all numbers, then the best one so far for each of them.
        given, best_so_far = (" ".join(_three_digits(each)) for each in (items, seen))
        reasoning = f"number {'highest' if down else 'lowest'}: {given}\n{best_so_far}"
        return Turn(question, reasoning, best, f"best{down} {items}", "number", (best,))
    what = source.choice(("numbers", "numbers", "values", "figures", "scores"))
    return _sorted_turn(source, plain, ("down" if down else "up", what), items, ordered, down)


def _first_word(source: Source) -> Turn:
    """Return a question for the alphabetically first or last of some words."""
    words = _words(source)
    ordered = sorted(words, key=str.lower)
    at_end = source.chance(0.35)
    best = ordered[-1 if at_end else 0]
    said = asked(source, **_SAID["first_word"])
    question = said.format(e="last" if at_end else "first", x=join_list(source, words, "or"))
    reasoning = f"sort {'last' if at_end else 'first'}: {reason_sort(words, ordered)}"
    return Turn(question, reasoning, best, f"first{at_end} {words}", "words", (best,))


def _words(source: Source) -> list[str]:
    size = source.choice((2, 2, 3, 3, 3, 4))
    style = source.random()
    if style < 0.75:
        return source.sample(ALL_LOWER, size)
    if style < 0.9:
        return source.sample(NAMES, size)
    words: dict[str, None] = {}
    while len(words) < size:
        words[random_letters(source, 3, 7)] = None
    return list(words)


def _sorted_turn(
    source: Source,
    is_plain: bool,
    said_of: tuple[str, str],
    items: list[str],
    ordered: list[str],
    down: bool,
) -> Turn:
    ends, what = said_of
    is_az = ends == "az" and source.chance(0.12)
    said = asked(source, **_SAID["plain_sort" if is_plain else "alphabetize" if is_az else "sort"])
    listed, (end,) = join_list(source, items), _SAID["ends"][ends]
    question = said.format(x=listed, e=source.spelled(end), z=what)
    reasoning = f"sort {'down' if down else 'up'}: {reason_sort(items, ordered)}"
    key = f"sort{down} {items}"
    return Turn(question, reasoning, ", ".join(ordered), key, "list", tuple(ordered))


def reverse_list(source: Source) -> Turn:
    """Return a question to reverse a list or a row of words."""
    size = source.randint(2, 5)
    style = source.random()
    if style < 0.35:
        items = [str(source.randint(0, 99)) for _ in range(size)]
    elif style < 0.8:
        items = source.sample(ALL_LOWER, size)
    elif style < 0.9:
        items = source.sample("abcdefghijklmnopqrstuvwxyz", size)
    else:
        items = [random_letters(source, 2, 5) for _ in range(source.randint(2, 4))]
    backwards = items[::-1]
    if style >= 0.35 and source.chance(0.25):
        question = asked(source, **_SAID["reverse_words"]).format(x=" ".join(items))
        answer = " ".join(backwards)
    else:
        said = asked(source, **_SAID["reverse"])
        question, answer = said.format(x=join_list(source, items)), ", ".join(backwards)
    reasoning = reason_reverse(items)
    return Turn(question, reasoning, answer, f"reverse {items}", "list", tuple(backwards))
