"""Addresses in a run's folder: where each process listens, for those of its host and for other hosts.

Knows no socket: runtime/wire_sockets listens and connects.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from hadal.core.errors import ConfigError
from hadal.core.messages.nodes import Address

_MAX_PATH = 107
"""sockaddr_un.sun_path less its final zero (unix(7))."""

Identity = tuple[int, int]


def socket_path(folder: Path, name: str) -> Path:
    """Where `name` listens. Raises ConfigError if a Unix socket's address cannot hold the path."""
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ConfigError(
            f"{path}: longer than a Unix socket's {_MAX_PATH} bytes. Set TMPDIR to a shorter"
            " folder."
        )
    return path


def address_path(folder: Path, name: str) -> Path:
    """Where it is written down at which port of which node `name` listens."""
    return folder / f"{name}.at"


def write_address(folder: Path, name: str, address: Address) -> None:
    """Replace what is known of where `name` listens, at once."""
    unborn = folder / f"{name}.at.new"
    unborn.write_bytes(msgspec.json.encode(address))
    unborn.rename(address_path(folder, name))


def read_address(path: Path) -> Address:
    """Raises OSError if it is not there, or none of ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except msgspec.MsgspecError as error:
        raise OSError(f"{path}: no address of a process ({error}).") from error


def identity_of(path: Path) -> Identity:
    """Return what tells this file from a later one of its name. Raises OSError."""
    found = os.stat(path)  # The inode alone may be used again.
    return found.st_ino, found.st_ctime_ns
