"""Progress: a bar on a terminal, lines in a file, and no output for work that ends at once."""

from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from hadal.progress import Bar
from tests.waiting import wait_until


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def printed(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.promise("Long operations report their progress on stderr.")
def test_a_file_gets_a_line_now_and_then() -> None:
    console = plain()
    with Bar("hadal test", 4.0, console=console, period_s=0.02) as bar:
        bar.update("the first half", done=2.0)
        wait_until(lambda: printed(console).count("\n") >= 2, "two lines are there")
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert re.fullmatch(
        r"hadal test: the first half, 50%, \d+ s so far", printed(console).splitlines()[-1]
    )


def test_what_ends_at_once_prints_nothing_into_a_file() -> None:
    console = plain()
    with Bar("hadal test", console=console) as bar:
        bar.update("quick")
    assert printed(console) == ""


def test_a_terminal_gets_a_bar_and_other_lines_stand_above_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Bar("hadal test", 4.0, console=console) as bar:
        bar.update("[half]", done=1.0)
        bar.update(advance=1.0)
        bar.print_above(b"a [line] of the log\n")
    assert "a [line] of the log" in printed(console)
    assert "[half]" in printed(console)
    assert "50%" in printed(console)
