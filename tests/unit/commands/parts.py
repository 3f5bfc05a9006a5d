"""Functions that pool processes run in tests in place of simulations. Every process imports this
module anew, so it imports little.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from hadal.core.errors import ConfigError


def part(size: int, *, by: float = 1.0) -> tuple[int, float]:
    """Return the process id, and size * by."""
    return os.getpid(), size * by


def refused() -> None:
    raise ConfigError("it cannot be.")


def blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def die_halfway() -> bytes:
    """End the process in the middle of sending its result."""
    send = Connection._send  # type: ignore[attr-defined]

    def half(self: Connection, part: bytes) -> None:
        send(self, part[: len(part) // 2])
        os._exit(1)

    Connection._send = half  # type: ignore[attr-defined]
    return bytes(10_000)
