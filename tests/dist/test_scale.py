"""The published fleet at its peak on a Ray cluster with as many nodes, all raylets on one host. The
provider finds a group of whole nodes for every unit, and gives all of them back.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hadal.core.config import ClusterConfig, FleetConfig, read_deployment
from hadal.core.messages.base import NODE_PROVIDER, SUPERVISOR
from hadal.core.messages.nodes import Address, KeepNodes, NodeNews, NodesKept
from hadal.runtime.addresses import write_address
from hadal.runtime.process.process import Run, write_run
from hadal.runtime.topology import place_units
from hadal.runtime.wire import ZmqWire
from hadal.runtime.wire_sockets import Network
from tests.dist.fake_nodes import GPUS, ClusterState
from tests.dist.hosts import NEEDS_HOSTS, PORT, ROOT, Host, Hosts
from tests.dist.light_provider import NUM_AGENTS
from tests.waiting import unix_now, wait_until

pytestmark = [NEEDS_HOSTS, pytest.mark.full, pytest.mark.timeout(3000)]

PREFILL, DECODE = map(int, os.environ.get("HADAL_UNITS", "29,9").split(","))
"""Numbers of prefill and decode units at the peak of 278 nodes; HADAL_UNITS=3,1 asks for 30 nodes."""
LIGHT = int(os.environ.get(NUM_AGENTS, "30"))
"""Number of nodes that get an agent."""
SECRET = bytes(range(32))
START_S, PLACE_S = 1200.0, 600.0
"""Timeouts for starts and placement. They are long, because hundreds of nodes share one host's cores."""
PATIENT = {"RAY_worker_register_timeout_seconds": "600"}
"""Environment of Ray, since all actors start at once on one host's cores."""


def state(host: Host) -> ClusterState | None:
    """Return the cluster's last state; None before it is up."""
    lines = [line for line in host.log("nodes").splitlines() if line.startswith("{")]
    return msgspec.json.decode(lines[-1], type=ClusterState) if lines else None


def wait_for(host: Host, is_so: Callable[[ClusterState], bool], what: str) -> ClusterState:
    def found() -> ClusterState | None:
        assert host.started["nodes"].poll() is None, host.log("nodes")[-3000:]
        now = state(host)
        return now if now is not None and is_so(now) else None

    seen = wait_until(found, what, START_S)
    assert isinstance(seen, ClusterState)
    return seen


class Asking:
    """Stand-in for the supervisor, with the part that node provider and agents use."""

    def __init__(self, host: Host, folder: Path, run: Run) -> None:
        network = Network(host.address, SECRET)
        self._wire = host.call(lambda: ZmqWire(SUPERVISOR, folder, epoch_number=1, network=network))
        write_run(folder, run)
        write_address(folder, SUPERVISOR, Address(1, self._wire.endpoint))
        self.found: tuple[tuple[int, ...], ...] | None = None
        """Groups in the node provider's last report."""
        self.agents: set[int] = set()
        """Nodes that have sent a message."""

    def have(self, groups: tuple[tuple[int, ...], ...]) -> None:
        """Ask for these groups repeatedly, like the supervisor, until the node provider has found them."""
        wanted = set(groups)

        def are_found() -> bool:
            self._wire.send(NODE_PROVIDER, KeepNodes(groups))
            self._hear()
            return self.found is not None and set(self.found) == wanted

        self.found = None
        wait_until(are_found, f"{len(groups)} groups are found", PLACE_S)

    def hear_agents(self, num_agents: int) -> None:
        """Wait until this number of nodes has sent a message."""

        def have_spoken() -> bool:
            self._hear()
            return len(self.agents) >= num_agents

        wait_until(have_spoken, f"{num_agents} agents speak", PLACE_S)

    def close(self) -> None:
        self._wire.close()

    def _hear(self) -> None:
        for message in self._wire.receive(1.0):
            if isinstance(message, NodesKept):
                assert not message.complaint
                self.found = message.found
            elif isinstance(message, NodeNews):
                assert message.node not in self.agents
                self.agents.add(message.node)


@pytest.mark.promise("waits for the nodes of each unit, all of them or none")
def test_every_group_of_the_published_peak_is_placed_whole_and_given_back() -> None:
    deployment = msgspec.structs.replace(
        read_deployment(ROOT / "configs" / "v3_ep32_ep144.toml"),
        fleet=FleetConfig(mode="auto", prefill_max=PREFILL, decode_max=DECODE),
    )
    groups = tuple(unit.nodes for unit in place_units(deployment))
    num_nodes = sum(map(len, groups))
    with Hosts(1) as hosts, tempfile.TemporaryDirectory(prefix="hadal-s-") as name:
        host, folder = hosts[0], Path(name)
        began_s = unix_now()
        arguments = [host.address, str(PORT), str(num_nodes)]
        host.start("nodes", [sys.executable, "-m", "tests.dist.fake_nodes", *arguments], PATIENT)
        wait_for(host, lambda now: now.num_free_gpus == num_nodes * GPUS, "all nodes are there")
        print(f"{num_nodes} nodes after {unix_now() - began_s:.0f} s", flush=True)

        address = f"{host.address}:{PORT}"
        cluster = ClusterConfig(
            on="ray",
            name="scale",
            address=address,
            volatile_head="allow",
            open_ray="allow",
            place_timeout_s=PLACE_S,
        )
        deployment = msgspec.structs.replace(deployment, cluster=cluster)
        asking = Asking(host, folder, Run("r0", deployment, address=host.address, secret=SECRET))
        command = [
            sys.executable,
            "-m",
            "tests.dist.light_provider",
            "--folder",
            name,
            "--epoch-number",
            "1",
        ]
        host.start("provider", command, {NUM_AGENTS: str(LIGHT)})
        try:
            asking.have(())
            began_s = unix_now()
            asking.have(groups)
            print(f"{len(groups)} groups after {unix_now() - began_s:.1f} s", flush=True)
            provided = wait_for(host, lambda now: now.num_free_gpus == 0, "no GPU is left")
            named = {f"r0-{'-'.join(map(str, group))}": len(group) for group in groups}
            assert {name: len(nodes) for name, nodes in provided.groups.items()} == named
            every = [node for nodes in provided.groups.values() for node in nodes]
            assert len(set(every)) == len(every) == num_nodes, "no node is in two groups"
            asking.hear_agents(LIGHT)
            print(f"{LIGHT} agents after {unix_now() - began_s:.1f} s", flush=True)
            assert asking.agents == set(range(LIGHT))

            asking.have(())
            free = num_nodes * GPUS
            wait_for(
                host, lambda now: not now.groups and now.num_free_gpus == free, "all is given back"
            )
        finally:
            print(host.log("provider")[-3000:])
            asking.close()
