"""Test the book of nodes: which nodes are up, what each must run, and what ends with a silent node."""

from __future__ import annotations

import math
import signal
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.config import AGENT_BEAT_S
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.nodes import Address, NodeNews, NodeOrders, ProcessNews, ProcessOrder
from hadal.policy.suspicion import PAUSE_PERIODS
from hadal.roles.nodes import PERIOD_S, FarProcess, NodePhase, Nodes, agent_name

TIMEOUT_S = 1.5
STEP_S = 0.1


def order(name: str, epoch_number: int = 1) -> ProcessOrder:
    return ProcessOrder(name, epoch_number, ("a.module", "--unit", name), 2)


def address(number: int, epoch_number: int = 1) -> Address:
    return Address(epoch_number, f"tcp://10.0.0.{number}:{40_000 + epoch_number}")


def news(node: int, *processes: ProcessNews, boot: str = "b1", host: str = "") -> NodeNews:
    return NodeNews(
        node, boot, address(node, 0), host or f"host-{node}", processes, {"hadal": "0.1"}
    )


def runs(
    name: str, epoch_number: int = 1, at: Address | None = None, code: int | None = None
) -> ProcessNews:
    return ProcessNews(name, epoch_number, 1000 + epoch_number, code, address=at)


class Book(Nodes):
    """Book that keeps its messages; time passes by `pass_time`."""

    def __init__(self, num_nodes: int = 2) -> None:
        self.now_s = 100.0
        self._kept: list[tuple[str, AnyMessage]] = []
        super().__init__(num_nodes, TIMEOUT_S)

    @property
    def sent(self) -> list[tuple[str, AnyMessage]]:
        """Messages to agents that the test has not taken yet."""
        assert self.check() == []
        self._kept += [(send.to, send.message) for send in self.take_sends()]
        return self._kept

    def orders(self, to: str) -> list[NodeOrders]:
        """Return the orders sent to this agent since the last call."""
        told = [message for name, message in self.sent if name == to]
        self._kept = [(name, message) for name, message in self._kept if name != to]
        return [message for message in told if isinstance(message, NodeOrders)]

    def pass_time(self, duration_s: float, *speaking: NodeNews) -> list[int]:
        """Tick once per STEP_S while these agents report; return the numbers of lost nodes."""
        lost = []
        until_s = self.now_s + duration_s
        while self.now_s < until_s - 1e-9:
            self.now_s = min(self.now_s + STEP_S, until_s)
            for each in speaking:
                self.update(self.now_s, each)
            lost += [node.number for node in self.tick(self.now_s)]
        return lost

    def up(self, *numbers: int) -> Self:
        """Let the agents of these nodes report."""
        for number in numbers:
            assert self.update(self.now_s, news(number))
        self.tick(self.now_s)
        return self


def names(orders: NodeOrders) -> dict[str, int]:
    return {each.name: each.epoch_number for each in orders.processes}


# ---- nodes that are up ----


def test_a_node_is_there_once_its_agent_speaks() -> None:
    book = Book()
    assert [node.phase for node in book.nodes] == [NodePhase.ABSENT] * 2
    assert book.pass_time(10 * TIMEOUT_S) == []
    assert book.sent == [], "nobody is known"
    assert book.update(book.now_s, news(1, host="gpu-7"))
    assert not book.update(book.now_s, news(1, host="gpu-7")), "it was known"
    assert [node.phase for node in book.nodes] == [NodePhase.ABSENT, NodePhase.UP]
    assert [node.host for node in book.nodes] == ["", "gpu-7"]
    assert [node.agent for node in book.nodes] == ["", "node-1-b1"]


@pytest.mark.promise("A node that sends nothing for node_timeout_s (1.5 s) is lost")
def test_a_node_is_lost_after_its_timeout_and_not_before() -> None:
    book = Book().up(0, 1)
    assert book.pass_time(TIMEOUT_S, news(0)) == []
    assert book.nodes[1].phase is NodePhase.UP
    assert book.pass_time(STEP_S, news(0)) == [1]
    assert [node.phase for node in book.nodes] == [NodePhase.UP, NodePhase.LOST]
    assert book.pass_time(10.0, news(0)) == [], "it is lost once"


