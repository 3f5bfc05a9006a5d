"""Small talk, repeating the user's words, and requests that the model declines: untaught subjects,
unreadable text, overlong texts, and instructions to misbehave.

There are few answers, so mostly frames and wordings are held out, not contents. The sentences are in smalltalk.yaml.
"""

import msgspec

from evals.frames import Frames, Said, load
from evals.texts import make_text
from evals.wordings import Source, asked, noisy
from evals.words import (
    ALL_LOWER,
    ANIMALS,
    CITIES,
    JOBS,
    NAMES,
    PLACES,
    THINGS,
    Turn,
    jumble,
    num_pieces,
    random_letters,
    with_articles,
)


class Talk(msgspec.Struct, frozen=True):
    """Messages of one kind, and their answer."""

    about: str
    answer: str
    said: Frames


class SmallTalk(msgspec.Struct, frozen=True):
    """Contents of smalltalk.yaml."""

    talk: dict[str, Talk]
    said: Said
    scripts: Frames
    emoji: str
    accented: str


_TEXTS = load("smalltalk", SmallTalk)
_SAID = _TEXTS.said
_TALK = tuple(_TEXTS.talk.values())
_CAN = _TEXTS.talk["can"].answer
CANNOT = "Sorry, I am too small to know that. " + _CAN
UNREADABLE = "Sorry, I can only read plain English and whole numbers. " + _CAN
TOO_LONG = "Sorry, that text is too long for me. " + _CAN
REFUSED = "Sorry, I will not do that. " + _CAN
NO_DECIMALS = "I cannot read decimals."
DECLINES = frozenset((CANNOT, UNREADABLE, TOO_LONG, REFUSED))


def _styled(source: Source, text: str) -> str:
    style = source.random()
    if style < 0.55:
        text = text[0].upper() + text[1:]
    return text + source.choice(("", "", "", "!", ".", "?", "...", " :)", "!!"))


def talk(source: Source) -> Turn:
    """Return a line of small talk."""
    kind = source.random()
    if kind < 0.58:
        talked = source.choice(_TALK)
        question = _styled(source, source.wording(source.frame(talked.said)))
        if source.chance(0.06):
            question = question.lower()
        return Turn(question, f"This is {talked.about}.", talked.answer, "", "talk")
    return name_turn(source) if kind < 0.7 else _repeat(source)


def name_turn(source: Source) -> Turn:
    """Return a turn in which the user gives their name."""
    name = source.choice(NAMES) if source.chance(0.7) else random_letters(source, 3, 7).capitalize()
    answer = f"Hello, {name}! How can I help you?"
    said = source.wording(source.frame(_SAID["name"])).format(n=name)
    return Turn(said, f"The name is {name}.", answer, f"name {name}", "name", (name,))


def _repeat(source: Source) -> Turn:
    text = jumble(source, source.randint(1, source.choice((6, 6, 14))))
    said = source.wording(source.frame(_SAID["repeat"])).format(x=text)
    return Turn(said, "Repeat the words.", text, text, "talk")


def unknown_turn(source: Source) -> Turn:
    """Return a question that the model was not taught."""
    said = asked(source, questions=_SAID["unknown"])
    place = (
        source.choice((*NAMES, *CITIES))
        if source.chance(0.5)
        else random_letters(source, 4, 8).capitalize()
    )
    w = source.choice((*ALL_LOWER, *JOBS)) if source.chance(0.8) else random_letters(source, 4, 9)
    question = said.format(
        x=place, w=w, v=source.choice((*ANIMALS, *PLACES)), y=source.randint(1500, 2030)
    )
    question = with_articles(question)
    return Turn(question, "I do not know this.", CANNOT, "", "decline")


