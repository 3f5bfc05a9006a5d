"""Measure servers that differ only in their balancers, in turn under one load: tokens per second and gauges.

All servers of a scene run at once, and only the measured one gets requests. So rounds are interleaved without
restarts, and a balancer keeps the plans that it installed. Each round starts new clients, which leave at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from bench.balance_device import DeviceCosts
from bench.live_load import Ask, ClosedLoop, balance_of, http_client, read_metrics
from bench.machine import CpuWatch
from bench.server import Running, launched, wait_ready

MODEL = "hadal-tiny"
BUSY_TIMEOUT_S = 90.0
BUSY_SHARE = 0.9
LOOK_S = 0.5
LATE = r"^\S+ (\S+) .* (\d+) of (\d+) ops computed for longer"
COUNTERS = (
    "hadal_replicas_moved_total",
    "hadal_layers_flipped_total",
    "hadal_requests_moved_total",
)


@dataclass(frozen=True)
class Variant:
    """Balancer settings of the measured unit."""

    name: str
    expert_balance: str = "off"
    request_balance: str = "off"


OFF = Variant("off")
EXPERTS = Variant("experts", expert_balance="auto")
REQUESTS = Variant("requests", request_balance="auto")
BOTH = Variant("both", "auto", "auto")


@dataclass(frozen=True)
class Scene:
    """A unit and its load."""

    name: str
    role: str
    ranks: int
    asks: Sequence[Ask]
    num_clients: int
    device: DeviceCosts | None = None
    """Costs of virtual devices; None: ops take their real time on the shared cores."""
    more: str = ""
    """More settings of the unit, as TOML."""
    top: str = ""
    """Settings of the deployment, as TOML."""

    @property
    def unit(self) -> str:
        return f"{self.role}-0"

    def deployment(self, variant: Variant) -> str:
        other = "decode" if self.role == "prefill" else "prefill"
        # Without overlap a step takes the sum of its ops' times. Only then do differences between
        # the ranks' devices show in full.
        overlap = "" if self.device is None else 'overlap = "sequential"\n'
        return (
            f"{self.top}[{other}]\nthreads = 1\nkv_memory_mb = 512\nmax_requests = 128\n"
            f"[{self.role}]\nranks = {self.ranks}\nthreads = 1\nkv_memory_mb ="
            f" 192\n{self.more}{overlap}"
            f'expert_balance = "{variant.expert_balance}"\nrequest_balance ='
            f' "{variant.request_balance}"\n'
        )


@dataclass(frozen=True)
class Window:
    """Measurements of one round."""

    tokens_per_s: float
    """Prefill: prompt tokens per second; decode: output tokens per second."""
    step_ms: float
    balance: dict[str, float]
    """Objective -> mean of its gauge."""


@dataclass
class Served:
    """A server and the measurements of its rounds."""

    variant: Variant
    running: Running
    windows: list[Window] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    """Counters since the server's start."""

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(window.tokens_per_s for window in self.windows)

    @property
    def late_share(self) -> float | None:
        """Share of the ranks' ops that computed for longer than their device would have needed; None without
        devices, or before the first report.
        """
        log = self.running.log.read_text(errors="replace")
        last = {rank: (int(late), int(ops)) for rank, late, ops in re.findall(LATE, log, re.M)}
        num_ops = sum(ops for _, ops in last.values())
        return sum(late for late, _ in last.values()) / num_ops if num_ops else None

    @property
    def step_ms(self) -> float:
        return statistics.median(window.step_ms for window in self.windows)

    def all_tokens_per_s(self) -> list[float]:
        """Return the tokens per second of every round."""
        return [window.tokens_per_s for window in self.windows]

    def balance(self, objective: str) -> float | None:
        values = [
            window.balance[objective] for window in self.windows if objective in window.balance
        ]
        return statistics.mean(values) if values else None

    def over(self, base: Served) -> float:
        """Return the ratio of this server's tokens/s to those of `base`, as the median over rounds."""
        pairs = zip(self.windows, base.windows, strict=True)
        return statistics.median(mine.tokens_per_s / other.tokens_per_s for mine, other in pairs)