@pytest.mark.parametrize("is_heard_first", [True, False])
def test_a_supervisor_that_stood_still_itself_loses_nobody(is_heard_first: bool) -> None:
    book = Book().up(0)
    process = book.run(book.now_s, 0, order("decode-0"))
    book.pass_time(1.0)  # The node was silent.
    book.now_s += 60.0  # The supervisor itself did not run: this is not the node's silence.
    if is_heard_first:
        book.update(book.now_s, news(0))
    assert book.tick(book.now_s) == []
    assert process.code is None
    silent_s = 0.0 if is_heard_first else 1.0
    assert book.pass_time(TIMEOUT_S - silent_s) == []
    assert book.pass_time(STEP_S) == [0]


def test_many_short_pauses_are_no_excuse_for_ever() -> None:
    """Gaps of PERIOD_S between ticks count as the node's silence, not as a pause of the supervisor."""
    book = Book().up(0)
    lost = []
    for _ in range(4):
        book.now_s += PERIOD_S
        lost += book.tick(book.now_s)
    assert [node.number for node in lost] == [0]


# ---- processes to run ----


def test_what_runs_on_a_node_is_told_at_every_change_and_every_beat() -> None:
    book = Book().up(0, 1)
    book.orders("node-0-b1")
    book.run(book.now_s, 0, order("decode-0"))
    book.run(book.now_s, 0, order("decode-1", 7))
    found = [names(each) for each in book.orders("node-0-b1")]
    assert found == [{"decode-0": 1}, {"decode-0": 1, "decode-1": 7}]
    book.pass_time(10 * AGENT_BEAT_S, news(0), news(1))
    told = book.orders("node-0-b1")
    assert 7 <= len(told) <= 11
    assert {each.processes for each in told} == {(order("decode-0"), order("decode-1", 7))}
    assert not any(each.is_over or each.addresses for each in told)
    assert {each.processes for each in book.orders("node-1-b1")} == {()}


def test_what_a_node_says_of_its_processes_is_known() -> None:
    book = Book().up(0)
    first = book.run(book.now_s, 0, order("decode-0"))
    assert (first.code, first.news.pid) == (None, 0)
    book.update(book.now_s, news(0, runs("decode-0", at=address(0))))
    assert (first.code, first.news.pid) == (None, 1001)
    assert book.addresses() == {"decode-0": address(0)}
    book.update(book.now_s, news(0, runs("decode-0", code=3)))
    assert (first.code, first.reason) == (3, "")
    assert book.addresses() == {}
    book.orders("node-0-b1")
    book.pass_time(2 * AGENT_BEAT_S, news(0, runs("decode-0", code=3)))
    assert {each.processes for each in book.orders("node-0-b1")} == {()}, "it need not say it more"
    second = book.run(book.now_s, 0, order("decode-0", 2))
    assert [names(each) for each in book.orders("node-0-b1")] == [{"decode-0": 2}]
    # Reports of the earlier life, or of a process that was not ordered, do not affect the second.
    book.update(book.now_s, news(0, runs("decode-0", code=3), runs("decode-9")))
    assert (second.code, second.news.pid) == (None, 0)
    assert book.nodes[0].processes.keys() == {"decode-0"}


def test_what_ran_on_a_lost_node_is_over_with_a_reason() -> None:
    book = Book().up(0, 1)
    ended, lost = (book.run(book.now_s, 0, order(name)) for name in ("decode-0", "decode-1"))
    other = book.run(book.now_s, 1, order("decode-2"))
    book.update(book.now_s, news(0, runs("decode-0", code=3), runs("decode-1", at=address(0))))
    assert book.pass_time(2 * TIMEOUT_S, news(1, runs("decode-2", at=address(1)))) == [0]
    assert (ended.code, ended.reason) == (3, "")
    assert lost.code == -signal.SIGKILL
    assert "sent no report for 1.5 s" in lost.reason
    assert (other.code, other.reason) == (None, "")
    assert book.addresses() == {"decode-2": address(1)}


