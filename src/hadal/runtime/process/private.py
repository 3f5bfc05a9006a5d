"""Folders and files that are for their owner alone: secrets, keys, sockets."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from hadal.core.errors import ConfigError

MAX_PRIVATE_BYTES = 1 << 20
"""Size of a file with a secret or with keys, at most."""


def state_folder() -> Path | None:
    """Hadal's, as the XDG base directory specification has it; None for a user without a home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if given and Path(given).is_absolute():  # Relative paths are to be ignored, it says.
        return Path(given) / "hadal"
    try:
        return Path.home() / ".local" / "state" / "hadal"
    except RuntimeError:
        return None


def make_private(folder: Path) -> None:
    """Make a folder that nobody else may enter; one that exists is made so, unless it is
    everybody's, as /tmp is. Raises ConfigError, saying why not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & stat.S_ISVTX:
            raise ConfigError(
                f"{folder} is for all users of this machine. Name a folder below it, which will be"
                " made."
            )
        take_from_others(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be made a folder for you alone ({error.strerror})."
        ) from error


def take_from_others(path: Path) -> None:
    """Let nobody but its owner at a file or folder of ours that is there; one with the sticky bit
    is everybody's, and stays. Raises OSError if it is not ours to change.
    """
    mode = path.stat().st_mode
    if mode & 0o077 and not mode & stat.S_ISVTX:
        path.chmod(mode & 0o700)


def append_private(path: Path) -> IO[bytes]:
    """A file of ours to add to, unbuffered, that nobody else may read; one that exists is made so.
    Raises OSError.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    take_from_others(path)
    return os.fdopen(fd, "ab", buffering=0)


def read_private(path: Path, what: str) -> bytes:
    """The contents of a file that only its owner may read, less white space around them; `what` it
    is, for errors. Raises ConfigError.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            found = file.read(MAX_PRIVATE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {what} cannot be read ({error.strerror}).") from error
    if mode & 0o077:
        raise ConfigError(
            f"{path}: others may read {what}. Keep it to yourself with: chmod 600 {path}"
        )
    if len(found) > MAX_PRIVATE_BYTES:
        raise ConfigError(f"{path}: {what} has more than {MAX_PRIVATE_BYTES} bytes.")
    return found.strip()
