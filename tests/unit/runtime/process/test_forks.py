"""Test processes forked from a warm fork server: what they inherit, and when and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hadal.runtime.process.forks import Forked, Forks, Left, reap_others
from tests.processes import is_alive
from tests.waiting import DEADLINE_S, wait_until

MODULES = ("json", "jobcode")
"""Modules: imported before the first fork, and imported when no fork is pending."""

CODE = """
import os, sys, time
def main():
    print(sys.argv[1:], os.environ.get("MARK"), os.environ.get("OTHER"), os.getpid() == os.getsid(0))
    if "read" in sys.argv:
        os.write(1, os.read(int(sys.argv[-1]), 9))
    if "sleep" in sys.argv:
        time.sleep(600)
    return 7
"""


def wait(forks: Forks) -> None:
    wait_until(lambda: not forks.is_warming, "it is warm")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the fork server's environment: it finds our module, and importing starts no thread."""
    (tmp_path / "jobcode.py").write_text(CODE)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OTHER": "left out"}


@pytest.fixture
def forks(environment: dict[str, str]) -> Iterator[Forks]:
    made = Forks(environment, MODULES)
    wait(made)
    yield made
    made.close()


def forked(forks: Forks, *arguments: str, fds: tuple[int, ...] = ()) -> Forked:
    found = forks.fork("decode-0", ["jobcode", *arguments], {"MARK": "its own"}, fds)
    assert found is not None
    return found


def test_it_is_the_module_with_its_own_arguments_and_environment(forks: Forks) -> None:
    process = forked(forks, "--unit", "x")
    with process.stdout:
        assert process.stdout.read() == b"['--unit', 'x'] its own None True\n"
    assert process.wait(DEADLINE_S) == 7
    assert process.poll() == 7


def test_it_finds_descriptors_under_their_numbers(forks: Forks) -> None:
    """Numbers may be taken or free in the process that it is forked from."""
    reader, writer = os.pipe()
    for number in range(3, 40):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(reader, number)
        else:
            continue
        process = forked(forks, "read", str(number), fds=(number,))
        os.write(writer, b"a message")
        os.close(number)
        with process.stdout:
            assert process.stdout.read().endswith(b"a message")
        assert process.wait(DEADLINE_S) == 7
    os.close(reader)
    os.close(writer)


def test_it_is_this_processes_child_and_ends_by_signals(forks: Forks) -> None:
    process = forked(forks, "sleep")
    with process.stdout:
        assert process.stdout.readline()
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert f"\nPPid:\t{os.getpid()}\n" in status
    assert "Name:\tdecode-0\n" in status
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == -signal.SIGTERM
    process.kill()  # A process that is gone is not signalled.


def test_without_its_server_processes_start_the_plain_way(forks: Forks) -> None:
    first = forked(forks, "sleep")
    assert forks._process is not None
    forks._process.kill()
    forks._process.wait()
    assert forks.fork("decode-0", ["jobcode"], {}) is None
    assert forks.fork("decode-0", ["jobcode"], {}) is None
    assert first.poll() is None, "what it forked lives on"
    first.stdout.close()
    first.kill()
    assert first.wait(DEADLINE_S) == -signal.SIGKILL


def test_processes_that_nobody_else_reaps_leave_no_zombie(forks: Forks) -> None:
    """The supervisor becomes the parent of its children's orphans."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid)"
    left = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    process = forked(forks, "sleep")
    process.stdout.close()
    os.kill(left, signal.SIGKILL)
    process.kill()

    def no_zombie() -> bool:
        reap_others((process.pid,))
        process.poll()
        return not Path(f"/proc/{left}").exists()

    wait_until(no_zombie, "what was left is reaped")
    assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_library_that_starts_threads_is_not_forked(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    forks = Forks(environment, MODULES)
    forks.clear_after(Left([], []))  # The server ends without reading this.
    wait(forks)
    assert forks.fork("decode-0", ["jobcode"], {}) is None
    forks.clear_after(Left([], []))
    forks.close()


def test_one_that_never_gets_ready_is_not_waited_for(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadal.runtime.process.forks._WARM_S", 0.3)
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)\n")
    forks = Forks(environment, MODULES)
    assert forks.is_warming
    wait(forks)
    assert forks.fork("decode-0", ["jobcode"], {}) is None
    forks.close()


def test_one_that_is_closed_clears_nothing(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed before its socket closes: a closed socket makes it clear the folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    forks = Forks(environment, MODULES)
    wait(forks)
    forks.clear_after(Left([], [str(folder)]))
    process, line = forks._process, forks._socket
    assert process is not None
    assert line is not None
    kill, are_open = process.kill, []

    def noted() -> None:
        are_open.append(line.fileno() >= 0)
        kill()

    monkeypatch.setattr(process, "kill", noted)
    forks.close()
    assert are_open == [True]
    assert process.poll() is not None
    assert folder.is_dir()


@pytest.mark.promise("the fork server removes its run folder and shared memory at once")
def test_what_a_killed_supervisor_leaves_is_removed_and_its_processes_end(
    environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    segment = Path("/dev/shm/hadal-forks-test.decode-0.1")
    segment.touch()
    code = (
        "import os, time\n"
        "from hadal.runtime.process.forks import Forks, Left\n"
        "forks = Forks(dict(os.environ), ['json', 'jobcode'])\n"
        f"forks.clear_after(Left(['/dev/shm/hadal-forks-test.*'], [{str(folder)!r}]))\n"
        "while forks.is_warming: time.sleep(0.01)\n"
        "print(forks.fork('decode-0', ['jobcode', 'sleep'], {}).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
    )
    assert supervisor.stdout is not None
    with supervisor.stdout:
        pid = int(supervisor.stdout.readline())
    os.kill(pid, 0)
    supervisor.kill()
    supervisor.wait()
    wait_until(
        lambda: not (folder.exists() or segment.exists() or is_alive(pid)), "nothing is left"
    )
    reap_others(())  # The first of these tests made this process a subreaper.
