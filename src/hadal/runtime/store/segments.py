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

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from hadal.core.cache import split
from hadal.core.errors import HadalError
from hadal.runtime.process.private import open_private, take_from_others

# Troubles with the folder of the disk cache. They are counted by kind, and each kind is one line in
# the log of a process, whichever of its threads met with it and at what, and is logged again only
# after a long while.


log = logging.getLogger("hadal.disk")

REPEAT_S = 600.0
GONE = "gone"
_logged_lock = threading.Lock()
_logged: dict[tuple[Path, str], float] = {}
"""(folder, kind) -> when it was logged. There is one of a process, for its store and its view meet
with the same trouble.
"""


class Troubles:
    """Troubles of one store or view. Called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.kind_to_count: Counter[str] = Counter()
        self._folder = folder
        self._lock = threading.Lock()

    def note(self, kind: str, text: str) -> None:
        """Count it, and tell the log if it has not heard of this kind lately."""
        now_s, key = time.monotonic(), (self._folder, kind)
        with self._lock:
            self.kind_to_count[kind] += 1
        with _logged_lock:
            is_new = now_s - _logged.get(key, -REPEAT_S) >= REPEAT_S
            if is_new:
                _logged[key] = now_s
        if is_new:
            log.warning("disk cache: %s", text)

    def note_gone(self) -> None:
        """The folder is not there."""
        self.note(
            GONE,
            f"the folder {self._folder} is gone: what was in it is computed, and it is made again"
            " as soon as there is something to keep",
        )

    def note_error(self, what: str, error: Exception) -> str:
        """Note an exception; returns what to say to whoever asked. A cause is one kind, whatever it
        is met at.
        """
        number = error.errno if isinstance(error, OSError) else None
        if number in (None, errno.ENOENT) and not self._folder.exists():
            self.note_gone()
        elif number is not None:
            name = errno.errorcode.get(number, str(number))
            self.note(
                name,
                f"the folder {self._folder} fails ({os.strerror(number)}): what cannot be read is "
                "computed, and nothing is kept until it works again",
            )
        else:
            self.note("segment", f"{error}; what was in it is computed")
        return f"{what}: {error}"

    def note_useless(self, error: Exception) -> None:
        """Note a segment that is whole no more, or never was ours; it is not removed by us."""
        text = (
            f"{error}; it takes room and is not used: delete it, unless another version of Hadal"
            " has it"
        )
        self.note("useless segment", text)


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
            os.pwrite(fd, packed + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed)), 0)
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

    def drop_pages(self) -> None:
        """Let the kernel forget its copies: the next read is the disk's. For measurements."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

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
        os.pwrite(self._fd, struct.pack("<Q", sequence), self._damaged_at + 8 * slot)
        # Drawn and not counted: of two readers that count at once, one would be lost.
        os.pwrite(self._fd, struct.pack("<Q", secrets.randbits(64)), _CHANGES_AT + 8)

    def changes(self) -> tuple[int, int]:
        """Two words that differ from before if the table, or what is known to be damaged, may have
        changed.
        """
        writers, readers = struct.unpack("<QQ", _pread(self._fd, 16, _CHANGES_AT, self.path))
        return writers, readers

    def tell_change(self) -> None:
        """Let those that look at `changes` read the table again. Owner only."""
        os.pwrite(self._fd, struct.pack("<Q", (self.changes()[0] + 1) % 2**64), _CHANGES_AT)

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
    (check,) = struct.unpack_from("<Q", packed, _HEADER.size)
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


# Memory that blocks pass through between a pool and a disk.


HUGE_PAGE = 2 * 1024 * 1024


