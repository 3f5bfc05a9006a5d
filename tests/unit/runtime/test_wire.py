"""Messages between processes: delivered, dropped and counted, never late to the wrong process,
never a crash.
"""

import asyncio
import multiprocessing
import os
import select
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from hadal.core.errors import ConfigError
from hadal.core.messages import Cancel, Drain, Tokens
from hadal.core.plans import Draw
from hadal.runtime.wire import MAX_BATCH, MAX_QUEUED, ZmqWire


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="hadal-w-"
    ) as name:  # pytest's own folders are too long for a socket.
        yield Path(name)


def receive_all(wire: ZmqWire, count: int, timeout_s: float = 5.0) -> list[object]:
    """Collect `count` messages, then make sure that no more follow."""
    messages: list[object] = []
    deadline_s = time.monotonic() + timeout_s
    while len(messages) < count and time.monotonic() < deadline_s:
        messages += wire.receive(0.1)
    return messages + wire.receive(0.05)


def test_messages_arrive_whole_and_in_order(folder: Path) -> None:
    a, b = ZmqWire("a", folder), ZmqWire("b", folder)
    sent = [
        Tokens("decode-0", bytes(n % 40), b"", b"x", ((n, "stop"),), {n: Draw(-0.5, ((n, -0.25),))})
        for n in range(3 * MAX_BATCH)
    ]
    for message in sent:
        a.send("b", message)
    assert receive_all(b, len(sent)) == sent
    a.close()
    b.close()


def test_a_message_to_nobody_is_dropped_and_counted(folder: Path) -> None:
    a = ZmqWire("a", folder)
    a.send("nobody", Drain())
    assert a.counts["absent"] == 1
    a.close()


def test_a_peer_that_does_not_read_fills_up_and_send_does_not_wait(folder: Path) -> None:
    a, b = ZmqWire("a", folder), ZmqWire("b", folder)
    count = 4 * MAX_QUEUED
    started_s = time.monotonic()
    message = Cancel("r" * 4000, 0)
    for _ in range(count):
        a.send("b", message)
    assert time.monotonic() - started_s < 5
    assert a.counts["full"] > 0
    assert (
        len(receive_all(b, a.counts["sent"], 20.0)) == a.counts["sent"] == count - a.counts["full"]
    )
    a.close()
    b.close()


def restart_a_peer(folder: Path) -> None:
    """It is reached, and gets nothing of its predecessor's."""
    a, b = ZmqWire("a", folder), ZmqWire("b", folder)
    a.send("b", Cancel("before", 0))
    assert receive_all(b, 1) == [Cancel("before", 0)]
    # As kill -9 does: the socket goes, its file stays.
    path = folder / "b.sock"
    b._pull.close(linger=0)
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


def test_what_is_left_for_the_dead_holds_nobody_up_who_closes() -> None:
    """It did in one of some thirty times, where several processes wanted a core."""
    processes = [
        multiprocessing.get_context("spawn").Process(target=restart_peers, args=(50,))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    until_s = time.monotonic() + 60.0
    for process in processes:
        process.join(max(0.0, until_s - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * 4


def test_a_restarted_peer_is_reached_and_gets_nothing_of_its_predecessors(folder: Path) -> None:
    restart_a_peer(folder)


def test_a_dead_sender_does_not_speak_after_its_successor(folder: Path) -> None:
    receiver = ZmqWire("b", folder)
    # The order in which they are started says nothing: the supervisor counts lives.
    new, old = (ZmqWire("a", folder, life=life) for life in (2, 1))
    new.send("b", Cancel("new", 0))
    assert receive_all(receiver, 1) == [Cancel("new", 0)]
    old.send("b", Cancel("old", 0))
    assert receive_all(receiver, 0) == []
    assert receiver.counts["stale"] == 1
    for wire in (old, new, receiver):
        wire.close()


def test_closing_leaves_the_name_to_a_successor(folder: Path) -> None:
    old = ZmqWire("a", folder)
    new = ZmqWire("a", folder)
    old.close()
    assert (folder / "a.sock").exists()
    new.close()
    assert not (folder / "a.sock").exists()


def test_what_was_sent_last_still_leaves_when_closing(folder: Path) -> None:
    a, b = ZmqWire("a", folder), ZmqWire("b", folder)
    a.send("b", Drain())
    a.close()
    assert receive_all(b, 1) == [Drain()]
    b.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"", b""],
        [b"\xff" * 40, b"\xff" * 40, b""],
        [msgspec.msgpack.encode(("x", 1)), b"not msgpack \xc1", b""],
        [
            msgspec.msgpack.encode(("x", 1)),
            msgspec.msgpack.encode(["Drain", 1, 2, {"a": []}])[:-1],
            b"",
        ],
        [msgspec.msgpack.encode(("x", 1)), msgspec.msgpack.encode(["NoSuchMessage"]), b""],
        [msgspec.msgpack.encode(("x", 1)), msgspec.msgpack.encode(["Cancel", 7, "seven"]), b""],
        [msgspec.msgpack.encode(("x", "soon")), msgspec.msgpack.encode(["Drain"]), b""],
        [msgspec.msgpack.encode(("x", 1)), b"\x91" * 100_000, b""],
    ],
)
def test_what_is_not_ours_is_dropped_and_counted(folder: Path, frames: list[bytes]) -> None:
    wire, good = ZmqWire("b", folder), ZmqWire("a", folder)
    context = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.connect(f"ipc://{folder / 'b.sock'}")
    stranger.send_multipart(frames)
    deadline_s = time.monotonic() + 5
    while not wire.counts["malformed"] and time.monotonic() < deadline_s:
        assert wire.receive(0.05) == []
    assert wire.counts["malformed"] == 1
    good.send("b", Drain())
    assert receive_all(wire, 1) == [Drain()]
    stranger.close(linger=0)
    context.term()
    good.close()
    wire.close()


