"""Marks of unclear sentences: a budget that may only fall, and the rules of counting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suite.language import Count, budget, count, counts, packages
from tests.suite.references import unknown_names
from tests.suite.unchanged import first_difference, messages

SAMPLE = '''"""Queue of requests."""

AGE_S = 3.0  # nobody waits so many seconds
"""Of a request that nobody wants."""


def pop() -> None:
    """Return the oldest request."""
'''


def test_no_package_has_more_marks_than_before() -> None:
    allowed, found = budget(), counts()
    assert sorted(allowed) == sorted(found), "python -m tests.suite.language --write"
    above = {
        name: (one.markers, one.beginnings)
        for name, one in found.items()
        if one.markers > allowed[name]["markers"] or one.beginnings > allowed[name]["beginnings"]
    }
    assert not above, "python -m tests.suite.language --list PATH shows the places"


def test_files_that_docstrings_and_comments_name_exist() -> None:
    files = [path for paths in packages().values() for path in paths if path.suffix == ".py"]
    assert [(path, *found) for path in files for found in unknown_names(path)] == []


def test_a_name_of_a_file_that_does_not_exist_is_found(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    lines = [
        "# Like policy/eviction.Arc, tests/suite, core/messages/units.UnitReport, docs/decisions/001;",
        "# 20 tokens/s, models/*/x.py, policy/absent, policy/eviction.Absent.",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert list(unknown_names(path)) == [(2, "policy/absent"), (2, "policy/eviction.Absent")]


def test_words_and_beginnings_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE, encoding="utf-8")
    found = count([path])
    assert found == Count(num_words=18, num_markers=3, num_docstrings=3, num_odd=1)
    page = tmp_path / "page.md"
    page.write_text("Whose box?\n```\nwhose box\n```\n", encoding="utf-8")
    assert count([page]).num_markers == 1, "not in the box"


@pytest.mark.parametrize(
    "after",
    [
        SAMPLE.replace("Queue of requests.", "Requests that wait."),
        SAMPLE.replace("  # nobody waits so many seconds", ""),
        SAMPLE.replace('"""Of a request that nobody wants."""\n', ""),
    ],
)
def test_only_docstrings_and_comments_differ(after: str) -> None:
    assert first_difference(SAMPLE, after) is None


def test_code_that_differs_is_found() -> None:
    assert first_difference(SAMPLE, SAMPLE.replace("3.0", "4.0")) is not None
    assert first_difference(SAMPLE, SAMPLE + "pop()\n") is not None


def test_messages_may_differ_and_are_listed() -> None:
    old = "def f(x): raise ValueError('no such key', f'{x} is what it is not')\n"
    new = "def f(x): raise ValueError('unknown key', f'not allowed: {x}')\n"
    assert first_difference(old, new) is not None
    assert first_difference(old, new, may_differ_in_messages=True) is None
    assert list(messages(old, new)) == [
        ("no such key", "unknown key"),
        ("f'{x} is what it is not'", "f'not allowed: {x}'"),
    ]
    other = old.replace("{x}", "{x!r}")
    assert first_difference(old, other, may_differ_in_messages=True) is not None
