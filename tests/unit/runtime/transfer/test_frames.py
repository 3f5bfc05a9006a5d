"""Bytes of the hand-over's protocol: what is put together comes apart the same, however the sockets
cut it.
"""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from hadal.core.handshake import NONCE_BYTES, Handshake
from hadal.runtime.transfer import frames
from hadal.runtime.transfer.frames import (
    About,
    AboutNixl,
    AskNixl,
    BadPeer,
    Frame,
    PullChunks,
    blocks_per_chunk,
    checksum,
    receive_bytes,
    receive_frame,
    receive_head,
    send_chunk,
    send_frame,
)
from hadal.runtime.transfer.grants import Grant
from hadal.runtime.transfer.peers import MAX_PIECES, Channel, NotProven
from tests.fresh import fresh


@contextlib.contextmanager
def channels(is_sealed: bool) -> Iterator[tuple[Channel, Channel]]:
    """Two ends that proved themselves, as on one host or as between two."""
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


def soon() -> float:
    return time.monotonic() + 10


GRANT = Grant((1, 2), (3, 4), b"tag")


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize(
    "frame",
    [
        About("hadal-a.b.1", "0f", (9, 2, 64, 10), "float32", True),
        AskNixl(),
        AboutNixl(b"\0\xff", 1 << 47, 3),
        PullChunks((1, 2), (3, 4), (0,), GRANT),
        PullChunks((), (), (), Grant()),
        PullChunks(tuple(range(100_000)), (1 << 40,) * 100_000, tuple(range(99)), GRANT),
    ],
)
def test_frames_arrive_as_they_were(frame: Frame, is_sealed: bool) -> None:
    with channels(is_sealed) as (here, there):
        thread = threading.Thread(target=send_frame, args=(there, frame))
        thread.start()
        assert receive_frame(here, soon()) == frame
        thread.join()


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with channels(False) as (here, there):
        there.connection.sendall(struct.pack("<I", frames.MAX_FRAME_BYTES + 1))
        with pytest.raises(BadPeer, match="announces"):
            receive_frame(here, soon())


@pytest.mark.parametrize("is_sealed", [False, True])
def test_chunks_arrive_whatever_pieces_they_are_sent_from_and_into(is_sealed: bool) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    data = os.urandom(3_000_000)
    found = bytearray(len(data))

    def cut(view: memoryview, num_pieces: int) -> list[memoryview]:
        cuts = sorted(rng.sample(range(1, len(data)), num_pieces - 1))
        return [view[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    for num_sent, num_received in (
        (1, 1),
        (3 * MAX_PIECES, 2),
        (2, 3 * MAX_PIECES),
        (MAX_PIECES, MAX_PIECES),
    ):
        pieces = cut(memoryview(data), num_sent)
        with channels(is_sealed) as (here, there):
            send = (there, frames.CHUNK, soon(), 7, pieces, checksum(pieces))
            thread = threading.Thread(target=send_chunk, args=send)
            thread.start()
            kind, chunk, num_bytes, digest = receive_head(here, soon())
            into = cut(memoryview(found), num_received)
            receive_bytes(here, into, soon())
            thread.join()
        assert (kind, chunk, num_bytes) == (frames.CHUNK, 7, len(data))
        assert bytes(found) == data
        assert checksum(into) == digest == checksum([memoryview(data)])
        found[rng.randrange(len(found))] ^= 1
        assert checksum(into) != digest


@pytest.mark.parametrize("how", ["changed", "repeated", "left out"])
def test_between_hosts_what_was_spoiled_on_the_way_is_refused(how: str) -> None:
    def sealed_by(side: Channel) -> list[bytes]:
        return [bytes([i] * 9) + side._out.tag([bytes([i] * 9)]) for i in range(3)]  # type: ignore[union-attr]

    with channels(True) as (here, there):
        first, second, third = sealed_by(there)
        spoiled = {"changed": b"x" + second[1:], "repeated": first, "left out": third}[how]
        there.connection.sendall(first + spoiled)
        here.fill(memoryview(bytearray(9)), deadline_s=soon(), silence_s=5.0)
        with pytest.raises(NotProven, match="changed on its way"):
            here.fill(memoryview(bytearray(9)), deadline_s=soon(), silence_s=5.0)


def test_a_chunk_is_a_block_at_least() -> None:
    assert blocks_per_chunk(1 << 10) == 1024
    assert blocks_per_chunk(frames.CHUNK_BYTES) == 1
    assert blocks_per_chunk(61 * 64 * 576 * 2) == 1
