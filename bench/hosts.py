"""Units over several hosts: how long a plan and a start take, what a step costs beside one host and
beside no encryption, and how fast KV is handed over.

    python -m bench.hosts [--quick] [--model mid] [plan|start|step|handover ...]

Hosts are network namespaces on one machine, joined by a link without a limit, with a Ray node each
(tests/dist/hosts.py; needs root). They share its cores: what a second host gives in cores is not
seen here, what it costs is.

    plan       the launch plan of DeepSeek's published fleet at its peak, 278 nodes
    start      16 ranks over 8 hosts, from the command to the last that is ready; Ray was there before
    step       one deployment three times: on one host, over two, over two without CURVE. All run all
               the while and are asked in turn, so what Ray takes when idle is taken from each
    handover   KV pulled from another host, in turn with as many bytes of a raw socket
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.checkpoints import ROOT, SHIPPED, mid_model
from bench.client import Stream, percentile, stream
from bench.handover import (
    COUNTS,
    SECRET,
    Blocks,
    SelfGrants,
    all_blocks,
    fill,
    in_turn,
    pull,
    receive,
)
from bench.subject import prompts
from hadal.core.config import ClusterConfig, FleetConfig, read_deployment
from hadal.core.messages import BLOCK_TOKENS, KvLease
from hadal.core.model_config import read_model_config
from hadal.runtime.topology import launch_plan
from hadal.runtime.transfer.kv import KvTransfer
from hadal.runtime.transfer.nixl import package
from hadal.runtime.transfer.pool import KvPool, pool_name
from tests.dist.hosts import Host, Hosts, why_no_hosts
from tests.dist.serving import Server
from tests.waiting import wait_until

PLAN_AIM_S, START_AIM_S = 1.0, 60.0
PREFILL, DECODE = 29, 9
"""Units at the published peak."""
START_HOSTS, RANKS_A_HOST = 8, 2
PATIENCE_S = 300.0
ONE, TWO, PLAIN = "one host", "two hosts", "two hosts, no CURVE"
PLAIN_PATH = {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "bench" / "plain", ROOT / "src", ROOT)))
}
CONTEXT = 64
BATCHES = (1, 16)
NETWORK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "e0", "UCX_LOG_LEVEL": "fatal"}
"""The kernel is the same, so UCX would try shared memory between these hosts."""


# ---- plan ----
def plan(console: Console) -> None:
    """The processes of 278 nodes."""
    deployment = msgspec.structs.replace(
        read_deployment(ROOT / "configs" / "v3_ep32_ep144.toml"),
        fleet=FleetConfig(mode="auto", prefill_max=PREFILL, decode_max=DECODE),
        cluster=ClusterConfig(on="ray"),
    )
    times_s = []
    for _ in range(20):
        began_s = time.perf_counter()
        plans = launch_plan(deployment)
        times_s.append(time.perf_counter() - began_s)
    nodes, took_s = (
        len({one.node for one in plans if one.node is not None}),
        statistics.median(times_s),
    )
    console.print(
        f"launch plan of {nodes} nodes, {len(plans):,} processes: {1e3 * took_s:.1f} ms"
        f" {mark(took_s <= PLAN_AIM_S)} (aim {PLAN_AIM_S:g} s)"
    )


def mark(is_good: bool) -> str:
    return "[green]✓[/green]" if is_good else "[red]✗[/red]"


# ---- start ----
def start(console: Console) -> None:
    """A prefill unit and a decode unit of eight ranks each, over four hosts each."""
    ranks = START_HOSTS * RANKS_A_HOST // 2
    unit = {"ranks": ranks, "ranks_per_node": RANKS_A_HOST, "threads": 1, "kv_blocks": 32}
    with Hosts(START_HOSTS) as hosts, tempfile.TemporaryDirectory(prefix="hadal-b-") as name:
        hosts.start_ray(*[RANKS_A_HOST] * START_HOSTS)
        began_s = time.monotonic()
        with ready(hosts, hosts.serve(Path(name), prefill=unit, decode=unit)):
            took_s = time.monotonic() - began_s
    console.print(
        f"{2 * ranks} ranks over {START_HOSTS} hosts: all ready after {took_s:.1f} s"
        f" {mark(took_s <= START_AIM_S)} (aim {START_AIM_S:g} s)"
    )


@contextmanager
def ready(hosts: Hosts, server: Server, number: int = 0) -> Iterator[Server]:
    """A server of a host, whole; it is stopped at the end."""
    name = server.log_path.stem.rpartition("-")[2]
    try:
        hosts[number].call(server.wait_ready)
        wait_until(lambda: server.status().ready, "all processes are ready", PATIENCE_S)
        yield server
    finally:
        if server.process.poll() is None:
            hosts[number].signal(name, signal.SIGTERM)
        server.process.wait(60)


# ---- step ----
@dataclass(frozen=True)
class Deployed:
    """One of the three."""

    host: Host
    url: str

    def ask(self, model: Path, batch: int, num_tokens: int, context: int = CONTEXT) -> list[Stream]:
        """Return `batch` streams that ran at once, of `num_tokens` behind prompts of `context`."""
        vocab_size = read_model_config(model).vocab_size
        body = {"model": model.name, "max_tokens": num_tokens, "ignore_eos": True}
        asked = [
            {**body, "temperature": 0.0, "prompt": prompt}
            for prompt in prompts(batch, context, vocab_size, seed=secrets.randbits(30))
        ]
        host, _, port = self.url.removeprefix("http://").partition(":")

        async def together() -> list[Stream]:
            address = host, int(port)
            return await asyncio.gather(
                *(stream(address, "/v1/completions", each) for each in asked)
            )

        return self.host.call(lambda: asyncio.run(together()))


@dataclass(frozen=True)
class Round:
    """What one deployment did at one batch."""

    tokens_per_s: float
    gaps_s: list[float]
    """Between two tokens of a stream."""


def one_round(deployed: Deployed, model: Path, batch: int, num_tokens: int) -> Round:
    """Ask once. Raises RuntimeError if an answer fails."""
    streams = deployed.ask(model, batch, num_tokens)
    if errors := [each.error for each in streams if each.error]:
        raise RuntimeError(errors[0])
    first_s = min(each.piece_times_s[0] for each in streams)
    last_s = max(each.piece_times_s[-1] for each in streams)
    gaps_s = [
        later - earlier
        for each in streams
        for earlier, later in zip(each.piece_times_s, each.piece_times_s[1:], strict=False)
    ]
    return Round(sum(each.num_tokens for each in streams) / (last_s - first_s), gaps_s)


@contextmanager
def deployments(model: Path, folder: Path) -> Iterator[dict[str, Deployed]]:
    """A prefill unit and a decode unit of two ranks, three times. One Ray cluster serves both that
    span hosts; labels keep them apart.
    """
    prefill = {"threads": 1, "kv_blocks": 256}
    decode = {**prefill, "ranks": 2}
    here = {"model": str(model), "prefill": prefill, "decode": decode}
    far = {**here, "decode": {**decode, "ranks_per_node": 1}}
    with Hosts(4) as hosts, ExitStack() as stack:
        for host in hosts:
            host.label = f"hadal={'curve' if host.number < 2 else 'plain'}"
            host.environment = {} if host.number < 2 else PLAIN_PATH
        hosts.start_ray(*[2] * 4)
        found = {}
        for name, number, tables in (
            (ONE, 0, {**here, "port": 8001, "cluster": {"on": "local"}}),
            (TWO, 0, {**far, "cluster": {**hosts.cluster, "label": hosts[0].label}}),
            (PLAIN, 2, {**far, "cluster": {**hosts.cluster, "label": hosts[2].label}}),
        ):
            own = folder / f"{len(found)}"
            own.mkdir()
            server = hosts.serve(own, f"serve{len(found)}", number, **tables)
            stack.enter_context(ready(hosts, server, number))
            found[name] = Deployed(hosts[number], server.url)
        yield found


def step(console: Console, *, quick: bool, model: Path) -> None:
    """Tokens/s and gaps by deployment, medians of rounds that take turns."""
    num_rounds, num_tokens = (2, 100) if quick else (9, 300)
    rows: dict[tuple[int, str], list[Round]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="hadal-b-") as name,
        deployments(model, Path(name)) as found,
    ):
        for deployed in found.values():
            one_round(deployed, model, max(BATCHES), 20)
        for number in range(num_rounds):
            for batch in BATCHES:
                for name in list(found)[:: 1 if number % 2 else -1]:
                    made = one_round(found[name], model, batch, num_tokens)
                    rows.setdefault((batch, name), []).append(made)
    table = Table(
        *("streams", "", "tokens/s", "p50 ms", "p99 ms", "tokens/s of one host's", "p99"),
        title=f"a step over hosts, {model.name}: medians of {num_rounds} rounds",
    )
    for batch, name in itertools.product(BATCHES, (ONE, TWO, PLAIN)):
        rounds, beside = rows[batch, name], rows[batch, ONE]
        ratios = [
            statistics.median(
                of(here) / of(there) for here, there in zip(rounds, beside, strict=True)
            )
            for of in (lambda one: one.tokens_per_s, lambda one: percentile(one.gaps_s, 0.99))
        ]
        times_ms = [
            1e3 * statistics.median(percentile(one.gaps_s, share) for one in rounds)
            for share in (0.5, 0.99)
        ]
        table.add_row(
            str(batch),
            name,
            f"{statistics.median(one.tokens_per_s for one in rounds):,.0f}",
            *(f"{value:.2f}" for value in times_ms),
            *("" if name == ONE else f"{value:.2f}x" for value in ratios),
        )
    console.print(table)


# ---- hand-over ----
@dataclass(frozen=True)
class Far:
    """Where the owner's pool is, seen from the puller's host."""

    here: str
    there: str
    pool: str
    port: int
    """Of its raw socket."""


def pull_from(run: str, handover: str, blocks: Blocks, most: int, far: Far, seconds: float) -> None:
    """The puller: print seconds by number of blocks of a raw socket and of a pull."""
    pool = KvPool.create(pool_name(run, "decode-0", "1"), blocks.shape(most), blocks.dtype)
    fill(pool)
    expected = pool.blocks.copy()
    transfer = KvTransfer(
        pool, handover, host=far.here, secret=SECRET, grants=SelfGrants(SECRET, pool.name)
    )
    found = {}
    with socket.create_connection((far.there, far.port)) as connection:
        for count in (count for count in COUNTS if count <= most):
            ids = tuple(range(1, 1 + count))
            lease = KvLease(far.pool, ids, (0,) * count, count * BLOCK_TOKENS)
            found[count] = in_turn(
                (
                    lambda: receive(connection, pool, count * pool.block_bytes),
                    lambda: pull(transfer, lease),
                ),
                seconds,
            )
            pool.blocks[1:] = 0
            pull(transfer, lease)
            if not np.array_equal(pool.blocks[1 : 1 + count], expected[1 : 1 + count]):
                raise RuntimeError("what was pulled is not what is there")
    transfer.close()
    pool.close()
    print(json.dumps(found), flush=True)


def measured(hosts: Hosts, handover: str, blocks: Blocks, most: int, seconds: float) -> Any:
    """Seconds of (raw socket, pull) by number of blocks, pulled by the second host from the first."""
    run, (there, here) = f"bench{secrets.token_hex(4)}", hosts
    asked = json.dumps((run, handover, blocks.shape(most), blocks.dtype, there.address))
    module = [sys.executable, "-m", "bench.handover", "--own", asked]
    owner = there.start("own", module, NETWORK, stdin=subprocess.PIPE)
    pool, port = wait_until(lambda: said(there, owner, "own"), "the owner serves", PATIENCE_S)
    far = Far(here.address, there.address, pool, port)
    asked = msgspec.json.encode((run, handover, blocks, most, far, seconds)).decode()
    module = [sys.executable, "-m", "bench.hosts", "--pull", asked]
    puller = here.start("pull", module, NETWORK)
    found = wait_until(lambda: said(here, puller, "pull"), "it has pulled", PATIENCE_S)
    puller.wait(30)
    assert owner.stdin is not None
    owner.stdin.close()
    owner.wait(30)
    return found


def said(host: Host, process: subprocess.Popen[bytes], name: str) -> Any:
    """The JSON that a process printed; None: nothing yet. Raises RuntimeError if it failed."""
    for line in host.log(name).splitlines():
        if line.startswith(('["', '{"')):
            return json.loads(line)
    if process.poll() not in (None, 0):
        raise RuntimeError(host.log(name)[-2000:])
    return None


def handover(console: Console, *, quick: bool) -> None:
    """A table for each model: GB/s by number of blocks."""
    most, seconds = (64, 0.3) if quick else (512, 1.0)
    ways = ["tcp", *(["nixl"] if package() else [])]
    with Hosts(2) as hosts:
        for blocks in all_blocks()[-1 if quick else 0 :]:
            found = {way: measured(hosts, way, blocks, most, seconds) for way in ways}
            table = Table(
                *("blocks", "raw socket", *ways),
                title=f"{blocks.model}'s blocks from another host, GB/s (of the raw socket's)",
            )
            for count in (count for count in COUNTS if count <= most):
                gb = count * blocks.num_bytes / 1e9
                raw_s = statistics.median(found[way][str(count)][0] for way in ways)
                pulls = [found[way][str(count)] for way in ways]
                cells = [
                    f"{gb / pull_s:.2f} ({beside_s / pull_s:.2f}x)" for beside_s, pull_s in pulls
                ]
                table.add_row(str(count), f"{gb / raw_s:.2f}", *cells)
            console.print(table)


PARTS = ("plan", "start", "step", "handover")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hosts", description=__doc__.split("\n\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, one model's blocks")
    parser.add_argument("--model", choices=("hadal-tiny", "mid"), default="hadal-tiny")
    parser.add_argument("--pull", help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; default: all")
    options = parser.parse_args(arguments)
    if options.pull:
        asked = msgspec.json.decode(options.pull, type=tuple[str, str, Blocks, int, Far, float])
        return pull_from(*asked)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Known: {', '.join(PARTS)}.")
    parts, console = options.parts or PARTS, Console(width=120)
    if "plan" in parts:
        plan(console)
    if why := why_no_hosts():
        return console.print(f"[yellow]nothing else: {why}[/yellow]")
    if "start" in parts:
        start(console)
    if "step" in parts:
        model = mid_model() if options.model == "mid" else SHIPPED
        step(console, quick=options.quick, model=model)
    if "handover" in parts:
        handover(console, quick=options.quick)
    return None


if __name__ == "__main__":
    main()
