"""Receiving exactly so many bytes, or an error in time."""

import socket
import threading
import time

import pytest

from hadal.runtime.transfer.peers import fill, wait


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
        fill(here, memoryview(found), time.monotonic() + 10, 10)
        thread.join()
        assert bytes(found) == b"abcdefghi"


@pytest.mark.parametrize(("deadline_s", "silence_s"), [(0.05, 10.0), (10.0, 0.05), (-1.0, 10.0)])
def test_silence_and_deadlines_are_errors(deadline_s: float, silence_s: float) -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(TimeoutError):
        fill(here, memoryview(bytearray(1)), time.monotonic() + deadline_s, silence_s)


def test_an_end_in_the_middle_is_an_error() -> None:
    here, there = socket.socketpair()
    with here:
        there.sendall(b"ab")
        there.close()
        with pytest.raises(ConnectionResetError):
            fill(here, memoryview(bytearray(3)), time.monotonic() + 10, 10)


def test_a_trickle_ends_at_the_deadline() -> None:
    here, there = socket.socketpair()
    with here, there:
        wait(here, time.monotonic() + 10, 3.0)
        assert here.gettimeout() == 3.0
        wait(here, time.monotonic() + 1, 3.0)
        assert (here.gettimeout() or 9) <= 1.0
