"""Wordings of users: frames with alternatives in them, polite words around them, and the noise of
typing.

A *frame* is one line such as `the [sum|total] of {a} and {b}`. Brackets hold alternatives; the task
fills the words in braces. A question is a frame within another one that makes it a request,
`[Can|Could] you tell me {}?` (wordings.yaml). One frame in eight is held out as a whole, by its
hash: training never sees any of its wordings. Of the other frames' wordings one in twenty is held
out. Very short frames and wordings are never held out. Independent of the tasks.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from evals.frames import Said, load

T = TypeVar("T")
FRAME_ONE_IN = 8
WORDING_ONE_IN = 20
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_WORD = re.compile(r"\b[a-z]{5,}\b(?![^{]*})")


def is_one_in(text: str, num: int) -> bool:
    """Return True for one of `num` texts on average, chosen by the text's hash."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % num == 0


@cache
def is_frame_held_out(frame: str) -> bool:
    """Return True if training never uses the frame. Frames of a few letters are not held out,
    because every wording of their kind contains them.
    """
    letters = sum(char.isalpha() for char in re.sub(r"\{\w*\}", "", frame))
    return letters > 6 and is_one_in(f"frame {frame}", FRAME_ONE_IN)


@cache
def _is_wording_held_out(wording: str) -> bool:
    letters = sum(char.isalpha() for char in re.sub(r"\{\w*\}", "", wording))
    return letters > 12 and is_one_in(f"wording {wording}", WORDING_ONE_IN)


@cache
def _split(frames: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    held = tuple(frame for frame in frames if is_frame_held_out(frame))
    if len(frames) < 3 or len(held) == len(frames):
        held = ()  # At least one frame must be left for training.
    return tuple(frame for frame in frames if frame not in held), held


class Source(random.Random):
    """Random choices for one example, with a record of the frames and wordings used.

    `trained_only`: held-out frames are never drawn.
    """

    def __init__(self, seed: int, trained_only: bool = False) -> None:
        super().__init__(seed)
        self.trained_only = trained_only
        self.frames: list[str] = []
        """All frames that were used."""
        self.held_frames: list[str] = []
        self.held_wordings: list[str] = []

    def chance(self, share: float) -> bool:
        return self.random() < share

    def frame(self, frames: tuple[str, ...]) -> str:
        """Draw a frame, record it, and return one of its wordings."""
        trained, held = _split(frames)
        if held and not self.trained_only and (not trained or self.chance(0.4)):
            frame = self.choice(held)
            self.held_frames.append(frame)
        else:
            frame = self.choice(trained)
        self.frames.append(frame)
        return self.spelled(frame)

    def spelled(self, frame: str) -> str:
        """Return one wording of a frame."""
        while "[" in frame:
            frame = _CHOICE.sub(lambda match: self.choice(match[1].split("|")), frame, count=1)
        return frame

    def wording(self, text: str) -> str:
        """Record that this wording was used; return it."""
        if _is_wording_held_out(text):
            self.held_wordings.append(text)
        return text

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Draw in the block without effect on the side of the split: no held-out frame, no wording recorded."""
        kept, num_noted = self.trained_only, len(self.held_wordings)
        self.trained_only = True
        try:
            yield
        finally:
            self.trained_only = kept
            del self.held_wordings[num_noted:]

    def until(self, make: Callable[[], T], fits: Callable[[T], bool]) -> T:
        """Call `make` until a result fits; record no frames or wordings of rejected results."""
        noted = (self.frames, self.held_frames, self.held_wordings)
        while True:
            sizes = [len(each) for each in noted]
            found = make()
            if fits(found):
                return found
            for each, size in zip(noted, sizes, strict=True):
                del each[size:]

    def some(self, words: Sequence[T], low: int, high: int) -> list[T]:
        """Return a few different items, `low` to `high` of them."""
        return self.sample(words, min(len(words), self.randint(low, high)))


_SAID = load("wordings", dict[str, Said])
_PLAIN = {
    "noun": _SAID["noun"]["plain"],
    "order": _SAID["order"]["plain"],
    "question": ("{}", "{}", "{}"),
    "whole": ("{}",),
}
_AROUND = {kind: _PLAIN[kind] + _SAID.get(kind, {}).get("around", ()) for kind in _PLAIN}


def _lower_first(text: str) -> str:
    first = text.split(" ", 1)[0]
    is_word = first.rstrip(",.:").isalpha() and first[1:].islower()
    return text[0].lower() + text[1:] if is_word else text


def _typo(source: Source, text: str) -> str:
    """Swap, drop or double a letter of a longer word that is not part of the content."""
    found = list(_WORD.finditer(text))
    if not found:
        return text
    at = source.choice(found)
    place = source.randint(at.start() + 1, at.end() - 2)
    kind = source.random()
    if kind < 0.4:
        return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    return text[:place] + (text[place] * 2 if kind < 0.7 else "") + text[place + 1 :]


def _with_noise(source: Source, text: str) -> str:
    """Return the wording as if typed in a hurry; text in braces is unchanged."""
    if text[0].islower() and source.chance(0.75):
        text = text[0].upper() + text[1:]
    kind = source.random()
    if kind < 0.16:
        text = text.lower()
    elif kind < 0.24:
        text = _lower_first(text)
    if source.chance(0.2):
        text = text.rstrip(".?!") or text
    elif source.chance(0.04):
        text = text.rstrip(".?!") + source.choice(("??", "!", "...", " ?", "?!", " :)", "!!"))
    if source.chance(0.06):
        text = text.replace("'", "")
    if source.chance(0.04):
        text = _typo(source, text)
    return text


def asked(
    source: Source,
    *,
    nouns: Sequence[str] = (),
    orders: Sequence[str] = (),
    questions: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> str:
    """Return the wording of a question, with its braces not filled yet. It is made from a noun phrase, an
    order (which begins with a verb), a question or a story, or a text that needs nothing around it.
    """
    given = zip(_PLAIN, (nouns, orders, questions, whole), strict=True)
    kinds = [(kind, frames) for kind, frames in given if frames]
    kind, frames = source.choices(kinds, [len(frames) ** 0.5 for _, frames in kinds])[0]
    core = source.frame(tuple(frames))
    if kind == "question" and source.chance(0.6):
        outer = "{}"
    else:
        outer = source.choice(_PLAIN[kind]) if source.chance(0.25) else source.frame(_AROUND[kind])
    if not outer.startswith("{}"):
        core = _lower_first(core)
    if kind != "question" and not outer.endswith("{}") and not outer.startswith("{}"):
        core = core.rstrip(".?")
    text = source.wording(outer.replace("{}", core, 1))
    return _with_noise(source, _around(source, text))


def _around(source: Source, text: str) -> str:
    if source.chance(0.12):
        opener = source.frame(_SAID["ends"]["openers"])
        text = f"{opener} {_lower_first(text) if opener[-1] == ',' else text}"
    if source.chance(0.1):
        end = "" if text[-1] in ".?!:}" else source.choice((".", ",", " -"))
        text = f"{text}{end} {source.frame(_SAID['ends']['closers'])}"
    return text


def noisy(source: Source, text: str) -> str:
    """Return a complete wording with typing noise."""
    return _with_noise(source, source.wording(text))
