"""Folders of tests: which part of the suite runs each, and its row in the budget."""

from __future__ import annotations

LIVE = (
    "tests/dist",
    "tests/gpu",
    "tests/unit/comm",
    "tests/unit/commands",
    "tests/unit/gateway",
    "tests/unit/runtime",
)
"""Folders with tests that serve, wait for real time, or start processes; others need only a core."""


def folder_of(test: str) -> str:
    """Return the folder that a test counts for: tests/sim, tests/unit/kv, or tests/unit for files
    outside rooms. `test` is a path or the id of a test.
    """
    parts = test.partition("::")[0].split("/")[:-1]
    return "/".join(parts[: 3 if parts[1:2] == ["unit"] else 2])
