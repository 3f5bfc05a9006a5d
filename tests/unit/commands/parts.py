"""Parts of a simulation that has none: what processes do in tests. Imports little, for each process
imports it anew.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from hadal.core.errors import ConfigError


def part(size: int, *, by: float = 1.0) -> tuple[int, float]:
    """Who did it, and what."""
    return os.getpid(), size * by


def refused() -> None:
    raise ConfigError("it cannot be.")


def blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def die_halfway() -> bytes:
    """It ends in the middle of saying what came of it."""
    send = Connection._send  # type: ignore[attr-defined]

    def half(self: Connection, part: bytes) -> None:
        send(self, part[: len(part) // 2])
        os._exit(1)

    Connection._send = half  # type: ignore[attr-defined]
    return bytes(10_000)