def make_buffer(block_bytes: int, most_bytes: int) -> Bytes:
    """Memory for adjacent slots, [slots, slot_bytes]: as many as `most_bytes` allows, one at least.

    In huge pages where the kernel gives them: a request to a disk has so many stretches of memory
    at most, and made of small pages it is a small request.
    """
    slot_bytes = slot_bytes_of(block_bytes)
    num_slots = max(1, most_bytes // slot_bytes)
    memory = mmap.mmap(
        -1, num_slots * slot_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with contextlib.suppress(OSError):  # A kernel without them.
        memory.madvise(mmap.MADV_HUGEPAGE)
    every: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
    # The kernel looks for huge pages now, which takes long where memory is full, and not in a load.
    every.fill(0)
    begin = -every.ctypes.data % HUGE_PAGE
    return every[begin : begin + num_slots * slot_bytes].reshape(num_slots, slot_bytes)


# The segments one writer of the disk cache owns: adopted from the dead or made, never beyond its
# share.
#
# Deletes nothing but dead writers' segments of its own model, and those only while all of that
# model's together exceed the deployment's budget; then oldest first. Knows nothing of which block
# lies where.


SEGMENT_BYTES = 256 * 1024 * 1024
"""Size of a new segment, if the share is cut into PARTS by that: small enough that siblings can
share what a dead writer left, large enough that there are few, for every leader holds all of them
open.
"""
PARTS = 8, 64
"""A share is cut into so many segments at least, at most."""
ORPHAN_S = 60.0
"""Time for which a dead writer's segments are left to its successor."""


class OwnSegments:
    """The segments that this writer owns. Called from the writer's thread alone. Methods raise
    OSError where the folder fails.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        block_bytes: int,
        share_bytes: int,
        total_bytes: int,
        troubles: Troubles,
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._share_bytes = share_bytes
        self._total_bytes = total_bytes
        self._troubles = troubles
        self._orphan_to_seen_s: dict[int, float] = {}
        self._foreign: set[int] = set()
        """Segments that are damaged, cut off or another model's: looked at once."""
        self.segments: dict[int, Segment] = {}
        """Number -> segment."""

    @property
    def num_bytes(self) -> int:
        return sum(segment.total_bytes for segment in self.segments.values())

    def enter(self) -> list[Segment]:
        """Make the folder if need be, and adopt what the dead left, the newest first, up to the
        share.
        """
        self.make_folder()
        # A folder with other things in it, a home perhaps, is let be: segments are 0600 wherever
        # they lie.
        if all(path.suffix in (SUFFIX, NEW_SUFFIX) for path in self._folder.iterdir()):
            with contextlib.suppress(
                PermissionError
            ):  # Another user's, which the start has said (runtime/cache_folder).
                take_from_others(self._folder)
        remove_unfinished(self._folder)
        return self.adopt()

    def make_folder(self) -> bool:
        """Make the folder where it is not, at first or because somebody deleted it; True if it was
        not there.
        """
        if self._folder.is_dir():
            return False
        # As the segments, for their owner alone: in whole, KV tells the prompts it is of.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return True

    def adopt(self, most: int | None = None) -> list[Segment]:
        """Lock dead writers' segments as far as the share allows, `most` of them at most. Returns
        the new ones.
        """
        adopted: list[Segment] = []
        for number in self._others(newest_first=True):
            if len(adopted) == most or self._share_bytes - self.num_bytes < segment_bytes(
                1, self._block_bytes
            ):
                break
            segment = self._adopt(number)
            if segment is None:
                continue
            if self.num_bytes + segment.total_bytes > self._share_bytes:
                segment.close()
                continue
            self.segments[number] = segment
            adopted.append(segment)
        return adopted

    def create(self) -> Segment | None:
        """Make an empty segment, as large as the share still allows; None if it allows none."""
        left_bytes = self._share_bytes - self.num_bytes
        slot_bytes = slot_bytes_of(self._block_bytes)
        # Of a share that is more than the disk, parts could be too: then there would be room and
        # nothing kept.
        share_bytes = min(self._share_bytes, _disk_bytes(self._folder) or self._share_bytes)
        wanted_bytes = max(min(SEGMENT_BYTES, share_bytes // PARTS[0]), share_bytes // PARTS[1])
        num_slots = min(MAX_SEGMENT_SLOTS, max(1, wanted_bytes // slot_bytes))
        while num_slots and segment_bytes(num_slots, self._block_bytes) > left_bytes:
            num_slots = min(num_slots - 1, max(0, left_bytes // slot_bytes))
        if not num_slots:
            return None
        segment = Segment.create(self._folder, self._fingerprint, self._block_bytes, num_slots)
        self.segments[segment.number] = segment
        return segment

    def lose(self, number: int) -> None:
        """Let go of a segment that is gone or does not work."""
        self.segments.pop(number).close()

    def refuse(self, number: int) -> None:
        """Let go of a segment that cannot be read, for good."""
        self._foreign.add(number)
        self.lose(number)

    def sweep(self) -> None:
        """Delete what the dead left and nobody took up, while there is more of this model than the
        budget.
        """
        now_s = time.monotonic()
        sizes: dict[int, int] = {}
        for number in self._others(newest_first=False):
            try:
                segment = Segment.open(self._folder, number)
            except (OSError, SegmentError):
                continue  # Removed since, or nothing that could be deleted for this model's sake.
            if (segment.fingerprint, segment.block_bytes) == (self._fingerprint, self._block_bytes):
                sizes[number] = segment.total_bytes
            segment.close()
        excess_bytes = self.num_bytes + sum(sizes.values()) - self._total_bytes
        orphans: dict[int, float] = {}
        for number, size in sizes.items():
            if excess_bytes <= 0 or (orphan := self._adopt(number)) is None:
                continue
            orphans[number] = self._orphan_to_seen_s.get(number, now_s)
            if now_s - orphans[number] >= ORPHAN_S:
                orphan.unlink()
                excess_bytes -= size
            orphan.close()
        self._orphan_to_seen_s = orphans

    def close(self) -> None:
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()

    def _others(self, *, newest_first: bool) -> list[int]:
        """Numbers of segments that are not this writer's, by their last change."""
        found: list[tuple[float, int]] = []
        for number in segment_numbers(self._folder):
            if number in self.segments or number in self._foreign:
                continue
            try:
                found.append((segment_path(self._folder, number).stat().st_mtime, number))
            except FileNotFoundError:
                continue  # Removed since the folder was read.
        return [number for _, number in sorted(found, reverse=newest_first)]

    def _adopt(self, number: int) -> Segment | None:
        """Lock it if it is a dead writer's, whole, and of this model."""
        try:
            segment = Segment.adopt(self._folder, number)
        except (SegmentTakenError, FileNotFoundError):
            return None
        except SegmentError as error:
            self._foreign.add(number)
            self._troubles.note_useless(error)
            return None
        except OSError as error:  # One that cannot be had is no reason to do without the others.
            if isinstance(error, PermissionError):
                self._foreign.add(number)
            self._troubles.note_error("adopt", error)
            return None
        try:
            segment.require(self._fingerprint, self._block_bytes)
        except OtherModelError as error:
            self._foreign.add(number)
            self._troubles.note(
                "another model", f"{error}; it stays, beside this model's and its budget"
            )
            segment.close()
            return None
        return segment


def _disk_bytes(folder: Path) -> int:
    """Size of the file system, with what others have of it; 0 where it does not say. Raises
    OSError.
    """
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize
