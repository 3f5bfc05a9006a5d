"""Folders and files that are for their owner alone: secrets, keys, sockets.

A process of root may have to write in a folder of another account, and that account can put links
there. So a name in such a folder is opened relative to the folder's descriptor, and a link there is
not followed. On the way to the folder, root follows no link of another account.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hadal.core.errors import ConfigError

MAX_PRIVATE_BYTES = 1 << 20
"""Largest size of a file with a secret or with keys."""
_PATH = os.O_PATH | os.O_CLOEXEC
_MAX_LINKS = 40
"""Maximum number of symbolic links on the way to a folder, as in Linux."""


def state_folder() -> Path | None:
    """Return Hadal's state folder, by the XDG specification; None for a user without a home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if given and Path(given).is_absolute():  # The specification ignores relative paths.
        return Path(given) / "hadal"
    try:
        return Path.home() / ".local" / "state" / "hadal"
    except RuntimeError:
        return None


def make_private(folder: Path) -> None:
    """Make a folder, if need be, and make it private to its owner. Raises ConfigError if that fails, and
    for a folder of all users, such as /tmp.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _opened(folder, is_ours=True) as descriptor:
            if os.fstat(descriptor).st_mode & stat.S_ISVTX:
                raise ConfigError(
                    f"{folder} is for all users of this machine. Name a folder below it, which will"
                    " be made."
                )
            _restrict(descriptor)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made private to you ({error.strerror}).") from error


def take_from_others(path: Path) -> None:
    """Make a file or folder of ours private. A folder with the sticky bit is shared by all users and is
    left as it is. A file is not opened, so that locks on it stay. Raises OSError for a file or folder of
    another account, and for a link to a file.
    """
    with _opened(path) if path.is_dir() else _opened(path.parent) as descriptor:
        if path.is_dir():
            _restrict(descriptor)
            return
        file = os.open(path.name, _PATH | os.O_NOFOLLOW, dir_fd=descriptor)
        try:
            _restrict(file)
        finally:
            os.close(file)


def open_private(path: Path, flags: int) -> int:
    """Open a private file of ours, made if need be, and return its descriptor. `flags`: O_APPEND, O_EXCL
    and the like. Raises OSError for a link, for anything but a regular file, and for a file of another
    account.
    """
    with _opened(path.parent) as folder:
        descriptor = os.open(
            path.name,
            flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            0o600,
            dir_fd=folder,
        )
    try:
        _restrict(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def append_private(path: Path) -> IO[bytes]:
    """Open a private file of ours for appending, unbuffered, made if need be. Raises OSError."""
    return os.fdopen(open_private(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)


def replace_private(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old content or the new. If root writes it, the
    file keeps its owner, and a new one belongs to the owner of its folder. Raises OSError, also for
    a link at this path.
    """
    new = f".{path.name}.{secrets.token_hex(8)}"
    with _opened(path.parent) as folder:
        owned = os.fstat(folder)
        with suppress(FileNotFoundError):
            owned = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(owned.st_mode):
                raise OSError(
                    errno.ELOOP, "it is a link or not a regular file; name the file itself"
                )
        descriptor = os.open(
            new,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=folder,
        )
        try:
            with os.fdopen(descriptor, "wb") as out:
                if os.geteuid() == 0:
                    os.fchown(descriptor, owned.st_uid, owned.st_gid)
                out.write(content)
                out.flush()
                os.fsync(descriptor)
            os.rename(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=folder)
            raise


@contextmanager
def _opened(folder: Path, *, is_ours: bool = False) -> Iterator[int]:
    """Open a folder and yield its descriptor. Raises OSError; for root also if a link of another
    account is on the way. `is_ours`: for root also if another account owns a folder on the way,
    because that account could replace the folders below.
    """
    is_root, trusted = os.geteuid() == 0, {0, _unmapped()}
    at, num_links = os.open("/", _PATH | os.O_DIRECTORY), 0
    left = [*reversed(folder.absolute().parts[1:])]
    try:
        while left:
            part = left.pop()
            below = os.open(part, _PATH | os.O_NOFOLLOW, dir_fd=at)
            found = os.fstat(below)
            if stat.S_ISLNK(found.st_mode):
                os.close(below)
                num_links += 1
                if num_links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
                if is_root and found.st_uid:
                    raise PermissionError(
                        errno.EPERM, f"the path leads through a link of another account: {part}"
                    )
                target = Path(os.readlink(part, dir_fd=at))
                left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
                if not target.is_absolute():
                    continue
                below = os.open("/", _PATH | os.O_DIRECTORY)
            elif is_root and is_ours and found.st_uid not in trusted:
                os.close(below)
                raise PermissionError(errno.EPERM, f"{part} belongs to another account")
            os.close(at)
            at = below
        if not stat.S_ISDIR(os.fstat(at).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        yield at
    finally:
        os.close(at)


def _unmapped() -> int:
    """Return the account that owns the files of the machine's root, as a user namespace shows them."""
    whole = "0 0 4294967295"
    if Path("/proc/self/uid_map").read_text().split() == whole.split():
        return 0
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


def _restrict(descriptor: int) -> None:
    """Take all permissions from other accounts; leave a folder with the sticky bit as it is. Raises
    OSError for a link, a special file, and anything else of another account.
    """
    found = os.fstat(descriptor)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OSError(errno.ELOOP, "it is a link, or neither file nor folder")
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another account")
    if found.st_mode & 0o077:
        # A descriptor that only names the file cannot change it; its path in /proc can.
        os.chmod(f"/proc/self/fd/{descriptor}", found.st_mode & 0o700)


def is_private(mode: int, owner: int, user: int) -> bool:
    """Return whether a file's permissions suit a secret: `user` alone reads it, or its `owner` is root
    and lets a group read it, as Kubernetes mounts secrets. PostgreSQL has this rule for its key files.
    """
    return not mode & (0o037 if owner == 0 != user else 0o077)


def read_private(path: Path, what: str) -> bytes:
    """Return a secret without white space around it. `what` names it in errors. Raises ConfigError, also
    for permissions that `is_private` refuses.
    """
    try:
        # Without O_NONBLOCK, opening a pipe without a writer would block for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            found = file.read(MAX_PRIVATE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(f"{path}: {what} cannot be read ({error.strerror}).") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is not a regular file, and {what} must be in one.")
    if not is_private(status.st_mode, status.st_uid, os.geteuid()):
        raise ConfigError(
            f"{path}: other users may read {what}. Make it private with: chmod 600 {path}"
        )
    if len(found) > MAX_PRIVATE_BYTES:
        raise ConfigError(f"{path}: {what} has more than {MAX_PRIVATE_BYTES} bytes.")
    return found.strip()
