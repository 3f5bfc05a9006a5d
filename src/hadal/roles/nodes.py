"""The nodes of a cluster, as the supervisor knows them: which of them are there, what each is to run,
and how what it runs fares.

Two clocks, on purpose. A node whose agent says nothing for `timeout_s` is lost: what ran on it is
over, here and now, and its units go on without. Whether it is to be replaced is the business of
whoever lends it, who may take a minute, for its word ends processes that may be well.

    ABSENT --an agent speaks--> UP --silent for timeout_s--> LOST --an agent speaks--> UP

What an agent runs that speaks for the first time, another supervisor had it run, and it goes on. A node
that was only cut off may still run what was given up. Everything that it is told names all
that it is to run, each with its epoch number: what is not named ends, and a message of an earlier epoch
is not heard (runtime/wire). Where two agents speak for one node, the one that began to speak later
counts, and the other is told to leave.
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
"""`Nodes.tick` is called as often as this, at least."""


class NodePhase(StrEnum):
    ABSENT = "absent"
    UP = "up"
    LOST = "lost"


@dataclass
class FarProcess:
    """A process that a node was told to run."""

    order: ProcessOrder
    news: ProcessNews
    reason: str = ""
    """Why it is over, if no exit code says it."""

    @property
    def code(self) -> int | None:
        """Its exit code; of one that was lost with its node, as if it had been killed. None while
        it runs.
        """
        return -signal.SIGKILL if self.reason else self.news.code


class Node:
    """One node, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.phase = NodePhase.ABSENT
        self.news: NodeNews | None = None
        """What its agent said last."""
        self.heard_s = -math.inf
        self.ordered_s = -math.inf
        self.processes: dict[str, FarProcess] = {}
        """By name, the last epoch of each."""
        self.told: dict[str, Address] | None = None
        """The addresses elsewhere that its agent knows; None: it was told of none."""

    @property
    def host(self) -> str:
        """Name of the host that it is; empty before an agent spoke."""
        return "" if self.news is None else self.news.host

    @property
    def agent(self) -> str:
        """Its agent's name on the wire; empty before one spoke."""
        return "" if self.news is None else agent_name(self.number, self.news.boot)


def agent_name(node: int, boot: str) -> str:
    """Name on the wire of one agent of a node."""
    return f"node-{node}-{boot}"


