"""Units over several hosts, on Ray: the same texts as on one, also while nodes and links fail.

Hosts are network namespaces with a Ray node each (tests/dist/hosts.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadal.runtime.launch import EXIT_GAVE_UP
from hadal.runtime.process.process import EXIT_CONFIG
from tests.dist.conftest import StartServer
from tests.dist.hosts import NEEDS_HOSTS, RAY, Host, Hosts
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases, make_cases
from tests.dist.serving import Server, blocks_used
from tests.waiting import wait_until

pytestmark = [NEEDS_HOSTS, pytest.mark.timeout(600 if not FULL else 3600)]

SEED = 17
OURS = {"prefill-0", "decode-0", "decode-0.0", "decode-0.1"}
NUM_STEPS = 400
SMALL = {"threads": 1, "ranks_per_node": 1, "kv_blocks": 96}
THREE_HOSTS = {
    "host": "0.0.0.0",
    "prefill": {**SMALL, "threads": 2},
    "decode": {**SMALL, "ranks": 2, "threads": 3},
    "gateway": {"nodes": 1},
}
"""Each process has one host where it fits."""


@dataclass
class Deployed:
    """A deployment on a cluster, asked from the host that its first gateway is on."""

    hosts: Hosts
    server: Server

    def complete(
        self,
        cases: list[Case],
        while_running: Callable[[], Awaitable[None]] | None = None,
        url: str = "",
    ) -> list[tuple[int, ...]]:
        """What it answers; `url`: of another gateway."""

        async def ask() -> list[tuple[int, ...]]:
            return await complete_all(
                url or self.server.url, "hadal-tiny", cases, while_running=while_running
            )

        return self.hosts[0].call(lambda: asyncio.run(ask()))

    def blocks_used(self) -> int:
        """By the audit of every ledger, which must add up."""
        return self.hosts[0].call(lambda: blocks_used(self.server))

    def host_of(self, process: str) -> Host:
        """The host that a process runs on."""
        name = self.server.status().processes[process].host
        return self.hosts[int(name.removeprefix("host-"))]

    def pid_of(self, process: str) -> int:
        """On its host."""
        return self.server.status().processes[process].pid

    def wait_whole(self, timeout_s: float = 120.0) -> None:
        """Wait until every process is ready. Ray nodes that ended are started again, as systemd or
        Kubernetes does: one that was given up ends when it hears of that.
        """

        def is_whole() -> bool:
            self.keep_ray_nodes()
            return self.server.status().ready

        wait_until(is_whole, "all processes are ready")

    def keep_ray_nodes(self) -> None:
        for host in self.hosts:
            self.hosts.keep_ray_node(host)

    def wait_started_again(self, process: str, num_starts: int) -> None:
        """Wait until a process was lost, and until all are ready."""

        def is_started_again() -> bool:
            return self.server.status().processes[process].num_starts > num_starts

        wait_until(is_started_again, f"{process} is started again")
        self.wait_whole()


def serve(hosts: Hosts, folder: Path, name: str = "serve", **tables: Any) -> Deployed:
    """Start `hadal serve` on the first host; `name`: of its log."""
    return Deployed(hosts, hosts.serve(folder, name, **tables))


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    """Prefill on the first of three hosts, a decode unit of two ranks over the others, and a gateway
    on one of those besides the first one's.
    """
    with Hosts(3) as hosts, tempfile.TemporaryDirectory(prefix="hadal-h-") as folder:
        hosts.start_ray(2, 4, 4)
        deployed = serve(hosts, Path(folder), **THREE_HOSTS)
        hosts[0].call(lambda: deployed.server.wait_ready(120))
        deployed.wait_whole()
        yield deployed
        print(deployed.server.log()[-5000:])


def test_the_texts_are_those_of_one_host(deployed: Deployed) -> None:
    cases = everyday_cases(200 if FULL else 12, SEED)
    assert not differences(cases, deployed.complete(cases))


@pytest.mark.full
def test_a_step_says_nothing_through_ray(deployed: Deployed) -> None:
    """What Ray's processes and the lender send while tokens stream is what they send anyway. What
    ours send is counted by the same means: a step of two hosts is several messages.
    """
    rays = {pid for host in deployed.hosts for word in RAY for pid in host.pids(word)}

    def sent() -> Counter[tuple[int, str, str]]:
        return sum((host.sent() for host in deployed.hosts), Counter())

    def through_ray(segments: Counter[tuple[int, str, str]]) -> int:
        return sum(number for (pid, *_), number in segments.items() if pid in rays)

    async def num_steps(client: httpx.AsyncClient) -> int:
        metrics = (await client.get("/metrics")).text
        return int(float(metrics.partition('hadal_steps_total{unit="decode-0"} ')[2].split()[0]))

    async def read(reply: httpx.Response) -> None:
        async for _ in reply.aiter_bytes():
            pass

    async def measure() -> tuple[int, Counter[Any], Counter[Any]]:
        """Steps, what was sent while they were made, and in the same time without a step."""
        body = {"model": "hadal-tiny", "prompt": [16] * 8, "max_tokens": 3000}
        body |= {"ignore_eos": True, "stream": True}
        async with httpx.AsyncClient(base_url=deployed.server.url, timeout=60.0) as client:
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                reading = asyncio.create_task(read(reply))
                before, first, began_s = sent(), await num_steps(client), time.monotonic()
                while (steps := await num_steps(client) - first) < NUM_STEPS:
                    assert not reading.done()
                    await asyncio.sleep(0.1)
                busy, took_s = sent() - before, time.monotonic() - began_s
                reading.cancel()
            await asyncio.sleep(1.0)  # The stream is given up.
            before = sent()
            await asyncio.sleep(took_s)
            return steps, busy, sent() - before

    steps, busy, idle = deployed.hosts[0].call(lambda: asyncio.run(measure()))
    told = f"{steps} steps: {through_ray(busy)} of {busy.total()}, idle {through_ray(idle)} of {idle.total()}"
    print(told)
    assert busy.total() - through_ray(busy) > steps, told
    assert through_ray(idle) > 0, told
    assert through_ray(busy) - through_ray(idle) < 0.25 * steps, told


def test_the_end_of_a_gateway_on_a_node_costs_its_own_streams_alone(deployed: Deployed) -> None:
    cases = everyday_cases(12, SEED)
    host = deployed.host_of("gateway-1")
    url = f"http://{host.address}:8000"
    assert not differences(cases, deployed.complete(cases, url=url))
    num_starts = deployed.server.status().processes["gateway-1"].num_starts
    ended: list[httpx.RemoteProtocolError] = []

    async def ask_and_kill() -> None:
        async def kill() -> None:
            await asyncio.sleep(0.5)
            os.kill(host.pid_of("gateway-1"), signal.SIGKILL)

        try:
            await complete_all(url, "hadal-tiny", cases, while_running=kill)
        except httpx.RemoteProtocolError as error:
            ended.append(error)

    assert not differences(cases, deployed.complete(cases, ask_and_kill))
    assert ended, "it had answered all; this test shows nothing"
    deployed.wait_started_again("gateway-1", num_starts)
    assert not differences(cases, deployed.complete(cases, url=url))


def test_the_end_of_the_front_costs_no_stream_of_a_gateway_on_a_node(deployed: Deployed) -> None:
    cases = everyday_cases(12, SEED)
    num_starts = deployed.server.status().processes["gateway"].num_starts

    async def kill() -> None:
        await asyncio.sleep(0.5)
        os.kill(deployed.hosts[0].pid_of("gateway"), signal.SIGKILL)

    url = f"http://{deployed.host_of('gateway-1').address}:8000"
    assert not differences(cases, deployed.complete(cases, kill, url))
    deployed.wait_started_again("gateway", num_starts)


def test_a_host_that_loses_power_costs_no_token(deployed: Deployed) -> None:
    cases = everyday_cases(12, SEED)
    leads, ranks = deployed.host_of("decode-0"), ("decode-0.0", "decode-0.1")
    [follows] = [host for host in map(deployed.host_of, ranks) if host is not leads]

    lost = next(rank for rank in ranks if deployed.host_of(rank) is follows)
    num_starts = deployed.server.status().processes[lost].num_starts

    async def kill() -> None:
        await asyncio.sleep(1.0)
        follows.kill()

    assert not differences(cases, deployed.complete(cases, kill))
    follows.boot()
    deployed.hosts.start_ray_node(follows)
    deployed.wait_started_again(lost, num_starts)
    assert not differences(cases, deployed.complete(cases))


def test_a_leader_that_is_cut_off_is_followed_by_another_and_not_heard_again(
    deployed: Deployed,
) -> None:
    cases = everyday_cases(12, SEED)
    leads = deployed.host_of("decode-0")

    async def cut() -> None:
        await asyncio.sleep(1.0)
        leads.unplug()
        await asyncio.sleep(8.0)
        leads.plug()

    num_starts = deployed.server.status().processes["decode-0"].num_starts
    assert not differences(cases, deployed.complete(cases, cut))
    deployed.wait_started_again("decode-0", num_starts)
    assert not differences(cases, deployed.complete(cases))


@pytest.mark.full
def test_a_rollout_costs_no_token(deployed: Deployed) -> None:
    cases = everyday_cases(40, SEED)
    server = deployed.server
    before = {name: one.num_starts for name, one in server.status().processes.items()}
    units = [name for name in before if name.startswith(("prefill", "decode"))]
    rolling: list[Any] = []

    async def roll_out() -> None:
        await asyncio.sleep(0.5)
        command = ["hadal", "rollout", "--run-folder", str(server.folder)]
        rolling.append(deployed.hosts[0].start("rollout", command))

    assert not differences(cases, deployed.complete(cases, roll_out))
    while rolling[0].poll() is None:
        deployed.keep_ray_nodes()
        assert not differences(cases, deployed.complete(cases))
    assert rolling[0].wait(5) == 0, deployed.hosts[0].log_path("rollout").read_text()
    after = {name: one.num_starts for name, one in server.status().processes.items()}
    assert {name: after[name] - before[name] for name in units} == dict.fromkeys(units, 1)


def test_a_supervisor_that_is_killed_is_followed_by_one_that_starts_nothing_anew(
    deployed: Deployed,
) -> None:
    """All of its host dies with it, also the front. A gateway elsewhere keeps its streams."""
    cases = everyday_cases(12, SEED)
    far = [*OURS, "gateway-1"]
    before = {name: (deployed.host_of(name), deployed.pid_of(name)) for name in far}
    answered_s, ready_s, next_s = [], [], []
    url = f"http://{deployed.host_of('gateway-1').address}:8000"

    async def ask() -> None:
        assert not differences(cases, await complete_all(url, "hadal-tiny", cases))
        answered_s.append(time.monotonic())

    async def kill_and_follow() -> None:
        asking = asyncio.ensure_future(ask())
        await asyncio.sleep(0.3)
        deployed.hosts[0].signal("serve", signal.SIGKILL)
        deployed.server.process.wait(10)
        began_s = time.monotonic()
        folder = deployed.server.folder.parent
        deployed.server = deployed.hosts.serve(folder, "next", **THREE_HOSTS)
        await asyncio.to_thread(deployed.hosts[0].call, lambda: deployed.server.wait_ready(120))
        ready_s.append(time.monotonic())
        next_s.append(ready_s[0] - began_s)
        await asking

    deployed.hosts[0].call(lambda: asyncio.run(kill_and_follow()))
    assert answered_s[0] > ready_s[0] - 0.5, "all was answered before; this test shows nothing"
    deployed.wait_whole()
    assert {name: (deployed.host_of(name), deployed.pid_of(name)) for name in far} == before
    assert not differences(cases, deployed.complete(cases))
    print(f"ready again after {next_s[0]:.1f} s")


def test_what_finds_no_nodes_ends_with_what_the_cluster_has(deployed: Deployed) -> None:
    with tempfile.TemporaryDirectory(prefix="hadal-h-") as folder:
        second = serve(
            deployed.hosts,
            Path(folder),
            name="second",
            port=8001,
            decode={**SMALL, "ranks": 2},
            cluster={**deployed.hosts.cluster, "place_timeout_s": 3.0},
        )
        assert second.server.process.wait(60) == EXIT_CONFIG
    assert "nodes 1-2 not found within 3 s" in second.server.log()
    assert "1 CPU are needed free each, and the cluster has 1 x 2 CPU, 2 x 4 CPU" in (
        second.server.log()
    )


def test_it_ends_and_gives_all_back(deployed: Deployed) -> None:
    names = sum((host.names() for host in deployed.hosts), Counter())
    assert {name: names[name] for name in OURS} == dict.fromkeys(OURS, 1), (
        "as a leader that was followed by another, and still runs"
    )
    deployed.hosts[0].signal("next", signal.SIGTERM)
    assert deployed.server.process.wait(30) == 0

    def is_gone() -> bool:
        return not any(host.names().keys() & OURS or host.pools() for host in deployed.hosts)

    wait_until(is_gone, "nothing of it is left on any host")


@pytest.mark.full
def test_a_supervisor_that_is_cut_off_is_followed_on_another_host_and_ends_when_it_is_back() -> (
    None
):
    cases = everyday_cases(40, SEED)
    tables = {**THREE_HOSTS, "gateway": {}}
    with Hosts(4) as hosts, tempfile.TemporaryDirectory(prefix="hadal-h-") as folder:
        hosts.start_ray(2, 4, 4, 0)
        cluster = {**hosts.cluster, "name": "cell"}
        (first := Path(folder) / "1").mkdir()
        (second := Path(folder) / "2").mkdir()
        cut_off = Deployed(hosts, hosts.serve(first, "first", 3, cluster=cluster, **tables))
        hosts[3].call(lambda: cut_off.server.wait_ready(120))
        cut_off.wait_whole()
        before = {name: (cut_off.host_of(name), cut_off.pid_of(name)) for name in OURS}
        hosts[3].unplug()
        began_s = time.monotonic()
        next_one = Deployed(hosts, hosts.serve(second, "second", 0, cluster=cluster, **tables))
        hosts[0].call(lambda: next_one.server.wait_ready(120))
        print(f"answers again after {time.monotonic() - began_s:.1f} s")

        async def plug() -> None:
            await asyncio.sleep(1.0)
            hosts[3].plug()

        assert not differences(cases, next_one.complete(cases, plug))
        assert cut_off.server.process.wait(180) == EXIT_GAVE_UP, cut_off.server.log()[-3000:]
        assert "another `hadal serve` has taken over" in cut_off.server.log()
        next_one.wait_whole()
        assert {name: (next_one.host_of(name), next_one.pid_of(name)) for name in OURS} == before
        assert not differences(cases, next_one.complete(cases))
        hosts[0].signal("second", signal.SIGTERM)
        assert next_one.server.process.wait(60) == 0


# ---- at full size: seven hosts ----


@pytest.fixture(scope="module")
def spread() -> Iterator[Callable[..., Any]]:
    """Serves on seven hosts: the head's and the supervisor's, two of a prefill unit of two ranks,
    and four of a decode unit of four.
    """
    with Hosts(7) as hosts:
        hosts.start_ray(0, *[1] * 6)

        @contextlib.contextmanager
        def start(**tables: Any) -> Iterator[Deployed]:
            units = {"prefill": {**SMALL, "ranks": 2}, "decode": {**SMALL, "ranks": 4}}
            with tempfile.TemporaryDirectory(prefix="hadal-h-") as folder:
                deployed = serve(hosts, Path(folder), **units, **tables)
                try:
                    hosts[0].call(lambda: deployed.server.wait_ready(300))
                    deployed.wait_whole(300)
                    yield deployed
                finally:
                    hosts[0].signal("serve", signal.SIGTERM)
                    deployed.server.process.wait(60)
                    print(deployed.server.log()[-5000:])

        yield start


@pytest.mark.full
@pytest.mark.parametrize(
    "tables", [{}, {"dispatch_format": "fp8"}, {"transport": "gloo"}, {"handover": "tcp"}], ids=str
)
def test_the_texts_over_seven_hosts(
    spread: Callable[..., Any], start_server: StartServer, tables: dict[str, Any]
) -> None:
    cases = everyday_cases(200, SEED)
    if "dispatch_format" in tables:
        here = start_server(**tables)
        outputs = asyncio.run(complete_all(here.url, here.model, cases))
        here.stop()
        cases = [Case(case.prompt, output) for case, output in zip(cases, outputs, strict=True)]
    with spread(**tables) as deployed:
        assert not differences(cases, deployed.complete(cases))


async def power(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """All that runs on it is killed at once; it is there again a while later."""
    await asyncio.to_thread(host.kill)
    await asyncio.sleep(rng.uniform(0.0, 5.0))
    await asyncio.to_thread(host.boot)
    await asyncio.to_thread(hosts.start_ray_node, host)


async def ray_node(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Its Ray node is killed, and with it what it runs."""
    await asyncio.to_thread(host.kill_ray)
    await asyncio.sleep(rng.uniform(0.0, 5.0))
    await asyncio.to_thread(hosts.start_ray_node, host)


