"""A deployment as a TOML file: what is not as it is by default, with a reason beside it where there is one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hadal.core.config import Deployment

_NOTE_COLUMN = 36


def to_toml(deployment: Deployment, heading: Sequence[str] = (), notes: Mapping[str, str] | None = None) -> str:
    """Text that `read_deployment` reads as this deployment.

    `heading`: lines of a comment at the top. `notes`: by field, such as "decode.ranks", what is said of it; a field
    that has a note is written down even if it is as it is by default.
    """
    notes = notes or {}
    lines = [f"# {line}".rstrip() for line in heading]
    lines += ["", *_fields(deployment, "", notes)]
    for table in dataclasses.fields(deployment):
        value = getattr(deployment, table.name)
        if dataclasses.is_dataclass(value) and (found := list(_fields(value, f"{table.name}.", notes))):
            lines += ["", f"[{table.name}]", *found]
    return "\n".join(lines).strip() + "\n"


def _fields(value: Any, prefix: str, notes: Mapping[str, str]) -> Iterator[str]:
    for field in dataclasses.fields(value):
        found, note = getattr(value, field.name), notes.get(prefix + field.name, "")
        if dataclasses.is_dataclass(found) or (found == field.default and not note):
            continue
        # JSON's strings and numbers are TOML's.
        line = f"{field.name} = {json.dumps(found, ensure_ascii=False)}"
        yield f"{line:<{_NOTE_COLUMN}}# {note}" if note else line
