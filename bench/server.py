"""`hadal serve` for a benchmark: started as a user starts it, observed from outside, stopped at the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.subject import ROOT
from hadal.runtime.process.status import Status, read_status

STOP_TIMEOUT_S = 30.0
Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True)
class Running:
    """A server that was started; it may not be ready yet."""

    process: subprocess.Popen[bytes]
    run_folder: Path
    log: Path
    started_s: float
    """Value of time.monotonic() just before the server was started."""

    @property
    def status(self) -> Status:
        """Current status, as the server's supervisor wrote it. Raises RuntimeError if there is none."""
        status = read_status(self.run_folder)
        if status is None:
            raise RuntimeError(f"the server has no status; see {self.log}")
        return status

    @property
    def address(self) -> Address:
        """Host and port."""
        url = urllib.parse.urlsplit(self.status.url)
        return url.hostname or "127.0.0.1", url.port or 80

    def get(self, path: str) -> bytes:
        """GET a path. Raises OSError if no server listens, RuntimeError if the answer is not 200."""
        status, body = request(self.address, "GET", path)
        if status != 200:
            raise RuntimeError(f"GET {path} was answered with {status}: {body[:200]!r}")
        return body

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics by its full name, labels included."""
        return samples_of(self.get("/metrics").decode())

    def pids(self) -> dict[str, int]:
        """Return process name -> process id: supervisor, gateway, prefill-0, decode-0 ..."""
        status = self.status
        return {
            "supervisor": status.supervisor_pid,
            **{name: p.pid for name, p in status.processes.items()},
        }


def asked(
    address: Address, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields of an answer. Raises RuntimeError if the status is not 200."""
    status, answer = request(address, method, path, body)
    if status != 200:
        raise RuntimeError(f"{method} {path} was answered with {status}: {answer[:200]!r}")
    fields: dict[str, Any] = json.loads(answer)
    return fields


def samples_of(text: str) -> dict[str, float]:
    """Return every sample of /metrics by its full name, labels included."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def request(
    address: Address,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    key: str = "",
    timeout_s: float = 120.0,
) -> tuple[int, bytes]:
    """Send one HTTP request on a connection of its own; return (status, body). `key`: a tenant's
    key. Raises OSError.
    """
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


@contextlib.contextmanager
def launched(
    deployment: str = "",
    environment: Mapping[str, str] | None = None,
    module: str = "hadal.cli",
    checkout: Path = ROOT,
) -> Iterator[Running]:
    """Start `hadal serve` on a free port with this deployment (TOML); does not wait until it is ready.

    `module` replaces hadal.cli and must have the same command line. `checkout`: the checkout to run.
    """
    with tempfile.TemporaryDirectory(prefix="hadal-b-") as name:
        folder = Path(name)
        config = folder / "deployment.toml"
        # Pages are not measured; older checkouts do not have this table.
        is_ours = checkout == ROOT and "[console]" not in deployment
        pages = '\n[console]\nmode = "off"\n' if is_ours else ""
        config.write_text("port = 0\n" + deployment + pages, encoding="utf-8")
        log = folder / "server.log"
        arguments = ["serve", "--config", str(config), "--run-folder", str(folder / "r")]
        sources = str(checkout / "src"), str(checkout), os.environ.get("PYTHONPATH", "")
        python_path = os.pathsep.join(filter(None, sources))
        # The server writes a ledger as always, but not into the user's file.
        ledger = {"HADAL_LEDGER": str(folder / "ledger.sqlite")}
        env = {**os.environ, "PYTHONPATH": python_path, **ledger, **(environment or {})}
        started_s = time.monotonic()
        with log.open("wb") as out:
            own = checkout / ".venv" / "bin" / "python"
            python = sys.executable if checkout == ROOT or not own.exists() else str(own)
            command = [python, "-m", module, *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
            )
        running = Running(process, folder / "r", log, started_s)
        try:
            yield running
        finally:
            stop(process)


@contextlib.contextmanager
def serving(
    deployment: str = "", environment: Mapping[str, str] | None = None, checkout: Path = ROOT
) -> Iterator[Running]:
    """Start a server as `launched` does, and wait until it is ready."""
    with launched(deployment, environment, checkout=checkout) as running:
        wait_ready(running)
        yield running


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a server; kill it if it has not ended after STOP_TIMEOUT_S."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


def wait_for(
    condition: Callable[[], bool], running: Running, what: str, timeout_s: float = 180.0
) -> None:
    """Poll `condition` until true. Raises RuntimeError if the server ends or the time is over."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s and running.process.poll() is None:
        with contextlib.suppress(OSError, RuntimeError):  # Not listening yet, or no status yet.
            if condition():
                return
        time.sleep(0.01)
    raise RuntimeError(f"{what} not seen:\n{running.log.read_text(errors='replace')[-2000:]}")


def wait_ready(running: Running, timeout_s: float = 120.0) -> None:
    """Wait until /health reports that requests can be answered. Raises RuntimeError with the end of
    the log if that fails.
    """
    wait_for(lambda: bool(running.get("/health")), running, "a ready server was", timeout_s)
