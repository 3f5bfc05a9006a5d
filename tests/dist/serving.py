"""`hadal serve` as its users start it: a tree of processes, looked at from outside, and gone
without a trace.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadal.runtime.process.child import Status, read_status
from hadal.runtime.resolve import model_folder
from hadal.runtime.transfer.pool import PREFIX, SHM_FOLDER
from tests.dist.served import Forked, fork

SOURCE = Path(__file__).resolve().parents[2] / "src"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
STOPPED_S = 0.1
"""What a process said before it was stopped has been read after this time."""

SMALL: dict[str, Any] = {
    "prefill": {"threads": 1, "kv_memory_mb": 64},
    "decode": {"threads": 1, "kv_memory_mb": 64},
}
"""What every server of the tests has unless a test says otherwise."""
RANKED: dict[str, Any] = {
    "prefill": {"ranks": 2, "threads": 1, "kv_memory_mb": 32},
    "decode": {
        "ranks": 4,
        "threads": 1,
        "kv_memory_mb": 32,
        "max_requests": 8,
        "redundant_experts": 32,
    },
}
"""Units of many ranks."""


FORMED = re.compile(
    r"^\S+ (\S+) .*formation (\d+) done in (\d+\.\d+) s with ranks (\d+(?:, \d+)*)", re.M
)
"""unit, formation, seconds, ranks, in a server's log"""
_NOTICED = re.compile(r"^(\S+) (\S+)\.(\d+) .*noticed that rank (\d+) is gone", re.M)


@dataclass(frozen=True)
class Noticed:
    """A line of the log: a rank noticed that another of its unit is gone."""

    at_s: float
    """Unix time."""
    unit: str
    rank: int
    gone: int


def noticed_in(log: str) -> list[Noticed]:
    return [
        Noticed(datetime.fromisoformat(time).timestamp(), unit, int(rank), int(gone))
        for time, unit, rank, gone in _NOTICED.findall(log)
    ]


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return the first true value of `condition`. Fails the test after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            pytest.fail(f"after {timeout_s:.0f} s still not: {what}")
        time.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Server:
    """One running `hadal serve`."""

    process: subprocess.Popen[bytes] | Forked
    folder: Path
    log_path: Path
    seen_pids: set[int] = field(default_factory=set)

    def status(self) -> Status:
        """What its supervisor says of it now."""
        status = read_status(self.folder)
        assert status is not None
        self.seen_pids |= {p.pid for p in status.processes.values() if p.pid}
        return status

    @property
    def url(self) -> str:
        """Without /v1."""
        return self.status().url

    @property
    def model(self) -> str:
        """Name of the model in the API."""
        return str(httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"][0]["id"])

    def pids(self) -> dict[str, int]:
        """Of "gateway", "prefill-0", "decode-0" ...; 0 while it does not run."""
        return {name: process.pid for name, process in self.status().processes.items()}

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to one of its processes; returns the pid it had."""
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until /health says that requests can be answered."""
        wait_until(self._healthy, timeout_s, "the server is ready")

    def wait_restarted(self, name: str, old_pid: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the process runs again under another pid, and the server is ready."""

        def restarted() -> bool:
            process = self.status().processes[name]
            return process.phase == "ready" and process.pid not in (0, old_pid)

        wait_until(restarted, timeout_s, f"{name} runs again")
        self.wait_ready(timeout_s)

    def shared_pools(self) -> list[str]:
        """Names of its KV pools in shared memory."""
        return [
            name
            for name in os.listdir(SHM_FOLDER)
            if name.startswith(f"{PREFIX}{self.status().run_id}.")
        ]

    def log(self) -> str:
        """What it and its processes have printed."""
        return self.log_path.read_text(errors="replace")

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, then wait for the end; returns the exit code."""
        self.status()
        self.process.terminate()
        return self.process.wait(timeout_s)

    def _healthy(self) -> bool:
        assert self.process.poll() is None, (
            f"hadal serve ended with {self.process.returncode}:\n{self.log()}"
        )
        status = read_status(self.folder)
        if status is None:
            return False
        try:
            return httpx.get(f"{status.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def blocks_used(server: Server) -> int:
    """By the audit of every ledger, which must add up."""
    reply = httpx.get(f"{server.url}/audit", timeout=30)
    assert reply.status_code == 200, reply.text
    return sum(unit["num_blocks_used"] for unit in reply.json()["units"].values())


def metric(server: Server, name: str, label: str = "") -> float:
    """The sum of a metric over its labels, or of those series that have this one."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    values = [
        float(line.rpartition(" ")[2])
        for line in lines
        if re.split("[{ ]", line)[0] == name and label in line
    ]
    assert values, f"there is no metric {name}"
    return sum(values)


async def kill_at_work(server: Server, unit: str, num_tokens: int = 20) -> None:
    """Kill a unit that has requests, once so many tokens have flowed. It is stopped first, so that
    what it has is not done by the time it is known.
    """
    state = "prefilling" if unit.startswith("prefill") else "decoding"
    before = metric(server, "hadal_output_tokens_total")
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while metric(server, "hadal_output_tokens_total") < before + num_tokens:
        assert time.monotonic() < deadline_s, "no tokens came"
        await asyncio.sleep(0.005)
    while True:
        server.kill(unit, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        if metric(server, "hadal_generations_now", f'state="{state}"'):
            server.kill(unit)
            return
        server.kill(unit, signal.SIGCONT)
        assert time.monotonic() < deadline_s, f"nothing was in flight at {unit}"
        await asyncio.sleep(0.005)


def to_toml(fields: dict[str, Any]) -> str:
    """Top-level values first, then one table per nested dict."""
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
    """Start `hadal serve` in `folder` with fields of the deployment overridden; does not wait for
    it. `is_plain`: as a user's shell does, not forked from a warm process; so is one that finds its
    code elsewhere.
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
    command = ["serve", "--config", str(config), "--run-folder", str(run_folder), *arguments]
    elsewhere = "PYTHONPATH" in environment
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
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
    return Server(process, run_folder, log_path)


_LOG_SHOWN = 8000


def finish(server: Server) -> None:
    """Stop the server if it runs, and see that no process and no pool outlive it. The end of its log is
    shown where the test failed.
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
            server.process.wait(STOP_TIMEOUT_S)
            pytest.fail(f"hadal serve did not end:\n{server.log()}")
    wait_until(
        lambda: not any(is_alive(pid) for pid in pids), 5.0, "all processes of the server are gone"
    )
    if status is not None:
        mark = f"{PREFIX}{status.run_id}."
        # Of one that was killed the fork server clears up, once it hears of that.
        wait_until(
            lambda: not any(name.startswith(mark) for name in os.listdir(SHM_FOLDER)),
            5.0,
            "no pools are left in shared memory",
        )


StartServer = Callable[..., Server]
