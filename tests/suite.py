"""The whole suite: what needs no processes of its own on all cores, then what serves, one by one.

    python -m tests.suite [OPTIONS OF PYTEST]

A test that kills, freezes and times live processes wants the machine to itself; a unit test does
not care. Both parts run whatever becomes of the first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fresh import RUN, VARIABLE

ROOT = Path(__file__).resolve().parents[1]
MOST_WORKERS = 8
NOTHING_TO_RUN = 5
"""pytest's exit code where the options left no test."""


def parts(asked: list[str]) -> list[list[str]]:
    """What each run of pytest is given besides `asked`, which may name files itself."""
    if any((ROOT / argument.partition("::")[0]).exists() for argument in asked):
        return [[]]
    here = ROOT / "tests"
    alone = ["dist", "gpu"]
    folders = [path.name for path in here.iterdir() if path.is_dir() and path.name.isalpha()]
    light = [f"tests/{name}" for name in folders if name not in alone]
    light += [f"tests/{path.name}" for path in here.glob("test_*.py")]
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    return [
        ["-n", str(workers), "--dist", "worksteal", *sorted(light)],
        [f"tests/{name}" for name in alone],
    ]


def main() -> int:
    """Run them all with the same fresh seeds; returns the worst exit code."""
    codes = []
    for arguments in parts(sys.argv[1:]):
        command = [sys.executable, "-m", "pytest", *sys.argv[1:], *arguments]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, VARIABLE: RUN}, check=False)
        codes.append(0 if done.returncode == NOTHING_TO_RUN else done.returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
