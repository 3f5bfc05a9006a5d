"""The list of samples covers the pages, and its deterministic commands print the output shown in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import samples
from tests.samples import PAGES, ROOT, Sample

LIST = samples.read()
MARKS = {"more": pytest.mark.more("runs commands"), "all": pytest.mark.full}
REMADE = [
    pytest.param(one, marks=MARKS[one.remake], id=one.command) for one in LIST.sample if one.remake
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_of_a_page_is_in_the_list(page: Path) -> None:
    found = [f"{page.name}:{one.line}: {one.text}" for one in samples.unlisted(page, LIST)]
    assert found == [], "name their source in docs/samples.toml"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_whose_output_is_shown_is_in_the_list(page: Path) -> None:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    shown = set(re.findall(r"^\$ (hadal .*)$", text, re.MULTILINE))
    assert shown <= {one.command for one in LIST.sample if one.page == name}
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", text)
    listed = {figure for one in LIST.sample if one.page == name for figure in one.figures}
    assert set(pictures) <= listed


def test_what_is_listed_stands_in_its_page() -> None:
    gone = [
        f"{entry.page}: {figure}"
        for entry in (*LIST.sample, *LIST.stated)
        for figure in entry.figures
        if not samples.stands_in(figure, (ROOT / entry.page).read_text(encoding="utf-8"))
    ]
    assert gone == []


def test_entries_are_whole() -> None:
    for one in LIST.sample:
        assert re.fullmatch(r"[0-9a-f]{7}", one.commit), one
        assert one.command, one
        assert "x86-64" in one.machine or one.machine.startswith("any"), one
        assert one.remake in ("", *MARKS), one
        assert not one.held_by or (ROOT / one.held_by).exists(), one
    kinds = {one.kind for one in LIST.stated}
    assert kinds <= {"setting", "limit", "published", "assumed", "arithmetic"}


def test_a_difference_is_found() -> None:
    one = next(one for one in LIST.sample if one.command == "hadal step")
    printed = "\n".join(f"{line}......" for line in one.figures)
    assert samples.missing(one, printed) == []
    assert samples.missing(one, printed.replace("gsss", "gss")) == [one.figures[1]]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sample", REMADE)
def test_a_command_prints_what_its_page_shows(sample: Sample) -> None:
    output = samples.output_of(sample.command)
    assert samples.missing(sample, output) == [], output
