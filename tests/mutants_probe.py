"""Says which mutants' statements were executed, in any process: code under test calls `hit`.

A copy of this file lies beside `hadal` in a copy of a checkout; nothing of ours is imported.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

EVERYWHERE = ""
"""In place of a test file: what is executed when modules are imported, which only the first file
that imports them does.
"""
_FOLDER = Path(__file__).with_suffix(".hits")
_AGAIN_S = 0.2
"""A process outlives a test, so it says the same again to the next one."""
_said: dict[int, float] = {}


def hit(mutant: int) -> None:
    """Say that the statement of a mutant is about to be executed."""
    now_s = monotonic()
    if now_s - _said.get(mutant, -_AGAIN_S) >= _AGAIN_S:
        _said[mutant] = now_s
        _FOLDER.mkdir(exist_ok=True)
        with (_FOLDER / str(os.getpid())).open("a") as file:
            file.write(f"{mutant}\n")


def taken() -> list[int]:
    """What was said since the last call."""
    _said.clear()
    found: set[int] = set()
    for path in _FOLDER.iterdir() if _FOLDER.exists() else ():
        found.update(int(line) for line in path.read_text().split())
        path.unlink()
    return sorted(found)