class Nodes:
    """All nodes. What agents are to be told is taken by `take_sends`."""

    def __init__(self, num_nodes: int, timeout_s: float) -> None:
        self.nodes = [Node(number) for number in range(num_nodes)]
        self._timeout_s = timeout_s
        self._sends: list[Send] = []
        self._absence = Absence(PERIOD_S)
        self._gone: set[tuple[int, str]] = set()
        """Agents whose place another has taken."""
        self._here: dict[str, Address] = {}
        self.num_rollouts = 0
        """See NodeOrders."""
        self.has_moved = True
        """Processes began or ceased to listen since nodes were last told where."""

    def take_sends(self) -> list[Send]:
        """What agents are to be told since the last call, in order."""
        sends, self._sends = self._sends, []
        return sends

    def check(self) -> list[str]:
        """Problems; empty where no process runs twice, or where nobody is heard."""
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

    def heard(self, now_s: float, news: NodeNews) -> bool:
        """An agent spoke. True if it is one that did not count before: it knows nothing yet."""
        node = self.nodes[news.node]
        if (node.number, news.boot) in self._gone:
            self._say(agent_name(node.number, news.boot), NodeOrders((), is_over=True))
            return False
        is_new = node.news is None or node.news.boot != news.boot
        if is_new and node.news is not None:
            self._gone.add((node.number, node.news.boot))
            self._say(node.agent, NodeOrders((), is_over=True))
            self._lose(node, "its node's agent was started again")
            node.told = None
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
        """What a supervisor before this one had a node run goes on, in its latest life."""
        name, epoch_number = news.name, news.epoch_number
        others = [other.processes[name] for other in self.nodes if name in other.processes]
        if any(other.order.epoch_number >= epoch_number for other in others):
            return
        for other in others:
            other.reason = other.reason or f"it was followed by another, on node {node.number}"
        # What it was given is not known. It matters to one that is to be started alone.
        node.processes[name] = FarProcess(ProcessOrder(name, epoch_number, (), 0), news)
        self.has_moved = True

    def listen_here(self, name_to_address: Mapping[str, Address]) -> None:
        """Where the processes of the supervisor's own host listen, by their names on the wire."""
        self.has_moved |= self._here != name_to_address
        self._here = dict(name_to_address)

    def addresses(self) -> dict[str, Address]:
        """Where the processes of all nodes listen, as far as they run and are heard."""
        return {
            name: process.news.address
            for node in self.nodes
            for name, process in node.processes.items()
            if process.code is None and process.news.address is not None
        }

    def tell_addresses(self, now_s: float) -> None:
        """Tell nodes whose processes elsewhere listen elsewhere by now. A node hears of all units
        and gateways, and of the ranks of its own units.
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
            if node.phase is NodePhase.UP and wanted != node.told:
                self.order(now_s, node, wanted)

    def tick(self, now_s: float) -> list[Node]:
        """Time passed: to be called every PERIOD_S, once all that was said is heard. Returns the
        nodes that were lost just now.
        """
        missed_s = self._absence.called(now_s)
        lost = []
        for node in self.nodes:
            node.heard_s = min(now_s, node.heard_s + missed_s)
            if node.phase is NodePhase.UP and now_s - node.heard_s > self._timeout_s:
                node.phase = NodePhase.LOST
                self._lose(node, f"its node has not been heard for {self._timeout_s:g} s")
                lost.append(node)
            if node.phase is not NodePhase.ABSENT and now_s - node.ordered_s >= AGENT_BEAT_S:
                self.order(now_s, node)
        return lost

    def run(self, now_s: float, number: int, order: ProcessOrder) -> FarProcess:
        """Have a node run a process, under a name that has none on it."""
        node = self.nodes[number]
        process = FarProcess(order, ProcessNews(order.name, order.epoch_number, 0))
        node.processes[order.name] = process
        self.has_moved = True
        self.order(now_s, node)
        return process

    def signal(self, now_s: float, number: int, process: FarProcess, code: int) -> None:
        """Have a node send a process a signal, if it is over neither here nor there."""
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
        """A node is given back."""
        node = self.nodes[number]
        if node.news is not None:
            self._gone.add((number, node.news.boot))
            self._say(node.agent, NodeOrders((), is_over=True))
        self._lose(node, "its node was given back")
        self.nodes[number] = Node(number)

    def order(self, now_s: float, node: Node, addresses: dict[str, Address] | None = None) -> None:
        """Tell a node all that it is to run, and whom its processes may speak to."""
        node.ordered_s = now_s
        node.told = node.told if addresses is None else addresses
        if node.agent:
            self._say(
                node.agent,
                NodeOrders(_orders(node.processes), addresses, num_rollouts=self.num_rollouts),
            )

    def dismiss(self) -> None:
        """The run is over."""
        for node in self.nodes:
            if node.agent:
                self._say(node.agent, NodeOrders((), is_over=True))

    def _say(self, agent: str, orders: NodeOrders) -> None:
        self._sends.append(Send(agent, orders))

    def _lose(self, node: Node, reason: str) -> None:
        self.has_moved = True
        for process in node.processes.values():
            if process.code is None:
                process.reason = reason


def unit_of(process: str) -> str:
    """The unit that a process is of, by its name: decode-0.3 is a rank of decode-0."""
    return process.partition(".")[0]


def _orders(processes: Mapping[str, FarProcess]) -> tuple[ProcessOrder, ...]:
    return tuple(process.order for process in processes.values() if process.code is None)


def _force(number: int) -> int:
    """SIGKILL stands above all that a process may ignore."""
    return 2 if number == signal.SIGKILL else number != 0
