"""What being distributed costs: one decode unit of 1, 2 and 4 ranks on the same cores, and where
its steps' time goes.

    python -m bench.distributed [--quick] [--model mid]

The cores do not grow with the ranks, so more ranks cannot be faster here: what each row adds is the
price of spreading experts over processes, and the table says which part is physics (bytes, waiting
for the slowest) and which is ours (scheduling and messages between leader and ranks: the time a
rank stands between two steps though work is there).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.checkpoints import SHIPPED, mid_model
from bench.machine import CpuWatch
from bench.results import CONTEXT
from bench.server import Running, launched, wait_ready
from bench.subject import prompts
from hadal.core.model_config import read_model_config

WIDTHS = (1, 2, 4)
BATCH = 32
TIMEOUT_S = 300.0
AIM_SHARE = 0.10
"""Scheduling and messages, of a step."""
_LONGEST = 3900
"""Output tokens that fit both models' context."""


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


@dataclass(frozen=True)
class Width:
    """Medians over steps and ranks, milliseconds per step."""

    ranks: int
    tokens_per_s: float
    schedule: str
    parts_ms: dict[str, float]
    others_cores: float

    @property
    def step_ms(self) -> float:
        return sum(self.parts_ms.values())


def deployment(ranks: int, model: Path) -> str:
    """One prefill rank, so that only decode differs."""
    return (
        f'model = "{model}"\n[prefill]\nthreads = 1\nkv_memory_mb = 512\nmax_requests ='
        f" {BATCH}\n[decode]\nranks = {ranks}\nkv_memory_mb = {512 // ranks}\nmax_requests ="
        f" {BATCH // ranks}\n"
    )


def split(steps: Sequence[Sequence[Any]]) -> dict[str, float]:
    """Where the time of traced steps went, seconds: medians over ranks and steps, of a rank's own
    lane.
    """
    by_rank: dict[int, list[tuple[float, float, dict[str, float]]]] = defaultdict(list)
    for _, _, _, _, events, *_ in steps:
        of_rank: dict[int, list[Any]] = defaultdict(list)
        for event in events:
            of_rank[event[0]].append(event)
        for rank, mine in of_rank.items():
            sums: dict[str, float] = defaultdict(float)
            for _, lane, op, _, _, start_s, end_s in mine:
                if lane == "wait":
                    sums["exposed wait"] += end_s - start_s
                elif lane == "compute":
                    name = (
                        "codec, copies, calls"
                        if op.startswith(">") or op.endswith(">")
                        else "compute"
                    )
                    sums["sampling" if op == "draw" else name] += end_s - start_s
            ends = (min(event[5] for event in mine), max(event[6] for event in mine))
            sums["between ops"] = ends[1] - ends[0] - sum(sums.values())
            by_rank[rank].append((*ends, sums))
    parts: dict[str, list[float]] = defaultdict(list)
    for rows in by_rank.values():
        for (_, ended_s, sums), (next_s, _, _) in pairwise(rows):
            for name in (
                "compute",
                "codec, copies, calls",
                "exposed wait",
                "sampling",
                "between ops",
            ):
                parts[name].append(sums.get(name, 0.0))
            parts["scheduling and messages"].append(max(0.0, next_s - ended_s))
    return {name: statistics.median(values) for name, values in parts.items()}


def measure(ranks: int, model: Path, num_steps: int) -> Width:
    """Decode BATCH streams for `num_steps` steps on a server of that width."""
    with launched(deployment(ranks, model)) as running:
        wait_ready(running)
        # Counters are read once a second; nobody may end before the traced steps.
        streams = Streams(running, model, min(3 * num_steps + 2000, _LONGEST))
        metric = "hadal_output_tokens_total"
        streams.wait_until('hadal_generations_now{state="decoding"}', BATCH)
        begin, start_s = running.metrics()[metric], time.perf_counter()
        watch = CpuWatch()
        watch.start(running.pids().values())
        streams.wait_until(metric, begin + BATCH * num_steps)
        end, seconds = running.metrics()[metric], time.perf_counter() - start_s
        others_cores = watch.stop()
        steps = traced(running, 24)
        streams.close()
        return Width(
            ranks,
            (end - begin) / seconds,
            steps[0][1],
            {name: 1e3 * value for name, value in split(steps).items()},
            others_cores,
        )


def traced(running: Running, num_steps: int) -> list[list[Any]]:
    reply = json.loads(running.get(f"/trace?unit=decode-0&steps={num_steps}"))
    return sorted(reply["steps"])


def table(model: str, widths: Sequence[Width]) -> Table:
    """A column a width."""
    out = Table(title=f"{model}, {BATCH} streams, decode on these cores", title_justify="left")
    out.add_column("ms per step")
    for width in widths:
        out.add_column(f"EP{width.ranks}", justify="right")
    out.add_row("tokens/s", *(f"{width.tokens_per_s:,.0f}" for width in widths))
    out.add_row("schedule", *(width.schedule for width in widths))
    for name in dict.fromkeys(name for width in widths for name in width.parts_ms):
        out.add_row(name, *(f"{width.parts_ms.get(name, 0.0):.2f}" for width in widths))
    out.add_row("step", *(f"{width.step_ms:.2f}" for width in widths))
    shares = [width.parts_ms["scheduling and messages"] / width.step_ms for width in widths]
    marks = ["[green]✓[/green]" if share <= AIM_SHARE else "[red]✗[/red]" for share in shares]
    cells = [f"{100 * share:.1f} % {mark}" for share, mark in zip(shares, marks, strict=True)]
    out.add_row(f"[bold]of it ours[/bold] (aim {100 * AIM_SHARE:.0f} %)", *cells)
    out.add_row("cores others used", *(f"{width.others_cores:.2f}" for width in widths))
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.distributed", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument(
        "--model", action="append", choices=("mid", "hadal-tiny"), help="default: both"
    )
    options = parser.parse_args(arguments)
    console = Console()
    for name in options.model or ["hadal-tiny", "mid"]:
        folder = mid_model() if name == "mid" else SHIPPED
        num_steps = (
            (300 if options.quick else 1000)
            if name == "hadal-tiny"
            else (60 if options.quick else 150)
        )
        widths = []
        for ranks in WIDTHS:
            widths.append(measure(ranks, folder, num_steps))
            console.print(
                f"  [dim]{name}, EP{ranks}: {widths[-1].tokens_per_s:,.0f} tokens/s[/dim]"
            )
        console.print(table(name, widths))


if __name__ == "__main__":
    main()
