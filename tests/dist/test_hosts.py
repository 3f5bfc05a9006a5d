"""Units over several hosts, on Ray, give the same texts as on one, also while nodes and links fail.

Hosts are network namespaces with a Ray node each (tests/dist/hosts.py). Tests hold the decode unit
before a step while they cause a fault, so that requests are then in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadal.core.errors import EXIT_CONFIG
from hadal.runtime.supervisor.run_end import EXIT_GAVE_UP
from tests.dist.conftest import StartServer
from tests.dist.gate import DECODE
from tests.dist.hosts import NEEDS_HOSTS, RAY, Host, Hosts
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases, make_cases
from tests.dist.serving import Server, blocks_used, metric
from tests.waiting import DEADLINE_S, PATIENCE_S, unix_now, wait_for, wait_until

pytestmark = [NEEDS_HOSTS, pytest.mark.timeout(3600)]

SEED = 17
OURS = {"prefill-0", "decode-0", "decode-0.0", "decode-0.1"}
NUM_STEPS = 400
SMALL = {"threads": 1, "ranks_per_node": 1, "kv_blocks": 96}
THREE_HOSTS = {
    "host": "0.0.0.0",
    "prefill": {**SMALL, "threads": 2},
    "decode": {**SMALL, "ranks": 2, "threads": 3},
    "gateway": {"nodes": 1},
    "collective_timeout_s": PATIENCE_S,
}
"""Deployment in which each process fits on one host only. The collective timeout is longer than a
test's waits, so that a step that a test holds does not fail.
"""
FAULT = pytest.mark.more("needs three hosts, and waits until what it breaks is whole again")


@dataclass
class Deployed:
    """A deployment on a cluster, with requests sent from its first gateway's host."""

    hosts: Hosts
    server: Server
    name: str = "serve"
    """Name of the process on the first host."""

    def complete(
        self,
        cases: list[Case],
        while_running: Callable[[], Awaitable[None]] | None = None,
        url: str = "",
    ) -> list[tuple[int, ...]]:
        """Return the answers to all cases; `url`: address of another gateway."""

        async def ask() -> list[tuple[int, ...]]:
            return await complete_all(
                url or self.server.url, "hadal-tiny", cases, while_running=while_running
            )

        return self.hosts[0].call(lambda: asyncio.run(ask()))

    def blocks_used(self) -> int:
        """Return the used blocks of all units, from an audit in which every ledger must add up."""
        return self.hosts[0].call(lambda: blocks_used(self.server))

    def host_of(self, process: str) -> Host:
        """Return the host that a process runs on."""
        name = self.server.status().processes[process].host
        return self.hosts[int(name.removeprefix("host-"))]

    def pid_of(self, process: str) -> int:
        """Return a process's pid on its host."""
        return self.server.status().processes[process].pid

    def count(self, name: str, label: str = "") -> float:
        """Return the sum of a metric over its series, or only over those with this label."""
        return self.hosts[0].call(lambda: metric(self.server, name, label))

    @contextlib.asynccontextmanager
    async def held(self, num_requests: int = 0, after: int = 2) -> AsyncIterator[None]:
        """Within the block, hold more than `num_requests` requests before a decode step; release
        them after it. `after`: steps that each process may still run.
        """
        self.hosts.gate.hold(DECODE, after)

        def are_there() -> bool:
            is_decoding = self.count("hadal_generations_now", 'state="decoding"') > 0
            return is_decoding and self.count("hadal_generations_now") > num_requests

        try:
            await wait_for(are_there, "requests are held before a step")
            yield
        finally:
            self.hosts.gate.open()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, and restart Ray nodes that have ended, as systemd or Kubernetes does:
        Ray abandons a node that takes 30 s to start, and a node that Ray has declared dead ends.
        """

        def is_met() -> bool:
            self.keep_ray_nodes()
            return condition()

        wait_until(is_met, what)

    def wait_whole(self) -> None:
        """Wait until every process is ready."""
        self.wait_until(lambda: self.server.status().ready, "all processes are ready")

    def keep_ray_nodes(self) -> None:
        for host in self.hosts:
            self.hosts.keep_ray_node(host)

    def wait_started_again(self, process: str, num_starts: int) -> None:
        """Wait until a process was started again and all are ready."""

        def is_started_again() -> bool:
            return self.server.status().processes[process].num_starts > num_starts

        self.wait_until(is_started_again, f"{process} is started again")
        self.wait_whole()


def serve(hosts: Hosts, folder: Path, name: str = "serve", **tables: Any) -> Deployed:
    """Start `hadal serve` on the first host; `name`: name of its log."""
    return Deployed(hosts, hosts.serve(folder, name, **tables), name)


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    """Three hosts: prefill on the first, a decode unit of two ranks over the others, and one of
    those with a second gateway. It must end cleanly after all tests.
    """
    with Hosts(3) as hosts, tempfile.TemporaryDirectory(prefix="hadal-h-") as folder:
        hosts.start_ray(2, 4, 4)
        deployed = serve(hosts, Path(folder), **THREE_HOSTS)
        hosts[0].call(deployed.server.wait_ready)
        deployed.wait_whole()
        yield deployed
        print(deployed.server.log()[-5000:])
        names = sum((host.names() for host in hosts), Counter())
        assert {name: names[name] for name in OURS} == dict.fromkeys(OURS, 1), (
            "as a leader that was followed by another, and still runs"
        )
        hosts[0].signal(deployed.name, signal.SIGTERM)
        assert deployed.server.process.wait(DEADLINE_S) == 0
        wait_until(lambda: is_gone(hosts), "nothing of it is left on any host")


def is_gone(hosts: Hosts) -> bool:
    """Return whether no process and no pool of a deployment is left."""
    return not any(
        any(name.startswith(("prefill", "decode")) for name in host.names()) or host.pools()
        for host in hosts
    )


@pytest.mark.slow("starts Ray on three hosts, and a deployment")
def test_the_texts_are_those_of_one_host_also_if_a_rank_dies(deployed: Deployed) -> None:
    cases = everyday_cases(200 if FULL else 12, SEED)
    assert not differences(cases, deployed.complete(cases))
    rank = "decode-0.1"
    num_starts = deployed.server.status().processes[rank].num_starts

    async def kill() -> None:
        async with deployed.held():
            os.kill(deployed.host_of(rank).pid_of(rank), signal.SIGKILL)

    assert not differences(cases, deployed.complete(cases, kill))
    deployed.wait_started_again(rank, num_starts)


@FAULT
def test_a_step_needs_nothing_of_ray(deployed: Deployed) -> None:
    """Requests are answered while all of Ray's processes and the node provider are frozen."""
    cases = everyday_cases(12, SEED)
    rays = {pid for host in deployed.hosts for word in RAY for pid in host.pids(word)}
    assert len(rays) > 6, "a raylet and an actor of each host, and the head"
    try:
        for pid in rays:
            os.kill(pid, signal.SIGSTOP)
        assert not differences(cases, deployed.complete(cases))
    finally:
        for pid in rays:
            os.kill(pid, signal.SIGCONT)
    deployed.wait_whole()


