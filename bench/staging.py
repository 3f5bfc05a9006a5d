"""What it takes to bring experts from another rank's process over loopback, and to stage a layer of
the shipped model.

    python -m bench.staging [--quick]

One process serves, this one fetches. "In the background" is as ranks do it: both threads of a lower
priority and with a share of a core (runtime/worker). The bound is a copy within memory, by one
thread.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from rich.console import Console

from bench.checkpoints import ROOT, SHIPPED
from hadal.core.handshake import key_of
from hadal.core.placement import spread
from hadal.core.plans import Source, Staged, StagePlan
from hadal.model.checkpoint import load_weights
from hadal.model.experts import ExpertStore
from hadal.reference.params import Matrix, MlpWeights
from hadal.runtime.transfer.experts import (
    PURPOSE,
    ExpertClient,
    ExpertServer,
    ExpertTransfer,
    Stager,
)
from hadal.runtime.worker import SHARE, Pace

HOST = "127.0.0.1"
KEY = key_of(b"bench", PURPOSE)
SIZES = {1: (256, 683, 128), 44: (4096, 1792, 2048)}
"""10^6 bytes of an FP32 expert, about -> 2I, D, I. 44 MB is an expert of DeepSeek-V3 in FP8."""
NUM_RANKS = 4
NUM_REDUNDANT = 32
TIMEOUT_S = 60.0


def expert(size_mb: int) -> MlpWeights:
    rows, dim, width = SIZES[size_mb]
    gate, up = torch.ones(rows, dim).chunk(2)
    return MlpWeights(Matrix(gate), Matrix(up), Matrix(torch.ones(dim, width)))


def serve(share: float) -> None:
    """Until this process is killed: synthetic experts as layers 1 and 44, the shipped model's as
    layer 0.
    """
    torch.set_num_threads(1)
    store = ExpertStore(SHIPPED, load_weights(SHIPPED))
    synthetic = {size_mb: expert(size_mb) for size_mb in SIZES}
    server = ExpertServer(
        HOST, KEY, lambda layer, one: synthetic.get(layer) or store.expert(layer, one), share
    )
    print(server.port, flush=True)
    time.sleep(3600)


def bytes_per_s(act: Callable[[], object], num_bytes: int, seconds: float) -> float:
    """Median of what single calls reach."""
    found, until_s = [], time.monotonic() + seconds
    while time.monotonic() < until_s or len(found) < 3:
        begun_s = time.perf_counter()
        act()
        found.append(num_bytes / (time.perf_counter() - begun_s))
    return statistics.median(found)


def fetch_rates(
    console: Console, port: int, what: str, rest: Callable[[], None], seconds: float
) -> None:
    for size_mb in SIZES:
        rate, bound = fetch_rate(size_mb, port, rest, seconds)
        num_bytes = sum(part.nbytes for part in expert(size_mb).parts)
        console.print(
            f"  an expert of {num_bytes / 1e6:.1f} MB, {what}: {rate / 1e6:,.0f} MB/s, "
            f"{1e3 * num_bytes / rate:.1f} ms [dim](copy in memory {bound / 1e6:,.0f} MB/s)[/dim]"
        )


def fetch_rate(
    size_mb: int, port: int, rest: Callable[[], None], seconds: float
) -> tuple[float, float]:
    """Bytes per second of a fetch, and of a copy within memory."""
    client, held, into = ExpertClient(KEY), expert(size_mb), expert(size_mb)
    num_bytes = sum(part.nbytes for part in held.parts)

    def fetch() -> None:
        if not client.fetch(size_mb, Source(0, HOST, port), held, rest):
            raise RuntimeError("it was not had")

    def copy() -> None:
        for to, part in zip(into.parts, held.parts, strict=True):
            to.copy_(part)

    fetch()  # The sum is made once.
    return bytes_per_s(fetch, num_bytes, seconds), bytes_per_s(copy, num_bytes, 0.3)


def stage_layer(console: Console, port: int, num_new: int) -> None:
    """A rank's slots of one layer, the last `num_new` of them with experts that it does not
    hold.
    """
    placement = spread(3, 256, NUM_RANKS, NUM_REDUNDANT)
    slot_to_expert_LS = placement.slot_to_expert_LRS[:, 0]
    store = ExpertStore(
        SHIPPED, load_weights(SHIPPED, slot_to_expert_LS=slot_to_expert_LS), slot_to_expert_LS
    )
    slots = slot_to_expert_LS[0].tolist()
    others = [
        one for one in np.unique(placement.slot_to_expert_LRS[0, 1:]).tolist() if one not in slots
    ]
    if num_new:
        slots[-num_new:] = others[:num_new]
    sources = tuple(Source(one, HOST, port) for one in others[:num_new])
    stager = Stager(store.stage, ExpertTransfer(HOST, KEY, store.expert), lambda: None)
    times, worked_s = [], time.process_time()
    for stage_id in range(1, 6):
        stager.submit(StagePlan(0, stage_id, 0, tuple(slots), sources))
        done: list[Staged] = []
        until_s = time.monotonic() + TIMEOUT_S
        while not done and time.monotonic() < until_s:
            time.sleep(0.001)
            done = stager.take()
        if not done or done[0].error or done[0].num_received != num_new:
            raise RuntimeError(f"not staged: {done}")
        times.append(done[0].elapsed_s)
    worked_s = time.process_time() - worked_s
    stager.stop(5.0)
    console.print(
        f"  a layer of {SHIPPED.name}, {len(slots)} slots, {num_new} of them new: "
        f"{1e3 * statistics.median(times):.0f} ms [dim](5 in {worked_s:.2f} s of a core)[/dim]"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.staging", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="a second a figure")
    parser.add_argument("--serve", type=float, metavar="SHARE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve)
        return
    torch.set_num_threads(1)
    console, seconds = Console(soft_wrap=True), 1.0 if options.quick else 5.0
    console.print("[bold]staging[/bold]: experts from another rank, over loopback")
    pace = Pace()
    ways: dict[str, tuple[float, Callable[[], None]]] = {
        "at full speed": (1.0, lambda: None),
        "in the background": (SHARE, lambda: time.sleep(pace.owed_s())),
    }
    for what, (share, rest) in ways.items():
        command = [sys.executable, "-m", "bench.staging", "--serve", str(share)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                port = int(process.stdout.readline())
                fetch_rates(console, port, what, rest, seconds)
                if share == SHARE:
                    for num_new in (0, 8, 72):
                        stage_layer(console, port, num_new)
            finally:
                process.kill()


if __name__ == "__main__":
    main()