@pytest.mark.promise(
    "when its messages arrive again, it ends its processes and receives the list of "
    "processes to run; earlier messages are dropped"
)
def test_a_node_that_is_heard_again_ends_what_was_given_up_and_runs_new_lives() -> None:
    book = Book().up(0, 1)
    speaks = [news(number, runs(f"decode-{number}", at=address(number))) for number in (0, 1)]
    for number in (0, 1):
        book.run(book.now_s, number, order(f"decode-{number}"))
    given_up = book.nodes[0].processes["decode-0"]
    assert book.pass_time(2 * TIMEOUT_S, speaks[1]) == [0]
    book.run(book.now_s, 1, order("decode-0", 2))
    # The link to the node may work again before the link from it, so orders are sent all the time.
    assert {each.processes for each in book.orders("node-0-b1")[-3:]} == {()}
    assert not book.update(book.now_s, speaks[0])
    assert book.nodes[0].phase is NodePhase.UP
    book.update(book.now_s, news(0, runs("decode-0", at=address(0, 9))))
    assert given_up.code == -signal.SIGKILL, "though it runs still"
    assert given_up.news.address is None, "nobody asks any more"
    assert book.addresses() == {"decode-1": address(1)}
    book.pass_time(2 * AGENT_BEAT_S, *speaks)
    assert {each.processes for each in book.orders("node-0-b1")} == {()}
    book.update(book.now_s, news(1, runs("decode-1", at=address(1)), runs("decode-0", 2, code=0)))
    again = book.run(book.now_s, 0, order("decode-0", 3))
    book.update(book.now_s, speaks[0])
    assert (again.news.epoch_number, again.news.address) == (3, None), "that was the first life"
    assert [names(each) for each in book.orders("node-0-b1")] == [{"decode-0": 3}]
    book.update(book.now_s, news(0, runs("decode-0", 3, address(0, 3))))
    assert book.addresses()["decode-0"] == address(0, 3)


def test_signals_are_part_of_the_orders_and_kill_stands_above_all() -> None:
    book = Book().up(0)
    process = book.run(book.now_s, 0, order("decode-0"))

    def told(*numbers: int) -> list[int]:
        book.orders("node-0-b1")
        for number in numbers:
            book.signal(book.now_s, 0, process, number)
        return [each.processes[0].signal for each in book.orders("node-0-b1")]

    assert process.order.signal == 0
    assert told(signal.SIGINT, signal.SIGTERM) == [signal.SIGINT, signal.SIGTERM]
    assert told(signal.SIGKILL, signal.SIGTERM) == [signal.SIGKILL] * 2
    assert (process.order.arguments, process.order.threads) == (order("decode-0").arguments, 2)
    book.tick(book.now_s + AGENT_BEAT_S)
    assert [each.processes[0].signal for each in book.orders("node-0-b1")] == [signal.SIGKILL]
    book.update(book.now_s, news(0, runs("decode-0", code=-9)))
    assert told(signal.SIGTERM) == [], "there is nobody to hear it"
    # The next life begins without the signal.
    assert book.run(book.now_s, 0, order("decode-0", 2)).order.signal == 0


def test_a_process_that_was_lost_with_its_node_is_not_signalled_there() -> None:
    book = Book().up(0)
    process = book.run(book.now_s, 0, order("decode-0"))
    book.pass_time(2 * TIMEOUT_S)
    book.orders("node-0-b1")
    book.signal(book.now_s, 0, process, signal.SIGKILL)
    assert book.orders("node-0-b1") == []


# ---- agents ----


def test_of_two_agents_the_later_counts_and_the_earlier_is_told_to_leave() -> None:
    book = Book().up(0)
    process = book.run(book.now_s, 0, order("decode-0"))
    book.update(book.now_s, news(0, runs("decode-0", at=address(0))))
    book.orders("node-0-b1")
    assert book.update(book.now_s, news(0, boot="b2", host="another"))
    assert process.code == -signal.SIGKILL
    assert "agent was started again" in process.reason
    assert (book.nodes[0].phase, book.nodes[0].host) == (NodePhase.UP, "another")
    assert [each.is_over for each in book.orders("node-0-b1")] == [True]
    second = book.run(book.now_s, 0, order("decode-0", 2))
    # The earlier agent may have missed the order to leave: each of its reports gets the order again.
    for _ in range(3):
        said = news(0, runs("decode-0", 2, address(0, 2)))
        assert not book.update(book.now_s, said)
        assert book.orders("node-0-b1") == [NodeOrders((), is_over=True)]
    assert (book.nodes[0].host, second.news.address) == ("another", None)
    assert not any(each.is_over for each in book.orders("node-0-b2"))
    # Reports of the earlier agent do not keep the node alive.
    assert book.pass_time(2 * TIMEOUT_S, news(0)) == [0]
    assert not book.update(book.now_s, news(0, boot="b2"))
    assert book.nodes[0].phase is NodePhase.UP


