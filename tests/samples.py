"""The list of samples: sources of the output and the figures in README.md and docs/.

    python -m tests.samples [WORD]      run the deterministic commands that contain WORD, and compare

A sample that differs must be corrected in its page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs" / "samples.toml"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WHOLE = "*"
FIGURE = re.compile(
    r"(?<![\w.,/=-])\$?\d[\d,]*(?:\.\d+)?\s?"
    r"(?:%|[mu]?s\b|(?:second|minute|hour|time)s?\b|tokens/s|[kKMGT]i?B(?:/s)?\b|x\b)"
)
"""Matches a number with a unit that may have been measured."""
_SETTING = re.compile(r"`\s?\(\Z")
"""Matches the text before the value of a field: `name` (1.5 s)."""
_COLUMNS = "100"
"""Width of the terminal for the tables in the pages."""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts of one page, and the command that printed them. docs/samples.toml describes the fields."""

    page: str
    command: str
    commit: str
    machine: str
    figures: tuple[str, ...]
    shows: tuple[str, ...] = ()
    remake: str = ""
    held_by: str = ""


class Stated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of one page that do not come from a run."""

    page: str
    kind: str
    figures: tuple[str, ...]


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole list."""

    sample: tuple[Sample, ...]
    stated: tuple[Stated, ...]


@dataclass(frozen=True)
class Figure:
    """A figure in a page."""

    line: int
    text: str


def read() -> Samples:
    """Return the list. Raises msgspec.ValidationError if a field is unknown or missing."""
    return msgspec.toml.decode(LIST.read_text(encoding="utf-8"), type=Samples)


def unlisted(page: Path, samples: Samples) -> list[Figure]:
    """Return the figures of a page that no entry of the list covers."""
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    quotes = [
        q
        for entry in (*samples.sample, *samples.stated)
        if entry.page == name
        for q in entry.figures
    ]
    if WHOLE in quotes:
        return []
    covered = [span for quote in quotes for span in _spans(quote, text)]
    return [
        Figure(text.count("\n", 0, found.start()) + 1, found.group())
        for found in FIGURE.finditer(text)
        if not any(start <= found.start() and found.end() <= end for start, end in covered)
        and not _SETTING.search(text, 0, found.start())
    ]


def _spans(quote: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield the quote's spans in the text; its spaces match line ends too."""
    pattern = r"\s+".join(re.escape(word) for word in quote.split())
    return (match.span() for match in re.finditer(pattern, text))


def stands_in(quote: str, text: str) -> bool:
    """Return whether the text contains the quote, with any white space between its words."""
    return quote == WHOLE or next(_spans(quote, text), None) is not None


def output_of(command: str) -> str:
    """Run `hadal ...` in a new folder; return its output. A refusal is output, too."""
    program, *arguments = shlex.split(command)
    assert program == "hadal", command
    arguments = [str(ROOT / part) if (ROOT / part).exists() else part for part in arguments]
    environment = {**os.environ, "COLUMNS": _COLUMNS, "PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "hadal.cli", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    return done.stdout + done.stderr


def missing(sample: Sample, output: str) -> list[str]:
    """Return the sample's texts that the output lacks. A page may omit lines."""
    found = " ".join(output.split())
    return [text for text in sample.shows or sample.figures if " ".join(text.split()) not in found]


def main() -> int:
    """Run the commands and print differences; return the number of samples that differ."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    num_different = 0
    for sample in read().sample:
        if not sample.remake or word not in sample.command:
            continue
        output = output_of(sample.command)
        lost = missing(sample, output)
        print(f"{'differs' if lost else 'same':8} {sample.page}: {sample.command}", flush=True)
        for text in lost:
            print(f"    not printed: {text}")
        if lost:
            print("    " + "\n    ".join(output.splitlines()))
            num_different += 1
    return num_different


if __name__ == "__main__":
    sys.exit(main())
