"""The nodes of a cluster, as the supervisor uses them: starts processes on them through their
agents, and makes the addresses of all known where they are needed.

Which nodes are there and what they are to run is in roles/nodes; how agents got onto them is the
business of whoever lends the nodes (runtime/ray_cluster).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

from hadal.core.config import Deployment
from hadal.core.messages import (
    Address,
    NodeNews,
    Printed,
    ProcessOrder,
    Suspect,
)
from hadal.roles.nodes import FarProcess, NodePhase, Nodes, agent_name
from hadal.runtime.agent import Joining
from hadal.runtime.process.child import NodeStatus
from hadal.runtime.topology import (
    ProcessPlan,
    gateway_names,
    num_nodes,
    place_units,
    wire_name,
)
from hadal.runtime.wire import ZmqWire, address_path, read_address, write_address

log = logging.getLogger("hadal.nodes")

_PUMP_S = 0.05


class _Output:
    """Lines of a process elsewhere, for a thread that reads them like a pipe."""

    def __init__(self) -> None:
        self._is_closed = False
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def put(self, line: bytes) -> None:
        """The next line."""
        self._lines.put(line)

    def close(self) -> None:
        """There are no more. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._lines.put(None)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._lines.get, None)

    def __enter__(self) -> _Output:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is held."""


class Elsewhere:
    """A process of a node, with as much of `subprocess.Popen` as a Child asks for."""

    def __init__(self, cluster: LiveNodes, node: int, process: FarProcess) -> None:
        self.stdout = _Output()
        self.node = node
        self.process = process
        self._cluster = cluster

    @property
    def pid(self) -> int:
        """On its node; 0 until that said it."""
        return self.process.news.pid

    def poll(self) -> int | None:
        return self.process.code

    def wait(self, timeout: float) -> int:
        """Hear its node meanwhile: nobody else does while the supervisor waits."""
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


class Lender(Protocol):
    """Whoever lends nodes, and replaces those that are gone (runtime/ray_cluster)."""

    address: str
    """Of this host, where the nodes reach it."""

    def begin(self, joining: Joining) -> None:
        """Agents are to join like this, but for their number and address."""

    def keep(self, groups: frozenset[tuple[int, ...]]) -> None:
        """Have an agent on every node of these groups, soon, and on no other. The nodes of a group
        are had together or not at all.
        """

    def complaint(self) -> str:
        """Why nodes that are wanted are not there; empty while they are, or may soon be."""

    def close(self) -> None:
        """Give all nodes back. Idempotent."""


class LiveNodes:
    """All nodes but the supervisor's own, which runs the gateways."""

    def __init__(
        self,
        deployment: Deployment,
        plans: Iterable[ProcessPlan],
        folder: Path,
        wire: ZmqWire,
        versions: Mapping[str, str],
        lender: Lender,
    ) -> None:
        self._lender = lender
        units = place_units(deployment)
        self._groups = dict.fromkeys(unit.nodes for unit in units)
        """Each the nodes of a large unit, or one that small units share."""
        self._kept: frozenset[tuple[int, ...]] = frozenset()
        self._complaint = ""
        self._rank_to_node = {plan.name: plan.node for plan in plans}
        self._names_here = [wire_name(name) for name in gateway_names(deployment)]
        self._versions = versions
        self._unfit: set[int] = set()
        """Nodes on which other versions are installed."""
        self._folder = folder
        self._wire = wire
        self._nodes = Nodes(num_nodes(units), deployment.cluster.node_timeout_s, wire.send)
        self._processes: dict[str, Elsewhere] = {}
        """By name, the last life of each."""
        self._shown: tuple[NodeStatus, ...] = ()
        self._known: dict[str, Address] = {}
        """Addresses that are in the folder."""

    def status(self) -> tuple[NodeStatus, ...]:
        """Which nodes are there."""
        return tuple(
            NodeStatus(node.number, node.phase.value, node.host) for node in self._nodes.nodes
        )

    def host_of(self, name: str) -> str:
        """The host that a process was started on last; empty if on none of the nodes."""
        elsewhere = self._processes.get(name)
        return self._nodes.nodes[elsewhere.node].host if elsewhere is not None else ""

    def hear(self, now_s: float, message: NodeNews | Printed) -> None:
        """An agent spoke."""
        if isinstance(message, Printed):
            elsewhere = self._processes.get(message.process)
            if elsewhere is not None and (elsewhere.node, elsewhere.process.order.life) == (
                message.node,
                message.life,
            ):
                for line in message.lines:
                    elsewhere.stdout.put(line)
            return
        agent = agent_name(message.node, message.boot)
        write_address(self._folder, agent, message.agent)
        node = self._nodes.nodes[message.node]
        was = node.phase
        if self._nodes.heard(now_s, message):
            self._look_at_versions(message)
            log.info("node %d is %s", message.node, message.host)
        elif was is NodePhase.LOST and node.phase is NodePhase.UP:
            log.info("node %d (%s) is heard again", message.node, message.host)
        self._close_outputs()

    def tick(self, now_s: float) -> bool:
        """Time passed: to be called several times a second, once all that was said is heard. True
        if nodes came or went since the last call.
        """
        for node in self._nodes.tick(now_s):
            log.error(
                "node %d (%s) has said nothing for %.1f s: it is lost with all that ran there",
                node.number,
                node.host,
                now_s - node.heard_s,
            )
        self._close_outputs()
        self._nodes.listen_here(self._addresses_here())
        self._write_addresses()
        self._nodes.tell_addresses(now_s)
        shown, self._shown = self._shown, self.status()
        return shown != self._shown

    def keep(self, nodes: Collection[int]) -> None:
        """Have these nodes, and give back all others as far as nobody they come with is needed."""
        kept = frozenset(group for group in self._groups if not set(group).isdisjoint(nodes))
        if kept == self._kept:
            return
        for group in self._kept - kept:
            for number in group:
                self._nodes.release(number)
        self._kept = kept
        self._lender.keep(kept)

    def complaint(self) -> str:
        """Why nodes are not there, if that has changed since it was asked last; else empty."""
        said, self._complaint = self._complaint, self._lender.complaint()
        return self._complaint if bool(said) != bool(self._complaint) else ""

    def node_for(self, plan: ProcessPlan) -> int | None:
        """The node that a process is to run on now: its own or, where that is lost, a leader with
        any of its ranks; None while none of them is there.
        """
        nodes = [plan.node]
        if self._nodes.nodes[plan.node].phase is NodePhase.LOST:
            nodes += [self._rank_to_node[name] for name in plan.ready_after]
        return next((number for number in nodes if self._is_up(number)), None)

    def start(
        self, plan: ProcessPlan, node: int, arguments: tuple[str, ...], life: int
    ) -> Elsewhere:
        """Have a node start a process."""
        order = ProcessOrder(plan.name, life, arguments, plan.threads)
        process = self._nodes.run(time.monotonic(), node, order)
        elsewhere = self._processes[plan.name] = Elsewhere(self, node, process)
        return elsewhere

    def why_lost(self, name: str) -> str:
        """Why a process is over, where no exit code says it; empty if one does, or it runs."""
        elsewhere = self._processes.get(name)
        return elsewhere.process.reason if elsewhere is not None else ""

    def waited_s(self, name: str) -> float:
        """How long the threads of a process were ready to run and had no processor."""
        elsewhere = self._processes.get(name)
        return elsewhere.process.news.waited_s if elsewhere is not None else 0.0

    def signal(self, elsewhere: Elsewhere, number: signal.Signals) -> None:
        """Have a process sent a signal, if it runs."""
        self._nodes.signal(time.monotonic(), elsewhere.node, elsewhere.process, number)

    def see(self, name: str) -> None:
        """Have a node tell a judge how a process fares."""
        elsewhere = self._processes.get(name)
        if elsewhere is not None:
            self._wire.send(self._nodes.nodes[elsewhere.node].agent, Suspect(name))

    def pump(self, timeout_s: float) -> None:
        """Hear the agents alone, as when the run ends."""
        for message in self._wire.receive(timeout_s):
            if isinstance(message, NodeNews | Printed):
                self.hear(time.monotonic(), message)
        self._nodes.tick(time.monotonic())

    def close(self) -> None:
        """Let the agents go."""
        self._nodes.dismiss()
        for elsewhere in self._processes.values():
            elsewhere.stdout.close()

    def _is_up(self, number: int) -> bool:
        return self._nodes.nodes[number].phase is NodePhase.UP and number not in self._unfit

    def _look_at_versions(self, news: NodeNews) -> None:
        """Nothing is started on a node that would compute something else."""
        other = [
            f"{name} {news.versions.get(name, 'not')} there and {here} here"
            for name, here in self._versions.items()
            if news.versions.get(name) != here
        ]
        self._unfit.discard(news.node)
        if other:
            self._unfit.add(news.node)
            log.error(
                "node %d (%s) is not used: %s. Install the same on all nodes.",
                news.node,
                news.host,
                ", ".join(other),
            )

    def _close_outputs(self) -> None:
        for elsewhere in self._processes.values():
            if elsewhere.process.code is not None:
                elsewhere.stdout.close()

    def _addresses_here(self) -> dict[str, Address]:
        """Where the gateways listen, who are on this host."""
        found = {}
        for name in self._names_here:
            with contextlib.suppress(OSError):
                found[name] = read_address(address_path(self._folder, name))
        return found

    def _write_addresses(self) -> None:
        """Make what listens elsewhere known to the processes of this host."""
        addresses = self._nodes.addresses()
        for name in self._known.keys() - addresses.keys():
            address_path(self._folder, name).unlink(missing_ok=True)
        for name, address in addresses.items():
            if self._known.get(name) != address:
                write_address(self._folder, name, address)
        self._known = addresses