@pytest.mark.promise(
    "its own streams end, no other; if it had the front, its successor finds the open "
    "requests of the other gateways"
)
@FAULT
def test_the_end_of_a_gateway_on_a_node_costs_its_own_streams_alone(deployed: Deployed) -> None:
    cases = everyday_cases(12, SEED)
    host = deployed.host_of("gateway-1")
    url = f"http://{host.address}:8000"
    assert not differences(cases, deployed.complete(cases, url=url))
    num_starts = deployed.server.status().processes["gateway-1"].num_starts
    ended: list[httpx.RemoteProtocolError] = []

    async def kill() -> None:
        async with deployed.held(len(cases)):  # Requests of both gateways.
            os.kill(host.pid_of("gateway-1"), signal.SIGKILL)

    async def ask_and_kill() -> None:
        try:
            await complete_all(url, "hadal-tiny", cases, while_running=kill)
        except httpx.RemoteProtocolError as error:
            ended.append(error)

    assert not differences(cases, deployed.complete(cases, ask_and_kill))
    assert ended
    deployed.wait_started_again("gateway-1", num_starts)
    assert not differences(cases, deployed.complete(cases, url=url))


@FAULT
def test_the_end_of_the_front_costs_no_stream_of_a_gateway_on_a_node(deployed: Deployed) -> None:
    cases = everyday_cases(12, SEED)
    num_starts = deployed.server.status().processes["gateway"].num_starts

    async def kill() -> None:
        async with deployed.held():
            os.kill(deployed.hosts[0].pid_of("gateway"), signal.SIGKILL)

    url = f"http://{deployed.host_of('gateway-1').address}:8000"
    assert not differences(cases, deployed.complete(cases, kill, url))
    deployed.wait_started_again("gateway", num_starts)


