"""Test files for a change, chosen by the imports that tests/test_tidy.py allows.

A room (package) depends on a changed room if it may import it, directly or not. The unit tests of all
such rooms run; also tests/dist, if `hadal serve` runs one of them. A test file also runs if a file that
it imports changed. A change to a file of EVERYTHING runs all tests. Run all tests before a merge.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.test_tidy import MAY_IMPORT, ROOT, room_in, room_of

ALWAYS = ("tests/test_tidy.py", "tests/test_docs.py", "tests/test_same_code.py")
EVERYTHING = ("pyproject.toml", "requirements.txt", "tests/conftest.py", "Makefile")
SERVED = {"runtime", "gateway", "apps/console"}
"""Rooms with processes that `hadal serve` starts."""
FOLDER_TO_ROOMS = {"tests/sim": {"lab/sim"}, "tests/dist": SERVED, "tests/gpu": {"model"}}


def tests_of_changes(since: str) -> list[str]:
    """Return the test files for all changes since the merge base with a commit, including
    uncommitted ones.
    """
    return chosen(_changed(since))


def chosen(changed: Iterable[str]) -> list[str]:
    """Return the test files to run for changed files; all paths are relative to the root."""
    changed = set(changed)
    everything = sorted(path.relative_to(ROOT).as_posix() for path in _test_files())
    if changed & set(EVERYTHING):
        return everything
    rooms = _importers({room_of(ROOT / one) for one in changed if one.startswith("src/hadal/")})
    found = {one for one in everything if one in ALWAYS or one in changed}
    for path in _test_files():
        name = path.relative_to(ROOT).as_posix()
        if _rooms_tested(path) & rooms or changed & _loads(path) or _is_about(path, changed):
            found.add(name)
    return sorted(found)


def _importers(rooms: set[str]) -> set[str]:
    """Return the rooms and all other rooms that may import them, directly or not."""
    found = set(rooms)
    while more := {room for room, may in MAY_IMPORT.items() if may & found} - found:
        found |= more
    return found


def _rooms_tested(path: Path) -> set[str]:
    """Return the rooms that a test file tests, by its place and its imports."""
    parts = path.relative_to(ROOT).parts
    found = {room_in(parts[2:])} if parts[1] == "unit" and len(parts) > 3 else set()
    found |= FOLDER_TO_ROOMS.get("/".join(parts[:2]), set())
    return found | {
        room_in(module.split(".")[1:]) for module in modules_of(path) if module.startswith("hadal.")
    }


def _is_about(path: Path, changed: set[str]) -> bool:
    """Return whether a test file names a changed file that is no Python module, or its top folder."""
    others = {one for one in changed if not one.endswith(".py")}
    text = path.read_text(encoding="utf-8") if others else ""
    return any(one.split("/")[-1] in text or f'"{one.split("/")[0]}"' in text for one in others)


@functools.cache
def _loads(path: Path) -> frozenset[str]:
    """Return the files outside `src` that a test file imports, directly or not."""
    found, todo = set[str](), [path, *_conftests(path)]
    while todo:
        one = todo.pop()
        name = one.relative_to(ROOT).as_posix()
        if name not in found:
            found.add(name)
            todo += _imported(one) if one.suffix == ".py" else []
    return frozenset(found)


def _conftests(path: Path) -> Iterator[Path]:
    for folder in path.parents:
        if folder == ROOT:
            return
        if (folder / "conftest.py").exists():
            yield folder / "conftest.py"


@functools.cache
def modules_of(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, by their dotted names."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def _imported(path: Path) -> list[Path]:
    """Return the files outside `src` that a file imports, with the YAML file beside each."""
    places = [ROOT / module.replace(".", "/") for module in modules_of(path)]
    endings = (".py", ".yaml", "/__init__.py")
    files = [Path(f"{place}{ending}") for place in places for ending in endings]
    return [file for file in files if file.is_file()]


@functools.cache
def _test_files() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "tests").rglob("test_*.py")))


def _changed(since: str) -> list[str]:
    base = _git("merge-base", since, "HEAD")[0]
    return [
        *_git("diff", "--name-only", base),
        *_git("ls-files", "--others", "--exclude-standard"),
    ]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines()