@contextlib.contextmanager
def serve_all(scene: Scene, variants: Sequence[Variant]) -> Iterator[list[Served]]:
    """Start a server for each variant; yield them when all are ready."""
    with contextlib.ExitStack() as stack:
        servers = [
            Served(variant, stack.enter_context(launch(scene, variant))) for variant in variants
        ]
        for served in servers:
            wait_ready(served.running, 240.0)
        yield servers


def launch(scene: Scene, variant: Variant) -> contextlib.AbstractContextManager[Running]:
    if scene.device is None:
        return launched(scene.deployment(variant))
    return launched(
        scene.deployment(variant), scene.device.environment(), module="bench.balance_device"
    )


def measure(
    scene: Scene,
    servers: Sequence[Served],
    *,
    num_rounds: int,
    warm_s: float,
    settle_s: float,
    window_s: float,
    say: Callable[[str], None],
) -> float:
    """Load every server for `warm_s`, then measure the servers in turn. Return the number of cores
    that other processes kept busy.
    """
    watch = CpuWatch()
    watch.start(pid for served in servers for pid in served.running.pids().values())
    for served in servers:
        asyncio.run(run_round(scene, served.running, 0.0, warm_s))
    for number in range(num_rounds):
        # Rotate the order: no server is always first.
        for at in range(len(servers)):
            served = servers[(at + number) % len(servers)]
            served.windows.append(asyncio.run(run_round(scene, served.running, settle_s, window_s)))
            say(
                f"round {number + 1}, {served.variant.name}: {served.windows[-1].tokens_per_s:,.0f}"
                " tokens/s"
            )
    for served in servers:
        metrics = served.running.metrics()
        served.counters = {
            name: metrics.get(f'{name}{{unit="{scene.unit}"}}', 0.0) for name in COUNTERS
        }
    return watch.stop()


async def run_round(scene: Scene, running: Running, settle_s: float, window_s: float) -> Window:
    """Fill the unit, let it settle for `settle_s`, and measure for `window_s`."""
    async with http_client(running.status.url, scene.num_clients) as http:
        loop = ClosedLoop(http, MODEL, scene.asks, scene.num_clients)
        async with loop:
            await until_busy(scene, http, loop)
            await asyncio.sleep(settle_s)
            seen: list[dict[str, float]] = []
            start_s, first = time.perf_counter(), await _tokens(scene, http, loop)
            while (now_s := time.perf_counter()) < start_s + window_s:
                await asyncio.sleep(min(LOOK_S, start_s + window_s - now_s))
                loop.check()
                seen.append(await read_metrics(http))
            end_s, last = time.perf_counter(), await _tokens(scene, http, loop)
    balances = [balance_of(metrics, scene.unit) for metrics in seen]
    names = dict.fromkeys(name for balance in balances for name in balance)
    return Window(
        (last - first) / (end_s - start_s),
        seen[-1][f'hadal_step_ms{{unit="{scene.unit}"}}'],
        {
            name: statistics.mean(balance[name] for balance in balances if name in balance)
            for name in names
        },
    )


async def until_busy(scene: Scene, http: httpx.AsyncClient, loop: ClosedLoop) -> None:
    """Wait until BUSY_SHARE of the clients' requests are in the unit. Raises RuntimeError after BUSY_TIMEOUT_S."""
    deadline_s = time.perf_counter() + BUSY_TIMEOUT_S
    name = f'hadal_unit_requests{{unit="{scene.unit}"}}'
    while (await read_metrics(http)).get(name, 0.0) < BUSY_SHARE * scene.num_clients:
        loop.check()
        if time.perf_counter() > deadline_s:
            raise RuntimeError(
                f"{scene.unit} did not get {BUSY_SHARE:.0%} of {scene.num_clients} requests"
            )
        await asyncio.sleep(0.2)


async def _tokens(scene: Scene, http: httpx.AsyncClient, loop: ClosedLoop) -> float:
    if scene.role == "prefill":
        return loop.num_prompt_tokens
    return (await read_metrics(http))["hadal_output_tokens_total"]