@pytest.mark.promise("A node that sends nothing for node_timeout_s (1.5 s) is lost")
@FAULT
def test_a_host_that_loses_power_costs_no_token(deployed: Deployed) -> None:
    cases = everyday_cases(12, SEED)
    leads, ranks = deployed.host_of("decode-0"), ("decode-0.0", "decode-0.1")
    [follows] = [host for host in map(deployed.host_of, ranks) if host is not leads]

    lost = next(rank for rank in ranks if deployed.host_of(rank) is follows)
    num_starts = deployed.server.status().processes[lost].num_starts

    async def kill() -> None:
        async with deployed.held():
            follows.kill()

    assert not differences(cases, deployed.complete(cases, kill))
    follows.boot()
    deployed.hosts.start_ray_node(follows)
    deployed.wait_started_again(lost, num_starts)
    assert not differences(cases, deployed.complete(cases))


@pytest.mark.promise(
    "another leader on another node of the unit takes the ranks over, with weights and KV"
)
@FAULT
def test_a_leader_that_is_cut_off_is_followed_by_another_and_not_heard_again(
    deployed: Deployed,
) -> None:
    cases = everyday_cases(12, SEED)
    leads = deployed.host_of("decode-0")
    num_starts = deployed.server.status().processes["decode-0"].num_starts

    async def cut() -> None:
        async with deployed.held():
            leads.unplug()

        def is_followed() -> bool:
            return deployed.server.status().processes["decode-0"].num_starts > num_starts

        await wait_for(is_followed, "another leader is started")
        leads.plug()

    assert not differences(cases, deployed.complete(cases, cut))
    deployed.wait_started_again("decode-0", num_starts)
    assert not differences(cases, deployed.complete(cases))


@FAULT
def test_a_slow_link_costs_no_token_and_its_host_rests(deployed: Deployed) -> None:
    cases = everyday_cases(12, SEED)
    leads, ranks = deployed.host_of("decode-0"), ("decode-0.0", "decode-0.1")
    [slow] = [rank for rank in ranks if deployed.host_of(rank) is not leads]
    begun = len(deployed.server.log())

    def is_told(words: str) -> bool:
        return words in deployed.server.log()[begun:]

    host = deployed.host_of(slow)
    with host.slow_link(0.05, 0.0):

        def is_resting() -> bool:
            assert not differences(cases, deployed.complete(cases))
            return is_told(f"is on {host.address}, for which the others wait")

        deployed.wait_until(is_resting, "the slow host rests")
        assert not differences(cases, deployed.complete(cases))
    begun += deployed.server.log()[begun:].index("that host rests for")
    deployed.wait_until(lambda: is_told("with ranks 0, 1"), "the unit has taken its host back")
    assert not differences(cases, deployed.complete(cases))


