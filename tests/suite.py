"""The whole suite, in three parts: what needs no processes of its own, what serves, and what serves
and must not be disturbed.

    python -m tests.suite [OPTIONS OF PYTEST]

The first two run on all cores. A test whose claim is about times (who notices whom within a second,
who waits for whom) or that takes every core for itself wants the machine alone: UNDISTURBED names
their files. All parts run whatever becomes of the others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fresh import ANSWERS, RUN, VARIABLE

ROOT = Path(__file__).resolve().parents[1]
MOST_WORKERS = 8
MOST_SERVING = 4
"""Workers of tests that serve: each has a server of up to eight processes."""
NOTHING_TO_RUN = 5
"""pytest's exit code where the options left no test."""
ALONE = ("dist", "gpu")
UNDISTURBED = (
    "test_cache_tenants.py",
    "test_handover_hosts.py",
    "test_live_balance.py",
    "test_moves.py",
    "test_overlap.py",
    "test_peer_loss.py",
    "test_prefill_balance.py",
    "test_rank_faults.py",
    "test_rank_processes.py",
    "test_rounds.py",
    "test_starved.py",
    "test_succession.py",
    "test_tenants.py",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Workers that all want every core for each op wait for one another."""


@dataclass(frozen=True)
class Part:
    """A run of pytest. What failed in it is remembered in a cache of its own: pytest runs all of a
    part again with `--last-failed` where only another part's tests are known to have failed.
    """

    name: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def parts(asked: list[str]) -> list[Part]:
    """What to run besides `asked`, which may name files itself: then that alone, one by one."""
    if any((ROOT / argument.partition("::")[0]).exists() for argument in asked):
        return [Part("asked", ())]
    here = ROOT / "tests"
    folders = [path.name for path in here.iterdir() if path.is_dir() and path.name.isalpha()]
    light = [f"tests/{name}" for name in folders if name not in ALONE]
    light += [f"tests/{path.name}" for path in here.glob("test_*.py")]
    serving = [f"tests/dist/{path.name}" for path in here.glob("dist/test_*.py")]
    undisturbed = [f"tests/dist/{name}" for name in UNDISTURBED]
    num_cores = os.cpu_count() or 1
    return [
        Part(
            "light",
            ("-n", str(min(MOST_WORKERS, num_cores)), "--dist", "worksteal", *sorted(light)),
            tuple(ONE_THREAD.items()),
        ),
        Part(
            "serving",
            (
                *("-n", str(min(MOST_SERVING, num_cores)), "--dist", "loadfile"),
                *sorted(set(serving) - set(undisturbed)),
            ),
        ),
        Part("undisturbed", (*undisturbed, "tests/gpu")),
    ]


def main() -> int:
    """Run them all with the same fresh seeds; returns the worst exit code."""
    codes = []
    with tempfile.TemporaryDirectory(prefix="hadal-answers-") as answers:
        shared = {**os.environ, VARIABLE: RUN, ANSWERS: answers}
        for part in parts(sys.argv[1:]):
            cache = f"cache_dir=.pytest_cache/{part.name}"
            command = [sys.executable, "-m", "pytest", "-o", cache, *sys.argv[1:], *part.arguments]
            environment = {**shared, **dict(part.environment)}
            done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
            codes.append(0 if done.returncode == NOTHING_TO_RUN else done.returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
