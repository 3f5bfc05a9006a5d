"""What a supervisor is given besides the deployment: how to run it, and where it listens.

Knows no process and no message.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from hadal.runtime.process.logs import TEXT


@dataclass(frozen=True)
class Options:
    """How to run it, as opposed to what to run."""

    run_folder: Path | None = None
    """None: a temporary one, removed at the end."""
    log_dir: Path | None = None
    """None: every process writes to this one's stderr, under its name."""
    log_level: str = "info"
    log_format: str = TEXT
    api_keys: tuple[str, ...] = ()
    has_bar: bool = False
    """Show the start as a bar at the foot of the terminal; else the log tells of it."""
    secret_file: Path | None = None
    """What the deployment's processes prove themselves by, where several hosts need the same; None:
    drawn at start.
    """
    api_keys_file: Path | None = None
    """With more keys than `api_keys`; the gateway with the front follows it."""


@dataclass(frozen=True)
class Listeners:
    """Sockets that outlive the processes that serve on them."""

    gateway: socket.socket
    url: str
    """URL of the gateway, as it is shown."""
    pages: socket.socket | None
    """Socket of the console; None: there is none."""
    pages_url: str
    """URL of the console; empty: there is none."""
