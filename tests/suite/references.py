"""Find names of files in docstrings and comments, and check that the files exist.

A name of a file is a path that begins with a folder of src/hadal or of the repository, such as
`policy/eviction` or `runtime/transfer/kv.KvWire`; the file must contain the part after a dot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.suite.language import ROOT, texts

_SRC = ROOT / "src" / "hadal"
_FIRST = {path.name for path in (*_SRC.iterdir(), *ROOT.iterdir()) if path.is_dir()}
_NAME = re.compile(r"(?<![\w/.~*-])([a-z_][a-z0-9_]*(?:/[A-Za-z0-9_.-]+)+)(?![\w*-])")
_SUFFIXES = ("", ".py", ".h", ".cpp", ".md", ".toml", ".yml", ".js", ".css", ".json", "-*.md")
_NO_FILES = {"tokens/s", "bench/results"}
"""Matches of _NAME that are no files of the repository: a rate, and a folder that benches make."""


def unknown_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of each file or symbol that a Python file names and that does not exist."""
    for text in texts(path):
        for match in _NAME.finditer(text.words):
            name = match[1].rstrip(".")
            is_file = name.split("/")[0] in _FIRST and name not in _NO_FILES
            if is_file and not _exists(name, path.parent):
                yield text.line, name


def _exists(name: str, beside: Path) -> bool:
    stem, *symbols = name.rsplit("/", 1)[1].split(".")
    parent = name.rsplit("/", 1)[0]
    for root in (ROOT, _SRC, ROOT / "tests", ROOT / "tests" / "unit", beside):
        if _found(root, name):
            return True
        file = root / parent / f"{stem}.py"
        if file.exists():
            code = file.read_text(encoding="utf-8")
            return all(re.search(rf"\b{re.escape(symbol)}\b", code) for symbol in symbols)
        package = root / parent / stem
        if package.is_dir():
            codes = "".join(one.read_text(encoding="utf-8") for one in package.glob("*.py"))
            return all(re.search(rf"\b{re.escape(symbol)}\b", codes) for symbol in symbols)
    return False


def _found(root: Path, name: str) -> bool:
    return any(next(root.glob(f"{name}{suffix}"), None) is not None for suffix in _SUFFIXES)
