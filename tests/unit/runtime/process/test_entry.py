"""A child ends with the process that started it, also while it still imports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hadal.runtime.process import entry

STARTS = """
import os, sys, time
from hadal.runtime.process.child import Child
from hadal.runtime.process.forks import start_here
child = Child("decode-0", "decode", ["slow_to_import"], None)
environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
child.start(0.0, lambda arguments, life: start_here(child.name, arguments, environment))
time.sleep(60)
"""
SLOW = """
import os, pathlib, time
pathlib.Path("pid").write_text(str(os.getpid()))
time.sleep(60)
"""


def is_there(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


def test_a_child_that_still_imports_ends_with_its_killed_supervisor(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    supervisor = subprocess.Popen(
        [sys.executable, "-c", STARTS], env={"PYTHONPATH": path}, cwd=tmp_path
    )
    pid_file = tmp_path / "pid"
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text(), "the child imports")
        pid = int(pid_file.read_text())
        assert is_there(pid)
    finally:
        supervisor.kill()
        supervisor.wait(10)
    wait_for(lambda: not is_there(pid), "the child is gone", timeout_s=2.0)


def test_one_whose_parent_is_gone_already_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text("print('it ran')")
    command = [sys.executable, "-P", entry.__file__, "1", "noisy"]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert "which started this one, is gone" in done.stderr


def test_a_module_is_run_as_if_it_were_named_to_python(tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(
        "import sys; print(__name__, sys.argv[1:], sys.modules['__main__'].__file__)"
    )
    command = [
        sys.executable,
        "-P",
        entry.__file__,
        str(os.getpid()),
        "tells",
        "--unit",
        "decode-0",
    ]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == f"__main__ ['--unit', 'decode-0'] {tmp_path / 'tells.py'}"
