"""Measure units that span several hosts: the time of a launch plan and of a start, and the cost of a step
compared with one host and with two hosts without encryption.

    python -m bench.hosts [--quick] [--model mid] [plan|start|step ...]

Hosts are network namespaces on one machine, each with a Ray node, joined by a link without a rate limit
(tests/dist/hosts.py; needs root). They share the machine's cores. So the figures show the cost of a
second host, but not the gain of its cores.

    plan       the launch plan of DeepSeek's published fleet at its peak, 278 nodes
    start      16 ranks over 8 hosts, from the command to the last ready rank; Ray was running before
    step       one deployment three times: on one host, over two, over two without CURVE. All three run
               all the time and get requests in turn, so the CPU time of Ray slows each of them
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from bench.checkpoints import ROOT, SHIPPED, mid_model
from bench.load import num_tokens, random_body, stream
from bench.subject import prompts
from bench.tables import parser_of, percentile
from hadal.apps.bench.request import Sample
from hadal.core.config import ClusterConfig, FleetConfig, read_deployment
from hadal.core.model_config import read_model_config
from hadal.runtime.topology import launch_plan
from tests.dist.hosts import Host, Hosts, why_no_hosts
from tests.dist.serving import Server
from tests.waiting import wait_until

PLAN_AIM_S, START_AIM_S = 1.0, 60.0
PREFILL, DECODE = 29, 9
"""Number of units at the published peak."""
START_HOSTS, RANKS_A_HOST = 8, 2
PATIENCE_S = 300.0
ONE, TWO, PLAIN = "one host", "two hosts", "two hosts, no CURVE"
PLAIN_PATH = {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "bench" / "plain", ROOT / "src", ROOT)))
}
CONTEXT = 64
BATCHES = (1, 16)


# ---- plan ----
def plan(console: Console) -> None:
    """Time the launch plan of 278 nodes."""
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
    """Time the start of a prefill and a decode unit with eight ranks each, over four hosts each."""
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
    """Yield the server, which host `number` runs, once all its processes are ready; stop it at the end."""
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
    """One of the deployments that are compared: on one host, over two, over two without CURVE."""

    host: Host
    url: str

    def ask(self, model: Path, batch: int, num_tokens: int, context: int = CONTEXT) -> list[Sample]:
        """Send `batch` concurrent requests for `num_tokens` tokens, with prompts of `context` tokens. Return
        their measurements.
        """
        vocab_size = read_model_config(model).vocab_size
        asked = [
            random_body(model.name, prompt, num_tokens)
            for prompt in prompts(batch, context, vocab_size, seed=secrets.randbits(30))
        ]
        host, _, port = self.url.removeprefix("http://").partition(":")

        async def together() -> list[Sample]:
            address = host, int(port)
            return await asyncio.gather(*(stream(address, "completions", each) for each in asked))

        return self.host.call(lambda: asyncio.run(together()))


@dataclass(frozen=True)
class Round:
    """Results of one deployment at one batch."""

    tokens_per_s: float
    gaps_s: list[float]
    """Seconds between consecutive tokens, of all streams."""


def one_round(deployed: Deployed, model: Path, batch: int, length: int) -> Round:
    """Run one batch of streams. Raises RuntimeError if an answer fails."""
    streams = deployed.ask(model, batch, length)
    first_s = min(each.first_s or 0.0 for each in streams)
    last_s = max(each.last_s or 0.0 for each in streams)
    gaps_s = [gap_s for each in streams for gap_s in each.gaps_s]
    return Round(num_tokens(streams) / (last_s - first_s), gaps_s)


@contextmanager
def deployments(model: Path, folder: Path) -> Iterator[dict[str, Deployed]]:
    """Start three deployments, each with a prefill unit and a decode unit of two ranks. One Ray
    cluster serves the two deployments that span hosts; labels separate them.
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
    """Print tokens/s and gaps by deployment, as medians over alternating rounds."""
    num_rounds, length = (2, 100) if quick else (9, 300)
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
                    made = one_round(found[name], model, batch, length)
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


PARTS = ("plan", "start", "step")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("hosts", __doc__, "few rounds")
    parser.add_argument("--model", choices=("hadal-tiny", "mid"), default="hadal-tiny")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; default: all")
    options = parser.parse_args(arguments)
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
    return None


if __name__ == "__main__":
    main()
