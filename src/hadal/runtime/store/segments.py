"""A segment: one preallocated file of the disk cache. Its disk slots, called slots for short in all
of runtime/store, hold blocks of KV, and its table is their index.

    page 0    header: magic, version, sizes, number, fingerprint, check; later two change words
    table     64 bytes per slot, a record: name, position, XXH3 of the block, sequence, own check
    uses      uint32 per slot, raised by users of the block: statistics, so lost updates do no harm
    damaged   uint64 per slot: sequence of a record that did not match its block in a read
    data      the slots, each a multiple of a page

One process writes. It holds a lock on the file while it lives (flock(2)), so an unlocked segment
belongs to a dead process, and the next process that locks it becomes its writer. All processes
read. A slot is overwritten in this order, so that after `kill -9` a record names only a whole
block:

    clear the record | write the block | write the record | fdatasync | report it as durable

After a power failure, or with a disk that ignores fdatasync, the record may survive without its
block: the block's checksum detects that. A record's check covers its location, so a record at a
wrong place is invalid. The file is not mapped: if it shrinks or the disk fails, a read raises an
error, but a mapping raises SIGBUS.

Independent of the content of blocks, of budgets and of eviction.
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
"""Bytes of blocks, such as [slots, slot_bytes]."""
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
"""Offset of two words: writers increment the first, readers that mark damage change the second."""
_RECORD_BYTES = 8 * RECORD_WORDS
_PRIME = np.uint64(0x9E3779B185EBCA87)
_SHIFT = np.uint64(29)
MAX_SEGMENT_SLOTS = 1 << 24
_PREAD_MAX = 1 << 30
"""Largest number of bytes in one read or write; Linux allows 2 GiB (read(2))."""


class SegmentError(HadalError):
    """Failure of a segment: it is gone, cut off, damaged, or belongs to another writer or model."""


class SegmentTakenError(SegmentError):
    """Failure to lock a segment: a living process writes it, or it was removed."""


class OtherModelError(SegmentError):
    """Mismatch: a whole segment has blocks of another model or of another size."""


class Segment:
    """One open segment. Methods raise OSError if the disk fails, SegmentError on a short file."""

    def __init__(
        self, path: Path, fd: int, header: tuple[int, int, int, int, str], *, is_owner: bool
    ) -> None:
        self.path = path
        self.num_slots, self.number, self.block_bytes, self.slot_bytes, self.fingerprint = header
        self.is_owner = is_owner
        self._fd = fd
        self._data_fd = -1
        """Descriptor for blocks, opened when needed: readers of tables need none. -1: not open."""
        self._uses_at, self._damaged_at, self._data_at, self.total_bytes = _layout(
            self.num_slots, self.slot_bytes
        )

    @classmethod
    def create(cls, folder: Path, fingerprint: str, block_bytes: int, num_slots: int) -> Segment:
        """Create, reserve and lock an empty segment under a new random number."""
        if not 1 <= num_slots <= MAX_SEGMENT_SLOTS or block_bytes < 1 or len(fingerprint) > 64:
            raise ValueError(f"cannot create a segment of {num_slots} slots of {block_bytes} bytes")
        number, slot_bytes = secrets.randbits(62), slot_bytes_of(block_bytes)
        path = segment_path(folder, number)
        new = path.with_suffix(NEW_SUFFIX)
        fd = open_private(new, os.O_RDWR | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Reserve the space now: a full disk must fail here, not in the middle of a block.
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
            os.rename(new, path)  # It is whole and locked before others see it.
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
        """Open any segment for reading and marking. Raises SegmentError or OSError."""
        return cls._open(segment_path(folder, number), is_owner=False)

    @classmethod
    def adopt(cls, folder: Path, number: int) -> Segment:
        """Lock a dead writer's segment. SegmentTakenError: its writer lives, or it was removed."""
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
                f"{self.path.name} holds KV of another model or format (with drafts, blocks have"
                " one more layer)"
            )

    def is_whole(self) -> bool:
        """Return True if the file still has its name and its length."""
        found = os.fstat(self._fd)
        return found.st_nlink > 0 and found.st_size >= self.total_bytes

    # ---- the table ----
    def table(self, first: int = 0, count: int | None = None) -> Words:
        """Return the records of `count` slots as stored, uint64 [count, RECORD_WORDS]."""
        num = self.num_slots - first if count is None else count
        words = np.empty((num, RECORD_WORDS), dtype="<u8")
        self._read(words, PAGE + first * _RECORD_BYTES)
        return words

    def is_good(self, records: Words, first: int = 0) -> NDArray[np.bool_]:
        """Return for each record if it is whole and was written for its slot; False if empty."""
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
        """Return the records of blocks in adjacent slots. `sums`: results of `sum_of`."""
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
        """Clear the records of slots before they are overwritten."""
        self.write_records(first, np.zeros((count, RECORD_WORDS), dtype="<u8"))

    # ---- blocks ----
    def read_blocks(self, first: int, into: Bytes) -> None:
        """Read adjacent whole slots into page-aligned memory."""
        self._read(into, self._data_at + first * self.slot_bytes, self._direct_fd())

    def write_blocks(self, first: int, blocks: Bytes) -> None:
        """Write adjacent whole slots from page-aligned memory. Their records must be empty."""
        self._write(blocks, self._data_at + first * self.slot_bytes, self._direct_fd())

    def sync(self) -> None:
        """Wait until all written data is on disk."""
        os.fdatasync(self._fd)

    # ---- what readers write ----
    def uses(self) -> NDArray[np.uint32]:
        """Return the number of uses of each slot, modulo 2^32."""
        counts = np.empty(self.num_slots, dtype="<u4")
        self._read(counts, self._uses_at)
        return counts

    def mark_used(self, slots: NDArray[np.int64]) -> None:
        """Count one use per entry of `slots`. Concurrent readers may lose a count."""
        counts = self.uses()
        np.add.at(counts, slots, np.uint32(1))
        for slot in np.unique(slots).tolist():
            os.pwrite(self._fd, counts[slot : slot + 1].tobytes(), self._uses_at + 4 * slot)

    def damaged(self) -> Words:
        """Return for each slot the sequence of its last record marked as damaged; 0 if none."""
        sequences = np.empty(self.num_slots, dtype="<u8")
        self._read(sequences, self._damaged_at)
        return sequences

    def mark_damaged(self, slot: int, sequence: int) -> None:
        """Mark the slot's record of this sequence as not matching its block. Later records in the
        slot are not affected.
        """
        os.pwrite(self._fd, U64.pack(sequence), self._damaged_at + 8 * slot)
        # Random, not counted: one of two concurrent increments would be lost.
        os.pwrite(self._fd, U64.pack(secrets.randbits(64)), _CHANGES_AT + 8)

    def changes(self) -> tuple[int, int]:
        """Return two words: one changes after changes of the table, one after marks of damage."""
        writers, readers = struct.unpack("<QQ", _pread(self._fd, 16, _CHANGES_AT, self.path))
        return writers, readers

    def tell_change(self) -> None:
        """Raise the writer's change word, so that readers read the table again. Owner only."""
        os.pwrite(self._fd, U64.pack((self.changes()[0] + 1) % 2**64), _CHANGES_AT)

    def unlink(self) -> None:
        """Remove the file. Owner only, so that no living writer loses its blocks."""
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
        """Return a check of each record and its location. A change of any one word changes the
        check, because every step is invertible.
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
    """Return the checksum of a block's bytes, for its record."""
    return xxhash.xxh3_128_digest(block.data)


