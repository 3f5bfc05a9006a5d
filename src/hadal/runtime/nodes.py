"""Nodes of a cluster, for the supervisor: starts processes on them through their agents, and
distributes the processes' addresses.

roles/nodes tracks which nodes are up and what they should run. The node provider gets
agents onto the nodes: runtime/provided_nodes sends it requests, runtime/ray_cluster implements it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from hadal.core.config import ClusterConfig, Deployment
from hadal.core.errors import ConfigError
from hadal.core.handshake import is_near
from hadal.core.messages.nodes import (
    Address,
    NodeNews,
    NodeOrders,
    NodesKept,
    Printed,
    ProcessOrder,
)
from hadal.core.messages.units import Suspect
from hadal.roles.nodes import FarProcess, NodePhase, Nodes, agent_name
from hadal.runtime.addresses import address_path, read_address, write_address
from hadal.runtime.process.process import Run
from hadal.runtime.process.status import NodeStatus
from hadal.runtime.provided_nodes import ProvidedNodes
from hadal.runtime.topology import ProcessPlan, gateways_here, node_groups, wire_name
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.nodes")

_RAY_ADDRESS = Path("/tmp/ray/ray_current_cluster")
"""File in which `ray start` stores the head's address."""
_MAX_LINES = 10_000
"""Unread output lines kept per process; further ones are dropped."""
_PUMP_S = 0.05
"""Longest wait for one batch of agents' messages while the run ends."""
_ADOPT_S = 5.0
"""Time for agents to contact a new supervisor, from the node provider's first report on."""


class _RemoteLines:
    """Output lines of a remote process, readable by a thread like a pipe."""

    def __init__(self) -> None:
        self._is_closed = False
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def put(self, line: bytes) -> None:
        """Add the next line; drop it if the reader is far behind, as at a stopped terminal."""
        if self._lines.qsize() < _MAX_LINES:
            self._lines.put(line)

    def close(self) -> None:
        """End the output. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._lines.put(None)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._lines.get, None)

    def __enter__(self) -> _RemoteLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing: there is nothing to release."""


