"""The fork server: units, and gateways that start later, are forked from this process. It has
imported torch and all other modules that they need, and has started no thread.

An import of torch takes one or two seconds of a core; a fork of a process that has imported it
takes some milliseconds and shares its pages. The supervisor starts the fork server first, and then
requests processes from it over a socket. If it cannot fork (no Linux, a library that starts threads
when it is imported, the fork server killed), the supervisor starts processes the plain way
(`entry.py`).

    supervisor                     fork server              forked process
        |-- Job, its output, fds ------>|-- fork, fork ---------->|   twice, to make its parent the
        |                               |                         |   supervisor, a subreaper
        |<----------------------- its pid ------------------------|
        |------------------------- go --------------------------->|   becomes the module
        X                               |   the supervisor was killed: its folder and shared memory
                                        |   are removed

A forked process does nothing before `go`. If the supervisor has stopped waiting for it, it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import glob
import importlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Protocol

import msgspec

from hadal.runtime.process.entry import PR_SET_PDEATHSIG

UNIT_MODULES = ("hadal.runtime.rank.host", "hadal.runtime.unit")
MODULES = (*UNIT_MODULES, "hadal.gateway.process")
"""Modules that forked processes need, in the order in which they are imported."""
API_KEYS = "HADAL_API_KEYS"
"""Environment variable: API keys that the gateway accepts, separated by commas. If it is empty and
there is no API_KEYS_FILE, requests need no key.
"""
API_KEYS_FILE = "HADAL_API_KEYS_FILE"
"""Environment variable: a file with more API keys. The gateway process with the front watches it
for changes. Empty: there is none.
"""
_WARM_S = 300.0
"""Imports that take longer count as hung: torch from a cold network folder takes a minute."""
PATIENCE_S = 30.0
"""Longest wait for a fork. After a timeout all later processes are started the plain way."""
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_GO = b"g"
_READY = b"r"
_MAX_BYTES = 1 << 18
_MAX_FDS = 8
_MAX_PID_BYTES = 32
_ENTRY = str(Path(__file__).with_name("entry.py"))
_QUIET_S = 3.0
"""After this time without a job, the fork server imports its last module: no fork is urgent."""

log = logging.getLogger(__name__)


class Left(msgspec.Struct, tag=True):
    """Files (by patterns) and then folders to remove if the supervisor is killed."""

    patterns: list[str]
    folders: list[str]


class Job(msgspec.Struct, tag=True):
    """Description of a process to fork. Descriptors travel with it: the process's output, its
    socket to the supervisor, and descriptors that the process gets under the numbers `fds`.
    """

    name: str
    arguments: list[str]
    environment: dict[str, str]
    fds: list[int]


def environment() -> dict[str, str]:
    """Return the environment of the fork server and all processes, without gateways' API keys."""
    source = str(Path(__file__).resolve().parents[3])
    inherited = {
        name: value for name, value in os.environ.items() if name not in (API_KEYS, API_KEYS_FILE)
    }
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", "")))),
        "PYTHONUNBUFFERED": "1",
        # Units share the cores: a thread that spins while it has no work slows the other units.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Decision code multiplies no large matrices, and a process with threads cannot be forked.
        "OPENBLAS_NUM_THREADS": "1",
    }


def _is_readable(fd: int, timeout_s: float) -> bool:
    """Return whether `fd` is readable in `timeout_s`. Unlike select(2), poll(2) takes any fd."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000.0 * max(0.0, timeout_s)))


class Output(Protocol):
    """Output of a process: a context manager that yields its lines and closes it at the end."""

    def __enter__(self) -> Iterable[bytes]: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Started(Protocol):
    """A started process on any host: the part of `subprocess.Popen` that its supervisor uses."""

    @property
    def pid(self) -> int:
        """Process id on its host."""

    @property
    def stdout(self) -> Output | None:
        """Output of the process; None only if its output was not requested."""

    def poll(self) -> int | None:
        """Return the exit code (-N: killed by signal N), None while the process runs."""

    def wait(self, timeout: float) -> int:
        """Wait for its end and return the exit code. Raises subprocess.TimeoutExpired."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""