def test_an_agent_that_follows_one_that_was_lost() -> None:
    book = Book().up(0)
    process = book.run(book.now_s, 0, order("decode-0"))
    book.pass_time(2 * TIMEOUT_S)
    assert book.update(book.now_s, news(0, boot="b2"))
    assert "sent no report" in process.reason, "it was over before"
    assert not book.update(book.now_s, news(0))
    assert book.orders("node-0-b1")[-1].is_over


def test_a_node_that_is_given_back() -> None:
    book = Book().up(0, 1)
    process = book.run(book.now_s, 0, order("decode-0"))
    other = book.run(book.now_s, 1, order("decode-1"))
    book.orders("node-0-b1")
    book.release(0)
    assert book.orders("node-0-b1") == [NodeOrders((), is_over=True)]
    assert (process.code, process.reason) == (
        -signal.SIGKILL,
        "its node was released to its provider",
    )
    assert other.code is None
    node = book.nodes[0]
    assert (node.phase, node.host, node.processes) == (NodePhase.ABSENT, "", {})
    # The node's agent may have missed the order to leave.
    assert not book.update(book.now_s, news(0, runs("decode-0", at=address(0))))
    assert book.nodes[0].phase is NodePhase.ABSENT
    assert book.orders("node-0-b1") == [NodeOrders((), is_over=True)]
    assert book.pass_time(10.0, news(1)) == []
    # The same node is provided again.
    assert book.update(book.now_s, news(0, boot="b2"))
    assert book.nodes[0].phase is NodePhase.UP
    book.release(0)
    book.release(0)  # No agent is left to send to.
    assert [each.is_over for each in book.orders("node-0-b2")] == [True]


def test_what_runs_when_an_agent_speaks_first_goes_on_in_its_latest_life() -> None:
    """A supervisor may have died just after a leader moved to another node."""
    book = Book()
    first = news(0, runs("decode-0", 1), runs("decode-0.0", 1))
    book.pass_time(1.0, first)
    assert names(book.orders("node-0-b1")[-1]) == {"decode-0": 1, "decode-0.0": 1}
    later = news(1, runs("decode-0", 2), runs("decode-0.1", 1), runs("prefill-0", code=0))
    book.update(book.now_s, later)
    assert (
        "a newer process of its name runs on node 1" in book.nodes[0].processes["decode-0"].reason
    )
    book.pass_time(1.0, first, later)
    assert names(book.orders("node-0-b1")[-1]) == {"decode-0.0": 1}
    assert names(book.orders("node-1-b1")[-1]) == {"decode-0": 2, "decode-0.1": 1}
    book.update(book.now_s, news(0, runs("decode-0.1", 1)))
    assert "decode-0.1" not in book.nodes[0].processes, "only at an agent's first word"


def test_when_the_run_is_over_all_agents_are_told() -> None:
    book = Book(3).up(0, 1)
    book.pass_time(2 * TIMEOUT_S, news(0))  # Node 1 is lost; node 2 never came up.
    book.sent.clear()
    book.dismiss()
    assert book.sent == [(f"node-{n}-b1", NodeOrders((), is_over=True)) for n in (0, 1)]


# ---- addresses ----


