"""Promises of README and docs, and the tests that check each.

    python -m tests.suite.promises            print the table
    python -m tests.suite.promises --write    write it into docs/testing.md

A test has the mark `@pytest.mark.promise("...")` with a sentence, or a part of one, exactly as in
README, ARCHITECTURE.md or docs. Marks are read from the test files; no test is run.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.suite.page_command import run_command

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- promises: make with python -m tests.suite.promises --write -->", "<!-- end -->"
PROMISE = "pytest.mark.promise"
LATER = re.compile(r"mark\.(more|full)\b")
"""Matches marks of tests that `make test` leaves out."""
SOURCES = (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md")))


@dataclass(frozen=True)
class Held:
    """A promise and one test for it."""

    sentence: str
    test: str
    """File, two colons, function."""
    is_in_test: bool
    """True if `make test` runs the test; otherwise `make test-more` or `make test-all` does."""


@functools.cache
def held() -> tuple[Held, ...]:
    """Return all marked promises, in order of file and line."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(one for path in files for one in _marks(path))


def page_of(sentence: str) -> Path | None:
    """Return the first page besides PAGE that contains a sentence; None if none does."""
    wanted = _plain(sentence)
    return next((page for page in SOURCES if page != PAGE and wanted in _text(page)), None)


def table() -> str:
    """Return the table as Markdown: page, sentence, tests."""
    by_sentence: dict[str, list[Held]] = defaultdict(list)
    for one in held():
        by_sentence[one.sentence].append(one)
    order = {page: index for index, page in enumerate(SOURCES)}
    rows = [(page_of(sentence) or PAGE, sentence) for sentence in by_sentence]
    lines = ["| page | promise | held by |", "| --- | --- | --- |"]
    for page, sentence in sorted(rows, key=lambda row: order.get(row[0], -1)):
        tests = ", ".join(
            f"`{one.test.removeprefix('tests/')}`{'' if one.is_in_test else ' (test-more)'}"
            for one in by_sentence[sentence]
        )
        shown = _plain(sentence).replace("|", "\\|")
        lines.append(f"| {page.relative_to(ROOT)} | {shown} | {tests} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """Return the page with the current table."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{table()}\n{text[end:]}"


def _marks(path: Path) -> Iterator[Held]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = path.relative_to(ROOT).as_posix()
    # Marks assigned to a name of the module, such as `pytestmark`.
    named = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marks = [ast.unparse(one) for one in node.decorator_list]
        # A mark inside `parametrize` leaves out only some cases, so `make test` still runs the test.
        own = [named.get(mark, mark) for mark in marks if "parametrize" not in mark]
        is_later = any(LATER.search(mark) for mark in (*own, named.get("pytestmark", "")))
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == PROMISE:
                sentence = ast.literal_eval(decorator.args[0])
                yield Held(sentence, f"{name}::{node.name}", not is_later)


def _plain(text: str) -> str:
    """Return a text without line breaks, emphasis and link targets."""
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"\s+", " ", re.sub(r"[*\[\]`]", "", text)).strip()


@functools.cache
def _text(page: Path) -> str:
    return _plain(page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command("promises", __doc__, PAGE, written, table)