@pytest.mark.full
def test_a_rollout_costs_no_token(deployed: Deployed) -> None:
    cases = everyday_cases(40, SEED)
    server = deployed.server
    before = {name: one.num_starts for name, one in server.status().processes.items()}
    units = [name for name in before if name.startswith(("prefill", "decode"))]
    rolling: list[Any] = []

    async def roll_out() -> None:
        async with deployed.held():
            command = ["hadal", "rollout", "--run-folder", str(server.folder)]
            rolling.append(deployed.hosts[0].start("rollout", command))

    assert not differences(cases, deployed.complete(cases, roll_out))
    while rolling[0].poll() is None:
        deployed.keep_ray_nodes()
        assert not differences(cases, deployed.complete(cases))
    assert rolling[0].wait(DEADLINE_S) == 0, deployed.hosts[0].log_path("rollout").read_text()
    after = {name: one.num_starts for name, one in server.status().processes.items()}
    assert {name: after[name] - before[name] for name in units} == dict.fromkeys(units, 1)


@pytest.mark.promise("takes the running units over with their streams and starts nothing anew")
@FAULT
def test_a_supervisor_that_is_killed_is_followed_by_one_that_starts_nothing_anew(
    deployed: Deployed,
) -> None:
    """The kill also ends the supervisor's children, the front among them. The gateway on another host
    keeps its streams.
    """
    cases = everyday_cases(12, SEED)
    far = [*OURS, "gateway-1"]
    before = {name: (deployed.host_of(name), deployed.pid_of(name)) for name in far}
    url = f"http://{deployed.host_of('gateway-1').address}:8000"

    async def kill_and_follow() -> None:
        async with deployed.held():
            deployed.hosts[0].signal(deployed.name, signal.SIGKILL)
            deployed.server.process.wait(DEADLINE_S)
            folder = deployed.server.folder.parent
            deployed.server = deployed.hosts.serve(folder, "next", **THREE_HOSTS)
            deployed.name = "next"
            await asyncio.to_thread(deployed.hosts[0].call, deployed.server.wait_ready)

    assert not differences(cases, deployed.complete(cases, kill_and_follow, url))
    deployed.wait_whole()
    assert {name: (deployed.host_of(name), deployed.pid_of(name)) for name in far} == before
    assert not differences(cases, deployed.complete(cases))


@pytest.mark.promise(
    "If nodes are missing after place_timeout_s, the start ends with an error that "
    "says what the cluster has."
)
@FAULT
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
        assert second.server.process.wait(DEADLINE_S) == EXIT_CONFIG
    assert "nodes 1-2 not found within 3 s" in second.server.log()
    assert "1 CPU are needed free each, and the cluster has 1 x 2 CPU, 2 x 4 CPU" in (
        second.server.log()
    )


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
        hosts[3].call(cut_off.server.wait_ready)
        cut_off.wait_whole()
        before = {name: (cut_off.host_of(name), cut_off.pid_of(name)) for name in OURS}
        hosts[3].unplug()
        next_one = Deployed(hosts, hosts.serve(second, "second", 0, cluster=cluster, **tables))
        hosts[0].call(next_one.server.wait_ready)

        async def plug() -> None:
            async with next_one.held():
                hosts[3].plug()

        assert not differences(cases, next_one.complete(cases, plug))

        def has_ended() -> bool:
            cut_off.keep_ray_nodes()  # Ray gives up a node that is cut off for long.
            return cut_off.server.process.poll() is not None

        wait_until(has_ended, "the first supervisor ends")
        code = cut_off.server.process.poll()
        assert code == EXIT_GAVE_UP, cut_off.server.log()[-3000:]
        assert "another `hadal serve` has taken over" in cut_off.server.log()
        next_one.wait_whole()
        assert {name: (next_one.host_of(name), next_one.pid_of(name)) for name in OURS} == before
        assert not differences(cases, next_one.complete(cases))
        hosts[0].signal("second", signal.SIGTERM)
        assert next_one.server.process.wait(DEADLINE_S) == 0


# ---- at full size: seven hosts ----


