"""Fork `hadal serve` and other child programs of tests from a warm process that has imported their
modules. A test's server is then ready in 0.5 s, without the cost of imports.

    pytest                        warm process                  hadal serve                its units
       |-- Job (runtime/process/forks) -->|-- fork ------------------>|   main() of this file
       |                                  |                           |-- fork -->  its fork server, warm
       |                                  |                           |             from the first

Only the importing process differs from a user's start: from `hadal.cli` on the code is the same.
Tests of how a server starts and ends use the plain start (`launch` with `is_plain`).
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hadal import cli
from hadal.commands import report  # noqa: F401  Imported for processes that are forked.
from hadal.gateway import process  # noqa: F401
from hadal.lab.plan import run as plan  # noqa: F401
from hadal.model.cache import KvCache
from hadal.roles.fleet import fleet
from hadal.runtime import banner, launch, rank, unit  # noqa: F401
from hadal.runtime.process import backoff, forks
from hadal.runtime.rank import host  # noqa: F401
from tests.dist import eager, gate
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
CHILDREN = ("tests.dist.ledger_child", "tests.dist.disk_child")
PROCESSOR = "HADAL_TEST_PROCESSOR"
"""Environment variable: number of the only processor that a server and its processes may use."""
RETRY = "HADAL_TEST_RETRY_S"
"""Environment variable: seconds until the first retry of a failed start."""
STAGED = "HADAL_TEST_STAGED"
"""Environment variable: if set, every KV cache lies beside its pool, as on a GPU."""
_PLAIN_START = forks.start
_warm: list[forks.Forks] = []


class Forked:
    """A forked server with the part of the `subprocess.Popen` interface that tests use."""

    def __init__(self, forked: forks.Forked) -> None:
        self._forked = forked
        self.pid = forked.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._forked.poll()

    def wait(self, timeout: float) -> int:
        return self._forked.wait(timeout)

    def send_signal(self, number: signal.Signals) -> None:
        self._forked.send_signal(number)

    def terminate(self) -> None:
        self._forked.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._forked.kill()


def fork(arguments: Sequence[str], environment: Mapping[str, str], log_fd: int) -> Forked:
    """Start `hadal ARGUMENTS` in a fork of the warm process; its output goes to `log_fd`."""
    forked = fork_module(__name__, [str(log_fd), *arguments], environment, (log_fd,))
    forked.stdout.close()
    return Forked(forked)


def fork_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int] = ()
) -> forks.Forked:
    """Start `python -m MODULE ARGUMENTS` in a fork of the warm process, with its output as `stdout`."""
    if not _warm:
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        modules = (__name__, *CHILDREN, "json")
        warm = forks.Forks({**forks.environment(), "PYTHONPATH": path}, modules)
        _warm.append(warm)
        atexit.register(warm.close)
    wait_until(lambda: not _warm[0].is_warming, "there is a warm process to fork from")
    forked = _warm[0].fork("hadal", [module, *arguments], environment, fds)
    assert forked is not None, "nothing to fork from"
    return forked


def main() -> int:
    """Run `hadal` with a fork server that is a fork of this process. Returns the exit code."""
    log_fd = int(sys.argv[1])
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    sys.argv[1:] = sys.argv[2:]
    forks.start = _start
    if PROCESSOR in os.environ:
        os.sched_setaffinity(0, {int(os.environ[PROCESSOR])})
    if RETRY in os.environ:
        backoff.PUT_OFF_S = fleet.BACKOFF_S = float(os.environ[RETRY])
    if STAGED in os.environ:  # A cache without a pool is unaffected.
        KvCache.__init__ = functools.partialmethod(  # type: ignore[assignment]
            KvCache.__init__, is_staged=True
        )
    if gate.VARIABLE in os.environ:  # Commands that do not serve have no gate.
        gate.install(os.environ[gate.VARIABLE])
    eager.install()
    try:
        cli.app()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


class _Process:
    """The fork server, with the part of `subprocess.Popen` that `Forks` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def _start(
    fd: int, environment: Mapping[str, str], modules: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Replace `forks.start` without a new interpreter. Only the first call forks: later the server
    has threads, so it uses the plain start.
    """
    forks.start = _PLAIN_START
    pid = os.fork()
    if pid:
        return _Process(pid)  # type: ignore[return-value]
    for other in map(int, os.listdir("/proc/self/fd")):
        if other > 2 and other != fd:
            try:
                os.close(other)
            except OSError:
                continue  # The descriptor of the listing itself.
    os.setsid()
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [forks.__name__, str(fd), *modules]
    os._exit(forks.main())