def test_a_node_hears_of_all_units_and_gateways_and_of_ranks_of_its_own_units() -> None:
    book = Book(3).up(0, 1, 2)
    places = {
        0: ("decode-0", "decode-0.0"),
        1: ("decode-0.1", "prefill-0"),
        2: ("prefill-0.0", "prefill-0.1"),
    }
    for number, on_it in places.items():
        for name in on_it:
            book.run(book.now_s, number, order(name))
        book.update(book.now_s, news(number, *(runs(name, at=address(number)) for name in on_it)))
    here = {"front": Address(1, "tcp://10.0.0.9:1"), "gateway-1": Address(1, "tcp://10.0.0.9:2")}
    book.listen_here(here)
    book.sent.clear()
    book.tell_addresses(book.now_s)
    told = {number: book.orders(f"node-{number}-b1") for number in places}
    assert [len(each) for each in told.values()] == [1, 1, 1]
    assert {number: each[0].addresses for number, each in told.items()} == {
        0: {**here, "decode-0.1": address(1), "prefill-0": address(1)},
        1: {
            **here,
            "decode-0": address(0),
            "decode-0.0": address(0),
            "prefill-0.0": address(2),
            "prefill-0.1": address(2),
        },
        2: {**here, "decode-0": address(0), "prefill-0": address(1)},
    }
    assert names(told[0][0]) == {"decode-0": 1, "decode-0.0": 1}, "with all that it is to run"
    book.tell_addresses(book.now_s)
    assert book.sent == [], "nothing has changed"


def test_a_change_is_told_to_whom_it_concerns() -> None:
    book = Book(3).up(0, 1, 2)
    for number, name in enumerate(("decode-0", "decode-0.0", "prefill-0")):
        book.run(book.now_s, number, order(name))
        book.update(book.now_s, news(number, runs(name, at=address(number))))
    book.tell_addresses(book.now_s)
    book.sent.clear()
    # A rank has another address in its next life: only its leader's node needs it.
    book.update(book.now_s, news(1, runs("decode-0.0", code=1)))
    book.run(book.now_s, 1, order("decode-0.0", 2))
    book.sent.clear()
    book.tell_addresses(book.now_s)
    assert {to for to, _ in book.sent} == {"node-0-b1"}
    assert book.orders("node-0-b1")[0].addresses == {"prefill-0": address(2)}
    book.update(book.now_s, news(1, runs("decode-0.0", 2, address(1, 2))))
    book.tell_addresses(book.now_s)
    assert {to for to, _ in book.sent} == {"node-0-b1"}
    found = book.orders("node-0-b1")[0].addresses
    assert found == {"prefill-0": address(2), "decode-0.0": address(1, 2)}
    # A unit that ended is removed: all other nodes are informed.
    book.update(book.now_s, news(2, runs("prefill-0", code=1)))
    book.tell_addresses(book.now_s)
    assert {to for to, _ in book.sent} == {"node-0-b1", "node-1-b1"}


def test_a_process_that_moved_away_is_heard_of_where_it_was() -> None:
    book = Book().up(0, 1)
    book.run(book.now_s, 0, order("decode-0"))
    book.run(book.now_s, 0, order("decode-0.0"))
    book.update(book.now_s, news(0, runs("decode-0", code=1), runs("decode-0.0", at=address(0))))
    book.run(book.now_s, 1, order("decode-0", 2))
    book.update(book.now_s, news(1, runs("decode-0", 2, address(1, 2))))
    book.tell_addresses(book.now_s)
    assert book.orders("node-0-b1")[-1].addresses == {"decode-0": address(1, 2)}
    assert book.orders("node-1-b1")[-1].addresses == {"decode-0.0": address(0)}


def test_who_is_not_there_is_told_no_addresses_and_all_when_it_comes() -> None:
    book = Book()
    here = {"front": Address(1, "tcp://10.0.0.9:1")}
    book.listen_here(here)
    book.tell_addresses(book.now_s)
    assert book.sent == []
    book.up(0)
    book.tell_addresses(book.now_s)
    assert book.orders("node-0-b1")[-1].addresses == here
    book.pass_time(2 * TIMEOUT_S)  # Lost.
    book.orders("node-0-b1")
    later = {"front": Address(2, "tcp://10.0.0.9:2")}
    book.listen_here(later)
    book.tell_addresses(book.now_s)
    assert book.orders("node-0-b1") == []
    book.update(book.now_s, news(0))
    book.tell_addresses(book.now_s)
    assert book.orders("node-0-b1")[-1].addresses == later
    # A new agent has no addresses, though nothing has changed.
    book.update(book.now_s, news(0, boot="b2"))
    book.tell_addresses(book.now_s)
    assert book.orders("node-0-b2")[-1].addresses == later
    book.release(0)
    book.update(book.now_s, news(0, boot="b3"))
    book.tell_addresses(book.now_s)
    assert book.orders("node-0-b3")[-1].addresses == later


