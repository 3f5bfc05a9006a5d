"""Tables of request fields, as shown in docs/api.md.

    python -m tests.suite.fields            print them
    python -m tests.suite.fields --write    write them into docs/api.md

Made from gateway/api/field_table: first fields that several APIs treat alike, then those of each;
served ones first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from hadal.gateway.api.field_rows import FieldRow, Verdict
from hadal.gateway.api.field_table import API_TO_PATH, CHAT, TOKENIZE, rows_of
from tests.suite.page_command import run_command

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- fields: make with python -m tests.suite.fields --write -->", "<!-- end -->"
_ORDER = (Verdict.SERVED, Verdict.REFUSED, Verdict.INERT)


def tables() -> str:
    """Return the tables as Markdown: of fields that several APIs treat alike, then of each API."""
    apis = [api for api in API_TO_PATH if api != TOKENIZE]
    where: dict[tuple[str, FieldRow], list[str]] = defaultdict(list)
    for api in apis:
        for path, row in rows_of(api).items():
            where[path, row].append(api)
    groups: dict[tuple[str, ...], dict[FieldRow, list[str]]] = {}
    for (path, row), found in where.items():
        groups.setdefault(tuple(found), {}).setdefault(row, []).append(path)
    own = {
        path: row for path, row in rows_of(TOKENIZE).items() if rows_of(CHAT).get(path) is not row
    }
    groups[TOKENIZE,] = {}
    for path, row in own.items():
        groups[TOKENIZE,].setdefault(row, []).append(path)
    shown = sorted(
        groups.items(), key=lambda group: (-len(group[0]), [*API_TO_PATH].index(group[0][0]))
    )
    return "\n\n".join(
        f"### Fields of {_title(key, apis)}\n\n{_table(rows)}" for key, rows in shown
    )


def _title(key: tuple[str, ...], apis: list[str]) -> str:
    if list(key) == apis:
        return "all of them"
    if key == (TOKENIZE,):
        return f"{API_TO_PATH[TOKENIZE]}, besides those of a chat"
    return " and ".join(API_TO_PATH[api] for api in key)


def counts() -> dict[str, dict[str, int]]:
    """Return API -> verdict -> number of fields."""
    found: dict[str, dict[str, int]] = {}
    for api in API_TO_PATH:
        own = found[api] = {verdict.value: 0 for verdict in _ORDER}
        for row in rows_of(api).values():
            own[row.verdict.value] += 1
    return found


def _table(rows: dict[FieldRow, list[str]]) -> str:
    lines = ["| fields | here | note | known from |", "| --- | --- | --- | --- |"]
    for row, paths in sorted(rows.items(), key=lambda pair: _ORDER.index(pair[0].verdict)):
        names = ", ".join(f"`{path}`" for path in paths)
        lines.append(f"| {names} | {row.verdict.value} | {_note(row)} | {row.by} |")
    return "\n".join(lines)


def _note(row: FieldRow) -> str:
    note = f"another name of `{row.alias}`" if row.alias else row.note
    if row.harmless:
        values = ", ".join(f"`{json.dumps(value)}`" for value in row.harmless if value is not None)
        note += f"; {values} is accepted" if values else ""
    return note


def written(text: str) -> str:
    """Return the page with the current tables."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{tables()}\n{text[end:]}"


if __name__ == "__main__":
    run_command("fields", __doc__, PAGE, written, lambda: f"{tables()}\n{counts()}")
