"""Sentences and words of the tasks, from the YAML file beside each module.

In a file, a block of text holds frames, one per line, or words separated by spaces. An entry of
`parts` replaces `<name>` in all other texts of the file. Independent of the tasks and of the
meaning of frames.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_PART = re.compile(r"<(\w+)>")


class Frames(tuple[str, ...]):
    """Frames of a block of text, one per line. Raises ValueError if a frame occurs twice."""

    __slots__ = ()

    def __new__(cls, text: str) -> "Frames":
        found = [line.strip() for line in text.splitlines() if line.strip()]
        if len(set(found)) < len(found):
            raise ValueError(f"a frame stands twice: {sorted(found)}")
        return super().__new__(cls, found)


class Words(tuple[str, ...]):
    """Words of a text; a word that is to be drawn more often occurs more than once."""

    __slots__ = ()

    def __new__(cls, text: str) -> "Words":
        return super().__new__(cls, text.split())


Said = dict[str, Frames]
"""Kind of frame (nouns, orders, questions, wholes) -> the frames of one subject."""


def load(name: str, into: type[T]) -> T:
    """Return the contents of `evals/<name>.yaml`. Raises msgspec.ValidationError if they do not
    fit.
    """
    raw = msgspec.yaml.decode(Path(__file__).with_name(f"{name}.yaml").read_bytes())
    return msgspec.convert(raw, into, dec_hook=partial(_made, raw.pop("parts", {})))


def _made(parts: dict[str, str], kind: type, text: Any) -> Any:
    return kind(_PART.sub(lambda match: parts[match[1]], text))
