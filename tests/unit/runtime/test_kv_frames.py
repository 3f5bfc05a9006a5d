"""Bytes of the hand-over's protocol: what is put together comes apart the same, however the sockets cut it."""

import os
import random
import socket
import struct
import threading
import time

import pytest

from hadal.runtime import kv_frames
from hadal.runtime.kv_frames import (
    MAX_PIECES,
    About,
    AboutNixl,
    Ask,
    AskNixl,
    BadPeer,
    Frame,
    blocks_per_chunk,
    checksum,
    receive_bytes,
    receive_frame,
    receive_head,
    send_chunk,
    send_frame,
)
from tests.fresh import fresh


def soon() -> float:
    return time.monotonic() + 10


@pytest.mark.parametrize(
    "frame",
    [
        About("hadal-a.b.1", "0f", (9, 2, 64, 10), "float32", True), Ask((1, 2), (3, 4), (0,)), Ask((), (), ()),
        Ask(tuple(range(100_000)), (1 << 40,) * 100_000, tuple(range(99))), AskNixl(), AboutNixl(b"\0\xff", 1 << 47, 3),
    ],
)  # fmt: skip
def test_frames_arrive_as_they_were(frame: Frame) -> None:
    here, there = socket.socketpair()
    with here, there:
        thread = threading.Thread(target=send_frame, args=(there, frame))
        thread.start()
        assert receive_frame(here, soon()) == frame
        thread.join()


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(struct.pack("<I", kv_frames.MAX_FRAME_BYTES + 1))
        with pytest.raises(BadPeer, match="announces"):
            receive_frame(here, soon())


def test_chunks_arrive_whatever_pieces_they_are_sent_from_and_into() -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    data = os.urandom(3_000_000)
    found = bytearray(len(data))

    def cut(view: memoryview, num_pieces: int) -> list[memoryview]:
        cuts = sorted(rng.sample(range(1, len(data)), num_pieces - 1))
        return [view[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    for num_sent, num_received in ((1, 1), (3 * MAX_PIECES, 2), (2, 3 * MAX_PIECES), (MAX_PIECES, MAX_PIECES)):
        pieces = cut(memoryview(data), num_sent)
        here, there = socket.socketpair()
        with here, there:
            send = (there, kv_frames.CHUNK, soon(), 7, pieces, checksum(pieces))
            thread = threading.Thread(target=send_chunk, args=send)
            thread.start()
            kind, chunk, num_bytes, digest = receive_head(here, soon())
            into = cut(memoryview(found), num_received)
            receive_bytes(here, into, soon())
            thread.join()
        assert (kind, chunk, num_bytes) == (kv_frames.CHUNK, 7, len(data))
        assert bytes(found) == data
        assert checksum(into) == digest == checksum([memoryview(data)])
        found[rng.randrange(len(found))] ^= 1
        assert checksum(into) != digest


def test_a_chunk_is_a_block_at_least() -> None:
    assert blocks_per_chunk(1 << 10) == 1024
    assert blocks_per_chunk(kv_frames.CHUNK_BYTES) == 1
    assert blocks_per_chunk(61 * 64 * 576 * 2) == 1