async def ray_head(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Ray's head is killed, and is there again a while later."""
    await asyncio.to_thread(hosts[0].kill_ray)
    await asyncio.sleep(rng.uniform(2.0, 15.0))
    await asyncio.to_thread(hosts.start_head)


async def cut(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Its link is down for a while."""
    host.unplug()
    await asyncio.sleep(rng.choice((1.0, 5.0, 30.0)))
    host.plug()


async def flapping(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Its link is down for a tenth of the time, and with it a tenth of its packets is lost."""
    for _ in range(50):
        host.unplug()
        await asyncio.sleep(0.02)
        host.plug()
        await asyncio.sleep(0.18)


async def lossy(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """A tenth of the packets that come to it is lost."""
    host.lose(1)
    await asyncio.sleep(10.0)
    host.lose(0)


async def slow(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """It sends no more than 2 Mbit/s."""
    host.shape("tbf", "rate", "2mbit", "burst", "32kb", "latency", "400ms")
    await asyncio.sleep(10.0)
    host.shape("pfifo_fast")


FAULTS = (power, ray_node, ray_head, cut, cut, flapping, lossy, slow)
NUM_ROUNDS = int(os.environ.get("HADAL_ROUNDS", "40"))


def print_times(what: str, times: Sequence[float]) -> None:
    """Median and worst."""
    if times:
        print(
            f"{what}: {len(times)}, median {statistics.median(times):.1f} s, worst {max(times):.1f} s"
        )


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nft") is None, reason="packets are lost by nft (nftables)")
def test_rounds_of_faults(spread: Callable[..., Any]) -> None:
    """A fault in each round while answers stream: the same texts, none lost, whole again."""
    rng, times = random.Random(SEED), []
    with spread() as deployed:
        for number in range(NUM_ROUNDS):
            fault, host = rng.choice(FAULTS), rng.choice(deployed.hosts.hosts[1:])
            cases = make_cases(24, SEED + number)
            began_s = time.monotonic()

            async def disturb(fault: Any = fault, host: Host = host, number: int = number) -> None:
                await asyncio.sleep(rng.uniform(0.2, 2.0))
                await fault(deployed.hosts, host, random.Random(number))

            outputs = deployed.complete(cases, disturb)
            answered_s = time.monotonic() - began_s
            assert not differences(cases, outputs), (number, fault.__name__, host.number)
            deployed.wait_whole(300)
            times.append((fault.__name__, time.monotonic() - began_s))
            told = f"answered {answered_s:.1f}, whole {times[-1][1]:.1f} s"
            print(number, fault.__name__, host.number, told, flush=True)
        assert deployed.blocks_used() == 0, "nothing runs"
        names = sum((each.names() for each in deployed.hosts), Counter())
        processes = deployed.server.status().processes
        units = [name for name in processes if name.startswith(("prefill", "decode"))]
        assert {name: names[name] for name in units} == dict.fromkeys(units, 1)
        ranks = [name for name in units if "." in name]
        assert sum(len(each.pools()) for each in deployed.hosts) == len(ranks)
        log = deployed.server.log()
    noticed = [float(found) for found in re.findall(r"has said nothing for ([\d.]+) s", log)]
    for fault in dict.fromkeys(FAULTS):
        of_fault = [whole_s for name, whole_s in times if name == fault.__name__]
        print_times(f"whole again after {fault.__name__}", of_fault)
    print_times("a node is lost", noticed)
    assert not noticed or max(noticed) <= 3.0
