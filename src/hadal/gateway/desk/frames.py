"""Console states at single instants, live or simulated, and files of them for playback.

A file has one ConsoleFrame per line as JSON, packed with gzip. Independent of pages.
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
    """Warning or error of a process."""

    time: str
    process: str
    level: str
    text: str


class ConsoleFrame(msgspec.Struct, frozen=True):
    """State of a server at one instant. None or an empty value: not known."""

    unix_s: float
    overview: Overview | None = None
    status: Status | None = None
    fleet: FleetSeen | None = None
    money: dict[str, Any] = {}
    """Reports (stats/report) of the last 24 hours by "hour", "model", "tenant"; or a "problem"."""
    lines: tuple[LogLine, ...] = ()
    traces: dict[str, TraceReply] = {}
    """Unit -> its trace, for the units that were asked."""
    problem: str = ""
    """Reason why the server does not answer; "" if it does."""
    place: str = ""
    """Description of a simulated deployment; "" for a live server."""


def write_frames(path: Path, frames: Iterable[ConsoleFrame]) -> None:
    """Write a file of frames. Raises ConfigError."""
    try:
        with gzip.open(path, "wb", compresslevel=6) as file:
            for frame in frames:
                file.write(msgspec.json.encode(frame) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from error


def read_frames(path: Path) -> list[ConsoleFrame]:
    """Read a file of frames. Raises ConfigError."""
    decode = msgspec.json.Decoder(ConsoleFrame).decode
    try:
        with gzip.open(path, "rb") as file:
            text = file.read(_MAX_BYTES)
        frames = [decode(line) for line in text.splitlines()]
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not written by `hadal simulate --frames` ({error}).") from error
    if not frames:
        raise ConfigError(f"{path}: the file contains no frames.")
    return frames
