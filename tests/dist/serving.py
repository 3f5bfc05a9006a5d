"""`hadal serve` for tests: a tree of processes that is observed from outside and must leave no process
and no shared memory behind.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadal.runtime.process.status import Status, read_status
from hadal.runtime.resolve import model_folder
from hadal.runtime.transfer.pool import PREFIX, SHM_FOLDER
from tests.dist import gate
from tests.dist.gate import Gate
from tests.dist.served import Forked, fork
from tests.processes import is_alive
from tests.suite import events
from tests.waiting import DEADLINE_S, PATIENCE_S, wait_for, wait_until

SOURCE = Path(__file__).resolve().parents[2] / "src"

SMALL: dict[str, Any] = {
    "prefill": {"threads": 1, "kv_memory_mb": 64},
    "decode": {"threads": 1, "kv_memory_mb": 64},
}
"""Deployment fields of every test server unless the test sets others."""
RANKED: dict[str, Any] = {
    "collective_timeout_s": PATIENCE_S,
    "prefill": {"ranks": 2, "threads": 1, "kv_memory_mb": 32},
    "decode": {
        "ranks": 4,
        "threads": 1,
        "kv_memory_mb": 32,
        "max_requests": 8,
        "redundant_experts": 32,
    },
}
"""Fields for units of several ranks. The collective timeout is long, so that a held or slow step does not fail."""


FORMED = re.compile(
    r"^\S+ (\S+) .*formation (\d+) done in (\d+\.\d+) s with ranks (\d+(?:, \d+)*)", re.M
)
"""Matches unit, formation number, seconds and ranks in a log line about a formed unit."""
_NOTICED = re.compile(r"^\S+ (\S+)\.(\d+) .*rank (\d+) is lost", re.M)


def noticed_in(log: str) -> set[tuple[str, int, int]]:
    """Return (unit, rank, lost rank) for every rank that noticed the loss of another rank of its unit."""
    return {(unit, int(rank), int(gone)) for unit, rank, gone in _NOTICED.findall(log)}


@dataclass
class Server:
    """One running `hadal serve`."""

    process: subprocess.Popen[bytes] | Forked
    folder: Path
    log_path: Path
    gate: Gate
    """Gate for the steps of the units; without effect in a server that was not forked."""
    seen_pids: set[int] = field(default_factory=set)

    def status(self) -> Status:
        """Return the supervisor's current status."""
        status = read_status(self.folder)
        assert status is not None
        self.seen_pids |= {p.pid for p in status.processes.values() if p.pid}
        return status

    @property
    def url(self) -> str:
        """Base URL without /v1."""
        return self.status().url

    @property
    def model(self) -> str:
        """Name of the model in the API."""
        return str(httpx.get(f"{self.url}/v1/models", timeout=DEADLINE_S).json()["data"][0]["id"])

    def pids(self) -> dict[str, int]:
        """Return process name ("gateway", "prefill-0", "decode-0" ...) -> pid; 0 if it does not run."""
        return {name: process.pid for name, process in self.status().processes.items()}

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the process with this name; return its pid."""
        pid = self.pids()[name]
        assert pid, f"{name} does not run"  # kill(0) would signal the test's own group.
        os.kill(pid, number)
        return pid

    @staticmethod
    def headers(api_key: str) -> dict[str, str]:
        """Return headers of a request with this API key; {} if it is empty."""
        return {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def wait_ready(self) -> None:
        """Wait until /health reports that the server can answer requests."""
        wait_until(self.is_healthy, "the server is ready")

    def wait_restarted(self, name: str, old_pid: int) -> None:
        """Wait until the process runs again under another pid, and the server is ready."""

        def restarted() -> bool:
            process = self.status().processes[name]
            return process.phase == "ready" and process.pid not in (0, old_pid)

        wait_until(restarted, f"{name} runs again")
        self.wait_ready()

    def shared_pools(self) -> list[str]:
        """Return names of the server's KV pools in shared memory."""
        return [
            name
            for name in os.listdir(SHM_FOLDER)
            if name.startswith(f"{PREFIX}{self.status().run_id}.")
        ]

    def log(self) -> str:
        """Return the output of the server and its processes."""
        return self.log_path.read_text(errors="replace")

    def stop(self, timeout_s: float = DEADLINE_S) -> int:
        """Send SIGTERM and wait for the end; return the exit code."""
        self.gate.open()
        self.status()
        self.process.terminate()
        return self.process.wait(timeout_s)

    def is_healthy(self) -> bool:
        """Return whether /health is 200. Raises AssertionError if the server has ended."""
        assert self.process.poll() is None, (
            f"hadal serve ended with {self.process.returncode}:\n{self.log()}"
        )
        status = read_status(self.folder)
        if status is None:
            return False
        try:
            return httpx.get(f"{status.url}/health", timeout=60).status_code == 200
        except httpx.TransportError:
            return False