def _odd_text(source: Source) -> str:
    kind = source.random()
    if kind < 0.4:
        script = source.choice(_TEXTS.scripts)
        text = "".join(source.choice(script) for _ in range(source.randint(2, 14)))
        return text[: len(text) // 2] + " " + text[len(text) // 2 :] if source.chance(0.4) else text
    if kind < 0.65:
        return "".join(source.choice(_TEXTS.emoji) for _ in range(source.randint(1, 5)))
    words = [
        source.choice(ALL_LOWER) if source.chance(0.4) else random_letters(source, 3, 9)
        for _ in range(source.randint(1, 6))
    ]
    for index in range(len(words)):
        if index == 0 or source.chance(0.4):
            place = source.randint(0, len(words[index]) - 1)
            words[index] = (
                words[index][:place] + source.choice(_TEXTS.accented) + words[index][place + 1 :]
            )
    source.shuffle(words)
    return " ".join(words)


def _unreadable(source: Source) -> Turn:
    if source.chance(0.4):
        a, b = (_decimal(source) for _ in range(2))
        said = noisy(source, source.frame(_SAID["decimals"]))
        question = said.format(
            a=a,
            b=b if source.chance(0.6) else source.randint(1, 99),
            s=source.choice("+-*/x"),
            w=source.choice(THINGS),
            k=source.randint(2, 60),
            i=source.randint(10, 900),
            n=source.choice(NAMES),
        )
        return Turn(question, NO_DECIMALS, UNREADABLE, f"decimal {a} {b}", "decline")
    odd = _odd_text(source)
    said = noisy(source, source.frame(_SAID["odd"]))
    question = said.format(o=odd, w=source.choice(ALL_LOWER), v=source.choice(ALL_LOWER))
    return Turn(question, "I cannot read this.", UNREADABLE, f"odd {odd}", "decline")


def _decimal(source: Source) -> str:
    return (
        f"{source.randint(0, 99)}.{source.choice((source.randint(1, 9), source.randint(10, 99)))}"
    )


def _refused(source: Source) -> Turn:
    said = asked(source, questions=_SAID["misbehave"])
    question = said.replace("{do}", source.choice(_SAID["deeds"])).format(
        x=source.choice(NAMES), w=source.choice(ALL_LOWER)
    )
    return Turn(question, "I should not do this.", REFUSED, "", "decline")


def _noise_text(source: Source) -> str:
    """Return a text without an answerable question."""
    kind = source.random()
    if kind < 0.4:
        unit = source.choice(
            (random_letters(source, 1, 3), "a", "x", "0", "1", "ab", "!", "?", ".", "-")
        )
        return (unit + source.choice(("", " "))) * source.randint(12, 60)
    if kind < 0.7:
        return "".join(
            source.choice("abcdefghijklmnopqrstuvwxyz;,.!?()0123456789 ")
            for _ in range(source.randint(6, 60))
        )
    return "".join(source.choice("!?.,;:-_#*+/=()[]<>@&%$") for _ in range(source.randint(1, 20)))


def long_text(source: Source, size: int) -> str:
    """Return a text of about `size` pieces (estimated tokens, see words.num_pieces): sentences, words, or one
    unit repeated. The text has no effect on the side of the split, which the frame around it decides.
    """
    kind = source.random()
    if kind < 0.1:
        if source.chance(0.5):
            return " ".join([source.choice(ALL_LOWER)] * size)
        unit = random_letters(source, 1, 4)
        return " ".join([unit] * (size // len(unit)))
    parts: list[str] = []
    left = float(size)
    while left > 0:
        if kind < 0.2:
            part = source.choice(ALL_LOWER)
        elif kind < 0.28:
            part = str(source.randint(0, 999))
        else:
            with source.aside():
                _, _, part = make_text(source, source.randint(1, 3))
        parts.append(part)
        left -= num_pieces(part) + (0.2 <= kind < 0.24)
    return (", " if 0.2 <= kind < 0.24 else " ").join(parts)


def too_long(source: Source, size: int) -> Turn:
    """Return a turn with a text of about `size` pieces (estimated tokens) that the model declines as too long."""
    text = long_text(source, size)
    said = source.frame(_SAID["long"])
    question = said.replace("\\n", "\n").format(
        t=text, n=source.choice(NAMES), w=source.choice(ALL_LOWER)
    )
    return Turn(question, "This text is too long.", TOO_LONG, "", "decline")


def decline(source: Source) -> Turn:
    """Return a request that the model should decline."""
    kind = source.random()
    if kind < 0.42:
        return unknown_turn(source)
    if kind < 0.68:
        return _unreadable(source)
    if kind < 0.86:
        return _refused(source)
    if kind < 0.93:
        return Turn(_noise_text(source), "This is no question.", CANNOT, "", "decline")
    return too_long(source, source.randint(190, 420))
