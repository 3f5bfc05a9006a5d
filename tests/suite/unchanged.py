"""Compare the code of the working tree with that of a commit, without docstrings and comments: a
change of language may not touch it.

    python -m tests.suite.unchanged REVISION [PATH ...]
    python -m tests.suite.unchanged --messages REVISION [PATH ...]

Files that differ in more than docstrings and comments are listed with their first difference; the exit
code is 1 if there is one. `--messages` allows other texts in strings, too, and lists each old and new
one. Without PATH: all Python files that differ from REVISION.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from tests.suite.language import ROOT, docstring


def first_difference(
    before: str, after: str, *, may_differ_in_messages: bool = False
) -> str | None:
    """Return the first line that differs in the dumps of two modules without docstrings, as
    "old -> new"; None if the dumps are equal.
    """
    trees = [_WithoutTexts().visit(ast.parse(source)) for source in (before, after)]
    if may_differ_in_messages:
        trees = [_WithoutMessages().visit(tree) for tree in trees]
    old_lines, new_lines = (ast.dump(tree, indent=1).splitlines() for tree in trees)
    for old, new in zip_longest(old_lines, new_lines, fillvalue="(no more)"):
        if old != new:
            return f"{old.strip()} -> {new.strip()}"
    return None


def messages(before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yield each string that differs in two modules of the same code, old and new."""
    old_new = [list(_strings(_WithoutTexts().visit(ast.parse(one)))) for one in (before, after)]
    for old, new in zip(*old_new, strict=True):
        if old != new:
            yield old, new


class _WithoutTexts(ast.NodeTransformer):
    """Removes statements that are only a string: docstrings of modules, classes, functions and fields."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if docstring(node) is not None else node


class _WithoutMessages(ast.NodeTransformer):
    """Empties strings. Of an f-string only the inserted values stay, in their order."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        values = [self.visit(one) for one in node.values if isinstance(one, ast.FormattedValue)]
        return ast.JoinedStr(values) if values else ast.Constant("")


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings in the order of the code; an f-string is one string, in source form."""
    if isinstance(tree, ast.JoinedStr):
        yield ast.unparse(tree)
    elif isinstance(tree, ast.Constant):
        if isinstance(tree.value, str):
            yield tree.value
    else:
        for child in ast.iter_child_nodes(tree):
            yield from _strings(child)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main(arguments: Sequence[str]) -> int:
    """Print the files with other code; return 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision")
    parser.add_argument("paths", nargs="*", help="files or folders; default: all that differ")
    parser.add_argument("--messages", action="store_true", help="strings may differ; list them")
    asked = parser.parse_args(arguments)
    names = _git("diff", "--name-only", "--no-renames", asked.revision, "--", *asked.paths)
    num_changed = num_same = 0
    for name in filter(lambda name: name.endswith(".py"), names.splitlines()):
        path = ROOT / name
        before = _git("ls-tree", "--name-only", asked.revision, name).strip()
        if not path.exists() or not before:
            found: str | None = "only in one of the two"
        else:
            old, new = _git("show", f"{asked.revision}:{name}"), path.read_text(encoding="utf-8")
            found = first_difference(old, new, may_differ_in_messages=asked.messages)
            if asked.messages and not found:
                for pair in messages(old, new):
                    print(f"{name}\n    {pair[0]!r}\n    {pair[1]!r}")
        if found:
            num_changed += 1
            print(f"{name}: {found}")
        else:
            num_same += 1
    allowed = "docstrings, comments and messages" if asked.messages else "docstrings and comments"
    print(f"{num_same} files differ in {allowed} only, {num_changed} in code")
    return int(num_changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
