"""Test messages between processes: they are delivered, or dropped and counted; none reaches the
wrong process late, and none causes a crash.
"""

import asyncio
import contextlib
import multiprocessing
import os
import select
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from hadal.core.errors import ConfigError
from hadal.core.messages.units import Cancel, Drain, Tokens
from hadal.core.plans import Draw
from hadal.runtime.wire import MAX_BATCH, ZmqWire
from hadal.runtime.wire_sockets import MAX_QUEUED
from tests.levels import MORE
from tests.waiting import DEADLINE_S, join, wait_for, wait_until

LONG_S = 3600.0
"""Timeout of a wait that must end early; otherwise the test hangs."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="hadal-w-"
    ) as name:  # pytest's own folders are too long for a socket.
        yield Path(name)


@pytest.fixture
def wire(folder: Path) -> Iterator[Callable[..., ZmqWire]]:
    """Make wires in the folder; close them in the end."""
    with contextlib.ExitStack() as stack:

        def made(name: str, **options: int) -> ZmqWire:
            wire = ZmqWire(name, folder, **options)
            stack.callback(lambda: wire._context.closed or wire.close())
            return wire

        yield made


def receive_all(wire: ZmqWire, count: int) -> list[object]:
    """Collect `count` messages, then make sure that no more follow."""
    messages: list[object] = []

    def are_there() -> bool:
        messages.extend(wire.receive(0.1))
        return len(messages) >= count

    wait_until(are_there, f"{count} messages come")
    return messages + wire.receive(0.05)


def test_messages_arrive_whole_and_in_order(wire: Callable[..., ZmqWire]) -> None:
    a, b = wire("a"), wire("b")
    sent = [
        Tokens("decode-0", bytes(n % 40), b"", b"x", ((n, "stop"),), {n: Draw(-0.5, ((n, -0.25),))})
        for n in range(3 * MAX_BATCH)
    ]
    for message in sent:
        a.send("b", message)
    assert receive_all(b, len(sent)) == sent


def test_a_message_to_nobody_is_dropped_and_counted(wire: Callable[..., ZmqWire]) -> None:
    a = wire("a")
    a.send("nobody", Drain())
    assert a.counts["absent"] == 1


def test_a_peer_that_does_not_read_fills_up_and_send_does_not_wait(
    wire: Callable[..., ZmqWire],
) -> None:
    a, b = wire("a"), wire("b")
    count = 4 * MAX_QUEUED
    message = Cancel("r" * 4000, 0)
    for _ in range(count):
        a.send("b", message)
    assert a.counts["full"] > 0
    assert len(receive_all(b, a.counts["sent"])) == a.counts["sent"] == count - a.counts["full"]


def restart_a_peer(folder: Path) -> None:
    """Restart a peer, and check that it is reached and gets no message for its predecessor."""
    a, b = ZmqWire("a", folder), ZmqWire("b", folder)
    a.send("b", Cancel("before", 0))
    assert receive_all(b, 1) == [Cancel("before", 0)]
    # Like kill -9: the socket goes, its file stays.
    path = folder / "b.sock"
    b._listener.near.close(linger=0)
    b._context.term()
    assert path.exists()
    for _ in range(100):
        a.send("b", Cancel("for the dead", 0))
    successor = ZmqWire("b", folder)
    a.send("b", Cancel("after", 0))
    assert receive_all(successor, 1) == [Cancel("after", 0)]
    a.close()
    successor.close()


def restart_peers(num_times: int) -> None:
    for _ in range(num_times):
        with tempfile.TemporaryDirectory(prefix="hadal-w-") as name:
            restart_a_peer(Path(name))


@pytest.mark.campaign("four processes restart peers fifty times")
def test_what_is_left_for_the_dead_holds_nobody_up_who_closes() -> None:
    """Closing hung in one of about thirty runs, when several processes competed for a core."""
    num_processes, num_times = (4, 50) if MORE else (2, 8)
    processes = [
        multiprocessing.get_context("spawn").Process(target=restart_peers, args=(num_times,))
        for _ in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        wait_until(lambda: all(p.exitcode is not None for p in processes), "all have closed")
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * num_processes


def test_a_restarted_peer_is_reached_and_gets_nothing_of_its_predecessors(folder: Path) -> None:
    restart_a_peer(folder)


def test_a_dead_sender_does_not_speak_after_its_successor(wire: Callable[..., ZmqWire]) -> None:
    receiver = wire("b")
    # The order of their starts does not matter, only the epoch number that the supervisor counts.
    new, old = (wire("a", epoch_number=epoch_number) for epoch_number in (2, 1))
    new.send("b", Cancel("new", 0))
    assert receive_all(receiver, 1) == [Cancel("new", 0)]
    old.send("b", Cancel("old", 0))
    assert receive_all(receiver, 0) == []
    assert receiver.counts["stale"] == 1


def test_closing_leaves_the_name_to_a_successor(folder: Path, wire: Callable[..., ZmqWire]) -> None:
    old, new = wire("a"), wire("a")
    old.close()
    assert (folder / "a.sock").exists()
    new.close()
    assert not (folder / "a.sock").exists()


def test_what_was_sent_last_still_leaves_when_closing(wire: Callable[..., ZmqWire]) -> None:
    a, b = wire("a"), wire("b")
    a.send("b", Drain())
    a.close()
    assert receive_all(b, 1) == [Drain()]


HEADER = msgspec.msgpack.encode(("x", 1))


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"", b""],
        [b"\xff" * 40, b"\xff" * 40, b""],
        [HEADER, b"not msgpack \xc1", b""],
        [HEADER, msgspec.msgpack.encode(["Drain", 1, 2, {"a": []}])[:-1], b""],
        [HEADER, msgspec.msgpack.encode(["NoSuchMessage"]), b""],
        [HEADER, msgspec.msgpack.encode(["Cancel", 7, "seven"]), b""],
        [msgspec.msgpack.encode(("x", "soon")), msgspec.msgpack.encode(["Drain"]), b""],
        [HEADER, b"\x91" * 100_000, b""],
    ],
)
def test_what_is_not_ours_is_dropped_and_counted(
    folder: Path, wire: Callable[..., ZmqWire], frames: list[bytes]
) -> None:
    b, good = wire("b"), wire("a")
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(f"ipc://{folder / 'b.sock'}")
    stranger.send_multipart(frames)

    def is_counted() -> bool:
        assert b.receive(0.05) == []
        return b.counts["malformed"] == 1

    wait_until(is_counted, "it is counted")
    good.send("b", Drain())
    assert receive_all(b, 1) == [Drain()]
    context.destroy(linger=0)


def test_a_path_too_long_for_a_socket_is_a_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with pytest.raises(ConfigError, match="TMPDIR"):
        ZmqWire("a", folder)


def test_receive_waits_for_as_long_as_asked(wire: Callable[..., ZmqWire]) -> None:
    a, waits = wire("a"), []
    poll = a._listener._poller.poll
    a._listener._poller.poll = lambda milliseconds: waits.append(milliseconds) or poll(milliseconds)  # type: ignore[method-assign]
    assert a.receive(0.0) == a.receive(0.05) == []
    assert waits == [51], "rounded up, and not at all without a time"


def test_a_descriptor_ends_the_wait(wire: Callable[..., ZmqWire]) -> None:
    a, got = wire("a"), []
    fd = os.eventfd(0)
    a.wake_on(fd)
    waiting = threading.Thread(target=lambda: got.append(a.receive(LONG_S)), daemon=True)
    waiting.start()
    os.eventfd_write(fd, 1)
    join(waiting)
    assert got == [[]]
    a.close()
    os.close(fd)


async def test_the_same_in_an_event_loop(wire: Callable[..., ZmqWire]) -> None:
    a, b = wire("a"), wire("b")
    sent = [Cancel(str(i), i) for i in range(2 * MAX_BATCH + 5)]
    got: list[object] = await b.receive_async(0.01)
    assert got == []
    loop = asyncio.get_running_loop()
    sending = loop.run_in_executor(None, lambda: [a.send("b", message) for message in sent])

    async def are_there() -> bool:
        got.extend(await b.receive_async(5.0))
        return len(got) >= len(sent)

    await wait_for(are_there, "all messages come")
    await sending
    assert await b.receive_async(0.01) == []
    assert got == sent


async def test_what_is_dropped_does_not_hold_up_what_follows_in_an_event_loop(
    folder: Path, wire: Callable[..., ZmqWire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """zmq signals new messages only once all old ones were taken."""
    monkeypatch.setattr("hadal.runtime.wire.MAX_BATCH", 1)
    b, context = wire("b"), zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.connect(f"ipc://{folder / 'b.sock'}")
    body = msgspec.msgpack.encode(Drain())
    for epoch_number in (2, *[1] * 10, 2):
        sender.send_multipart([msgspec.msgpack.encode(("a", epoch_number)), body, b""])
    b._listener.near.poll()  # Wait until messages have arrived.
    got: list[object] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(got) < 2:
            got += await b.receive_async(LONG_S)
    assert got == [Drain(), Drain()]
    context.destroy(linger=0)


async def test_a_wait_is_cancelled_though_a_message_comes_at_that_moment(
    wire: Callable[..., ZmqWire],
) -> None:
    """If the wait went on, a gateway that must end would run until its supervisor's timeout."""
    a, b = wire("a"), wire("b")
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(b.receive_async(LONG_S))
    await asyncio.sleep(0)
    a.send("b", Cancel("r", 0))
    assert select.select([b._listener.near.FD], [], [], DEADLINE_S)[0]
    # Cancel between the loop's turn for the descriptor and the turn of the task it wakes.
    loop.call_soon(loop.call_soon, task.cancel)
    await asyncio.wait({task}, timeout=DEADLINE_S)
    assert task.cancelled()
