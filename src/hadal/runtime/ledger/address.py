"""Address of the ledger: turns the setting into the URL of a database, and finds its outbox.

The setting is a URL, a path, "off" or "auto". "auto" is $HADAL_LEDGER, which may hold any of the
others; without it, a file in the user's state folder ($XDG_STATE_HOME, else ~/.local/state), never
in the working folder.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from hashlib import blake2b
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from hadal.core.balance import AUTO, OFF
from hadal.runtime.ledger.outbox import SUFFIX
from hadal.runtime.process.private import state_folder
from hadal.stats.ledger import LedgerError

LEDGER_VARIABLE = "HADAL_LEDGER"
FILE_NAME = "ledger.sqlite"
_DRIVERS = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
}


def ledger_url(asked: str) -> str:
    """Return the database as a URL, with an absolute path for a file; "" if there is none ("off",
    or "auto" for a user without a home). Raises LedgerError.
    """
    asked = asked.strip()
    if asked in ("", AUTO):
        asked = os.environ.get(LEDGER_VARIABLE, "").strip()
    if asked in ("", AUTO):
        folder = state_folder()
        return "" if folder is None else _file_url(folder / FILE_NAME)
    if asked == OFF:
        return ""
    if "://" not in asked:
        return _file_url(Path(asked))
    try:
        url = sa.make_url(asked)
    except ArgumentError:
        raise LedgerError(
            "the ledger's URL cannot be read; take a path, or postgresql://USER:PASSWORD@HOST/NAME."
        ) from None
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        raise LedgerError(
            f"the ledger must be in SQLite or PostgreSQL, not in {url.get_backend_name()}."
        )
    if driver == "sqlite":
        if not url.database or url.database == ":memory:":
            raise LedgerError(
                "the ledger's URL names no file, and a ledger in memory would be lost. Name a file."
            )
        return _file_url(Path(url.database))
    if importlib.util.find_spec("psycopg") is None:
        raise LedgerError("a ledger in PostgreSQL needs psycopg: pip install 'hadal[postgres]'.")
    return url.set(drivername=driver).render_as_string(hide_password=False)


def shown(url: str) -> str:
    """Return the database for display: a path, or a URL without its password."""
    parsed = sa.make_url(url)
    return (
        parsed.database or ""
        if parsed.get_backend_name() == "sqlite"
        else parsed.render_as_string()
    )


def file_of(url: str) -> Path | None:
    """Return the file of a SQLite ledger; None for a database server."""
    parsed = sa.make_url(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def outbox_of(url: str) -> Path:
    """Return the database's outbox: beside its file, else in the state or a temporary folder."""
    path = file_of(url)
    if path is not None:
        return path.with_name(f"{path.name}{SUFFIX}")
    parsed = sa.make_url(url)
    place = f"{parsed.host}:{parsed.port}/{parsed.database}".encode()
    folder = state_folder() or Path(tempfile.gettempdir())
    return folder / f"ledger-{blake2b(place, digest_size=6).hexdigest()}{SUFFIX}"


def _file_url(path: Path) -> str:
    try:
        path = path.expanduser().absolute()
    except RuntimeError:
        raise LedgerError(
            f"the ledger's path is {path}, but that user has no home here. Give the whole path."
        ) from None
    return sa.URL.create("sqlite", database=str(path)).render_as_string()
