"""`hadal status` and `hadal logs` of a live server: who runs where, what was started again and why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.dist.served import fork
from tests.dist.serving import Server, StartServer
from tests.waiting import DEADLINE_S


def hadal(*arguments: str) -> tuple[int, str]:
    """Exit code of a command, and what it printed."""
    with tempfile.TemporaryFile() as said:
        code = fork(arguments, {**os.environ, "COLUMNS": "200"}, said.fileno()).wait(DEADLINE_S)
        said.seek(0)
        return code, said.read().decode()


@pytest.mark.more("what `hadal status` says of a process that runs is in tests/unit/commands")
@pytest.mark.slow("a rank starts anew, and the unit forms with it")
def test_a_killed_rank_is_told_of(mortal: StartServer) -> None:
    server = mortal(decode={"ranks": 2, "redundant_experts": 16})
    folder = "--run-folder", str(server.folder)
    code, whole = hadal("status", "--json", *folder)
    assert code == 0, whole
    found = json.loads(whole)
    assert found["wrong"] == []
    assert found["versions"]["hadal"]
    assert found["processes"]["decode-0.1"]["node"] == 0
    assert "secret" not in whole
    old_pid = server.kill("decode-0.1", signal.SIGKILL)
    server.wait_restarted("decode-0.1", old_pid)
    code, after = hadal("status", *folder)
    assert code == 0, after
    assert "3 of 3" in after
    assert "killed by SIGKILL" in " ".join(after.split())
    of_unit = hadal("logs", "decode-0", *folder)[1].splitlines()
    assert {line.split()[1] for line in of_unit} == {"decode-0", "decode-0.0", "decode-0.1"}
    assert of_unit == sorted(of_unit)
    _, supervisors = hadal("logs", "supervisor", *folder)
    assert "decode-0.1 ended: killed by SIGKILL" in supervisors
    assert len(hadal("logs", "-n", "3", *folder)[1].splitlines()) == 3


@pytest.mark.more("it ends its server")
def test_a_log_is_followed_until_the_server_ends(start_server: StartServer) -> None:
    server = start_server()
    command = [sys.executable, "-m", "hadal.cli", "logs", "-f", "-n", "1"]
    command += ["--run-folder", str(server.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline(), "it follows from here on"
        old_pid = server.kill("prefill-0", signal.SIGKILL)
        server.wait_restarted("prefill-0", old_pid)
        server.process.terminate()
        written, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0
    assert "prefill-0 ended: killed by SIGKILL" in written


def test_what_is_not_there_is_said(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = str(tmp_path_factory.mktemp("empty"))
    for command in ("status", "logs"):
        code, refused = hadal(command, "--run-folder", empty)
        assert code == 2
        assert "no `hadal serve` runs there" in refused
    code, unknown = hadal("logs", "decode-7", "--run-folder", str(server.folder))
    assert code == 2
    assert "decode-0" in unknown
