"""The pages refer only to existing files, headings and commands of `hadal`."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from hadal.cli import app
from tests.suite import promises

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES, MOST_CHARACTERS = 6, 120
"""Maximum lines of a paragraph, and maximum characters of a line outside tables and code."""
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
SHAPED = [*PAGES, ROOT / "LOG.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Return the link anchors of a page's headings: lower case, words and hyphens."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_there(page: Path) -> None:
    known = set(get_command(app).commands)
    named = set(re.findall(r"`hadal ([a-z]+(?:-[a-z]+)*)", page.read_text(encoding="utf-8")))
    assert named <= known, f"{page.name}: {named - known}"


def paragraphs(page: Path) -> Iterator[list[str]]:
    """Yield the lines of each paragraph and list item; no tables, headings or code."""
    lines: list[str] = []
    is_code = False
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        is_fence = line.startswith("```")
        is_code ^= is_fence
        is_prose = not is_code and not is_fence and line.strip() and line[0] not in "|#<!"
        if lines and (not is_prose or re.match(r" *(-|[0-9]+\.) ", line)):
            yield lines
            lines = []
        lines += [line] if is_prose else []


@pytest.mark.parametrize("page", SHAPED, ids=lambda page: page.name)
def test_paragraphs_are_short(page: Path) -> None:
    long = [lines[0] for lines in paragraphs(page) if len(lines) > MOST_LINES]
    assert not long, f"{page.name}: a paragraph has at most {MOST_LINES} lines"
    wide = [line for lines in paragraphs(page) for line in lines if len(line) > MOST_CHARACTERS]
    assert not wide, f"{page.name}: a line has at most {MOST_CHARACTERS} characters"


def test_the_first_page_says_every_command() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    left_out = [
        name for name in get_command(app).commands if not re.search(rf"`(hadal )?{name}\b", text)
    ]
    assert left_out == []


def test_promises_stand_in_the_pages() -> None:
    missing = [one for one in promises.held() if promises.page_of(one.sentence) is None]
    assert not missing, "\n".join(f"{one.test}: {one.sentence}" for one in missing)


def test_every_promise_is_held_by_make_test() -> None:
    held = promises.held()
    in_test = {one.sentence for one in held if one.is_in_test}
    assert {one.sentence for one in held} == in_test


def test_the_table_of_promises_is_of_today() -> None:
    text = promises.PAGE.read_text(encoding="utf-8")
    assert promises.written(text) == text, "python -m tests.suite.promises --write"