@pytest.fixture(scope="module")
def spread() -> Iterator[Callable[..., Any]]:
    """Deployments on seven hosts: one for head and supervisor, two for a prefill unit of two ranks,
    four for a decode unit of four.
    """
    with Hosts(7) as hosts:
        hosts.start_ray(0, *[1] * 6)

        @contextlib.contextmanager
        def start(**tables: Any) -> Iterator[Deployed]:
            units = {"prefill": {**SMALL, "ranks": 2}, "decode": {**SMALL, "ranks": 4}}
            with tempfile.TemporaryDirectory(prefix="hadal-h-") as folder:
                deployed = serve(hosts, Path(folder), **units, **tables)
                try:
                    hosts[0].call(deployed.server.wait_ready)
                    deployed.wait_whole()
                    yield deployed
                finally:
                    hosts[0].signal("serve", signal.SIGTERM)
                    deployed.server.process.wait(DEADLINE_S)
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
    """Kill all processes of a host at once; boot it again after at most 5 s."""
    await asyncio.to_thread(host.kill)
    await asyncio.sleep(rng.uniform(0.0, 5.0))
    await asyncio.to_thread(host.boot)
    await asyncio.to_thread(hosts.start_ray_node, host)


async def ray_node(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Kill a host's Ray node with everything it runs, then start it again."""
    await asyncio.to_thread(host.kill_ray)
    await asyncio.sleep(rng.uniform(0.0, 5.0))
    await asyncio.to_thread(hosts.start_ray_node, host)


async def ray_head(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Kill Ray's head, then start it again after 2 to 15 s."""
    await asyncio.to_thread(hosts[0].kill_ray)
    await asyncio.sleep(rng.uniform(2.0, 15.0))
    await asyncio.to_thread(hosts.start_head)


async def cut(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Take a host's link down for 1 to 30 s."""
    host.unplug()
    await asyncio.sleep(rng.choice((1.0, 5.0, 30.0)))
    host.plug()


async def flapping(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Take a host's link down for a tenth of the time, which loses about a tenth of its packets."""
    for _ in range(50):
        host.unplug()
        await asyncio.sleep(0.02)
        host.plug()
        await asyncio.sleep(0.18)


async def lossy(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Lose a tenth of a host's packets in both directions."""
    with host.slow_link(0.0, 0.1):
        await asyncio.sleep(10.0)


async def slow(hosts: Hosts, host: Host, rng: random.Random) -> None:
    """Limit a host's outgoing traffic to 2 Mbit/s."""
    host.shape("tbf", "rate", "2mbit", "burst", "32kb", "latency", "400ms")
    await asyncio.sleep(10.0)
    host.shape("pfifo_fast")


FAULTS = (power, ray_node, ray_head, cut, cut, flapping, lossy, slow)
NUM_ROUNDS = int(os.environ.get("HADAL_ROUNDS", "40"))


@pytest.mark.full
def test_rounds_of_faults(spread: Callable[..., Any]) -> None:
    """One fault per round while answers stream: equal texts, none lost, and full recovery."""
    rng = random.Random(SEED)
    with spread() as deployed:
        for number in range(NUM_ROUNDS):
            fault, host = rng.choice(FAULTS), rng.choice(deployed.hosts.hosts[1:])
            cases = make_cases(24, SEED + number)
            num_steps = rng.randrange(40)
            began_s = unix_now()

            async def disturb(
                fault: Any = fault, host: Host = host, number: int = number, after: int = num_steps
            ) -> None:
                async with deployed.held(after=after):
                    pass
                await fault(deployed.hosts, host, random.Random(number))

            outputs = deployed.complete(cases, disturb)
            answered_s = unix_now() - began_s
            assert not differences(cases, outputs), (number, fault.__name__, host.number)
            deployed.wait_whole()
            told = f"answered {answered_s:.1f}, whole {unix_now() - began_s:.1f} s"
            print(number, fault.__name__, host.number, told, flush=True)
        assert deployed.blocks_used() == 0, "nothing runs"
        names = sum((each.names() for each in deployed.hosts), Counter())
        processes = deployed.server.status().processes
        units = [name for name in processes if name.startswith(("prefill", "decode"))]
        assert {name: names[name] for name in units} == dict.fromkeys(units, 1)
        ranks = [name for name in units if "." in name]
        assert sum(len(each.pools()) for each in deployed.hosts) == len(ranks)
        log = deployed.server.log()
    print("nodes were lost after", *re.findall(r"has sent no report for ([\d.]+) s", log))
