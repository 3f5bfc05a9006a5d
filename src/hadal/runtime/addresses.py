"""Addresses in a run's folder: where each process listens, for its own host and for other hosts.

Opens no sockets: runtime/wire_sockets listens and connects.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from hadal.core.errors import ConfigError
from hadal.core.messages.nodes import Address

_MAX_PATH = 107
"""Longest path of a Unix socket in bytes: sockaddr_un.sun_path without its final zero (unix(7))."""

Identity = tuple[int, int]


def socket_path(folder: Path, name: str) -> Path:
    """Return the path of `name`'s Unix socket. Raises ConfigError if it exceeds _MAX_PATH bytes."""
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ConfigError(
            f"{path}: longer than a Unix socket's {_MAX_PATH} bytes. Give a shorter --run-folder, or"
            " without one a shorter TMPDIR."
        )
    return path


def address_path(folder: Path, name: str) -> Path:
    """Return the path of the file with the address at which `name` listens for other hosts."""
    return folder / f"{name}.at"


def write_address(folder: Path, name: str, address: Address) -> None:
    """Replace the address of `name` atomically."""
    unborn = folder / f"{name}.at.new"
    unborn.write_bytes(msgspec.json.encode(address))
    unborn.rename(address_path(folder, name))


def read_address(path: Path) -> Address:
    """Read an address file. Raises OSError if it is missing or is not an address file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except msgspec.MsgspecError as error:
        raise OSError(f"{path}: not the address of a process ({error}).") from error


def identity_of(path: Path) -> Identity:
    """Return (inode, change time in ns): another pair for each file at `path`. Raises OSError."""
    found = os.stat(path)  # An inode number alone may be reused.
    return found.st_ino, found.st_ctime_ns