class Forked:
    """A forked process, with the part of `subprocess.Popen` that a Child uses."""

    def __init__(self, pid: int, output_fd: int) -> None:
        self.pid = pid
        self.stdout = os.fdopen(output_fd, "rb")
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (-N: killed by signal N), None while the process runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self._code

    def wait(self, timeout: float) -> int:
        """Wait for its end and return the exit code. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            _is_readable(self._pidfd, timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    fd: int, environment: Mapping[str, str], modules: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a fork server that receives its jobs from descriptor `fd`."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(fd), *modules],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(fd,),
        env=dict(environment),
    )


class Forks:
    """Supervisor's side of the fork server. Only `fork` waits for an answer, for a bounded time."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        """Start the fork server without waiting for it. `modules`: the modules that it imports
        before it forks. It imports the last one only after _QUIET_S without a job.
        """
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._warm_by_s = time.monotonic() + _WARM_S
        if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
            return
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = start(theirs.fileno(), environment, modules)
            self._socket = ours
        except OSError as error:
            log.warning("processes are started without a fork server: %s", error)

    def clear_after(self, left: Left) -> None:
        """Register files and folders that the fork server removes if this process is killed."""
        if self._socket is not None:
            try:
                self._socket.send(msgspec.json.encode(left))
            except OSError:  # The fork server has ended already.
                self.close()

    @property
    def is_warming(self) -> bool:
        """True if the fork server is expected to fork, but is not ready yet."""
        if self._socket is None or self._is_ready:
            return False
        if _is_readable(self._socket.fileno(), 0.0):
            said = b""
            with contextlib.suppress(OSError):  # It ended with unread messages in its queue.
                said = self._socket.recv(1)
            self._is_ready = said == _READY
            if not self._is_ready:
                self.close()
        elif time.monotonic() > self._warm_by_s:
            log.warning(
                "processes are started without the fork server: it did not become ready in time"
            )
            self.close()
        return self._socket is not None and not self._is_ready

    @property
    def pid(self) -> int:
        """Process id of the fork server, also after its end; 0 if none was started."""
        return self._process.pid if self._process else 0

    def fork(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
    ) -> Forked | None:
        """Fork a process and return it; None if it has to be started the plain way."""
        if self._socket is None or not self._is_ready:
            return None
        job = Job(name, list(arguments), dict(environment), list(fds))
        line, its_line = socket.socketpair()
        output, its_output = os.pipe()
        with line:
            try:
                with its_line:
                    passed = [its_output, its_line.fileno(), *fds]
                    self._socket.settimeout(PATIENCE_S)
                    socket.send_fds(self._socket, [msgspec.json.encode(job)], passed)
                line.settimeout(PATIENCE_S)
                forked = Forked(int(line.recv(_MAX_PID_BYTES)), output)
                line.sendall(_GO)
                return forked
            except (OSError, ValueError) as error:
                log.warning("processes are started without the fork server: %s", error)
                os.close(output)
                self.close()
                return None
            finally:
                os.close(its_output)

    def close(self) -> None:
        """Kill the fork server, so that it forks no more and removes nothing. Idempotent."""
        if self._socket is None or self._process is None:
            return
        self._process.kill()  # Before the socket closes, or it would remove the run's files.
        self._process.wait()
        self._socket.close()
        self._socket = None


def start_here(
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    pass_fds: tuple[int, ...] = (),
    forks: Forks | None = None,
) -> Started:
    """Start a module with its arguments as a process of this host, in a session of its own, so that
    Ctrl-C reaches its supervisor alone. `forks`: the fork server to use if it is ready.
    """
    forked = forks.fork(name, arguments, environment, pass_fds) if forks else None
    return forked or subprocess.Popen(
        [sys.executable, "-P", _ENTRY, str(os.getpid()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=pass_fds,
        env=environment,
    )


def reap_others(own: Collection[int]) -> None:
    """Reap ended processes that a child left to this one, their subreaper. Stop at an ended process
    of `own`: its exit code is read elsewhere.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def main() -> int:
    """Import the modules, and fork processes until the supervisor ends. Return the exit code."""
    supervisor_pid = os.getppid()
    line = socket.socket(fileno=int(sys.argv[1]))
    left = Left([], [])
    waiting = sys.argv[2:]
    gc.disable()  # Imports leave no garbage, and collecting takes 0.3 s of torch's 1.6 s.
    for module in waiting[:-1]:
        importlib.import_module(module)
    gc.freeze()  # Forked processes share the pages of all objects made so far.
    gc.enable()
    if len(os.listdir("/proc/self/task")) > 1:
        return 1  # A lock held by another thread would stay locked for ever in a forked process.
    with contextlib.suppress(BrokenPipeError):  # The supervisor is gone; recv_fds reports that.
        line.send(_READY)
    del waiting[:-1]
    while True:
        if waiting and not _is_readable(line.fileno(), _QUIET_S):
            importlib.import_module(waiting.pop())  # No fork is urgent: prepare gateway restarts.
            continue
        try:
            data, fds, _, _ = socket.recv_fds(line, _MAX_BYTES, _MAX_FDS)
        except ConnectionResetError:  # The supervisor ended before it read _READY.
            data, fds = b"", []
        if not data:
            _clear(left)
            return 0
        job: Job | Left = msgspec.json.decode(data, type=Job | Left)
        if isinstance(job, Left):
            left = job
            continue
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            os.waitpid(pid, 0)
            continue
        if os.fork():
            os._exit(0)
        line.close()
        _become(job, fds, supervisor_pid)


def _become(job: Job, fds: list[int], supervisor_pid: int) -> NoReturn:
    """Run the job's module in a session of its own, and end with its exit code."""
    output, its_line = fds[0], socket.socket(fileno=fds[1])
    until_s = time.monotonic() + PATIENCE_S
    while os.getppid() != supervisor_pid and time.monotonic() < until_s:
        time.sleep(0.0005)  # The intermediate process of the two forks has not ended yet.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor_pid:
        os._exit(1)
    os.setsid()
    libc.prctl(_PR_SET_NAME, job.name.encode(), 0, 0, 0)
    its_line.sendall(str(os.getpid()).encode())
    if its_line.recv(1) != _GO:
        os._exit(1)
    its_line.close()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    above = max(job.fds, default=0) + 1  # No copy may take a number that a job's descriptor needs.
    taken = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds[2:]]
    for fd in fds[2:]:
        os.close(fd)
    for fd, number in zip(taken, job.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.argv = list(job.arguments)
    code = int(importlib.import_module(job.arguments[0]).main())
    # The interpreter's shutdown frees objects one by one, the kernel frees them together: 0.25 s of
    # a core in a process that has torch. The module has closed all of Hadal's own objects.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _clear(left: Left) -> None:
    """Remove the files and folders of a killed supervisor. Its processes die with it."""
    for pattern in left.patterns:
        for name in glob.glob(pattern):
            Path(name).unlink(missing_ok=True)
    for folder in left.folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
