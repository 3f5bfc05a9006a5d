"""`hadal status` and `hadal logs` of a live server: who runs where, what was started again and why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.dist.conftest import Server, StartServer, starting


def hadal(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hadal.cli", *arguments]
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=wide
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with starting() as start:
        yield start(decode={"ranks": 2, "redundant_experts": 16})


def test_a_killed_rank_is_told_of(server: Server) -> None:
    folder = "--run-folder", str(server.folder)
    whole = hadal("status", "--json", *folder)
    assert whole.returncode == 0, whole.stderr
    found = json.loads(whole.stdout)
    assert found["wrong"] == []
    assert found["versions"]["hadal"]
    assert found["processes"]["decode-0.1"]["node"] == 0
    assert "secret" not in whole.stdout
    old_pid = server.kill("decode-0.1", signal.SIGKILL)
    server.wait_restarted("decode-0.1", old_pid)
    after = hadal("status", *folder)
    assert after.returncode == 0, after.stdout
    assert "3 of 3" in after.stdout
    assert "killed by SIGKILL" in " ".join(after.stdout.split())
    of_unit = hadal("logs", "decode-0", *folder).stdout.splitlines()
    assert {line.split()[1] for line in of_unit} == {"decode-0", "decode-0.0", "decode-0.1"}
    assert of_unit == sorted(of_unit)
    supervisors = hadal("logs", "supervisor", *folder).stdout
    assert "decode-0.1 ended: killed by SIGKILL" in supervisors
    assert len(hadal("logs", "-n", "3", *folder).stdout.splitlines()) == 3


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
        written, _ = following.communicate(timeout=60)
    assert following.returncode == 0
    assert "prefill-0 ended: killed by SIGKILL" in written


def test_what_is_not_there_is_said(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = str(tmp_path_factory.mktemp("empty"))
    for command in ("status", "logs"):
        refused = hadal(command, "--run-folder", empty)
        assert refused.returncode == 2
        assert "no `hadal serve` runs there" in refused.stderr
    unknown = hadal("logs", "decode-7", "--run-folder", str(server.folder))
    assert unknown.returncode == 2
    assert "decode-0" in unknown.stderr
