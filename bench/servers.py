"""Servers that bench.served compares: Hadal's and its peers', each on a free port of loopback."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.machine import cpu_seconds, tree_of
from bench.peers.installed import LLAMA_SERVER, VLLM_VENV, gguf_of, python_of
from bench.peers.vllm_engine import ENVIRONMENT
from bench.server import serving, stop
from bench.subject import ROOT

START_TIMEOUT_S = 600.0
MAX_STREAMS = 64


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    model: str
    """Model name for requests."""
    address: tuple[str, int]
    roots: dict[str, int]
    """Process name -> process id. A process's CPU time includes its descendants', except those named here."""

    def cpu_s(self) -> dict[str, float]:
        """Return process name -> CPU seconds used."""
        taken = {}
        for name, pid in self.roots.items():
            others = set(self.roots.values()) - {pid}
            taken[name] = cpu_seconds(tree_of(pid, others))
        return taken


@contextlib.contextmanager
def hadal_server(
    folder: Path, tables: str, checkout: Path = ROOT, name: str = "hadal"
) -> Iterator[Server]:
    """Run Hadal's server inside the block. `tables`: its deployment, without the model."""
    deployment = f'model = "{folder}"\nmodel_name = "{folder.name}"\n{tables}\n'
    with serving(deployment, checkout=checkout) as running:
        yield Server(name, folder.name, running.address, running.pids())


@contextlib.contextmanager
def llama_server(folder: Path, kind: str, threads: int) -> Iterator[Server]:
    """Run llama.cpp's server with MAX_STREAMS slots. `folder`: weights in FP32 or BF16."""
    port, slots = _free_port(), MAX_STREAMS
    command = [
        *(str(LLAMA_SERVER), "-m", str(gguf_of(folder, kind)), "--port", str(port)),
        *("-t", str(threads), "-np", str(slots), "-c", str(slots * 2048), "--no-webui"),
    ]
    with _served(f"llama-server {kind}", folder.name, port, command, {}) as server:
        yield server


@contextlib.contextmanager
def vllm_server(folder: Path, dtype: str, threads: int) -> Iterator[Server]:
    """Run vLLM's server, compiled. `folder`: weights in FP32 or BF16."""
    port = _free_port()
    command = [
        *(python_of(VLLM_VENV), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", folder.name, "--dtype", dtype, "--port", str(port)),
        *("--host", "127.0.0.1", "--max-model-len", "2048", "--max-num-seqs", str(MAX_STREAMS)),
        *("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
    ]
    # The server's engine runs in a process of its own, which is the default; ENVIRONMENT switches
    # that off for the bare engine.
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": str(threads)}
    environment = {**ENVIRONMENT, **own}
    with _served(f"vllm {dtype}", folder.name, port, command, environment) as server:
        yield server


@contextlib.contextmanager
def _served(
    name: str, model: str, port: int, command: list[str], environment: dict[str, str]
) -> Iterator[Server]:
    """Start a peer's server and wait until it is healthy. Raises RuntimeError if it ends or takes too long."""
    log = ROOT / ".peers" / "logs" / f"{name.replace(' ', '-')}-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        _wait(lambda: _is_healthy(port), process, log)
        yield Server(name, model, ("127.0.0.1", port), {name: process.pid})
    finally:
        stop(process)


def _wait(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the server did not start; see {log}")
        time.sleep(0.2)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
