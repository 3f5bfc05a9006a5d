"""Test direct connections: data arrives unchanged however the sockets cut it, or an error is raised
in time.
"""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from hadal.core.handshake import NONCE_BYTES, Handshake
from hadal.runtime.transfer.experts import AskExpert, ExpertHead
from hadal.runtime.transfer.grants import Grant
from hadal.runtime.transfer.peers import (
    MAX_FRAME_BYTES,
    MAX_PIECES,
    BadPeer,
    Channel,
    NotProven,
    fill,
    wait,
)
from hadal.runtime.transfer.tcp import (
    AboutNixl,
    AboutPool,
    AskNixl,
    ChunkHead,
    ChunksEnd,
    PullChunks,
)
from tests.fresh import fresh
from tests.waiting import deadline


@contextlib.contextmanager
def channels(is_sealed: bool) -> Iterator[tuple[Channel, Channel]]:
    """Open both ends of a proven connection, as on one host or as between two."""
    sides = [
        Handshake(
            bytes(32),
            os.urandom(NONCE_BYTES),
            is_connector=is_connector,
            port=1,
            is_sealed=is_sealed,
        )
        for is_connector in (True, False)
    ]
    sides[0].challenged(sides[1].nonce)
    sides[1].challenged(sides[0].nonce)
    here, there = socket.socketpair()
    with here, there:
        yield Channel(here, sides[0], "there"), Channel(there, sides[1], "here")


GRANT = Grant((1, 2), (3, 4), b"tag")
HEARD: msgspec.msgpack.Decoder[msgspec.Struct] = msgspec.msgpack.Decoder(
    AboutPool | AskNixl | AboutNixl | PullChunks | ChunkHead | ChunksEnd | AskExpert | ExpertHead
)


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize(
    "frame",
    [
        AboutPool("hadal-a.b.1", "0f", (9, 2, 64, 10), "float32", True),
        AskNixl(),
        ChunkHead(3, 1 << 20, (1 << 64) - 1),
        ChunksEnd("freed"),
        AskExpert(60, 255),
        ExpertHead((("float8_e4m3fn", (2048, 7168)), ("float32", (16, 56))) * 3, 5),
        AboutNixl(b"\0\xff", 1 << 47, 3),
        PullChunks((1, 2), (3, 4), (0,), GRANT),
        PullChunks((), (), (), Grant()),
        PullChunks(tuple(range(100_000)), (1 << 40,) * 100_000, tuple(range(99)), GRANT),
    ],
)
def test_frames_arrive_as_they_were(frame: msgspec.Struct, is_sealed: bool) -> None:
    with channels(is_sealed) as (here, there):
        thread = threading.Thread(target=there.send_frame, args=(frame,))
        thread.start()
        assert here.receive_frame(HEARD, deadline()) == frame
        thread.join()


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with channels(False) as (here, there):
        there.connection.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
        with pytest.raises(BadPeer, match="announces"):
            here.receive_frame(HEARD, deadline())


@pytest.mark.parametrize("is_sealed", [False, True])
def test_bytes_arrive_whatever_pieces_they_are_sent_from_and_into(is_sealed: bool) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    data = os.urandom(3_000_000)
    head = ChunkHead(7, len(data), 99)

    def cut(view: memoryview, num_pieces: int) -> list[memoryview]:
        cuts = sorted(rng.sample(range(1, len(data)), num_pieces - 1))
        return [view[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    for num_sent, num_received in (
        (1, 1),
        (3 * MAX_PIECES, 2),
        (2, 3 * MAX_PIECES),
        (MAX_PIECES, MAX_PIECES),
    ):
        pieces, found = cut(memoryview(data), num_sent), bytearray(len(data))
        with channels(is_sealed) as (here, there):
            thread = threading.Thread(target=there.send_frame, args=(head, *pieces))
            thread.start()
            assert here.receive_frame(HEARD, deadline()) == head
            here.fill(*cut(memoryview(found), num_received), deadline_s=deadline())
            thread.join()
        assert bytes(found) == data


@pytest.mark.promise(
    "mesh, KV and experts over TCP prove the secret in a handshake and tag every record"
)
@pytest.mark.parametrize("how", ["changed", "repeated", "left out"])
def test_between_hosts_what_was_spoiled_on_the_way_is_refused(how: str) -> None:
    def sealed_by(side: Channel) -> list[bytes]:
        return [bytes([i] * 9) + side._out.tag([bytes([i] * 9)]) for i in range(3)]  # type: ignore[union-attr]

    with channels(True) as (here, there):
        first, second, third = sealed_by(there)
        spoiled = {"changed": b"x" + second[1:], "repeated": first, "left out": third}[how]
        there.connection.sendall(first + spoiled)
        here.fill(memoryview(bytearray(9)), deadline_s=deadline())
        with pytest.raises(NotProven, match="changed on its way"):
            here.fill(memoryview(bytearray(9)), deadline_s=deadline())


def test_bytes_arrive_in_pieces() -> None:
    here, there = socket.socketpair()
    with here, there:
        found = bytearray(9)

        def send() -> None:
            for piece in (b"abc", b"d", b"efghi", b"j"):
                there.sendall(piece)
                time.sleep(0.01)

        thread = threading.Thread(target=send)
        thread.start()
        fill(here, memoryview(found), deadline(), 10)
        thread.join()
        assert bytes(found) == b"abcdefghi"


@pytest.mark.parametrize(("deadline_s", "silence_s"), [(0.05, 10.0), (10.0, 0.05), (-1.0, 10.0)])
def test_silence_and_deadlines_are_errors(deadline_s: float, silence_s: float) -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(TimeoutError):
        fill(here, memoryview(bytearray(1)), deadline(deadline_s), silence_s)


def test_an_end_in_the_middle_is_an_error() -> None:
    here, there = socket.socketpair()
    with here:
        there.sendall(b"ab")
        there.close()
        with pytest.raises(ConnectionResetError):
            fill(here, memoryview(bytearray(3)), deadline(), 10)


def test_a_trickle_ends_at_the_deadline() -> None:
    here, there = socket.socketpair()
    with here, there:
        wait(here, deadline(), 3.0)
        assert here.gettimeout() == 3.0
        wait(here, deadline(100.0), 200.0)
        assert 0 < (here.gettimeout() or 0) <= 100.0
