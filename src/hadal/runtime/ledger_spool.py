"""Facts that wait for their database, in an append-only file beside it, flushed before they count
as kept.

    record = length (4 bytes) | CRC-32 of the facts (4) | facts, msgpack

A spool has one writer, which holds the file's lock while it lives; a dead writer's is read by
whoever comes next. The file is there only while something waits. A record that was cut short by a
crash was told to nobody as kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hadal.core.facts import PackedFacts

log = logging.getLogger("hadal.ledger")

MAX_BYTES = 64 * 1024 * 1024
"""Of one spool: some 400,000 requests."""
SUFFIX = ".spool"
_NAME_BYTES = 6
_HEAD = struct.Struct("<II")
_decode = msgspec.msgpack.Decoder(PackedFacts).decode
_encode = msgspec.msgpack.Encoder().encode


class Spool:
    """One writer's file, made when it is first needed. Used by one thread."""

    def __init__(self, folder: Path, stem: str, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._stem = stem
        self._max_bytes = max_bytes
        self._fd: int | None = None
        self._path = folder / f"{stem}.{secrets.token_hex(_NAME_BYTES)}{SUFFIX}"
        self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        return self._num_bytes == 0

    def append(self, facts: PackedFacts) -> bool:
        """Keep facts, durably. False if the file is full. Raises OSError if it cannot be written;
        nothing is kept then.
        """
        body = _encode(facts)
        record = _HEAD.pack(len(body), zlib.crc32(body)) + body
        if self._num_bytes + len(record) > self._max_bytes:
            return False
        fd = self._open()
        try:
            if os.pwrite(fd, record, self._num_bytes) != len(record):
                raise OSError("the disk took a part of a record")
            os.fdatasync(fd)
        except OSError:
            os.ftruncate(fd, self._num_bytes)
            raise
        self._num_bytes += len(record)
        return True

    def read(self) -> Iterator[PackedFacts]:
        """What waits here, oldest first; also if somebody removed the file."""
        if self._fd is not None:
            yield from _records(self._fd)

    def clear(self) -> None:
        """Its facts are in the database: remove the file, or keep it aside as `adopted` does."""
        if self._fd is not None:
            _remove(self._fd, self._path, self._num_bytes)
            os.close(self._fd)
            self._fd = None
        self._num_bytes = 0

    def close(self) -> None:
        """Let go of the file; what waits in it is for the next writer."""
        if self._num_bytes:
            assert self._fd is not None
            os.close(self._fd)
            self._fd = None
        else:
            self.clear()

    def orphans(self) -> list[Path]:
        """Spools of this ledger that other writers may have left. Those of a ledger whose name
        begins alike are not.
        """
        name = re.compile(
            rf"{re.escape(self._stem)}\.[0-9a-f]{{{2 * _NAME_BYTES}}}{re.escape(SUFFIX)}"
        )
        try:
            return sorted(
                p for p in self._folder.iterdir() if name.fullmatch(p.name) and p != self._path
            )
        except OSError:
            # There is no folder yet; or none that can be read, and what is in it says so when it is
            # written.
            return []

    def _open(self) -> int:
        if self._fd is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            while True:
                fd = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(fd, fcntl.LOCK_EX)
                if _is_at(fd, self._path):
                    break
                os.close(
                    fd
                    # Somebody took the empty file for an orphan, and removed it, before it was
                    # locked.
                )
            _sync_folder(self._folder)
            self._fd = fd
        return self._fd


@contextmanager
def adopted(path: Path) -> Iterator[Iterator[PackedFacts] | None]:
    """A dead writer's facts, removed when the block ends well; None if its writer lives, or
    somebody else was first.

    A file that cannot be read to its end is kept aside as `.damaged`: there may be more in it than
    was found.
    """
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield None
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        if not _is_at(fd, path):
            yield None
            return
        yield _records(fd)
        _remove(fd, path, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _remove(fd: int, path: Path, num_bytes: int) -> None:
    if _num_sound_bytes(fd) < num_bytes:
        log.warning("%s could not be read to its end; it is kept as %s.damaged", path, path.name)
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f"{path.name}.damaged"))
    else:
        path.unlink(missing_ok=True)


def _records(fd: int) -> Iterator[PackedFacts]:
    for _, facts in _sound(fd):
        yield facts


def _num_sound_bytes(fd: int) -> int:
    return max((end for end, _ in _sound(fd)), default=0)


def _sound(fd: int) -> Iterator[tuple[int, PackedFacts]]:
    """Whole records up to the first that is not, each with the place where it ends. Of the open
    file, not of a path: what has been kept in it is there as long as it is open.
    """
    end = 0
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, crc = _HEAD.unpack(head)
            body = file.read(length)
            if len(body) < length or zlib.crc32(body) != crc:
                return
            try:
                facts = _decode(body)
            except msgspec.DecodeError:
                return
            end += _HEAD.size + length
            yield end, facts


def _is_at(fd: int, path: Path) -> bool:
    """Whether the path still leads to the open file."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(fd))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
