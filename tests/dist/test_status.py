"""`hadal status` and `hadal logs` of a live server: hosts of processes, restarts and their reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hadal.cli import app
from tests.dist.conftest import Server, StartServer
from tests.waiting import DEADLINE_S

RANKS = {"ranks": 2, "redundant_experts": 16}


def hadal(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.mark.promise(
    "prints the last lines of a unit's processes in order, whether or not the server answers"
)
@pytest.mark.promise(
    "show this host's units and processes, restarts with their causes, and current "
    "problems; print the processes' last log lines"
)
@pytest.mark.more("a server is asked in `make test`, too")
def test_a_killed_rank_is_told_of(mortal: StartServer) -> None:
    server = mortal(decode=RANKS)
    folder = "--run-folder", str(server.folder)
    whole = hadal("status", "--json", *folder)
    assert whole.exit_code == 0, whole.stderr
    found = json.loads(whole.stdout)
    assert found["wrong"] == []
    assert found["versions"]["hadal"]
    assert found["processes"]["decode-0.1"]["node"] == 0
    assert "secret" not in whole.stdout
    old_pid = server.kill("decode-0.1")
    server.wait_restarted("decode-0.1", old_pid)
    after = hadal("status", *folder)
    assert after.exit_code == 0, after.stdout
    assert "3 of 3" in after.stdout
    assert "killed by SIGKILL" in " ".join(after.stdout.split())
    of_unit = hadal("logs", "decode-0", *folder).stdout.splitlines()
    assert {line.split()[1] for line in of_unit} == {"decode-0", "decode-0.0", "decode-0.1"}
    assert of_unit == sorted(of_unit)
    supervisors = hadal("logs", "supervisor", *folder).stdout
    assert "decode-0.1 ended: killed by SIGKILL" in supervisors
    assert len(hadal("logs", "-n", "3", *folder).stdout.splitlines()) == 3


@pytest.mark.promise(
    "prints the last lines of a unit's processes in order, whether or not the server answers"
)
@pytest.mark.more("it starts a server that ends")
def test_a_log_is_followed_until_the_server_ends(ending: StartServer) -> None:
    server = ending(decode=RANKS)
    command = [sys.executable, "-m", "hadal.cli", "logs", "-f", "-n", "1"]
    command += ["--run-folder", str(server.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stdout.readline(), "it follows from here on"
        old_pid = server.kill("prefill-0")
        server.wait_restarted("prefill-0", old_pid)
        server.process.terminate()
        written, _ = following.communicate(timeout=DEADLINE_S)
    assert following.returncode == 0
    assert "prefill-0 ended: killed by SIGKILL" in written


def test_a_server_and_what_is_not_there(server: Server, tmp_path: Path) -> None:
    folder = "--run-folder", str(server.folder)
    found = json.loads(hadal("status", "--json", *folder).stdout)
    assert (found["wrong"], set(found["processes"])) == ([], set(server.pids()))
    assert "decode-0 is ready" in hadal("logs", "supervisor", *folder).stdout
    for command in ("status", "logs"):
        refused = hadal(command, "--run-folder", str(tmp_path))
        assert refused.exit_code == 2
        assert "no `hadal serve` runs there" in refused.stderr
    unknown = hadal("logs", "decode-7", *folder)
    assert unknown.exit_code == 2
    assert "decode-0" in unknown.stderr
