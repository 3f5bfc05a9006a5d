"""Compare the code of two commits without its docstrings and comments: what a change of language may not
touch.

    python -m tests.suite.unchanged REVISION [PATH ...]

Files that differ in more than docstrings and comments are listed with their first difference; the exit
code is 1 if there is one. Without PATH: all Python files that differ from REVISION.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def first_difference(before: str, after: str) -> str | None:
    """Return the first line that differs in the dumps of two modules without docstrings, as "old -> new"."""
    for old, new in zip_longest(_lines(before), _lines(after), fillvalue="(no more)"):
        if old != new:
            return f"{old.strip()} -> {new.strip()}"
    return None


def _lines(source: str) -> list[str]:
    tree = _WithoutTexts().visit(ast.parse(source))
    return ast.dump(tree, indent=1).splitlines()


class _WithoutTexts(ast.NodeTransformer):
    """Removes statements that are only a string: docstrings of modules, classes, functions and fields."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main(arguments: Sequence[str]) -> int:
    """Print the files whose code differs; return 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision")
    parser.add_argument("paths", nargs="*", help="files or folders; default: all that differ")
    asked = parser.parse_args(arguments)
    names = _git("diff", "--name-only", "--no-renames", asked.revision, "--", *asked.paths)
    num_changed = num_same = 0
    for name in names.splitlines():
        if not name.endswith(".py"):
            continue
        path = ROOT / name
        before = _git("ls-tree", "--name-only", asked.revision, name).strip()
        if not path.exists() or not before:
            found = "only in one of the two"
        else:
            old = _git("show", f"{asked.revision}:{name}")
            found = first_difference(old, path.read_text(encoding="utf-8")) or ""
        if found:
            num_changed += 1
            print(f"{name}: {found}")
        else:
            num_same += 1
    print(f"{num_same} files differ in docstrings and comments only, {num_changed} in code")
    return int(num_changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
