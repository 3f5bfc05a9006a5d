"""The whole suite, in three parts.

    python -m tests.suite [OPTIONS OF PYTEST]

    pure         what needs nothing but a processor, on all cores, at the lowest priority  ┐ together
    undisturbed  what serves, and whose claim is about times: one test after the other     ┘
    serving      all else that serves or waits, on all cores

A test whose claim is about times (who notices whom within a second, who waits for whom) or that takes
every core for itself is disturbed by others that serve: UNDISTURBED names their files. They wait more
than they compute, and the pure tests, which claim nothing about time, take what they leave: the kernel
gives a process of the idle class a core only while nobody else wants it. All parts run whatever becomes
of the others.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fresh import ANSWERS, RUN, VARIABLE

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".pytest_cache"
MOST_WORKERS = 8
MOST_SERVING = 4
"""Workers of tests that serve: each has a server of up to eight processes. One more than there are
cores gained nothing.
"""
SOME_FAILED, NOTHING_TO_RUN = 1, 5
"""pytest's exit codes where it came to its end and tests failed, and where the options left no test."""
LAST_FAILED = "--last-failed"
LIVE = ("dist", "gpu", "unit/comm", "unit/commands", "unit/gateway", "unit/runtime")
"""Folders of tests that serve, wait for real time, or start processes."""
UNDISTURBED = (
    "test_cache_tenants.py",
    "test_handover_hosts.py",
    "test_hosts.py",
    "test_live_balance.py",
    "test_moves.py",
    "test_overlap.py",
    "test_peer_loss.py",
    "test_prefill_balance.py",
    "test_rank_faults.py",
    "test_rank_processes.py",
    "test_rounds.py",
    "test_scale.py",
    "test_starved.py",
    "test_succession.py",
    "test_tenants.py",
)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Workers that all want every core for each op wait for one another."""
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Taken out of the environment: where it is set, every worker of every part compiles all tests anew,
8 s of its processor time.
"""


@dataclass(frozen=True)
class Part:
    """A run of pytest. What failed in it is remembered in a cache of its own: pytest runs all of a
    part again with `--last-failed` where only another part's tests are known to have failed. Of one
    that did not come to its end not all that failed is known, so it is run whole again.
    """

    name: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    is_beside: bool = False
    """It runs beside the next part, at the lowest priority; what it prints is shown at its end."""

    @property
    def ended(self) -> Path:
        """File that is there if the last run came to its end."""
        return CACHE / f"{self.name}.ended"

    def asked(self, options: list[str]) -> list[str]:
        """What of pytest's options is for it."""
        if LAST_FAILED not in options or self.ended.exists():
            return options
        return [option for option in options if not option.startswith(LAST_FAILED)]


def parts(asked: list[str]) -> list[Part]:
    """What to run besides `asked`, which may name files itself: then that alone, one by one."""
    if any((ROOT / argument.partition("::")[0]).exists() for argument in asked):
        return [Part("asked", ())]
    here = ROOT / "tests"
    folders = [path for path in here.glob("unit/*") if path.is_dir() and path.name.isalpha()]
    folders += [path for path in here.iterdir() if path.is_dir() and path.name.isalpha()]
    names = [path.relative_to(here).as_posix() for path in folders]
    pure = [f"tests/{name}" for name in names if name not in (*LIVE, "unit")]
    pure += [f"tests/{path.name}" for path in here.glob("test_*.py")]
    serving = [f"tests/dist/{path.name}" for path in here.glob("dist/test_*.py")]
    live = [f"tests/{name}" for name in LIVE if name.startswith("unit/")]
    live += [f"tests/unit/{path.name}" for path in here.glob("unit/test_*.py")]
    undisturbed = [f"tests/dist/{name}" for name in UNDISTURBED]
    num_cores = os.cpu_count() or 1
    return [
        Part(
            "pure",
            ("-n", str(min(MOST_WORKERS, num_cores)), "--dist", "worksteal", *sorted(pure)),
            tuple(ONE_THREAD.items()),
            is_beside=True,
        ),
        Part("undisturbed", (*undisturbed, "tests/gpu")),
        Part(
            "serving",
            (
                *(
                    "-n",
                    str(min(MOST_SERVING, num_cores)),
                    "--dist",
                    "loadfile",
                    "--no-loadscope-reorder",
                ),
                *sorted(set(serving) - set(undisturbed)),
                *sorted(live),  # The shortest last, so that no worker waits long for another.
            ),
        ),
    ]


class Running:
    """A part that runs."""

    def __init__(self, part: Part, answers: str) -> None:
        self._part = part
        self._output = CACHE / f"{part.name}.log" if part.is_beside else None
        asked = part.asked(sys.argv[1:])
        part.ended.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE / part.name}"]
        environment = {**os.environ, **dict(part.environment), VARIABLE: RUN, ANSWERS: answers}
        environment.pop(NO_BYTECODE, None)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self._output.open("wb")) if self._output else None
            self._process = subprocess.Popen(
                [*command, *asked, *part.arguments],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
                preexec_fn=_at_lowest_priority if part.is_beside else None,
            )

    def code(self) -> int:
        """Wait for its end, and show what it printed if it did not yet; returns its exit code, or what
        a shell would say of a signal.
        """
        code = self._process.wait()
        code = 128 - code if code < 0 else code
        if code in (0, SOME_FAILED, NOTHING_TO_RUN):
            self._part.ended.touch()
        if self._output is not None:
            print(self._output.read_text(errors="replace"), flush=True)
        return 0 if code == NOTHING_TO_RUN else code


def _at_lowest_priority() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> int:
    """Run them all with the same fresh seeds; returns the worst exit code."""
    CACHE.mkdir(exist_ok=True)
    codes, beside = [], None
    with tempfile.TemporaryDirectory(prefix="hadal-answers-") as answers:
        for part in parts(sys.argv[1:]):
            running = Running(part, answers)
            if part.is_beside:
                beside = running
                continue
            codes.append(running.code())
            if beside is not None:
                codes.append(beside.code())
                beside = None
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
