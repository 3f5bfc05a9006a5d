"""Records which mutants' statements were executed, in any process: code under test calls `hit`.

A copy of this file lies beside `hadal` in a copy of a checkout; it imports no module of ours.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

EVERYWHERE = ""
"""Pseudo test file for statements that run at import, which only the first importing file executes."""
_FOLDER = Path(__file__).with_suffix(".hits")
_AGAIN_S = 0.2
"""Seconds until a hit is recorded again: a process outlives a test, and the next one counts anew."""
_said: dict[int, float] = {}


def hit(mutant: int) -> None:
    """Record that a mutant's statement is about to be executed."""
    now_s = monotonic()
    if now_s - _said.get(mutant, -_AGAIN_S) >= _AGAIN_S:
        _said[mutant] = now_s
        _FOLDER.mkdir(exist_ok=True)
        with (_FOLDER / str(os.getpid())).open("a") as file:
            file.write(f"{mutant}\n")


def taken() -> list[int]:
    """Return mutants recorded since the last call, and forget them."""
    _said.clear()
    found: set[int] = set()
    for path in _FOLDER.iterdir() if _FOLDER.exists() else ():
        found.update(int(line) for line in path.read_text().split())
        path.unlink()
    return sorted(found)
