"""Test that a child ends with the process that started it, even while it still imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hadal.runtime.process import entry
from tests.processes import is_alive
from tests.waiting import DEADLINE_S, wait_until

STARTS = """
import os, sys, time
from hadal.runtime.process.child import Child
from hadal.runtime.process.relay import OutputRelay
from hadal.runtime.process.forks import start_here
child = Child("decode-0", "decode", ["slow_to_import"], OutputRelay("decode-0", None))
environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
child.start(0.0, lambda arguments, life: start_here(child.name, arguments, environment))
time.sleep(600)
"""
SLOW = """
import os, pathlib, time
pathlib.Path("pid").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.promise(
    "Any child ends with the supervisor, even before the child has imported anything"
)
def test_a_child_that_still_imports_ends_with_its_killed_supervisor(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    supervisor = subprocess.Popen(
        [sys.executable, "-c", STARTS], env={"PYTHONPATH": path}, cwd=tmp_path
    )
    pid_file = tmp_path / "pid"
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the child imports")
        pid = int(pid_file.read_text())
        assert is_alive(pid)
    finally:
        supervisor.kill()
        supervisor.wait(DEADLINE_S)
    wait_until(lambda: not is_alive(pid), "the child is gone")


def test_one_whose_parent_is_gone_already_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text("print('it ran')")
    command = [sys.executable, "-P", entry.__file__, "1", "noisy"]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
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
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout.strip() == f"__main__ ['--unit', 'decode-0'] {tmp_path / 'tells.py'}"