def blocks_used(server: Server) -> int:
    """Return the used blocks of all units, from an audit in which every ledger must add up."""
    reply = httpx.get(f"{server.url}/audit", timeout=DEADLINE_S)
    assert reply.status_code == 200, reply.text
    return sum(unit["num_blocks_used"] for unit in reply.json()["units"].values())


def metric(server: Server, name: str, label: str = "", *, key: str = "") -> float:
    """Return the sum of a metric over its series, or only over those with this label."""
    reply = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S, headers=Server.headers(key))
    lines = reply.text.splitlines()
    values = [
        float(line.rpartition(" ")[2])
        for line in lines
        if re.split("[{ ]", line)[0] == name and label in line
    ]
    assert values, f"there is no metric {name}"
    return sum(values)


async def kill_at_work(
    server: Server, unit: str, num_steps: int = 3, number: signal.Signals = signal.SIGKILL
) -> None:
    """Send a signal to a unit or rank while the gate limits its steps, so that it has requests."""
    is_prefill = unit.startswith("prefill")
    state = "prefilling" if is_prefill else "decoding"
    server.gate.hold(gate.PREFILL if is_prefill else gate.DECODE, num_steps)
    await wait_for(
        lambda: metric(server, "hadal_generations_now", f'state="{state}"'),
        f"{unit} has requests",
    )
    server.kill(unit, number)
    server.gate.open()


def to_toml(fields: dict[str, Any]) -> str:
    """Return TOML: first the top-level values, then one table per nested dict."""
    plain = [
        f"{name} = {_value(value)}" for name, value in fields.items() if not isinstance(value, dict)
    ]
    tables = [
        "\n".join([f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())])
        for name, table in fields.items()
        if isinstance(table, dict)
    ]
    return "\n".join([*plain, *tables]) + "\n"


def _value(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def launch(
    folder: Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    *,
    is_plain: bool = False,
    **overrides: Any,
) -> Server:
    """Start `hadal serve` in `folder` with overridden deployment fields; does not wait. `is_plain`:
    start a new interpreter, like a user's shell, instead of a fork. A server with code from another
    place is always plain.
    """
    fields: dict[str, Any] = {
        "port": 0,
        "model": str(model_folder("")),
        "console": {"mode": "off"},
        **overrides,
    }
    for kind in ("prefill", "decode"):
        fields[kind] = {**SMALL[kind], **overrides.get(kind, {})}
    config = folder / "deployment.toml"
    config.write_text(to_toml(fields))
    run_folder, log_path = folder / "run", folder / "server.log"
    its_gate = Gate(folder / "gate")
    events.num_servers += 1
    command = ["serve", "--config", str(config), "--run-folder", str(run_folder), *arguments]
    elsewhere = "PYTHONPATH" in environment
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        gate.VARIABLE: str(its_gate.path),
        **environment,
    }
    process: subprocess.Popen[bytes] | Forked
    with log_path.open("wb") as log:
        if is_plain or elsewhere:
            process = subprocess.Popen(
                [sys.executable, "-m", "hadal.cli", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        else:
            process = fork(command, environment, log.fileno())
    return Server(process, run_folder, log_path, its_gate)


_LOG_SHOWN = 8000


def finish(server: Server) -> None:
    """Stop the server if it runs, and check that no process and no pool outlives it. The end of its
    log is shown if the test failed.
    """
    print(server.log()[-_LOG_SHOWN:])
    status = read_status(server.folder)
    pids = server.seen_pids | (
        {p.pid for p in status.processes.values() if p.pid} if status else set()
    )
    if server.process.poll() is None:
        try:
            server.stop()
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait(DEADLINE_S)
            pytest.fail(f"hadal serve did not end:\n{server.log()}")
    wait_until(
        lambda: not any(is_alive(pid) for pid in pids), "all processes of the server are gone"
    )
    if status is not None:
        mark = f"{PREFIX}{status.run_id}."
        # The fork server of a killed server removes its pools once it has noticed the kill.
        wait_until(
            lambda: not any(name.startswith(mark) for name in os.listdir(SHM_FOLDER)),
            "no pools are left in shared memory",
        )


StartServer = Callable[..., Server]
