"""Where a decode step's time goes when the real server decodes 32 streams, and what the server adds
to the bare engine.

    python -m bench.step_breakdown [--quick] [--model mid]

The server runs as `hadal serve` runs it; its processes are looked at from outside (CPU time per
thread, /metrics). The bare engine is the same Runner at the same batch in a process alone. What the
server adds to a step is the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.checkpoints import PEERS, ROOT, SHIPPED, mid_model
from bench.machine import CLOCK_TICKS, CpuWatch
from bench.server import Running, launched, wait_ready
from bench.subject import prompts
from hadal.core.model_config import read_model_config

BATCH = 32
CONTEXT = 128
AIM_MS = 2.0
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment. CPU seconds by process, and of the decode unit's threads by what they
    are for.
    """

    time_s: float
    num_tokens: float
    cpu_s: dict[str, float]


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds per decode step."""

    model: str
    parts: dict[str, float]
    """Of the bare engine; see bench/step_parts.py."""
    step_ms: float
    """Between two tokens of a stream, through the server."""
    runner_ms: float
    idle_ms: float
    cpu_ms: dict[str, float]
    others_cores: float

    @property
    def added_ms(self) -> float:
        """What gateway, scheduling and messages add to a step."""
        return self.step_ms - self.parts["step"]


def cpu_seconds(pid: int) -> dict[int, tuple[str, float]]:
    """Thread id -> (name, CPU seconds)."""
    threads = {}
    for entry in Path(f"/proc/{pid}/task").iterdir():
        name, rest = (entry / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        fields = rest.split()
        threads[int(entry.name)] = (name, (int(fields[11]) + int(fields[12])) / CLOCK_TICKS)
    return threads


def snapshot(running: Running) -> Snapshot:
    """Read all counters. The metrics first: reading them costs the gateway some time."""
    num_tokens = running.metrics()["hadal_output_tokens_total"]
    time_s = time.perf_counter()
    cpu_s: dict[str, float] = {"load generator": time.process_time()}
    for name, pid in running.pids().items():
        threads = cpu_seconds(pid)
        if name == "decode-0":
            # The main thread receives, plans and sends; zmq's own threads move the bytes; the rest
            # compute.
            io = {
                tid
                for tid, (thread, _) in threads.items()
                if tid == pid or thread.startswith("ZMQ")
            }
            cpu_s["decode-0 leader and wire"] = sum(threads[tid][1] for tid in io)
            cpu_s["decode-0 compute"] = sum(
                used for tid, (_, used) in threads.items() if tid not in io
            )
        else:
            cpu_s[name] = sum(used for _, used in threads.values())
    return Snapshot(time_s, num_tokens, cpu_s)


class Streams:
    """Clients that look at their sockets ten times a second: they share the cores with what is
    measured.
    """

    def __init__(self, running: Running, model: Path, num_tokens: int) -> None:
        vocab_size = read_model_config(model).vocab_size
        body = {
            "model": model.name,
            "max_tokens": num_tokens,
            "temperature": 0.6,
            "top_p": 0.95,
            "ignore_eos": True,
            "stream": True,
        }
        self._running = running
        self._ended = b""
        self._sockets = []
        for index, prompt in enumerate(prompts(BATCH, CONTEXT, vocab_size, seed=3)):
            content = json.dumps({**body, "prompt": prompt, "seed": index}).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
                " application/json\r\n"
            )
            client = socket.create_connection(running.address, timeout=TIMEOUT_S)
            client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            client.setblocking(False)
            self._sockets.append(client)

    def wait_until(self, metric: str, value: float) -> None:
        """Read what comes until a metric has reached a value. Scraped once a second: it costs the
        gateway time.
        """
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._running.metrics().get(metric, 0.0) < value:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{metric} did not reach {value:.0f} within {TIMEOUT_S:.0f} s")
            for _ in range(10):
                time.sleep(0.1)
                self._read()
            if self._ended:
                raise RuntimeError(
                    f"a stream ended before the measurement did: {self._ended[-300:]!r}"
                )

    def close(self) -> None:
        """Leave; the server cancels what still runs."""
        for client in self._sockets:
            client.close()

    def _read(self) -> None:
        for client in self._sockets:
            with contextlib.suppress(BlockingIOError):
                piece = client.recv(1 << 20)
                if not piece or b"data: [DONE]" in piece:
                    self._ended = piece or b"closed"


def run_streams(running: Running, model: Path, steps: int) -> tuple[Snapshot, Snapshot, float]:
    """Decode BATCH streams; return counters after all had joined and `steps` later, and the cores
    others kept busy.
    """
    # Nobody may end before the second snapshot, nor those that joined first.
    streams = Streams(running, model, 2 * steps + 800)
    try:
        streams.wait_until('hadal_generations_now{state="decoding"}', BATCH)
        watch = CpuWatch()
        watch.start(running.pids().values())
        first = snapshot(running)
        streams.wait_until("hadal_output_tokens_total", first.num_tokens + BATCH * steps)
        last = snapshot(running)
        return first, last, watch.stop()
    finally:
        streams.close()


def bare_engine(model: Path, threads: int, steps: int) -> tuple[dict[str, float], float]:
    """Milliseconds per step without a server, from a process of its own; and the cores others kept
    busy meanwhile.
    """
    command = [
        sys.executable,
        "-m",
        "bench.step_parts",
        str(model),
        str(threads),
        str(BATCH),
        str(CONTEXT),
        str(steps),
    ]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # As the server starts its units.
    watch = CpuWatch()
    watch.start(())
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    others_cores = watch.stop()
    if done.returncode != 0:
        raise RuntimeError(f"bench.step_parts failed:\n{done.stderr[-2000:]}")
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts, others_cores


def measure(model: Path, threads: int, steps: int) -> Breakdown:
    """The bare engine before and after the server, so that a drift of the machine is seen by
    both.
    """
    before, others_before = bare_engine(model, threads, steps)
    deployment = (
        f'model = "{model}"\n[prefill]\nthreads = {threads}\n[decode]\nthreads = {threads}\n'
    )
    with launched(deployment) as running:
        wait_ready(running)
        first, last, others = run_streams(running, model, steps)
        metrics = running.metrics()
    after, others_after = bare_engine(model, threads, steps)
    num_steps = (last.num_tokens - first.num_tokens) / BATCH
    return Breakdown(
        model=model.name,
        parts={name: (before[name] + after[name]) / 2 for name in before},
        step_ms=1e3 * (last.time_s - first.time_s) / num_steps,
        runner_ms=metrics['hadal_step_ms{unit="decode-0"}'],
        idle_ms=metrics['hadal_overhead_ms{unit="decode-0"}'],
        cpu_ms={
            name: 1e3 * (last.cpu_s[name] - first.cpu_s[name]) / num_steps for name in first.cpu_s
        },
        others_cores=max(others, others_before, others_after),
    )


def table(result: Breakdown) -> Table:
    """The breakdown for people."""
    out = Table(
        title=f"{result.model}: one decode step at batch {BATCH}, ms",
        title_justify="left",
        show_header=False,
    )
    out.add_column()
    out.add_column(justify="right")
    out.add_column(style="dim")
    parts, cpu = result.parts, result.cpu_ms
    wires = cpu["decode-0 leader and wire"] - parts["planning"]
    rows = [
        ("bare engine: compute", parts["compute"], "the model's decode"),
        ("bare engine: sampling", parts["sampling"], "temperature 0.6, top-p 0.95"),
        ("bare engine: a whole step", parts["step"], "the same Runner, nothing around it"),
        ("server: Runner's step", result.runner_ms, "smoothed; shares the cores with all below"),
        ("server: Runner idle", result.idle_ms, "between steps, though work was there"),
        ("server: between two tokens", result.step_ms, "as the streams see it"),
        ("CPU: leader, planning", parts["planning"], "beside the running step"),
        ("CPU: wire of the unit", max(0.0, wires), f"a message alone: {parts['wire']:.3f}"),
        ("CPU: gateway", cpu["gateway"], "front, text, SSE"),
        ("CPU: supervisor, prefill", cpu["supervisor"] + cpu["prefill-0"], "waiting"),
        ("CPU: load generator", cpu["load generator"], "not part of the server"),
    ]
    for name, value, note in rows:
        out.add_row(name, f"{value:.3f}", note)
    mark = "[green]✓[/green]" if result.added_ms <= AIM_MS else "[red]✗[/red]"
    if result.added_ms < -AIM_MS:
        mark = "[yellow]?[/yellow]"  # The machine was another one in between.
    note = f"aim {AIM_MS:g}; others kept up to {result.others_cores:.1f} cores busy"
    out.add_row(
        "[bold]added by the server[/bold]", f"[bold]{result.added_ms:.3f}[/bold] {mark}", note
    )
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step_breakdown", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument(
        "--model", action="append", choices=("mid", "hadal-tiny"), help="default: both"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    console = Console()
    for name in options.model or ["hadal-tiny", "mid"]:
        console.print(f"[bold]step breakdown, {name}[/bold]")
        folder = mid_model() if name == "mid" else SHIPPED
        steps = (
            (300 if options.quick else 1000)
            if name == "hadal-tiny"
            else (60 if options.quick else 150)
        )
        result = measure(folder, options.threads, steps)
        console.print(table(result))
        path = PEERS.parent / "bench" / "results" / time.strftime(f"step-{name}-%Y%m%d-%H%M%S.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({**vars(result), "added_ms": result.added_ms}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
