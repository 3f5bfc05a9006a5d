"""Frozen tables as a TOML file that core/tables reads back: what is not as it is by default, or all
of it.

A deployment, a study: a dataclass whose fields are numbers, strings, tuples of those or of
dataclasses, or dataclasses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NOTE_COLUMN = 36


def to_toml(
    value: Any,
    heading: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
    *,
    is_whole: bool = False,
) -> str:
    """Text that is read as this value.

    `heading`: lines of a comment at the top. `notes`: by field, such as "decode.ranks", what is
    said of it; a field that has a note is written down even if it is as it is by default.
    `is_whole`: and so are all others.
    """
    lines = [f"# {line}".rstrip() for line in heading]
    lines += ["", *_tables(value, "", notes or {}, is_whole)]
    return "\n".join(lines).strip() + "\n"


def _tables(value: Any, path: str, notes: Mapping[str, str], is_whole: bool) -> Iterator[str]:
    """A table's fields, then the tables in it."""
    inner = []
    for each in dataclasses.fields(value):
        found, note = getattr(value, each.name), notes.get(path + each.name, "")
        if dataclasses.is_dataclass(found):
            inner.append((f"{path}{each.name}", found))
        elif is_whole or note or found != each.default:
            line = f"{each.name} = {_text(found)}"
            yield f"{line:<{_NOTE_COLUMN}}# {note}" if note else line
    for name, table in inner:
        lines = list(_tables(table, f"{name}.", notes, is_whole))
        if lines:
            yield from ("", f"[{name}]", *lines)


def _text(value: Any) -> str:
    """A value on one line."""
    if dataclasses.is_dataclass(value):
        fields = (
            f"{each.name} = {_text(getattr(value, each.name))}"
            for each in dataclasses.fields(value)
        )
        return f"{{ {', '.join(fields)} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(_text(one) for one in value)}]"
    return json.dumps(value, ensure_ascii=False)  # JSON's strings and numbers are TOML's.