class Elsewhere:
    """Process on a node, with the part of `subprocess.Popen` that a Child needs."""

    def __init__(self, cluster: LiveNodes, node: int, process: FarProcess) -> None:
        self.stdout = _RemoteLines()
        self.node = node
        self.process = process
        self._cluster = cluster

    @property
    def pid(self) -> int:
        """Return the process id on its node; 0 until the node reported it."""
        return self.process.news.pid

    def poll(self) -> int | None:
        return self.process.code

    def wait(self, timeout: float) -> int:
        """Wait for the end. Receives the agents' messages meanwhile, because nothing else does
        while the supervisor waits.
        """
        until_s = time.monotonic() + timeout
        while self.process.code is None and time.monotonic() < until_s:
            self._cluster.pump(min(_PUMP_S, timeout))
        if self.process.code is None:
            raise subprocess.TimeoutExpired(self.process.order.name, timeout)
        return self.process.code

    def send_signal(self, number: signal.Signals) -> None:
        self._cluster.signal(self, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Fitness:
    """Versions that affect the nodes' results; they must be equal on all nodes."""

    def __init__(self, versions: Mapping[str, str]) -> None:
        self._versions = dict(versions)
        self._unfit: dict[int, str] = {}
        """Node -> why its results would differ."""

    def look(self, news: NodeNews) -> None:
        """Compare a node's versions with the supervisor's, and its CPU with the first node's. A
        node that differs starts no process.
        """
        self._versions.setdefault("cpu", news.versions.get("cpu", ""))
        other = [
            f"{name} {news.versions.get(name, 'none')!r} there and {expected!r} elsewhere"
            for name, expected in self._versions.items()
            if news.versions.get(name) != expected
        ]
        self._unfit.pop(news.node, None)
        if other:
            self._unfit[news.node] = f"{', '.join(other)}; all nodes must have the same versions"

    def why_unfit(self, number: int) -> str:
        """Return why a node is not used; empty if it may be."""
        return self._unfit.get(number, "")


class _Addresses:
    """Addresses, in the run's folder, of agents and of processes elsewhere."""

    def __init__(self, folder: Path, deployment: Deployment) -> None:
        self._folder = folder
        self._lease_s = deployment.cluster.lease_s
        self._names_here = [wire_name(name) for name in gateways_here(deployment)]
        self._agents: dict[str, float] = {}
        """Agent's name -> time of its last message; replaced agents are ordered to end."""
        self._known: dict[str, Address] = {}
        """Addresses of processes elsewhere, as the folder has them."""

    def agent_spoke(self, now_s: float, agent: str, address: Address) -> None:
        """Record an agent's address and the time of its message."""
        if agent not in self._agents:
            write_address(self._folder, agent, address)
        self._agents[agent] = now_s

    def forget_agents(self, now_s: float, current: Collection[str]) -> list[str]:
        """Forget replaced agents without a message for `lease_s`: they have ended. Return names."""
        forgotten = [
            name
            for name, heard_s in self._agents.items()
            if name not in current and now_s - heard_s > self._lease_s
        ]
        for name in forgotten:
            del self._agents[name]
            address_path(self._folder, name).unlink(missing_ok=True)
        return forgotten

    def here(self) -> dict[str, Address]:
        """Return the addresses of this host's gateways."""
        found = {}
        for name in self._names_here:
            with contextlib.suppress(OSError):
                found[name] = read_address(address_path(self._folder, name))
        return found

    def write(self, addresses: dict[str, Address]) -> None:
        """Write the addresses of processes elsewhere for the processes of this host."""
        for name in self._known.keys() - addresses.keys():
            address_path(self._folder, name).unlink(missing_ok=True)
        for name, address in addresses.items():
            if self._known.get(name) != address:
                write_address(self._folder, name, address)
        self._known = addresses


class LiveNodes:
    """All nodes except the supervisor's own host."""

    def __init__(
        self,
        deployment: Deployment,
        plans: Iterable[ProcessPlan],
        folder: Path,
        wire: ZmqWire,
        versions: Mapping[str, str],
        *,
        adopts: bool = False,
    ) -> None:
        """`adopts`: the nodes run processes that another supervisor left."""
        self.is_adopting = adopts
        """True while the running processes are unknown: nothing is started, no node is released."""
        self._adopt_until_s = math.inf
        self._adopted: list[Elsewhere] = []
        groups = node_groups(deployment)
        self._provided = ProvidedNodes(groups, wire, adopts=adopts)
        self._timeout_s = deployment.cluster.place_timeout_s
        self._name_to_node = {plan.name: plan.node for plan in plans if plan.node is not None}
        self._fitness = _Fitness(versions)
        self._addresses = _Addresses(folder, deployment)
        self._wire = wire
        self._nodes = Nodes(sum(map(len, groups)), deployment.cluster.node_timeout_s)
        self._processes: dict[str, Elsewhere] = {}
        """Process name -> process of its latest epoch."""
        self._shown: tuple[str, tuple[NodeStatus, ...]] = "", ()

    @property
    def wrong(self) -> str:
        """Complaint for an operator about provided nodes; empty if there is none."""
        return self._provided.wrong

    def status(self) -> tuple[NodeStatus, ...]:
        """Return each node's state."""
        return tuple(
            NodeStatus(node.number, node.phase.value, node.host) for node in self._nodes.nodes
        )

    def host_of(self, name: str) -> str:
        """Return the host on which a process was last started; empty if on none of the nodes."""
        elsewhere = self._processes.get(name)
        return self._nodes.nodes[elsewhere.node].host if elsewhere is not None else ""

    def handle(self, now_s: float, message: NodeNews | Printed | NodesKept) -> bool:
        """Handle a message of an agent or the node provider. Return True if the supervisor should act."""
        if isinstance(message, NodesKept):
            self._provided.handle(now_s, message)
            self._adopt_until_s = min(self._adopt_until_s, now_s + _ADOPT_S)
            return False
        if isinstance(message, Printed):
            elsewhere = self._processes.get(message.process)
            if elsewhere is not None and (elsewhere.node, elsewhere.process.order.epoch_number) == (
                message.node,
                message.epoch_number,
            ):
                for line in message.lines:
                    elsewhere.stdout.put(line)
            return False
        if message.node >= len(self._nodes.nodes):
            return False
        agent = agent_name(message.node, message.boot)
        self._addresses.agent_spoke(now_s, agent, message.agent)
        if message.node not in self._provided:
            self._wire.send(agent, NodeOrders((), is_over=True))  # Its node was released.
            return False
        node = self._nodes.nodes[message.node]
        was = node.phase
        if self._nodes.update(now_s, message):
            self._fitness.look(message)
            log.info("node %d is %s", message.node, message.host)
            self._adopt(message.node)
        elif was is NodePhase.LOST and node.phase is NodePhase.UP:
            log.info("node %d (%s) reports again", message.node, message.host)
        for news in message.processes:
            elsewhere = self._processes.get(news.name)
            if news.code is not None and elsewhere is not None and elsewhere.process.news is news:
                elsewhere.stdout.close()
        return self._nodes.has_moved

    def _adopt(self, number: int) -> None:
        """Adopt the processes that a node already runs for an earlier supervisor."""
        for name, process in self._nodes.nodes[number].processes.items():
            before = self._processes.get(name)
            if process.code is None and (before is None or before.process is not process):
                if before is not None:
                    before.stdout.close()
                self._processes[name] = elsewhere = Elsewhere(self, number, process)
                self._adopted.append(elsewhere)

    def take_adopted(self) -> list[Elsewhere]:
        """Return the adopted processes since the last call."""
        adopted, self._adopted = self._adopted, []
        return adopted

    def _is_all_heard(self) -> bool:
        """Return whether the agents of all found nodes have reported."""
        return all(
            self._nodes.nodes[number].phase is not NodePhase.ABSENT
            for number, _ in self._provided.found()
        )

    def tick(self, now_s: float) -> bool:
        """Advance the time. Call several times a second, after handling a batch of messages. Return
        True if `status` or `wrong` changed.
        """
        if self.is_adopting and (
            now_s > self._adopt_until_s or (self._adopt_until_s < math.inf and self._is_all_heard())
        ):
            self.is_adopting = False
        self._provided.tick(now_s)
        for node in self._nodes.tick(now_s):
            log.error(
                "node %d (%s) has sent no report for %.1f s: it is lost, with all its processes",
                node.number,
                node.host,
                now_s - node.heard_s,
            )
            for elsewhere in self._processes.values():
                if elsewhere.node == node.number:
                    elsewhere.stdout.close()
        self._provided.complain(self._why_silent(now_s))
        for name in self._addresses.forget_agents(
            now_s, {node.agent for node in self._nodes.nodes}
        ):
            self._wire.forget(name)
        self._nodes.listen_here(self._addresses.here())
        if self._nodes.has_moved:
            self._addresses.write(self._nodes.addresses())
        if not self.is_adopting:  # Else agents would drop addresses not reported yet.
            self._nodes.tell_addresses(now_s)
        self._send_queued()
        shown, self._shown = self._shown, (self.wrong, self.status())
        return shown != self._shown

    def keep(self, now_s: float, nodes: Collection[int]) -> None:
        """Request these nodes; release groups without any of them. While adopting, do nothing."""
        if self.is_adopting:
            return
        for number in self._provided.keep(now_s, nodes):
            self._nodes.release(number)

    def complaint(self) -> str:
        """Return why nodes are missing, at the first call after they went missing; else empty."""
        return self._provided.complaint()

    def node_for(self, plan: ProcessPlan) -> int | None:
        """Return the node for a process now: its own or, if that is lost and the process is a
        leader, the node of any of its ranks. None if none of them is up.
        """
        nodes = [self._name_to_node[plan.name]]
        if self._nodes.nodes[nodes[0]].phase is NodePhase.LOST:
            nodes += [self._name_to_node[name] for name in plan.ready_after]
        return next((number for number in nodes if self._is_up(number)), None)

    def start(
        self, plan: ProcessPlan, node: int, arguments: tuple[str, ...], epoch_number: int
    ) -> Elsewhere:
        """Start a process on a node."""
        if (before := self._processes.get(plan.name)) is not None:
            before.stdout.close()
        order = ProcessOrder(plan.name, epoch_number, arguments, plan.threads)
        process = self._nodes.run(time.monotonic(), node, order)
        self._send_queued()
        elsewhere = self._processes[plan.name] = Elsewhere(self, node, process)
        return elsewhere

    def renew_code(self) -> None:
        """Have processes started from now on run the code installed on their node."""
        self._nodes.num_rollouts += 1

    def why_lost(self, name: str) -> str:
        """Return why a process has ended if no exit code explains it; else empty."""
        elsewhere = self._processes.get(name)
        return elsewhere.process.reason if elsewhere is not None else ""

    def waited_s(self, name: str) -> float:
        """Return the seconds that a process's threads waited for a processor."""
        elsewhere = self._processes.get(name)
        return elsewhere.process.news.waited_s if elsewhere is not None else 0.0

    def signal(self, elsewhere: Elsewhere, number: signal.Signals) -> None:
        """Send a process a signal, if it runs."""
        self._nodes.signal(time.monotonic(), elsewhere.node, elsewhere.process, number)
        self._send_queued()

    def see(self, name: str) -> None:
        """Have a node report a process's state to its judge (failure detector)."""
        elsewhere = self._processes.get(name)
        if elsewhere is not None:
            self._wire.send(self._nodes.nodes[elsewhere.node].agent, Suspect(name))

    def pump(self, timeout_s: float) -> None:
        """Receive messages while the run ends; handle those of agents and drop all others."""
        for message in self._wire.receive(timeout_s):
            if isinstance(message, NodeNews | Printed):
                self.handle(time.monotonic(), message)
        self._nodes.tick(time.monotonic())
        self._send_queued()

    def close(self) -> None:
        """Order the agents to end, and close all processes' output."""
        self._nodes.dismiss()
        self._send_queued()
        for elsewhere in self._processes.values():
            elsewhere.stdout.close()

    def _send_queued(self) -> None:
        """Send the queued orders; those queued while messages are handled go at the next tick."""
        for send in self._nodes.take_sends():
            self._wire.send(send.to, send.message)

    def _is_up(self, number: int) -> bool:
        return self._nodes.nodes[number].phase is NodePhase.UP and not self._fitness.why_unfit(
            number
        )

    def _why_silent(self, now_s: float) -> str:
        """Return why a found node is unusable; empty if each is usable or may soon be."""
        for number, found_s in self._provided.found():
            node = self._nodes.nodes[number]
            if why := self._fitness.why_unfit(number):
                return f"node {number} ({node.host}) is not used: {why}"
            if node.phase is NodePhase.ABSENT and now_s - found_s > self._timeout_s:
                return (
                    f"no report from the agent of node {number}, {self._timeout_s:g} s after Ray"
                    " found the node. The agent's output is in Ray's logs there"
                )
        return ""


def address_here(cluster: ClusterConfig) -> str:
    """Return this host's address on the route to the cluster, where the nodes can reach it;
    loopback without a cluster. Raises ConfigError.
    """
    if not cluster.spans_hosts:
        return Run.address
    head = cluster.address
    if head == "auto":
        head = os.environ.get("RAY_ADDRESS", "") or _ray_address()
    host, _, port = head.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # Sends nothing (UDP).
            probe.connect((host.strip("[]"), int(port)))
            address = str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cluster.address is {cluster.address!r}, and {head!r} cannot be used ({error}). Give the"
            " address and the port of the Ray head, such as 10.0.0.1:6379."
        ) from error
    if is_near(address):
        raise ConfigError(
            f"cluster.address is {cluster.address!r}, and the Ray head is at {head!r}, a loopback address,"
            " which other hosts cannot reach. Start the head with --node-ip-address and the address"
            " of its network."
        )
    return address


def _ray_address() -> str:
    """Return the address of the head of this host's Ray node; empty if there is none."""
    with contextlib.suppress(OSError):
        return _RAY_ADDRESS.read_text(encoding="utf-8").strip()
    return ""
