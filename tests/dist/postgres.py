"""A PostgreSQL server for tests, on a socket in a temporary folder. Tests are skipped if PostgreSQL
is not installed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.needs import NEEDS, leave_out, need
from tests.waiting import DEADLINE_S

_OPTIONS = "-c listen_addresses='' -c fsync=on -c max_connections=20 -c shared_buffers=16MB"


@dataclass
class Postgres:
    """A running server."""

    url: str
    _bin: Path
    _folder: Path
    _user: str | None

    def stop(self) -> None:
        """Stop without a shutdown, as a crash does: the server recovers from its log at the next start."""
        self._call("pg_ctl", "stop", "-D", str(self._folder / "data"), "-m", "immediate", "-w")

    def start(self) -> None:
        """Start, and wait until the server accepts connections."""
        options = f"{_OPTIONS} -k {self._folder}"
        log = str(self._folder / "log")
        self._call(
            "pg_ctl", "start", "-D", str(self._folder / "data"), "-w", "-o", options, "-l", log
        )

    def _call(self, command: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._bin / command), *arguments],
            check=True,
            timeout=DEADLINE_S,
            user=self._user,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
        )


@contextmanager
def postgres() -> Iterator[Postgres]:
    """Yield a new server, removed with its data at the end."""
    need("postgresql")
    initdb = NEEDS["postgresql"].find("initdb")
    assert initdb is not None
    user = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root.
        user = "postgres"
        if user not in {entry.pw_name for entry in pwd.getpwall()}:
            leave_out(
                "PostgreSQL does not run as root, and there is no user postgres",
                NEEDS["postgresql"].how,
            )
    folder = Path(tempfile.mkdtemp(prefix="hadal-pg-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        url = f"postgresql://hadal@/postgres?host={folder}"
        server = Postgres(url, initdb.parent, folder, user)
        server._call(
            "initdb",
            "-D",
            str(folder / "data"),
            "-U",
            "hadal",
            "-A",
            "trust",
            "--no-sync",
            "-E",
            "UTF8",
        )
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
