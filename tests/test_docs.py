"""The pages refer only to existing files, headings and commands of `hadal`."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from hadal.cli import app
from tests.suite import promises

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


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
    named = set(re.findall(r"`hadal ([a-z]+)", page.read_text(encoding="utf-8")))
    assert named <= known, f"{page.name}: {named - known}"


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
