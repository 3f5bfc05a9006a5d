"""A segment: one preallocated file of the disk cache. Blocks of KV lie in its disk slots, which all
of runtime/store calls slots for short, and its table is their index.

    page 0    header: magic, version, sizes, number, fingerprint, check; then, by themselves, two change words
    table     a record of 64 bytes a slot: name, position, XXH3 of the block, sequence, check of the record
    uses      uint32 a slot, raised by whoever uses the block: statistics, so lost updates do no harm
    damaged   uint64 a slot: the sequence of a record whose block was read and was not what the record says
    data      the slots, each a multiple of a page

One process writes: it holds a lock on the file while it lives (flock(2)), so a segment that nobody
locks is a dead process's, and whoever locks it next goes on with it. Everybody reads. A slot is
overwritten in this order, so that after `kill -9` a record names only what is whole:

    clear the record | write the block | write the record | fdatasync | say that it is durable

Power that fails, or a disk that lies, may keep the record and lose the block: the sum tells.
Records are checked with their location, so none is believed where it was not written. Nothing is
mapped: of a file that shrinks or a disk that fails, a read tells with an error, a mapping with
SIGBUS.

Knows nothing of what is in a block, of budgets or of which block should go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from hadal.core.cache import split
from hadal.core.errors import HadalError
from hadal.core.framing import U64
from hadal.runtime.process.private import open_private

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
"""[slots, slot_bytes]"""
PAGE = 4096
SUFFIX = ".seg"
NEW_SUFFIX = ".new"
RECORD_WORDS = 8
NAME, POSITION, SUM, SEQUENCE, CHECK = slice(0, 2), 2, slice(3, 5), 5, 7
"""Columns of a table, uint64 [slots, RECORD_WORDS], little-endian on disk. Column 6 is 0."""
_MAGIC = b"HADALSEG"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQQ64s")
"""magic, version, slots, number, bytes of a block, bytes of a slot, fingerprint"""
_CHANGES_AT = 2048
"""Two words: the writer raises the first, readers that mark a slot as damaged draw the second."""
_RECORD_BYTES = 8 * RECORD_WORDS
_PRIME = np.uint64(0x9E3779B185EBCA87)
_SHIFT = np.uint64(29)
MAX_SEGMENT_SLOTS = 1 << 24
_PREAD_MAX = 1 << 30
"""Linux moves at most 2 GiB in one call (read(2))."""


class SegmentError(HadalError):
    """A segment is gone, cut off, damaged, or another's."""


class SegmentTakenError(SegmentError):
    """A living process writes it."""


class OtherModelError(SegmentError):
    """A segment is whole, and of another model or shape of block."""


