"""Command line of modules that make a part of a page: print the part, or write it into the page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def run_command(
    name: str,
    about: str | None,
    page: Path,
    written: Callable[[str], str],
    shown: Callable[[], str],
) -> None:
    """Run `python -m tests.suite.NAME`. `written`: page text -> the text with the current part; `shown`:
    returns the text to print.
    """
    parser = argparse.ArgumentParser(
        f"python -m tests.suite.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help=f"write it into docs/{page.name}")
    if parser.parse_args().write:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(shown())
