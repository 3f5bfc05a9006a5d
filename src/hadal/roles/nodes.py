"""Nodes of a cluster in the supervisor: their state, the processes that each must run, and the
state of these.

Two timeouts, on purpose. A node is lost if its agent sends nothing for `timeout_s`: its processes
count as ended at once, and its units continue without them. Only the node provider replaces a node,
and it may wait for a minute before, because replacing a node ends processes that may be healthy.

    ABSENT --an agent reports--> UP --silent for timeout_s--> LOST --an agent reports--> UP
    any of them --released--> ABSENT

If an agent's first report lists running processes, an earlier supervisor started them, and they
continue. A node that was only cut off may still run processes that were given up. Every order
therefore names all processes that the node must run, each with its epoch number: an unnamed process
is killed, and a message of an earlier epoch is ignored (runtime/wire). If a second agent reports
for a node, it replaces the first, which is ordered to exit.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from hadal.core.config import AGENT_BEAT_S
from hadal.core.messages.nodes import Address, NodeNews, NodeOrders, ProcessNews, ProcessOrder
from hadal.core.seams import Send
from hadal.roles.suspects import Absence

PERIOD_S = 0.5
"""Longest interval between calls of `Nodes.tick`, seconds."""


class NodePhase(StrEnum):
    ABSENT = "absent"
    UP = "up"
    LOST = "lost"


@dataclass
class FarProcess:
    """Process that a node was ordered to run."""

    order: ProcessOrder
    news: ProcessNews
    reason: str = ""
    """Reason for the process's end, if the supervisor counts it as ended without an exit code."""

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs. A process lost with its node counts as killed."""
        return -signal.SIGKILL if self.reason else self.news.code


class Node:
    """One node, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.phase = NodePhase.ABSENT
        self.news: NodeNews | None = None
        """Latest message of the node's agent; None before the first."""
        self.heard_s = -math.inf
        self.ordered_s = -math.inf
        self.processes: dict[str, FarProcess] = {}
        """Name -> the process in its latest epoch."""
        self.sent_addresses: dict[str, Address] | None = None
        """Addresses last sent to the node's agent; None: none were sent to this agent."""

    @property
    def host(self) -> str:
        """Name of the node's host; empty before an agent reported."""
        return "" if self.news is None else self.news.host

    @property
    def agent(self) -> str:
        """Name of the node's agent on the wire; empty before one reported."""
        return "" if self.news is None else agent_name(self.number, self.news.boot)


def agent_name(node: int, boot: str) -> str:
    """Return the name on the wire of an agent of a node."""
    return f"node-{node}-{boot}"


