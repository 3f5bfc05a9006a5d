"""Counts over a checkout: lines, files, parameters, attributes, section comments, importers.

    python -m tests.suite.house [--checkout FOLDER] [--json]

Run it on two checkouts to compare them. It sets no limits.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.suite.language import docstring

HERE = Path(__file__).resolve().parents[2]
MAX_PARAMETERS = 8
MAX_ATTRIBUTES = 15


def counts(root: Path) -> dict[str, float]:
    """Return name -> count for a checkout."""
    src = root / "src" / "hadal"
    files = sorted(src.rglob("*.py"))
    lengths = [_num_lines(path) for path in files]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, float] = {f"lines of {name}": sum(_lines_of(root / name)) for name in _FOLDERS}
    found |= {f"files of {name}": len(_lines_of(root / name)) for name in _FOLDERS}
    return found | {
        "code lines of src": sum(_num_code_lines(path, tree) for path, tree in trees.items()),
        "median lines of a src file": statistics.median(lengths),
        "largest src file": max(lengths),
        "src files imported by one other": _one_importer(src, trees),
        f"functions with over {MAX_PARAMETERS} parameters": sum(
            num > MAX_PARAMETERS for tree in trees.values() for num in _parameters(tree)
        ),
        f"classes with over {MAX_ATTRIBUTES} attributes": sum(
            num > MAX_ATTRIBUTES for tree in trees.values() for num in _attributes(tree)
        ),
        "section comments": sum(_section_comments(path) for path in files),
        "core dependencies": len(project["dependencies"]),
    }


_FOLDERS = ("src/hadal", "tests", "bench", "evals")


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _num_code_lines(path: Path, tree: ast.Module) -> int:
    """Return the number of lines without imports, docstrings, comments and blank ones."""
    others: set[int] = set()
    for node in ast.walk(tree):
        if docstring(node) is not None or isinstance(node, ast.Import | ast.ImportFrom):
            others |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    lines = path.read_text(encoding="utf-8").splitlines()
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in others
        for number, line in enumerate(lines, 1)
    )


def _lines_of(folder: Path) -> list[int]:
    return [_num_lines(path) for path in sorted(folder.rglob("*.py"))]


def _parameters(tree: ast.Module) -> Iterator[int]:
    """Yield the number of parameters of each function, without self and cls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            yield len([name for name in names if name not in ("self", "cls")])


def _attributes(tree: ast.Module) -> Iterator[int]:
    """Yield the number of attributes that each class sets on itself in its methods. Fields of
    dataclasses and structs do not count.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names = {
                target.attr
                for one in ast.walk(node)
                for target in _targets(one)
                if isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
            yield len(names)


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ast.walk(target)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target


def _section_comments(path: Path) -> int:
    """Return the number of comment blocks at module level between empty lines."""
    text = "\n" + path.read_text(encoding="utf-8")
    return len(re.findall(r"\n\n(?:#[^\n]*\n)+\n", text))


def _one_importer(src: Path, trees: dict[Path, ast.Module]) -> int:
    modules = {_module(src, path): path for path in trees}
    importers: Counter[str] = Counter()
    for path, tree in trees.items():
        own, seen = _module(src, path), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                seen |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                seen |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        importers.update(seen & modules.keys() - {own})
    return sum(
        importers[module] == 1 for module, path in modules.items() if path.name != "__init__.py"
    )


def _module(src: Path, path: Path) -> str:
    parts = path.relative_to(src.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.suite.house", description=__doc__)
    parser.add_argument("--checkout", type=Path, default=HERE, help="another checkout of Hadal")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    found = counts(options.checkout)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<40} {value:>10,.0f}")


if __name__ == "__main__":
    main()
