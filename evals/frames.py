"""Sentences and words of the tasks, from the YAML file beside each module.

In a file a block of text is frames, one a line, or words with spaces between them; what `parts` names
stands for `<name>` in every other text of the file. Knows neither what frames mean nor which tasks
there are.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_PART = re.compile(r"<(\w+)>")


class Frames(tuple[str, ...]):
    """Frames of a block of text, one a line. Raises ValueError where one stands twice."""

    __slots__ = ()

    def __new__(cls, text: str) -> "Frames":
        found = [line.strip() for line in text.splitlines() if line.strip()]
        if len(set(found)) < len(found):
            raise ValueError(f"a frame stands twice: {sorted(found)}")
        return super().__new__(cls, found)


class Words(tuple[str, ...]):
    """Words of a text; one that is to be drawn more often stands more than once."""

    __slots__ = ()

    def __new__(cls, text: str) -> "Words":
        return super().__new__(cls, text.split())


Said = dict[str, Frames]
"""The frames of one subject by what they are: nouns, orders, questions, or wholes."""


def load(name: str, into: type[T]) -> T:
    """Return the contents of `evals/<name>.yaml`. Raises msgspec.ValidationError if they do not fit `into`."""
    raw = msgspec.yaml.decode(Path(__file__).with_name(f"{name}.yaml").read_bytes())
    return msgspec.convert(raw, into, dec_hook=partial(_made, raw.pop("parts", {})))


def _made(parts: dict[str, str], kind: type, text: Any) -> Any:
    return kind(_PART.sub(lambda match: parts[match[1]], text))
