"""Parameters of a supervisor besides the deployment: options of the run, and listening sockets.

Independent of processes and messages.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from hadal.runtime.process.logs import TEXT


@dataclass(frozen=True)
class Options:
    """Options of a run. They set how the deployment runs, not what it serves."""

    run_folder: Path | None = None
    """Run folder; None: a temporary one, removed at the end."""
    log_dir: Path | None = None
    """Folder of log files; None: all processes write to the supervisor's stderr."""
    log_level: str = "info"
    log_format: str = TEXT
    api_keys: tuple[str, ...] = ()
    has_bar: bool = False
    """True: show the start as a bar at the foot of the terminal; False: in the log."""
    secret_file: Path | None = None
    """File with the secret by which the deployment's processes prove themselves, if several hosts
    need the same one; None: a random secret, made at the start.
    """
    api_keys_file: Path | None = None
    """File with keys besides `api_keys`; the gateway with the front watches it for changes."""


@dataclass(frozen=True)
class Listeners:
    """Sockets that outlive the processes that serve on them."""

    gateway: socket.socket
    url: str
    """URL of the gateway, as shown to users."""
    pages: socket.socket | None
    """Socket of the console; None: there is none."""
    pages_url: str
    """URL of the console; empty: there is none."""