# ---- everything together: obedient agents on a network with faults ----

DELAY_S = 0.2
"""Longest delay of a message while no link is cut, seconds."""
HOMES = {"decode-0": 0, "decode-0.0": 0, "decode-0.1": 1, "prefill-0": 2}
"""Process -> its node; if the node is lost, a leader may run on any other."""
HERE = {"front": Address(1, "tcp://10.0.0.9:1")}


@dataclass
class Agent:
    """Agent of one node: it obeys orders, reports the outcome, and has no other state."""

    node: int
    boot: str
    world: World
    is_cut: bool = False
    is_here: bool = True
    """False once it left or died."""
    running: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Name -> (life, time at which it begins to listen)."""
    ended: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name -> (life, exit code), as long as orders include it."""
    known: dict[str, Address] = field(default_factory=dict)
    inbox: deque[tuple[float, NodeOrders]] = field(default_factory=deque)
    outbox: deque[tuple[float, NodeNews]] = field(default_factory=deque)
    """Messages in flight, in order: the wire keeps them while a link is cut."""
    spoke_s: float = 0.0
    term: int = 1
    """Term of the supervisor that the agent follows."""
    hears_s: float = 0.0
    """Time at which the agent learns of a later supervisor, if there is one."""

    def step(self, now_s: float) -> None:
        if self.term < self.world.term and not self.is_cut and now_s >= self.hears_s:
            self.term = self.world.term
            self.inbox.clear()  # Drop orders of earlier supervisors.
            self.outbox.clear()
            self.spoke_s = -math.inf
        while self.is_here and not self.is_cut and self.inbox and self.inbox[0][0] <= now_s:
            self._obey(now_s, self.inbox.popleft()[1])
        if self.is_here and now_s - self.spoke_s >= AGENT_BEAT_S:
            self.spoke_s = now_s
            said = [
                runs(
                    name,
                    epoch_number,
                    self.listens_at(epoch_number) if listens_s <= now_s else None,
                )
                for name, (epoch_number, listens_s) in self.running.items()
            ]
            said += [
                runs(name, epoch_number, code=code)
                for name, (epoch_number, code) in self.ended.items()
            ]
            message = news(self.node, *said, boot=self.boot)
            self.outbox.append((self.due(now_s, self.outbox), message))

    def due(
        self, now_s: float, queue: deque[tuple[float, NodeOrders]] | deque[tuple[float, NodeNews]]
    ) -> float:
        """Return a message's arrival time, which is never before that of the previous message."""
        return max(now_s + self.world.random.uniform(0.0, DELAY_S), queue[-1][0] if queue else 0.0)

    def listens_at(self, epoch_number: int) -> Address:
        return Address(epoch_number, f"tcp://{self.node}.{self.boot}:{epoch_number}")

    def end(self, name: str, code: int) -> None:
        epoch_number, _ = self.running.pop(name)
        self.ended[name] = epoch_number, code
        self.world.ended.add((name, epoch_number))

    def leave(self) -> None:
        self.is_here = False
        self.running.clear()
        if self.is_cut:  # The agent's queued messages are lost.
            self.outbox.clear()

    def _obey(self, now_s: float, orders: NodeOrders) -> None:
        if orders.is_over:
            self.leave()
            return
        self.known = self.known if orders.addresses is None else orders.addresses
        wanted = names(orders)
        self.running = {n: at for n, at in self.running.items() if wanted.get(n) == at[0]}
        self.ended = {n: end for n, end in self.ended.items() if wanted.get(n) == end[0]}
        for each in orders.processes:
            is_there = each.name in self.running.keys() | self.ended.keys()
            if not is_there and each.arguments:
                assert (each.name, each.epoch_number) not in self.world.started, (
                    "no life is lived twice"
                )
                self.world.started.add((each.name, each.epoch_number))
                self.running[each.name] = (
                    each.epoch_number,
                    now_s + self.world.random.uniform(0.0, 0.5),
                )
            elif is_there and each.signal == signal.SIGKILL and each.name in self.running:
                self.end(each.name, -signal.SIGKILL)