class Nodes:
    """All nodes. `take_sends` returns the orders for their agents."""

    def __init__(self, num_nodes: int, timeout_s: float) -> None:
        self.nodes = [Node(number) for number in range(num_nodes)]
        self._timeout_s = timeout_s
        self._sends: list[Send] = []
        self._absence = Absence(PERIOD_S)
        self._gone: set[tuple[int, str]] = set()
        """Agents that were dismissed: replaced by another, or their node was released."""
        self._here: dict[str, Address] = {}
        self.num_rollouts = 0
        """Number of rollouts so far, sent in NodeOrders."""
        self.has_moved = True
        """True if addresses, or nodes that need them, may have changed since `tell_addresses`."""

    def take_sends(self) -> list[Send]:
        """Return the orders for agents since the last call, in order."""
        sends, self._sends = self._sends, []
        return sends

    def check(self) -> list[str]:
        """Return problems; empty if no process runs twice, or on a node that is lost."""
        running: dict[str, int] = {}
        problems = []
        for node in self.nodes:
            for name, process in node.processes.items():
                if process.code is not None:
                    continue
                if name in running:
                    problems.append(f"{name} runs on nodes {running[name]} and {node.number}")
                if node.phase is NodePhase.LOST and process.news.pid:
                    problems.append(f"{name} runs on node {node.number}, which is lost")
                running[name] = node.number
        return problems

    def update(self, now_s: float, news: NodeNews) -> bool:
        """Apply an agent's message. Return True for a new agent, which has no orders yet."""
        node = self.nodes[news.node]
        if (node.number, news.boot) in self._gone:
            self._send(agent_name(node.number, news.boot), NodeOrders((), is_over=True))
            return False
        is_new = node.news is None or node.news.boot != news.boot
        if is_new and node.news is not None:
            self._gone.add((node.number, node.news.boot))
            self._send(node.agent, NodeOrders((), is_over=True))
            self._lose(node, "its node's agent was started again")
            node.sent_addresses = None
        self.has_moved |= is_new or node.phase is not NodePhase.UP
        node.news, node.heard_s = news, now_s
        node.phase = NodePhase.UP
        for process in news.processes:
            if is_new and process.code is None:
                self._adopt(node, process)
            known = node.processes.get(process.name)
            if (
                known is not None
                and known.order.epoch_number == process.epoch_number
                and not known.reason
            ):
                self.has_moved |= (known.news.code, known.news.address) != (
                    process.code,
                    process.address,
                )
                known.news = process
        return is_new

    def _adopt(self, node: Node, news: ProcessNews) -> None:
        """Adopt a process of an earlier supervisor, unless this or a later epoch is known."""
        name, epoch_number = news.name, news.epoch_number
        others = [other.processes[name] for other in self.nodes if name in other.processes]
        if any(other.order.epoch_number >= epoch_number for other in others):
            return
        for other in others:
            other.reason = other.reason or f"a newer process of its name runs on node {node.number}"
        # Its arguments are unknown; they matter only to a process to be started.
        node.processes[name] = FarProcess(ProcessOrder(name, epoch_number, (), 0), news)
        self.has_moved = True

    def listen_here(self, name_to_address: Mapping[str, Address]) -> None:
        """Set the addresses of the processes on the supervisor's own host, by their names on the wire."""
        self.has_moved |= self._here != name_to_address
        self._here = dict(name_to_address)

    def addresses(self) -> dict[str, Address]:
        """Return the addresses of the running processes of all nodes, as far as reported."""
        return {
            name: process.news.address
            for node in self.nodes
            for name, process in node.processes.items()
            if process.code is None and process.news.address is not None
        }

    def tell_addresses(self, now_s: float) -> None:
        """Send changed addresses to nodes. A node gets the addresses of all units and gateways, and
        of the ranks of its own units, except those of its own running processes.
        """
        if not self.has_moved:
            return
        self.has_moved = False
        leaders: dict[str, Address] = {}
        unit_to_ranks: dict[str, dict[str, Address]] = {}
        for name, address in (*self.addresses().items(), *self._here.items()):
            unit = unit_of(name)
            of_unit = leaders if unit == name else unit_to_ranks.setdefault(unit, {})
            of_unit[name] = address
        for node in self.nodes:
            wanted = dict(leaders)
            for unit in {unit_of(name) for name in node.processes}:
                wanted |= unit_to_ranks.get(unit, {})
            for name, process in node.processes.items():
                if process.code is None:
                    wanted.pop(name, None)
            if node.phase is NodePhase.UP and wanted != node.sent_addresses:
                self.order(now_s, node, wanted)

    def tick(self, now_s: float) -> list[Node]:
        """Find lost nodes and repeat orders. To be called at least every PERIOD_S, after all
        received messages are applied. Return the nodes found lost by this call.
        """
        missed_s = self._absence.called(now_s)
        lost = []
        for node in self.nodes:
            node.heard_s = min(now_s, node.heard_s + missed_s)
            if node.phase is NodePhase.UP and now_s - node.heard_s > self._timeout_s:
                node.phase = NodePhase.LOST
                self._lose(node, f"its node has sent no report for {self._timeout_s:g} s")
                lost.append(node)
            if node.phase is not NodePhase.ABSENT and now_s - node.ordered_s >= AGENT_BEAT_S:
                self.order(now_s, node)
        return lost

    def run(self, now_s: float, number: int, order: ProcessOrder) -> FarProcess:
        """Order a node to run a process, under a name that no running process there has."""
        node = self.nodes[number]
        process = FarProcess(order, ProcessNews(order.name, order.epoch_number, 0))
        node.processes[order.name] = process
        self.has_moved = True
        self.order(now_s, node)
        return process

    def signal(self, now_s: float, number: int, process: FarProcess, code: int) -> None:
        """Order a node to send a process a signal, unless the process has ended."""
        if process.code is not None:
            return
        name, order = process.order.name, process.order
        process.order = ProcessOrder(
            name,
            order.epoch_number,
            order.arguments,
            order.threads,
            max(code, order.signal, key=_force),
        )
        self.order(now_s, self.nodes[number])

    def release(self, number: int) -> None:
        """Release a node: dismiss its agent, and end its processes."""
        node = self.nodes[number]
        if node.news is not None:
            self._gone.add((number, node.news.boot))
            self._send(node.agent, NodeOrders((), is_over=True))
        self._lose(node, "its node was released to its provider")
        self.nodes[number] = Node(number)

    def order(self, now_s: float, node: Node, addresses: dict[str, Address] | None = None) -> None:
        """Send a node the list of all processes that it must run, and the `addresses` that these
        may connect to; None: the addresses sent last stay valid.
        """
        node.ordered_s = now_s
        node.sent_addresses = node.sent_addresses if addresses is None else addresses
        if node.agent:
            self._send(
                node.agent,
                NodeOrders(_orders(node.processes), addresses, num_rollouts=self.num_rollouts),
            )

    def dismiss(self) -> None:
        """Dismiss all agents: the run is over."""
        for node in self.nodes:
            if node.agent:
                self._send(node.agent, NodeOrders((), is_over=True))

    def _send(self, agent: str, orders: NodeOrders) -> None:
        self._sends.append(Send(agent, orders))

    def _lose(self, node: Node, reason: str) -> None:
        self.has_moved = True
        for process in node.processes.values():
            if process.code is None:
                process.reason = reason


def unit_of(process: str) -> str:
    """Return the unit of a process, by its name: decode-0.3 is a rank of decode-0."""
    return process.partition(".")[0]


def _orders(processes: Mapping[str, FarProcess]) -> tuple[ProcessOrder, ...]:
    return tuple(process.order for process in processes.values() if process.code is None)


def _force(number: int) -> int:
    """Return the strength of a signal: SIGKILL 2, any other signal 1, none 0."""
    return 2 if number == signal.SIGKILL else number != 0
