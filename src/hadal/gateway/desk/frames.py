"""What the console shows at one instant, and files of such instants: of a live server, or of a
simulated one that is played back.

A file is JSON, a ConsoleFrame a line, packed with gzip. Knows no page.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from hadal.core.errors import ConfigError
from hadal.core.overview import FleetSeen, Overview
from hadal.gateway.desk.trace import TraceReply
from hadal.runtime.process.status import Status

_MAX_BYTES = 1 << 28


class LogLine(msgspec.Struct, frozen=True):
    """A warning or an error of a process."""

    time: str
    process: str
    level: str
    text: str


class ConsoleFrame(msgspec.Struct, frozen=True):
    """All that is known at one instant. None and empty: not known."""

    unix_s: float
    overview: Overview | None = None
    status: Status | None = None
    fleet: FleetSeen | None = None
    money: dict[str, Any] = {}
    """Reports (stats/report) of the last 24 hours by "hour", "model" and "tenant"."""
    lines: tuple[LogLine, ...] = ()
    traces: dict[str, TraceReply] = {}
    """Of the units that were asked."""
    problem: str = ""
    """Why the server says nothing."""
    place: str = ""
    """Of what is simulated: what it is."""


def write_frames(path: Path, frames: Iterable[ConsoleFrame]) -> None:
    """Write a file of them. Raises ConfigError."""
    try:
        with gzip.open(path, "wb", compresslevel=6) as file:
            for frame in frames:
                file.write(msgspec.json.encode(frame) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be written ({error.strerror}).") from error


def read_frames(path: Path) -> list[ConsoleFrame]:
    """Read such a file. Raises ConfigError."""
    decode = msgspec.json.Decoder(ConsoleFrame).decode
    try:
        with gzip.open(path, "rb") as file:
            text = file.read(_MAX_BYTES)
        frames = [decode(line) for line in text.splitlines()]
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not written by `hadal simulate --frames` ({error}).") from error
    if not frames:
        raise ConfigError(f"{path}: there is nothing in it.")
    return frames
