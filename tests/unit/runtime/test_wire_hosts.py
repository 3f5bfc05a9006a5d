"""Test messages between processes of different hosts: loss, duplication and delay on the way are
repaired, and messages of other senders are dropped.

Two folders stand for two hosts. In place of an agent, the test writes to a host's folder where a
process of the other host listens. A relay between them breaks connections. zmq waits long before it
gives up a silent end, or it would drop a busy one; tests of silence set a shorter time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import selectors
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.z85 import decode as z85_decoded

from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.nodes import Address
from hadal.core.messages.pools import Pull
from hadal.core.messages.ranks import RankDo
from hadal.core.messages.units import Cancel, Drain, KvLease, Tokens
from hadal.core.plans import Draw
from hadal.runtime.addresses import address_path, write_address
from hadal.runtime.process.process import Run, raise_descriptor_limit
from hadal.runtime.transfer.grants import Grants
from hadal.runtime.wire import MAX_BATCH, ZmqWire, open_wire
from hadal.runtime.wire_sockets import MAX_QUEUED, FarLink, Network, keys_of
from tests.fresh import fresh
from tests.levels import MORE
from tests.needs import leave_out
from tests.waiting import DEADLINE_S, join, wait_for, wait_until

HOST = "127.0.0.1"
SECRET = bytes(range(32))
NETWORK = Network(HOST, SECRET)
ROUND_S = 0.02
NUM_QUIET = 15
"""Rounds in which unwanted messages would have arrived, on a machine that is not busy."""


class Relay:
    """Port that forwards connections to another port until they break. `cuts` draws the number of bytes
    after which a connection breaks; bytes inside the relay are lost then. If `swallows` is set, the
    relay instead drops all later bytes and breaks nothing.
    """

    def __init__(self, endpoint: str, cuts: Callable[[], int] | None = None) -> None:
        self.target = int(endpoint.rpartition(":")[2])
        self.num_cut = 0
        self.swallows = False
        self._cuts = cuts
        self._is_cut = self._is_over = self._is_silent = self._was_silent = False
        self._listener = socket.create_server((HOST, 0))
        # A silent relay must not leave room in the kernel's buffers.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.endpoint = f"tcp://{HOST}:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._other: dict[socket.socket, socket.socket] = {}
        self._left: dict[socket.socket, int] = {}
        """Number of bytes that each end may still send."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def be_silent(self, is_silent: bool = True) -> None:
        """Stop forwarding in either direction without closing connections; or start again."""
        self._is_silent = is_silent
        wait_until(lambda: self._was_silent == is_silent, "the relay obeys")

    def cut(self) -> None:
        """Break all connections, and wait until that is done."""
        self._is_cut = True
        wait_until(lambda: not self._is_cut, "the relay cuts")

    def swallow(self) -> None:
        """Lose all bytes that the present connections carry from now on."""
        self.swallows = True
        for end in list(self._left):
            self._left[end] = 0

    @property
    def is_swallowing(self) -> bool:
        return 0 in self._left.values()

    def close(self) -> None:
        self._is_over = True
        join(self._thread)
        self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._is_over:
            if self._is_cut:
                for end in list(self._other):
                    self._break(end)
                self._is_cut = False
            self._was_silent = self._is_silent
            if self._was_silent:
                time.sleep(0.005)
                continue
            for key, _ in self._selector.select(0.01):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._other:  # Skip an end that was broken in this round.
                    self._forward(key.fileobj)
        for end in list(self._other):
            self._break(end)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection((HOST, self.target), DEADLINE_S)
        except OSError:
            near.close()
            return
        for end, other in ((near, far), (far, near)):
            end.settimeout(DEADLINE_S)
            self._other[end] = other
            self._left[end] = self._cuts() if self._cuts else 1 << 62
            self._selector.register(end, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            self._other[end].sendall(data[: self._left[end]])
        except OSError:
            data = b""
        is_hole = self.swallows and not self._left[end]
        self._left[end] = max(0, self._left[end] - len(data))
        if is_hole:
            if not data:
                self._selector.unregister(end)  # The other end is not informed.
        elif not data or not (self._left[end] or self.swallows):
            self._break(end)

    def _break(self, end: socket.socket) -> None:
        if end not in self._other:
            return
        self.num_cut += 1
        for each in (end, self._other[end]):
            del self._other[each], self._left[each]
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()  # Resets the connection: bytes in flight are lost.


class Hosts:
    """Folders for several hosts, and the wires that run there; the test's end closes all."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def folder(self) -> Path:
        # pytest's own folders are too long for a socket.
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hadal-w-")))

    def wire(
        self,
        name: str,
        epoch_number: int = 1,
        folder: Path | None = None,
        network: Network | None = NETWORK,
        grants: Grants | None = None,
    ) -> ZmqWire:
        """Open a process's wire, on a host of its own or in this folder."""
        wire = ZmqWire(
            name, folder or self.folder(), grants, epoch_number=epoch_number, network=network
        )
        self._stack.callback(lambda: wire._context.closed or wire.close())
        return wire

    def pair(self) -> tuple[ZmqWire, ZmqWire]:
        """Open the wires `a` and `b`, on hosts that have each other's addresses."""
        a, b = self.wire("a"), self.wire("b")
        introduce(a, b)
        introduce(b, a)
        return a, b

    def relay(self, wire: ZmqWire, cuts: Callable[[], int] | None = None) -> Relay:
        """Open a relay to this wire."""
        relay = Relay(wire.endpoint, cuts)
        self._stack.callback(relay.close)
        return relay


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setattr("hadal.runtime.wire_sockets.SILENT_MS", int(1000 * DEADLINE_S))
    with contextlib.ExitStack() as stack:
        yield Hosts(stack)


def introduce(
    wire: ZmqWire, to: ZmqWire, epoch_number: int = 1, relay: Relay | None = None
) -> None:
    """Write to `to`'s host the address of `wire`, or of a relay before it."""
    endpoint = relay.endpoint if relay else wire.endpoint
    write_address(to._links._folder, wire.name, Address(epoch_number, endpoint))


def kill(wire: ZmqWire) -> None:
    """Close a wire like kill -9: all its sockets go, its files stay."""
    wire._context.destroy(linger=0)


def receive_all(wire: ZmqWire, count: int, *also: ZmqWire, num_quiet: int = 3) -> list[AnyMessage]:
    """Collect `count` messages, then make sure that no more follow. The wires `also` run meanwhile
    and receive nothing.
    """
    messages: list[AnyMessage] = []

    def are_there() -> bool:
        messages.extend(wire.receive(ROUND_S))
        assert not any(other.receive(0.0) for other in also)
        return len(messages) >= count

    wait_until(are_there, f"{count} messages come")
    for _ in range(num_quiet):
        are_there()
    return messages


def wait_in_silence(condition: Callable[[], object], what: str, *wires: ZmqWire) -> None:
    """Wait for a condition while wires run and receive nothing."""

    def is_so() -> object:
        assert not any(wire.receive(ROUND_S / 2) for wire in wires)
        return condition()

    wait_until(is_so, what)


def numbered(count: int, first: int = 0) -> list[AnyMessage]:
    return [Cancel(str(number), number) for number in range(first, first + count)]


def num_kept(wire: ZmqWire, to: str = "b") -> int:
    """Return the number of messages kept for resending."""
    peer = wire._links.last(to)
    assert isinstance(peer, FarLink)
    return len(peer._kept)


def is_kept_no_more(a: ZmqWire, b: ZmqWire) -> None:
    """Wait until all messages of `a` are acknowledged, though `b` sends no messages of its own."""
    wait_in_silence(lambda: not num_kept(a), "nothing is kept any more", a, b)


# ---- without faults ----


@pytest.mark.promise("a connection may break and nothing is lost, doubled or out of order")
def test_messages_arrive_whole_and_in_order(hosts: Hosts) -> None:
    a, b = hosts.pair()
    sent: list[AnyMessage] = [
        Tokens("decode-0", bytes(n % 40), b"", b"x", ((n, "stop"),), {n: Draw(-0.5, ((n, -0.25),))})
        for n in range(3 * MAX_BATCH)
    ]
    sent.append(Cancel("r" * (1 << 21), 0))
    for message in sent:
        a.send("b", message)
    assert receive_all(b, len(sent), a) == sent
    assert a.counts["sent"] == b.counts["received"] == len(sent)
    assert a.counts["again"] == b.counts["repeated"] == b.counts["early"] == 0


def test_a_message_to_nobody_is_dropped_and_counted(hosts: Hosts) -> None:
    a = hosts.wire("a")
    a.send("nobody", Drain())
    address_path(a._links._folder, "torn").write_text("[1, ")
    a.send("torn", Drain())
    address_path(a._links._folder, "nowhere").write_text('[1, "the other host"]')
    a.send("nowhere", Drain())
    assert (a.counts["absent"], a.counts["sent"]) == (3, 0)


def test_an_answer_is_faster_than_the_news_of_the_senders_address(hosts: Hosts) -> None:
    a, b = hosts.wire("a"), hosts.wire("b")
    introduce(b, a)
    a.send("b", Cancel("a question", 0))
    assert receive_all(b, 1) == [Cancel("a question", 0)]
    assert not address_path(b._links._folder, "a").exists()
    b.send("a", Cancel("an answer", 0))
    assert receive_all(a, 1) == [Cancel("an answer", 0)]
    assert b.counts["absent"] == 0
    # The address in the folder is the same, so the link stays the same.
    introduce(a, b)
    link = b._links.last("a")
    b.send("a", Cancel("more", 0))
    assert receive_all(a, 1) == [Cancel("more", 0)]
    assert b._links.last("a") is link
    # Once the folder's entry is gone the peer is absent, though its own address was learnt.
    address_path(b._links._folder, "a").unlink()
    b.send("a", Drain())
    assert b.counts["absent"] == 1


def test_one_that_is_known_to_be_gone_is_not_sent_to_where_it_said_it_listens(hosts: Hosts) -> None:
    a, b = hosts.wire("a"), hosts.wire("b")
    introduce(b, a)
    a.send("b", Drain())
    assert receive_all(b, 1) == [Drain()]
    b.forget("a")
    b.send("a", Drain())
    assert (b.counts["absent"], b.counts["sent"]) == (1, 0)


def test_nor_is_one_whose_next_life_was_heard(hosts: Hosts) -> None:
    """A leader may have moved to this host and ended there."""
    a, b = hosts.wire("a"), hosts.wire("b")
    introduce(b, a)
    a.send("b", Drain())
    assert receive_all(b, 1) == [Drain()]
    moved = hosts.wire("a", 2, b._links._folder, network=None)
    moved.send("b", Drain())
    assert receive_all(b, 1) == [Drain()]
    moved.close()
    b.send("a", Drain())
    assert b.counts["absent"] == 1
    assert receive_all(a, 0, b) == []


def test_much_from_this_host_does_not_keep_the_others_waiting(hosts: Hosts) -> None:
    class Endless:
        """Socket of this host's messages; it always has more."""

        def recv_multipart(self, flags: int) -> list[bytes]:
            return [msgspec.msgpack.encode(("c", 1)), msgspec.msgpack.encode(Cancel("c", 0)), b""]

    a, b = hosts.pair()
    assert b._listener.far is not None
    b._listener._in_turn = [Endless(), b._listener.far]  # type: ignore[list-item]
    a.send("b", Drain())
    assert b._listener.far.poll(1000 * DEADLINE_S)
    got = b.receive(0.0) + b.receive(0.0)
    assert Drain() in got
    assert len(got) == 2 * MAX_BATCH


def test_acknowledgements_go_out_when_nothing_else_is_sent(hosts: Hosts) -> None:
    a, b = hosts.pair()
    for message in numbered(10):
        a.send("b", message)
    assert num_kept(a) == 10
    assert receive_all(b, 10) == numbered(10)
    is_kept_no_more(a, b)
    assert b.counts["sent"] == 0, "that was no message"


def test_they_go_with_what_is_sent_anyway(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadal.runtime.wire.ACK_S", 3600.0)
    a, b = hosts.pair()
    for message in numbered(10):
        a.send("b", message)
    assert receive_all(b, 10) == numbered(10)
    b.send("a", Drain())
    assert receive_all(a, 1, num_quiet=0) == [Drain()]
    assert num_kept(a) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_they_go_out_though_the_receiver_waits_for_long(hosts: Hosts, is_async: bool) -> None:
    a, b = hosts.pair()
    a.send("b", Drain())
    assert receive_all(b, 1, num_quiet=0) == [Drain()]
    got: list[AnyMessage] = []

    def wait() -> None:
        while not got:
            got.extend(asyncio.run(b.receive_async(3600.0)) if is_async else b.receive(3600.0))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    wait_in_silence(lambda: not num_kept(a), "it is acknowledged", a)
    a.send("b", Drain())
    join(waiting)
    assert got == [Drain()]


async def test_in_an_event_loop(hosts: Hosts) -> None:
    a, b = hosts.pair()
    near = hosts.wire("c", folder=b._links._folder)
    count = 2 * MAX_BATCH + 5
    got = await b.receive_async(0.01)
    assert got == []
    for message in numbered(count):
        a.send("b", message)
        near.send("b", Drain())

    async def are_there() -> bool:
        got.extend(await b.receive_async(5.0))
        return len(got) >= 2 * count

    await wait_for(are_there, "all come")
    assert [message for message in got if message != Drain()] == numbered(count)


# ---- connections break ----


def both_ways(a: ZmqWire, b: ZmqWire, count: int) -> None:
    """Send `count` messages each way, and check that all arrive once and in order."""
    generator = Random(0)
    sent: list[AnyMessage] = [
        Cancel("x" * generator.choice((0, 10, 100, 700)), n) for n in range(count)
    ]
    at_a: list[AnyMessage] = []
    at_b: list[AnyMessage] = []
    num_sent = 0

    def are_there() -> bool:
        nonlocal num_sent
        if num_sent < min(count, len(at_a) + MAX_QUEUED // 2, len(at_b) + MAX_QUEUED // 2):
            for message in sent[num_sent : num_sent + 20]:
                a.send("b", message)
                b.send("a", message)
            num_sent += 20
        at_a.extend(a.receive(0.001))
        at_b.extend(b.receive(0.001))
        return min(len(at_a), len(at_b)) >= count

    wait_until(are_there, "all come")
    at_a.extend(a.receive(0.05))
    at_b.extend(b.receive(0.05))
    assert at_a == sent
    assert at_b == sent
    assert a.counts["sent"] == b.counts["sent"] == count


@pytest.mark.promise("a connection may break and nothing is lost, doubled or out of order")
@pytest.mark.campaign("more messages, and more breaks")
@pytest.mark.parametrize("seed", [1, None])
def test_a_connection_that_breaks_again_and_again_loses_and_doubles_nothing(
    hosts: Hosts, seed: int | None
) -> None:
    generator = fresh() if seed is None else Random(seed)
    a, b = hosts.wire("a"), hosts.wire("b")

    def cuts() -> int:
        """Cut mostly within a message, sometimes within a handshake."""
        return 500 if generator.random() < 0.15 else generator.randrange(60_000, 120_000)

    to_a, to_b = hosts.relay(a, cuts), hosts.relay(b, cuts)
    introduce(a, b, relay=to_a)
    introduce(b, a, relay=to_b)
    both_ways(a, b, 2000 if MORE else 1000)
    assert min(to_a.num_cut, to_b.num_cut) >= (5 if MORE else 2)
    assert min(a.counts["again"], b.counts["again"]) >= (3 if MORE else 1)
    to_a._cuts = to_b._cuts = None
    to_a.cut()
    to_b.cut()
    is_kept_no_more(a, b)


def test_a_way_that_is_silent_for_a_while(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The silence is longer than either end's timeout. Of three pairs, one resumes, one is reset, and
    one loses all bytes while neither end notices.
    """
    monkeypatch.setattr("hadal.runtime.wire_sockets.SILENT_MS", 400)
    monkeypatch.setattr("hadal.runtime.wire_sockets.BEAT_MS", 100)
    goes_on, is_reset, leads_nowhere = pairs = [hosts.pair() for _ in range(3)]
    relays: dict[ZmqWire, Relay] = {}
    for a, b in pairs:
        for wire, other in ((a, b), (b, a)):
            relays[wire] = hosts.relay(wire)
            introduce(wire, other, relay=relays[wire])
        both_ways(a, b, 100)
    silent = [relays[wire] for wire in (*goes_on, *is_reset)]
    sent = numbered(500)
    ends = [(wire, to) for a, b in pairs for wire, to in ((a, "b"), (b, "a"))]
    before = {wire.endpoint: wire.counts["again"] for wire, _ in ends}
    got: list[list[AnyMessage]] = [[] for _ in ends]
    num_sent = 0

    def send_and_receive() -> None:
        nonlocal num_sent
        for wire, to in ends:
            for message in sent[num_sent : num_sent + 5]:
                wire.send(to, message)
        num_sent += 5
        for (wire, _), messages in zip(ends, got, strict=True):
            messages += wire.receive(0.005)

    def have_noticed() -> bool:
        send_and_receive()
        return all(wire.counts["again"] > before[wire.endpoint] for wire, _ in ends)

    def are_there() -> bool:
        send_and_receive()
        return min(map(len, got)) >= len(sent)

    for relay in silent:
        relay.be_silent()
    for wire in leads_nowhere:
        relays[wire].swallow()
    wait_until(have_noticed, "every end opens another connection")
    for wire in is_reset:
        relays[wire].cut()
    for relay in silent:
        relay.be_silent(False)
    wait_until(are_there, "all come")
    assert got == [sent] * len(ends)


def test_what_a_broken_connection_held_is_sent_again_though_both_ends_wait(hosts: Hosts) -> None:
    a, b = hosts.pair()
    relay = hosts.relay(b)
    introduce(b, a, relay=relay)
    a.send("b", Cancel("before", 0))
    assert receive_all(b, 1, a) == [Cancel("before", 0)]
    relay.be_silent()
    a.send("b", Cancel("on the way", 0))
    got: list[AnyMessage] = []

    def wait(wire: ZmqWire) -> None:
        while not got:
            got.extend(wire.receive(3600.0))

    threads = [threading.Thread(target=wait, args=(wire,), daemon=True) for wire in (a, b)]
    for thread in threads:
        thread.start()
    relay.cut()
    relay.be_silent(False)
    join(threads[1])
    b.send("a", Drain())
    join(threads[0])
    assert got[0] == Cancel("on the way", 0)


def test_an_acknowledgement_that_is_lost_is_said_again(hosts: Hosts) -> None:
    a, b = hosts.pair()
    relay = hosts.relay(a)
    introduce(a, b, relay=relay)
    b.send("a", Drain())
    assert receive_all(a, 1, b) == [Drain()]
    relay.be_silent()
    a.send("b", Drain())
    assert receive_all(b, 1) == [Drain()]
    wait_in_silence(lambda: not b._heard["a"].owed, "it is acknowledged", b)
    assert num_kept(a) == 1
    relay.cut()
    relay.be_silent(False)
    is_kept_no_more(a, b)


def test_a_grant_goes_with_its_message_when_that_is_sent_again(hosts: Hosts) -> None:
    lease = KvLease("prefill-0#1", (1, 2), (3, 4), 100)
    at_a, at_b = (Grants(SECRET, name) for name in "ab")
    a, b = hosts.wire("a", grants=at_a), hosts.wire("b", grants=at_b)
    relay = hosts.relay(b, lambda: 2000)
    relay.swallows = True
    introduce(b, a, relay=relay)
    a.send("b", Cancel("x" * 10_000, 0))
    wait_until(lambda: relay.is_swallowing, "it is on the way")
    message = RankDo(Pull("r", 1, lease, lease.block_ids))
    a.send("b", message)
    relay._cuts = None
    relay.cut()
    assert receive_all(b, 2, a)[1:] == [message]
    assert at_b.of(lease) == at_a.grant("b", lease)


# ---- one end has faults ----


def test_a_peer_that_does_not_read_fills_up_and_send_does_not_wait(hosts: Hosts) -> None:
    a, b = hosts.pair()
    first = numbered(MAX_QUEUED // 2 - 1)  # zmq does not count yet that they were read.
    for message in first:
        a.send("b", message)
    assert receive_all(b, len(first), a) == first
    is_kept_no_more(a, b)
    later = numbered(2 * MAX_QUEUED)
    for message in later:
        a.send("b", message)
    assert num_kept(a) == MAX_QUEUED
    assert a.counts["full"] == MAX_QUEUED
    assert b._listener.far is not None
    assert b._listener.far.get(zmq.RCVHWM) > MAX_QUEUED, "zmq would stop to read, beats as well"
    for _ in range(NUM_QUIET):
        assert a.receive(ROUND_S) == []
    # The first messages that fit arrive.
    assert receive_all(b, MAX_QUEUED, a) == later[:MAX_QUEUED]
    assert a.counts["again"] == 0, "it was not read, not broken"
    is_kept_no_more(a, b)
    a.send("b", Drain())
    assert receive_all(b, 1, a) == [Drain()]


def test_what_zmq_does_not_take_at_once_is_not_left_out(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zmq counts delivered messages in halves of its queue, so a queue with room can seem full."""
    monkeypatch.setattr("hadal.runtime.wire_sockets.MAX_QUEUED", 200)
    a, b = hosts.pair()
    relay = hosts.relay(b)
    introduce(b, a, relay=relay)
    for message in numbered(50):
        a.send("b", message)
    assert receive_all(b, 50, a) == numbered(50)
    is_kept_no_more(a, b)
    relay.be_silent()
    sent: list[AnyMessage] = [Cancel("x" * 200_000, n) for n in range(190)]
    for message in sent:
        a.send("b", message)  # The kernel and zmq take as many as they can.
    link = a._links.last("b")
    assert isinstance(link, FarLink)
    assert link.has_rest, "it took all: this test says nothing"
    relay.be_silent(False)
    assert receive_all(b, len(sent), a) == sent
    assert a.counts["full"] == a.counts["again"] == 0
    assert not link.has_rest


# ---- lives ----


def test_a_restarted_peer_is_reached_and_gets_nothing_of_its_predecessors(hosts: Hosts) -> None:
    a, b = hosts.pair()
    a.send("b", Cancel("before", 0))
    assert receive_all(b, 1) == [Cancel("before", 0)]
    kill(b)
    for _ in range(100):
        a.send("b", Cancel("for the dead", 0))
    successor = hosts.wire("b", 2, b._links._folder)
    assert receive_all(successor, 0, a, num_quiet=NUM_QUIET) == []
    introduce(successor, a, 2)
    a.send("b", Cancel("after", 0))
    assert receive_all(successor, 1, a, num_quiet=NUM_QUIET) == [Cancel("after", 0)]


@pytest.mark.parametrize(("name", "epoch_number"), [("b", 2), ("c", 1)])
def test_one_that_listens_at_the_place_of_a_dead_one_gets_nothing_of_its(
    hosts: Hosts, name: str, epoch_number: int
) -> None:
    """The kernel reuses ports, and zmq reconnects by itself."""
    a, b, other = hosts.wire("a"), hosts.wire("b"), hosts.wire(name, epoch_number)
    relay = hosts.relay(b)
    introduce(b, a, relay=relay)
    for message in numbered(5):
        a.send("b", message)
    assert receive_all(b, 5) == numbered(5)  # `b` dies before `a` gets the acknowledgement.
    kill(b)
    relay.target = int(other.endpoint.rpartition(":")[2])
    relay.cut()
    a.send("b", Cancel("for the dead", 0))
    wait_in_silence(lambda: other.counts["stale"], "it is heard and dropped", a, other)
    write_address(a._links._folder, name, Address(epoch_number, relay.endpoint))
    a.send(name, Drain())
    assert receive_all(other, 1, a) == [Drain()]


def test_what_was_acknowledged_to_a_predecessor_is_not_taken_for_ones_own(hosts: Hosts) -> None:
    dead, b = hosts.pair()
    for message in numbered(50):
        dead.send("b", message)
    assert receive_all(b, 50) == numbered(50)
    kill(dead)
    a = hosts.wire("a", 2)
    relay = hosts.relay(b, lambda: 2000)  # Only enough for a handshake.
    relay.swallows = True
    introduce(b, a, relay=relay)
    introduce(a, b, 2)
    sent: list[AnyMessage] = [Cancel("x" * 10_000, n) for n in range(10)]
    for message in sent:
        a.send("b", message)
    wait_until(lambda: relay.is_swallowing, "it is on the way")
    b.send("a", Drain())  # `b` only received from the dead `a`.
    assert receive_all(a, 1, b) == [Drain()]
    relay.cut()
    relay._cuts = None
    assert receive_all(b, 10, a) == sent


@pytest.mark.parametrize("was_heard", [True, False])
def test_an_earlier_life_that_is_heard_again_is_not_heard_after_a_later_one(
    hosts: Hosts, was_heard: bool
) -> None:
    old, b = hosts.pair()
    relay = hosts.relay(b)
    introduce(b, old, relay=relay)
    if was_heard:
        old.send("b", Cancel("old, before", 0))
        assert receive_all(b, 1) == [Cancel("old, before", 0)]
    relay.be_silent()  # The host is cut off.
    for message in numbered(5):
        old.send("b", message)
    new = hosts.wire("a", 2)
    introduce(b, new)
    introduce(new, b, 2)
    new.send("b", Cancel("new", 0))
    assert receive_all(b, 1) == [Cancel("new", 0)]
    relay.be_silent(False)
    wait_in_silence(lambda: b.counts["stale"] >= 5, "all is heard and dropped", b, old, new)
    # The old process gets no answer.
    b.send("a", Cancel("an answer", 0))
    assert receive_all(new, 1, old) == [Cancel("an answer", 0)]
    new.send("b", Cancel("new, again", 0))
    assert receive_all(b, 1, old) == [Cancel("new, again", 0)]


def test_what_was_queued_for_one_that_is_forgotten_is_dropped_and_all_after_it_arrives(
    hosts: Hosts,
) -> None:
    a, b = hosts.pair()
    relay = hosts.relay(b)
    introduce(b, a, relay=relay)
    a.send("b", Cancel("before", 0))
    assert receive_all(b, 1, a) == [Cancel("before", 0)]
    relay.be_silent()
    for message in numbered(100):
        a.send("b", message)
    a.forget("b")
    for message in numbered(100, first=100):
        a.send("b", message)
    relay.be_silent(False)
    # Messages sent by then arrive, unless the new link was faster.
    got: list[AnyMessage] = []

    def is_there() -> bool:
        got.extend(b.receive(0.01))
        return numbered(200)[-1] in got

    wait_until(is_there, "the last comes")
    got += receive_all(b, 0, a)
    assert got[-100:] == numbered(100, first=100)
    assert got[:-100] == numbered(len(got) - 100)
    is_kept_no_more(a, b)


def test_what_is_kept_for_one_that_is_gone_is_dropped(hosts: Hosts) -> None:
    a, b = hosts.pair()
    kill(b)
    for message in numbered(100):
        a.send("b", message)
    address_path(a._links._folder, "b").unlink()
    wait_in_silence(lambda: a._links.last("b") is None, "it is dropped", a)


def test_it_speaks_to_more_peers_than_a_program_of_zmqs_usually_does(hosts: Hosts) -> None:
    raise_descriptor_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 4096:
        leave_out("4,096 descriptors are not to be had", "ulimit -n 4096; make test")
    a, b = hosts.pair()
    names = [f"decode-{index}" for index in range(400)]
    for name in names:
        write_address(a._links._folder, name, Address(1, f"tcp://{HOST}:1"))  # No listener.
        a.send(name, Drain())
    assert a.counts["sent"] == len(names)
    a.send("b", Drain())
    assert receive_all(b, 1, a) == [Drain()]


# ---- strangers ----


def keys_of_others() -> Sequence[tuple[bytes, bytes, bytes]]:
    """Return CURVE keys: the server's, and a client's pair."""
    public, secret = zmq.curve_keypair()
    our_public, our_secret = keys_of(SECRET)
    their_public, their_secret = keys_of(bytes(32))
    return [
        (public, public, secret),
        (public, our_public, our_secret),
        (their_public, their_public, their_secret),
    ]


def sender_to(
    context: zmq.Context[Any], endpoint: str, keys: tuple[bytes, bytes, bytes]
) -> zmq.Socket[bytes]:
    sender: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    for option, key in zip(
        (zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), keys, strict=True
    ):
        sender.set(option, key)
    sender.connect(endpoint)
    return sender


@pytest.mark.promise(
    "Messages between hosts are encrypted with CURVE under a key that is derived from it"
)
def test_a_stranger_is_not_heard_and_does_not_disturb(hosts: Hosts) -> None:
    a, b = hosts.pair()
    a.send("b", Cancel("before", 0))
    header = msgspec.msgpack.encode(("a", 1, 1, 2, 0, 0, a.endpoint, "b", 1))
    frames = [header, msgspec.msgpack.encode(Cancel("a stranger's", 0)), b""]
    port = int(b.endpoint.rpartition(":")[2])
    context = zmq.Context()
    plain: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    strangers = [plain]
    plain.connect(b.endpoint)
    strangers += [sender_to(context, b.endpoint, keys) for keys in keys_of_others()]
    for stranger in strangers:
        stranger.send_multipart(frames)
    raw = [socket.create_connection((HOST, port), DEADLINE_S) for _ in range(20)]
    generator = fresh()
    for connection in raw:
        connection.sendall(generator.randbytes(generator.randrange(1, 2000)))
    assert receive_all(b, 1, a, num_quiet=NUM_QUIET) == [Cancel("before", 0)]
    a.send("b", Cancel("after", 0))
    assert receive_all(b, 1, a) == [Cancel("after", 0)]
    assert b.counts.keys() <= {"received", "sent"}
    assert a.counts["again"] == 0
    for connection in raw:
        connection.close()
    context.destroy(linger=0)


@pytest.mark.promise(
    "Messages between hosts are encrypted with CURVE under a key that is derived from it"
)
def test_a_stranger_where_a_peer_should_be_is_told_nothing(hosts: Hosts) -> None:
    a, context, got = hosts.wire("a"), zmq.Context(), b""
    stranger: zmq.Socket[bytes] = context.socket(zmq.PULL)
    stranger.set(zmq.CURVE_SERVER, 1)
    stranger.set(zmq.CURVE_SECRETKEY, zmq.curve_keypair()[1])
    port = stranger.bind_to_random_port(f"tcp://{HOST}")
    write_address(a._links._folder, "curve", Address(1, f"tcp://{HOST}:{port}"))
    with socket.create_server((HOST, 0)) as server:
        write_address(
            a._links._folder, "raw", Address(1, f"tcp://{HOST}:{server.getsockname()[1]}")
        )
        for to in ("curve", "raw"):
            a.send(to, Cancel("a secret", 0))
        assert a.receive(ROUND_S) == []
        server.settimeout(DEADLINE_S)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(DEADLINE_S)
            # The greeting of a server that speaks CURVE (ZMTP 3.1).
            connection.sendall(
                b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\1" + bytes(31)
            )
            while b"HELLO" not in got:
                got += connection.recv(1 << 16)
            connection.settimeout(NUM_QUIET * ROUND_S)
            with contextlib.suppress(OSError):
                while data := connection.recv(1 << 16):
                    got += data
    assert b"CURVE" in got
    for said in (b"a secret", keys_of(SECRET)[0], z85_decoded(keys_of(SECRET)[0])):
        assert said not in got
    assert not stranger.poll(0)
    context.destroy(linger=0)


def malformed(a: ZmqWire) -> list[list[bytes]]:
    """Return frames of a peer that has the secret but is faulty, or of another version."""

    def header(*fields: Any, **changed: Any) -> bytes:
        whole = {
            "name": "x",
            "epoch_number": 1,
            "link": 1,
            "number": 1,
            "acked_link": 0,
            "acked": 0,
        }
        whole |= {"endpoint": a.endpoint, "to": "b", "to_life": 1}
        return msgspec.msgpack.encode(tuple((whole | changed).values()))

    body = msgspec.msgpack.encode(Drain())
    return [
        [b""],
        [b"", b"", b""],
        [header(), body],
        [header(), body, b"", b""],
        [b"\xff" * 40, b"\xff" * 40, b""],
        [header()[:-1], body, b""],
        [header(number="first"), body, b""],
        [header(link=None), body, b""],
        [header(), b"not msgpack \xc1", b""],
        [header(name="y"), msgspec.msgpack.encode(["Cancel", 7, "seven"]), b""],
        [header(name="z"), b"\x91" * 100_000, b""],
        [header(endpoint=""), body, b""],
        [header(endpoint="the other host"), body, b""],
        [header(endpoint="ipc:///dev/null"), body, b""],
        [header(name="\0"), body, b""],
        [header(name="../a"), body, b""],
        [header(name="n" * 5000), body, b""],
        [header(name=""), body, b""],
    ]


def test_what_is_not_ours_is_dropped_and_counted(hosts: Hosts) -> None:
    a, b = hosts.pair()
    a.send("b", Cancel("before", 0))
    assert receive_all(b, 1, a) == [Cancel("before", 0)]
    context = zmq.Context()
    public, secret = keys_of(SECRET)
    every = malformed(a)
    senders = []
    for frames in every:
        senders.append(sender_to(context, b.endpoint, (public, public, secret)))
        senders[-1].send_multipart(frames)
    wait_in_silence(lambda: b.counts["malformed"] >= len(every), "all are counted", b)
    assert receive_all(b, 0, a, num_quiet=NUM_QUIET) == []  # They may be acknowledged.
    assert b.counts["malformed"] == len(every)
    a.send("b", Cancel("after", 0))
    assert receive_all(b, 1, a) == [Cancel("after", 0)]
    context.destroy(linger=0)


def test_one_that_acknowledges_what_was_never_sent(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = hosts.pair()
    a.send("b", Drain())
    link = a._links.last("b")
    assert isinstance(link, FarLink)
    header = a._header_decoder.decode(
        msgspec.msgpack.encode(("b", 1, 1, 1, link.link, 1 << 40, b.endpoint, "a", 1))
    )
    with monkeypatch.context() as patched:
        patched.setattr(link, "_push", lambda *_: False)  # zmq accepts no more.
        a.send("b", Cancel("never sent", 0))
        assert a._is_next(header)
    for message in numbered(10):
        a.send("b", message)
    assert receive_all(b, 1, a) == [Drain()], "it said itself that it has the second"
    a.forget("b")
    a.send("b", Cancel("on another link", 0))
    assert receive_all(b, 1, a) == [Cancel("on another link", 0)]


# ---- listening addresses ----


def listening() -> set[tuple[str, int]]:
    """Return the (address, port) pairs on which this process listens, as the kernel lists them."""
    inodes = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] != "0A" or f"socket:[{words[9]}]" not in inodes:
                continue
            address, _, port = words[1].partition(":")
            packed = b"".join(
                struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)
            )
            found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


@pytest.mark.promise("No process of Hadal listens beyond a node's own address.")
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_nothing_listens_beyond_the_address_that_is_named(hosts: Hosts, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            leave_out(f"{address} is no address here", f"ip address add {address} dev lo")
    before = listening()
    a, b = (hosts.wire(name, network=Network(address, SECRET)) for name in "ab")
    ports = {int(wire.endpoint.rpartition(":")[2]) for wire in (a, b)}
    assert listening() - before == {(address, port) for port in ports}
    introduce(b, a)
    a.send("b", Drain())
    assert receive_all(b, 1, a) == [Drain()]


def test_a_run_of_one_host_opens_no_port(hosts: Hosts) -> None:
    before = listening()
    run = Run("run", Deployment(), secret=SECRET)
    near = open_wire(run, "near", hosts.folder(), 1)
    alone = hosts.wire("alone", network=None)
    assert listening() == before
    assert near.endpoint == alone.endpoint == ""
    assert not address_path(near._links._folder, "near").exists()
    near.close()


def test_an_address_that_is_none_of_this_hosts_is_a_clear_error(hosts: Hosts) -> None:
    folder, before = hosts.folder(), threading.active_count()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        ZmqWire("a", folder, network=Network("192.0.2.1", SECRET))  # RFC 5737: for documentation.
    assert list(folder.iterdir()) == []
    assert threading.active_count() == before


def test_closing_leaves_the_name_to_a_successor(hosts: Hosts) -> None:
    old = hosts.wire("a")
    new = hosts.wire("a", 2, old._links._folder)
    old.close()
    assert address_path(new._links._folder, "a").exists()
    new.close()
    assert not address_path(new._links._folder, "a").exists()


def test_what_was_sent_last_still_leaves_when_closing(hosts: Hosts) -> None:
    a, b = hosts.pair()
    a.send("b", Cancel("before", 0))
    assert receive_all(b, 1, a) == [Cancel("before", 0)]
    a.send("b", Drain())
    a.close()
    assert receive_all(b, 1) == [Drain()]


def test_closing_does_not_wait_for_one_that_cannot_be_reached(hosts: Hosts) -> None:
    a, b = hosts.pair()
    kill(b)
    for message in numbered(100):
        a.send("b", message)
    closing = threading.Thread(target=a.close, daemon=True)
    closing.start()
    join(closing)