def names_of(records: Words) -> list[bytes]:
    """Return the block name of each record."""
    return list(split(np.ascontiguousarray(records[:, NAME]).tobytes()))


def slot_bytes_of(block_bytes: int) -> int:
    """Return the size of a block on disk: whole pages."""
    return -(-block_bytes // PAGE) * PAGE


def segment_bytes(num_slots: int, block_bytes: int) -> int:
    """Return the size of a segment's file, in bytes."""
    return _layout(num_slots, slot_bytes_of(block_bytes))[-1]


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:016x}{SUFFIX}"


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments in a folder, from the files' names. Raises OSError."""
    return _numbers(folder, SUFFIX)


def remove_unfinished(folder: Path) -> None:
    """Remove unfinished segments of makers that died; other files stay. Raises OSError."""
    for number in _numbers(folder, NEW_SUFFIX):
        path = segment_path(folder, number).with_suffix(NEW_SUFFIX)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # It is finished now, or gone, or another user's.
        try:
            _lock(fd, path)
            path.unlink(missing_ok=True)
        except (SegmentTakenError, PermissionError):
            continue  # Its maker lives; or it is another user's, in a folder with a sticky bit.
        finally:
            os.close(fd)


def _numbers(folder: Path, suffix: str) -> list[int]:
    """Return the numbers of the files with names of our form; other files are left alone."""
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
    """Return the offsets of uses, damaged and data, and the size of the whole file."""
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
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)  # Marks fail, reads work.


def _open_direct(fd: int, is_owner: bool) -> int:
    """Open a second descriptor of the file, for blocks, with direct I/O: it bypasses the page
    cache, which costs as much time as the disk and evicts other processes' pages. Without direct
    I/O in the file system, use the page cache.
    """
    flags = (os.O_RDWR if is_owner else os.O_RDONLY) | os.O_CLOEXEC
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT)
    except OSError:
        return os.open(f"/proc/self/fd/{fd}", flags)


def _lock(fd: int, path: Path) -> None:
    """Lock the file. Raises SegmentTakenError if its writer lives or it was removed meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SegmentTakenError(f"another process writes {path.name}") from error
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
    """Make a new name in the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