class World:
    """Supervisor with its book, and agents. Links may be cut; the wire keeps messages meanwhile."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.random = Random(seed)
        self.agents: list[Agent] = []
        self.book = Nodes(3, TIMEOUT_S)
        self.book.listen_here(HERE)
        self.term = 1
        self.adopts_until_s = 0.0
        """Time until which a supervisor that took over only collects reports."""
        self.lives: dict[str, int] = dict.fromkeys(HOMES, 0)
        self.processes: dict[str, tuple[int, FarProcess]] = {}
        self.lost: set[int] = set()
        self.disturbed: set[int] = set()
        """Nodes that were cut off or that got another agent."""
        self.still_until_s = self.supervised_s = 0.0
        self.started: set[tuple[str, int]] = set()
        self.ended: set[tuple[str, int]] = set()
        """Lives that agents started, and lives that ended by themselves or by a signal."""
        for node in range(3):
            self.join(node)

    def join(self, node: int) -> None:
        """Add another agent for a node."""
        boot = f"b{len(self.agents)}"
        # An agent's start takes longer than the delivery of the earlier agent's messages.
        self.agents.append(Agent(node, boot, self, spoke_s=self.now_s, term=self.term))

    def pass_time(self, duration_s: float) -> None:
        until_s = self.now_s + duration_s
        while self.now_s < until_s:
            self.now_s += STEP_S
            for agent in self.agents:
                agent.step(self.now_s)
            if self.now_s >= self.still_until_s:
                self._supervise()

    def apply(self, event: str, number: int) -> None:
        agent = next(each for each in reversed(self.agents) if each.node == number)
        name = sorted(HOMES)[number]
        if event == "still":
            self.still_until_s = self.now_s + 3.0 * (number + 1) * self.random.random()
            return
        if event == "succeed":
            self.succeed()
            return
        if event == "crash":
            for each in self.agents:
                if name in each.running:
                    each.end(name, 1)
            return
        if event == "kill":
            if name in self.processes:
                self.book.signal(self.now_s, *self.processes[name], signal.SIGKILL)
                self._deliver()
            return
        if event == "lose":  # The wire's queue overflowed.
            for each in self.agents:
                if each.node == number:
                    each.inbox = deque(told for told in each.inbox if told[1].addresses is not None)
            return
        self.disturbed.add(number)
        if event == "cut":
            agent.is_cut = True
        elif event == "mend":
            for each in self.agents:
                each.is_cut &= each.node != number
        elif event == "power":
            agent.leave()
            self.join(number)
        elif event == "second":
            self.join(number)
        elif event == "release":
            self.book.release(number)
            self._deliver()
            self.join(number)

    def succeed(self) -> None:
        """Let another supervisor without state take over."""
        self.term += 1
        self.book = Nodes(3, TIMEOUT_S)
        self.book.listen_here(HERE)
        self.processes.clear()
        self.lives = dict.fromkeys(HOMES, 0)
        self.adopts_until_s = self.now_s + self.random.uniform(0.0, 3.0)
        for agent in self.agents:
            agent.hears_s = self.now_s + self.random.uniform(0.0, 1.0)

    def _adopt(self) -> None:
        for node in self.book.nodes:
            for name, process in node.processes.items():
                if process.code is None and self.lives[name] < process.order.epoch_number:
                    self.processes[name] = node.number, process
                    self.lives[name] = process.order.epoch_number

    def _deliver(self) -> None:
        assert self.book.check() == []
        for send in self.book.take_sends():
            assert isinstance(send.message, NodeOrders)
            for agent in self.agents:
                if agent_name(agent.node, agent.boot) == send.to:
                    agent.inbox.append((agent.due(self.now_s, agent.inbox), send.message))

    def _supervise(self) -> None:
        # A supervisor that did not run for long may receive only part of its backlog at once.
        was_still = self.now_s - self.supervised_s > PAUSE_PERIODS * PERIOD_S + STEP_S
        is_late = was_still and self.random.random() < 0.5
        self.supervised_s = self.now_s
        for agent in self.agents if not is_late else ():
            while not agent.is_cut and agent.outbox and agent.outbox[0][0] <= self.now_s:
                message = agent.outbox.popleft()[1]
                if agent.term == self.term:
                    self.book.update(self.now_s, message)
        self._adopt()
        self.lost |= {node.number for node in self.book.tick(self.now_s)}
        for node in self.book.nodes:
            if node.phase is NodePhase.LOST:
                assert all(process.code is not None for process in node.processes.values())
        for name, home in HOMES.items():
            _, process = self.processes.get(name, (0, None))
            if process is not None and process.code is not None and not process.reason:
                assert (name, process.order.epoch_number) in self.ended, "it has not ended"
            nodes = [home, *range(3)] if name == "decode-0" else [home]
            up = [n for n in nodes if self.book.nodes[n].phase is NodePhase.UP]
            is_known = self.now_s >= self.adopts_until_s
            if up and is_known and (process is None or process.code is not None):
                self.lives[name] = max(self.lives[name], self.term << 20) + 1
                started = self.book.run(self.now_s, up[0], order(name, self.lives[name]))
                self.processes[name] = up[0], started
        self.book.tell_addresses(self.now_s)
        self._deliver()

    def check(self) -> None:
        """Check invariants that hold after a quiet period."""
        here = [agent for agent in self.agents if agent.is_here]
        assert sorted(agent.node for agent in here) == [0, 1, 2], "one agent a node"
        assert not any(agent.running for agent in self.agents if not agent.is_here)
        running = {
            name: epoch_number
            for agent in here
            for name, (epoch_number, _) in agent.running.items()
        }
        assert sum(len(agent.running) for agent in here) == len(running), "each in one place"
        assert running == self.lives, "the last life of each, and no other"
        everywhere = HERE | {
            name: agent.listens_at(epoch_number)
            for agent in here
            for name, (epoch_number, _) in agent.running.items()
        }
        for agent in here:
            node = self.book.nodes[agent.node]
            assert (node.phase, node.agent) == (NodePhase.UP, agent_name(agent.node, agent.boot))
            assert {name: epoch_number for name, (epoch_number, _) in agent.running.items()} == {
                name: process.order.epoch_number
                for name, process in node.processes.items()
                if process.code is None
            }
            needed = {
                name: at
                for name, at in everywhere.items()
                if name not in agent.running
                and ("." not in name or agent.running.keys() & siblings(name))
            }
            assert needed.items() <= agent.known.items()
            assert agent.known.items() <= everywhere.items(), "nobody who is gone"
            assert not agent.known.keys() & agent.running.keys()
        assert self.book.addresses() == {n: at for n, at in everywhere.items() if n not in HERE}
        assert self.lost <= self.disturbed, "it was there all along"


def siblings(name: str) -> set[str]:
    """Return the processes of the same unit."""
    return {other for other in HOMES if other.partition(".")[0] == name.partition(".")[0]}


events = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("cut", "mend", "lose", "crash", "kill", "still", "power", "second", "release"),
                "succeed",
            )
        ),
        st.integers(0, 2),
        st.sampled_from((0.1, 0.3, 1.0, 2.0, 4.0)),
    ),
    max_size=16,
)


@given(events, st.integers(0, 1 << 32))
def test_after_the_last_fault_every_node_runs_what_the_book_says(
    faults: list[tuple[str, int, float]], seed: int
) -> None:
    world = World(seed)
    world.pass_time(1.0)
    for event, number, pause_s in faults:
        world.apply(event, number)
        world.pass_time(pause_s)
    for number in range(3):
        world.apply("mend", number)
    world.disturbed = {n for e, n, _ in faults if e in ("cut", "power", "second", "release")}
    world.still_until_s = 0.0
    world.pass_time(3 * TIMEOUT_S)
    world.check()
