"""Units over several hosts, on Ray: the same texts as on one, also while nodes and links fail.

Hosts are network namespaces with a Ray node each (tests/dist/hosts.py).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hadal.runtime.resolve import model_folder
from tests.dist.hosts import NEEDS_HOSTS, PORT, Host, Hosts
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases
from tests.dist.serving import Server, to_toml, wait_until

pytestmark = [NEEDS_HOSTS, pytest.mark.timeout(600 if not FULL else 3600)]

SEED = 17
SMALL = {"threads": 1, "ranks_per_node": 1, "kv_blocks": 96}


@dataclass
class Deployed:
    """A deployment on a cluster, asked from the host that its gateway is on."""

    hosts: Hosts
    server: Server

    def complete(
        self, cases: list[Case], while_running: Callable[[], Awaitable[None]] | None = None
    ) -> list[tuple[int, ...]]:
        """What it answers."""

        async def ask() -> list[tuple[int, ...]]:
            return await complete_all(
                self.server.url, "hadal-tiny", cases, while_running=while_running
            )

        return self.hosts[0].call(lambda: asyncio.run(ask()))

    def host_of(self, process: str) -> Host:
        """The host that a process runs on."""
        name = self.server.status().processes[process].host
        return self.hosts[int(name.removeprefix("host-"))]

    def wait_whole(self, timeout_s: float = 120.0) -> None:
        """Wait until every process is ready."""
        wait_until(lambda: self.server.status().ready, timeout_s, "all processes are ready")


def serve(hosts: Hosts, folder: Path, **tables: Any) -> Deployed:
    """Start `hadal serve` on the first host."""
    config = folder / "deployment.toml"
    fields = {
        "port": 8000,
        "model": str(model_folder("")),
        "cluster": {"on": "ray", "address": f"{hosts[0].address}:{PORT}"},
        **tables,
    }
    config.write_text(to_toml(fields))
    command = ["hadal", "serve", "--config", str(config), "--run-folder", str(folder / "run")]
    process = hosts[0].start("serve", command)
    return Deployed(hosts, Server(process, folder / "run", hosts[0].log_path("serve")))


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    """Prefill on the first of three hosts, and a decode unit of two ranks over the others."""
    with Hosts(3) as hosts, tempfile.TemporaryDirectory(prefix="hadal-h-") as folder:
        hosts.start_ray(1, 2, 2)
        decode = {**SMALL, "ranks": 2, "threads": 2}
        deployed = serve(hosts, Path(folder), prefill=SMALL, decode=decode)
        hosts[0].call(lambda: deployed.server.wait_ready(120))
        deployed.wait_whole()
        yield deployed
        print(deployed.server.log()[-5000:])


def test_the_texts_are_those_of_one_host(deployed: Deployed) -> None:
    cases = everyday_cases(200 if FULL else 12, SEED)
    assert not differences(cases, deployed.complete(cases))


def test_a_host_that_loses_power_costs_no_token(deployed: Deployed) -> None:
    cases = everyday_cases(12, SEED)
    leads, ranks = deployed.host_of("decode-0"), ("decode-0.0", "decode-0.1")
    [follows] = [host for host in map(deployed.host_of, ranks) if host is not leads]

    async def kill() -> None:
        await asyncio.sleep(1.0)
        follows.kill()

    assert not differences(cases, deployed.complete(cases, kill))
    follows.boot()
    deployed.hosts.start_ray_node(follows, 2)
    deployed.wait_whole()
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

    assert not differences(cases, deployed.complete(cases, cut))
    deployed.wait_whole()
    assert not differences(cases, deployed.complete(cases))