def test_a_path_too_long_for_a_socket_is_a_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with pytest.raises(ConfigError, match="TMPDIR"):
        ZmqWire("a", folder)


def test_receive_waits_no_longer_than_asked(folder: Path) -> None:
    wire = ZmqWire("a", folder)
    started_s = time.monotonic()
    assert wire.receive(0.05) == []
    assert 0.045 < time.monotonic() - started_s < 1
    wire.close()


def test_a_descriptor_ends_the_wait(folder: Path) -> None:
    wire = ZmqWire("a", folder)
    fd = os.eventfd(0)
    wire.wake_on(fd)
    threading.Timer(0.05, lambda: os.eventfd_write(fd, 1)).start()
    started_s = time.monotonic()
    assert wire.receive(5.0) == []
    assert time.monotonic() - started_s < 2
    wire.close()
    os.close(fd)


def test_the_same_in_an_event_loop(folder: Path) -> None:
    a, b = ZmqWire("a", folder), ZmqWire("b", folder)
    count = 2 * MAX_BATCH + 5

    async def receive() -> list[object]:
        got: list[object] = await b.receive_async(0.01)
        assert got == []
        sending = asyncio.get_running_loop().run_in_executor(
            None, lambda: [a.send("b", Cancel(str(i), i)) for i in range(count)]
        )
        until_s = time.monotonic() + 5.0
        while len(got) < count:
            assert time.monotonic() < until_s
            got += await b.receive_async(5.0)
        await sending
        assert await b.receive_async(0.01) == []
        return got

    assert asyncio.run(receive()) == [Cancel(str(i), i) for i in range(count)]
    a.close()
    b.close()


def test_what_is_dropped_does_not_hold_up_what_follows_in_an_event_loop(folder: Path) -> None:
    """zmq tells of new messages only once all old ones were taken."""
    b, context = ZmqWire("b", folder), zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.connect(f"ipc://{folder / 'b.sock'}")
    body = msgspec.msgpack.encode(Drain())
    for life in (2, *[1] * (4 * MAX_BATCH), 2):
        sender.send_multipart([msgspec.msgpack.encode(("a", life)), body, b""])
    time.sleep(0.2)  # All of them have come.

    async def receive() -> list[object]:
        got: list[object] = []
        until_s = time.monotonic() + 20.0
        while len(got) < 2 and time.monotonic() < until_s:
            got += await b.receive_async(5.0)
        return got

    begun_s = time.monotonic()
    assert asyncio.run(receive()) == [Drain(), Drain()]
    assert time.monotonic() - begun_s < 4.0
    sender.close(linger=0)
    context.term()
    b.close()


def test_a_wait_is_cancelled_though_a_message_comes_at_that_moment(folder: Path) -> None:
    """Else a gateway that ends goes on for as long as its supervisor lets it."""
    a, b = ZmqWire("a", folder), ZmqWire("b", folder)

    async def cancelled() -> bool:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(b.receive_async(5.0))
        await asyncio.sleep(0)
        a.send("b", Cancel("r", 0))
        descriptor = b._pull.FD
        assert select.select([descriptor], [], [], 5.0)[0]
        # Between the descriptor's turn of the loop and that of the task it wakes.
        loop.call_soon(loop.call_soon, task.cancel)
        await asyncio.wait({task}, timeout=2.0)
        return task.cancelled()

    assert asyncio.run(cancelled())
    a.close()
    b.close()
