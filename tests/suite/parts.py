"""Parts of a run of the suite, and the pytest processes that run them.

    live   tests that serve, wait or start processes  ┐ both run at the same time, on all cores; no
    pure   tests that need only a processor           ┘ result depends on how busy the machine is

Live tests wait more than they compute, so the pure tests run beside them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.suite import events
from tests.suite.folders import LIVE

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".pytest_cache"
MAX_WORKERS = 8
MAX_LIVE_WORKERS = 4
"""Maximum number of workers of the live part. Each has servers of five to about ten processes."""
SOME_FAILED, NOTHING_TO_RUN = 1, 5
"""pytest's exit codes: a test failed; the options and paths left no test to run."""
END_S = 60.0
"""Seconds that an interrupted part has to end its servers."""
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Variable that is removed from the environment: with it every worker would compile all tests anew."""


@dataclass(frozen=True)
class Part:
    """One run of pytest."""

    name: str
    arguments: tuple[str, ...]
    threads: int = 0
    """OMP_NUM_THREADS; 0: unchanged. Workers that all use every core for each op block each other."""


def parts(paths: Sequence[str]) -> list[Part]:
    """Return the parts that run `paths` (files or folders of tests), or all tests if there are none."""
    num_cores = len(os.sched_getaffinity(0))
    live, pure = _split(paths or ("tests",))
    made = []
    if live:
        num = min(MAX_LIVE_WORKERS, num_cores + 1)
        made.append(
            Part("live", ("-n", str(num), "--dist", "loadfile", "--no-loadscope-reorder", *live))
        )
    if pure:
        num = min(MAX_WORKERS, num_cores)
        made.append(Part("pure", ("-n", str(num), "--dist", "worksteal", *pure), threads=1))
    return made


def _split(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return files of the live part, tests/dist first, and of the pure part; test names are kept."""
    live, pure = list[str](), list[str]()
    for path in paths:
        name, colons, test = path.partition("::")
        place = ROOT / name
        files = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
        for file in files:
            one = file.resolve().relative_to(ROOT).as_posix() + colons + test
            is_live = one.startswith(tuple(f"{folder}/" for folder in LIVE)) or (
                one.startswith("tests/unit/test_")
            )
            (live if is_live else pure).append(one)
    return live, pure


class Running:
    """A running part. Its output goes to a file; its events can be read while it runs."""

    def __init__(self, part: Part, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self.part = part
        self.output = CACHE / f"{part.name}.log"
        self._events_path = CACHE / f"{part.name}.events"
        self._events_path.write_bytes(b"")
        self._num_read = 0
        threads = {"OMP_NUM_THREADS": str(part.threads)} if part.threads else {}
        settings = {
            **os.environ,
            **threads,
            **environment,
            events.VARIABLE: str(self._events_path),
        }
        settings.pop(NO_BYTECODE, None)
        command = [
            *(sys.executable, "-m", "pytest", "-p", "tests.suite.events"),
            *("-o", f"cache_dir={CACHE / part.name}", *options, *part.arguments),
        ]
        with self.output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A shell that runs the suite in the background ignores SIGINT, and the child would
                # inherit that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def poll(self) -> int | None:
        """Return the exit code; 128 plus the signal's number if a signal ended it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> None:
        """Interrupt the part as Ctrl-C does, if it runs, and wait until it has ended its servers;
        kill it after END_S.
        """
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def read(self) -> list[bytes]:
        """Return the events since the last call, one line each."""
        with self._events_path.open("rb") as file:
            file.seek(self._num_read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._num_read += len(whole) + len(newline)
        return whole.split(b"\n") if whole else []
