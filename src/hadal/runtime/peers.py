"""What direct connections between processes of a run have in common: the key they know each other by, and receiving
exactly so many bytes within a deadline.

Knows neither what is asked nor what is answered (runtime/expert_wire, runtime/kv_frames).
"""

from __future__ import annotations

import hashlib
import socket
import time


def key_of(run_id: str, purpose: str) -> bytes:
    """The 16 bytes by which processes of a run know each other when they speak of `purpose`."""
    return hashlib.blake2b(f"hadal {purpose} {run_id}".encode(), digest_size=16).digest()


def fill(connection: socket.socket, view: memoryview, deadline_s: float, silence_s: float) -> None:
    """Receive exactly these bytes. Raises OSError: silence for `silence_s`, the deadline, or an end in the middle."""
    while view:
        wait(connection, deadline_s, silence_s)
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("it closed the connection")
        view = view[count:]


def wait(connection: socket.socket, deadline_s: float, silence_s: float) -> None:
    """Let the next call on the connection wait for `silence_s`, and not beyond the deadline. Raises TimeoutError."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it is too slow")
    connection.settimeout(min(silence_s, left_s))