class Segment:
    """One open segment. Methods raise OSError where the disk fails and SegmentError where the file
    ends too early.
    """

    def __init__(
        self, path: Path, fd: int, header: tuple[int, int, int, int, str], *, is_owner: bool
    ) -> None:
        self.path = path
        self.num_slots, self.number, self.block_bytes, self.slot_bytes, self.fingerprint = header
        self.is_owner = is_owner
        self._fd = fd
        self._data_fd = -1
        """Opened when a block is read or written: who reads tables alone needs none."""
        self._uses_at, self._damaged_at, self._data_at, self.total_bytes = _layout(
            self.num_slots, self.slot_bytes
        )

    @classmethod
    def create(cls, folder: Path, fingerprint: str, block_bytes: int, num_slots: int) -> Segment:
        """Make, reserve and lock an empty segment under a number nobody had before."""
        if not 1 <= num_slots <= MAX_SEGMENT_SLOTS or block_bytes < 1 or len(fingerprint) > 64:
            raise ValueError(f"a segment of {num_slots} slots of {block_bytes} bytes cannot be")
        number, slot_bytes = secrets.randbits(62), slot_bytes_of(block_bytes)
        path = segment_path(folder, number)
        new = path.with_suffix(NEW_SUFFIX)
        fd = open_private(new, os.O_RDWR | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Reserved now: a full disk is noticed here and not in the middle of a block.
            os.posix_fallocate(fd, 0, _layout(num_slots, slot_bytes)[-1])
            packed = _HEADER.pack(
                _MAGIC,
                _VERSION,
                num_slots,
                number,
                block_bytes,
                slot_bytes,
                fingerprint.encode("ascii"),
            )
            os.pwrite(fd, packed + U64.pack(xxhash.xxh3_64_intdigest(packed)), 0)
            os.fsync(fd)
            os.rename(new, path)  # Whole and locked before anybody else sees it.
            _sync_folder(folder)
        except BaseException:
            new.unlink(missing_ok=True)
            os.close(fd)
            raise
        return cls(
            path, fd, (num_slots, number, block_bytes, slot_bytes, fingerprint), is_owner=True
        )

    @classmethod
    def open(cls, folder: Path, number: int) -> Segment:
        """Open anybody's segment to read and to mark. Raises SegmentError or OSError."""
        return cls._open(segment_path(folder, number), is_owner=False)

    @classmethod
    def adopt(cls, folder: Path, number: int) -> Segment:
        """Lock a dead writer's segment and go on with it. Raises SegmentTakenError if its writer
        lives.
        """
        return cls._open(segment_path(folder, number), is_owner=True)

    @classmethod
    def _open(cls, path: Path, *, is_owner: bool) -> Segment:
        fd = _open_to_mark(path, is_owner)
        try:
            if is_owner:
                _lock(fd, path)
            header = _read_header(fd, path)
            return cls(path, fd, header, is_owner=is_owner)
        except BaseException:
            os.close(fd)
            raise

    def require(self, fingerprint: str, block_bytes: int | None = None) -> None:
        """Raise OtherModelError unless its blocks are of this model and size."""
        if self.fingerprint != fingerprint or block_bytes not in (None, self.block_bytes):
            raise OtherModelError(
                f"{self.path.name} holds KV of another model or format (with drafts, blocks have a"
                " layer more)"
            )

    def is_whole(self) -> bool:
        """The file has its name and its length still."""
        found = os.fstat(self._fd)
        return found.st_nlink > 0 and found.st_size >= self.total_bytes

    # ---- the table ----
    def table(self, first: int = 0, count: int | None = None) -> Words:
        """The records of `count` slots, as they are on disk, uint64 [count, RECORD_WORDS]."""
        num = self.num_slots - first if count is None else count
        words = np.empty((num, RECORD_WORDS), dtype="<u8")
        self._read(words, PAGE + first * _RECORD_BYTES)
        return words

    def is_good(self, records: Words, first: int = 0) -> NDArray[np.bool_]:
        """Which records are whole and were written for these slots. Empty ones are not."""
        return np.asarray(
            (records[:, SEQUENCE] != 0) & (records[:, CHECK] == self._checks(records, first))
        )

    def records(
        self,
        first: int,
        names: Sequence[bytes],
        positions: Sequence[int],
        sums: Sequence[bytes],
        sequences: Sequence[int],
    ) -> Words:
        """The records of blocks in adjacent slots. `sums`: of `sum_of`."""
        words = np.zeros((len(names), RECORD_WORDS), dtype="<u8")
        words[:, NAME] = np.frombuffer(b"".join(names), dtype="<u8").reshape(-1, 2)
        words[:, POSITION] = positions
        words[:, SUM] = np.frombuffer(b"".join(sums), dtype="<u8").reshape(-1, 2)
        words[:, SEQUENCE] = sequences
        words[:, CHECK] = self._checks(words, first)
        return words

    def write_records(self, first: int, records: Words) -> None:
        self._write(records, PAGE + first * _RECORD_BYTES)

    def clear(self, first: int, count: int) -> None:
        """Empty the records of slots that are about to be overwritten."""
        self.write_records(first, np.zeros((count, RECORD_WORDS), dtype="<u8"))

    # ---- blocks ----
    def read_blocks(self, first: int, into: Bytes) -> None:
        """Read adjacent slots, whole, into memory that begins with a page."""
        self._read(into, self._data_at + first * self.slot_bytes, self._direct_fd())

    def write_blocks(self, first: int, blocks: Bytes) -> None:
        """Write adjacent slots, whole, out of memory that begins with a page. Their records must be
        empty.
        """
        self._write(blocks, self._data_at + first * self.slot_bytes, self._direct_fd())

    def sync(self) -> None:
        """Return when all that was written is on disk."""
        os.fdatasync(self._fd)

    # ---- what readers write ----
    def uses(self) -> NDArray[np.uint32]:
        """How often each slot was used, modulo 2^32."""
        counts = np.empty(self.num_slots, dtype="<u4")
        self._read(counts, self._uses_at)
        return counts

    def mark_used(self, slots: NDArray[np.int64]) -> None:
        """Count uses of slots, each as often as it is named. Readers that meet may lose a count."""
        counts = self.uses()
        np.add.at(counts, slots, np.uint32(1))
        for slot in np.unique(slots).tolist():
            os.pwrite(self._fd, counts[slot : slot + 1].tobytes(), self._uses_at + 4 * slot)

    def damaged(self) -> Words:
        """The sequence, for each slot, of the record that is not to be believed any more."""
        sequences = np.empty(self.num_slots, dtype="<u8")
        self._read(sequences, self._damaged_at)
        return sequences

    def mark_damaged(self, slot: int, sequence: int) -> None:
        """Say that the slot's block is not what its record, of this sequence, says. A record
        written since is not meant.
        """
        os.pwrite(self._fd, U64.pack(sequence), self._damaged_at + 8 * slot)
        # Drawn and not counted: of two readers that count at once, one would be lost.
        os.pwrite(self._fd, U64.pack(secrets.randbits(64)), _CHANGES_AT + 8)

    def changes(self) -> tuple[int, int]:
        """Two words that differ from before if the table, or what is known to be damaged, may have
        changed.
        """
        writers, readers = struct.unpack("<QQ", _pread(self._fd, 16, _CHANGES_AT, self.path))
        return writers, readers

    def tell_change(self) -> None:
        """Let those that look at `changes` read the table again. Owner only."""
        os.pwrite(self._fd, U64.pack((self.changes()[0] + 1) % 2**64), _CHANGES_AT)

    def unlink(self) -> None:
        """Remove the file. Owner only: no living writer loses what it wrote."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            if self._data_fd >= 0:
                os.close(self._data_fd)
            self._fd = self._data_fd = -1

    def _direct_fd(self) -> int:
        if self._data_fd < 0:
            self._data_fd = _open_direct(self._fd, self.is_owner)
        return self._data_fd

    def _checks(self, records: Words, first: int) -> Words:
        """A sum of each record and its location. Any change of one word changes it: every step can
        be undone.
        """
        mixed = np.arange(
            first + 1, first + 1 + len(records), dtype=np.uint64
        ) * _PRIME ^ np.uint64(self.number)
        for column in range(CHECK):
            mixed = (mixed ^ records[:, column]) * _PRIME
            mixed ^= mixed >> _SHIFT
        return np.asarray(mixed)

    def _read(self, into: NDArray[np.generic], offset: int, fd: int | None = None) -> None:
        view, done = into.data.cast("B"), 0
        while done < len(view):
            num = os.preadv(
                self._fd if fd is None else fd, [view[done : done + _PREAD_MAX]], offset + done
            )
            if num == 0:
                raise SegmentError(f"{self.path.name} is cut off")
            done += num

    def _write(self, array: NDArray[np.generic], offset: int, fd: int | None = None) -> None:
        view, done = array.data.cast("B"), 0
        while done < len(view):
            done += os.pwrite(
                self._fd if fd is None else fd, view[done : done + _PREAD_MAX], offset + done
            )


def sum_of(block: Bytes) -> bytes:
    """What a record says of its block's bytes."""
    return xxhash.xxh3_128_digest(block.data)


def names_of(records: Words) -> list[bytes]:
    """The names in records."""
    return list(split(np.ascontiguousarray(records[:, NAME]).tobytes()))


def slot_bytes_of(block_bytes: int) -> int:
    """What a block takes on disk: whole pages."""
    return -(-block_bytes // PAGE) * PAGE


def segment_bytes(num_slots: int, block_bytes: int) -> int:
    """Size of the file."""
    return _layout(num_slots, slot_bytes_of(block_bytes))[-1]


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:016x}{SUFFIX}"


def segment_numbers(folder: Path) -> list[int]:
    """Numbers of the segments in a folder, by their names. Raises OSError."""
    return _numbers(folder, SUFFIX)


def remove_unfinished(folder: Path) -> None:
    """Remove segments whose makers died before they were whole; others' files stay. Raises
    OSError.
    """
    for number in _numbers(folder, NEW_SUFFIX):
        path = segment_path(folder, number).with_suffix(NEW_SUFFIX)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # It is whole now, or gone, or another's to remove.
        try:
            _lock(fd, path)
            path.unlink(missing_ok=True)
        except (SegmentTakenError, PermissionError):
            continue  # It is being made; or in a folder where everybody removes their own.
        finally:
            os.close(fd)


def _numbers(folder: Path, suffix: str) -> list[int]:
    """Numbers of the files that have names as we give them. The folder may hold anything else: that
    is left alone.
    """
    numbers = []
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, dot, end = entry.name.partition(".")
            is_ours = (
                dot + end == suffix and len(stem) == 16 and not set(stem) - set("0123456789abcdef")
            )
            if is_ours and entry.is_file(follow_symlinks=False):
                numbers.append(int(stem, 16))
    return sorted(numbers)


def _layout(num_slots: int, slot_bytes: int) -> tuple[int, int, int, int]:
    """Offsets of uses, damaged and data; size of the whole."""
    uses_at = PAGE + num_slots * _RECORD_BYTES
    damaged_at = uses_at + -(-num_slots * 4 // 8) * 8
    data_at = -(-(damaged_at + num_slots * 8) // PAGE) * PAGE
    return uses_at, damaged_at, data_at, data_at + num_slots * slot_bytes


def _open_to_mark(path: Path, is_owner: bool) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if is_owner or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)  # It can be read at least.


def _open_direct(fd: int, is_owner: bool) -> int:
    """A second descriptor of the same file, for the blocks: past the kernel's own copies, which
    cost as much to make as the disk takes, and push out what others need. Where the file system has
    no such thing, through them.
    """
    flags = (os.O_RDWR if is_owner else os.O_RDONLY) | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT)
    except OSError:
        return os.open(f"/proc/self/fd/{fd}", flags)


def _lock(fd: int, path: Path) -> None:
    """Take the file, or raise SegmentTakenError: its writer lives, or somebody removed it
    meanwhile.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SegmentTakenError(f"{path.name} has a writer") from error
    if os.fstat(fd).st_nlink == 0:
        raise SegmentTakenError(f"{path.name} was removed")


def _read_header(fd: int, path: Path) -> tuple[int, int, int, int, str]:
    packed = _pread(fd, _HEADER.size + 8, 0, path)
    magic, version, num_slots, number, block_bytes, slot_bytes, fingerprint = _HEADER.unpack_from(
        packed
    )
    if magic != _MAGIC or version != _VERSION:
        raise SegmentError(
            f"{path.name} is not a segment of this version (it starts with {magic!r})"
        )
    (check,) = U64.unpack_from(packed, _HEADER.size)
    is_named = segment_path(path.parent, number) == path
    if (
        check != xxhash.xxh3_64_intdigest(packed[: _HEADER.size])
        or not is_named
        or num_slots > MAX_SEGMENT_SLOTS
    ):
        raise SegmentError(f"{path.name}: its header is damaged")
    size = os.fstat(fd).st_size
    if size < _layout(num_slots, slot_bytes)[-1]:
        raise SegmentError(
            f"{path.name} is cut off: {size} bytes of {_layout(num_slots, slot_bytes)[-1]}"
        )
    return num_slots, number, block_bytes, slot_bytes, fingerprint.rstrip(b"\0").decode("ascii")


def _pread(fd: int, count: int, offset: int, path: Path) -> bytes:
    found = os.pread(fd, count, offset)
    if len(found) < count:
        raise SegmentError(f"{path.name} is cut off")
    return found


def _sync_folder(folder: Path) -> None:
    """Make a new name in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
