"""Count marks of unclear sentences, by package, against the budget of tests/language.toml.

    python -m tests.suite.language                 the counts, beside the budget
    python -m tests.suite.language --list PATH     each marker word and each odd beginning in a file or folder
    python -m tests.suite.language --write         lower the budget to what was counted; it never rises
    python -m tests.suite.language --draw 100 --seed 1    draw docstrings and comments for readers to grade

Two marks are counted. Marker words (MARKER) stand for persons or are vague; their count is
given per 1,000 words of docstrings and comments. Odd beginnings are a preposition, a relative or a
pronoun; their count is given in percent of all docstrings. Both only hint at problems: a text without
them can still be unclear.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
BUDGET = ROOT / "tests" / "language.toml"
MARKER = re.compile(
    r"\b(nobody|somebody|anybody|whoever|whatever|whomever|whom|whose|so many|those who|those that"
    r"|by whom|of which|he|him|his)\b",
    re.IGNORECASE,
)
ODD_BEGINNING = re.compile(
    r"^(of|by|for|from|in|on|at|to|with|beyond|behind|up to|what|who|whose|which|where|whether|how"
    r"|why|that|those|these|this|and|or|but|so|the same)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_GENERATED = "<!-- promises: make"
"""Start of the table of promises, where counting stops: its sentences are copies from other pages."""
_HEAD = """\
# Marks of sentences that must be read twice, by package: `python -m tests.suite.language --write` lowers
# a value to what was counted; no value may rise. `markers`: marker words in 1,000 words of docstrings and
# comments (of pages: in 1,000 words). `beginnings`: percent of docstrings that begin with a preposition, a
# relative or a pronoun.
"""


@dataclass(frozen=True)
class Text:
    """A docstring, a comment line, or a line of a page."""

    path: Path
    line: int
    words: str
    is_docstring: bool


@dataclass(frozen=True)
class Count:
    """Marks in the texts of one package."""

    num_words: int
    num_markers: int
    num_docstrings: int
    num_odd: int

    @property
    def markers(self) -> float:
        """Marker words in 1,000 words."""
        return 1000 * self.num_markers / max(self.num_words, 1)

    @property
    def beginnings(self) -> float:
        """Percent of docstrings with an odd beginning."""
        return 100 * self.num_odd / max(self.num_docstrings, 1)


def docstring(node: ast.AST) -> str | None:
    """Return the text of a statement that is only a string: a docstring, also of a field."""
    match node:
        case ast.Expr(value=ast.Constant(value=str(words))):
            return words
    return None


def texts(path: Path) -> Iterator[Text]:
    """Yield the docstrings and comments of a Python file, or the lines of a page outside its code boxes."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        is_code = False
        for number, line in enumerate(source.splitlines(), 1):
            is_code ^= line.startswith("```")
            if line.startswith(_GENERATED):
                return
            if not is_code:
                yield Text(path, number, line, is_docstring=False)
        return
    for node in ast.walk(ast.parse(source)):
        if (words := docstring(node)) is not None:
            yield Text(path, node.lineno, words.strip(), is_docstring=True)  # type: ignore[attr-defined]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], token.string.lstrip("# "), is_docstring=False)


def packages() -> dict[str, list[Path]]:
    """Return the name of each package -> its files: rooms of src, tests, bench, evals, pages."""
    found: dict[str, list[Path]] = {}
    src = ROOT / "src" / "hadal"
    for path in sorted(src.rglob("*.py")):
        inner = path.relative_to(src).parts
        found.setdefault(f"src/{inner[0] if len(inner) > 1 else 'top'}", []).append(path)
    for name in ("tests", "bench", "evals"):
        found[name] = sorted((ROOT / name).rglob("*.py"))
    pages = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "LOG.md"]
    found["pages"] = [*pages, *sorted((ROOT / "docs").rglob("*.md"))]
    return found


def count(paths: Sequence[Path]) -> Count:
    """Count the marks in files."""
    found = [text for path in paths for text in texts(path)]
    docstrings = [text for text in found if text.is_docstring]
    return Count(
        sum(len(_WORD.findall(text.words)) for text in found),
        sum(len(MARKER.findall(text.words)) for text in found),
        len(docstrings),
        sum(bool(ODD_BEGINNING.match(text.words)) for text in docstrings),
    )


def counts() -> dict[str, Count]:
    """Return package -> count of its marks; "src" has the count of all packages of src."""
    files = packages()
    found = {name: count(paths) for name, paths in files.items()}
    src = [path for name, paths in files.items() if name.startswith("src/") for path in paths]
    return {"src": count(src), **found}


def budget() -> dict[str, dict[str, float]]:
    """Return package -> largest allowed "markers" and "beginnings"."""
    return tomllib.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}


def _write(found: dict[str, Count]) -> None:
    allowed = budget()
    lines = [_HEAD]
    for name, one in found.items():
        before = allowed.get(name, {})
        # Rounded up, so that the current count stays within the budget.
        markers = min(before.get("markers", 1000.0), _rounded_up(one.markers))
        beginnings = min(before.get("beginnings", 100.0), _rounded_up(one.beginnings))
        lines.append(f'["{name}"]\nmarkers = {markers:.1f}\nbeginnings = {beginnings:.1f}\n')
    BUDGET.write_text("\n".join(lines), encoding="utf-8")


def _rounded_up(value: float) -> float:
    return -(-value * 10 // 1) / 10


def _show(found: dict[str, Count]) -> None:
    table = Table("package", "words", "markers", "at most", "docstrings", "odd", "at most")
    allowed = budget()
    for name, one in found.items():
        most = allowed.get(name, {})
        markers, odd = most.get("markers", 0.0), most.get("beginnings", 0.0)
        words, docstrings = str(one.num_words), str(one.num_docstrings)
        table.add_row(
            *(name, words, f"{one.markers:.1f}", f"{markers:.1f}"),
            *(docstrings, f"{one.beginnings:.1f} %", f"{odd:.1f} %"),
        )
    Console().print(table)


def _list(place: Path) -> None:
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    for path in files:
        for text in texts(path):
            is_odd = text.is_docstring and ODD_BEGINNING.match(text.words)
            if is_odd or MARKER.search(text.words):
                first = text.words.split("\n", 1)[0]
                print(f"{path}:{text.line}: {first}")


def _draw(number: int, seed: int) -> None:
    """Print docstrings and comments of three words or more, each with the same chance."""
    files = [path for name, paths in packages().items() if name != "pages" for path in paths]
    found = [text for path in files for text in texts(path) if len(_WORD.findall(text.words)) >= 3]
    print(f"{number} of {len(found)}, seed {seed}")
    for text in random.Random(seed).sample(found, number):
        print(f"\n{text.path.relative_to(ROOT)}:{text.line}\n    {text.words}")


def main(arguments: Sequence[str]) -> int:
    """Show the counts, list marks, or write the budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="lower the budget")
    parser.add_argument(
        "--list", type=Path, metavar="PATH", help="show the marks of a file or folder"
    )
    parser.add_argument("--draw", type=int, metavar="NUMBER", help="print that many texts")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (1)")
    asked = parser.parse_args(arguments)
    if asked.draw:
        _draw(asked.draw, asked.seed)
        return 0
    if asked.list is not None:
        _list(asked.list)
        return 0
    found = counts()
    if asked.write:
        _write(found)
    _show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
