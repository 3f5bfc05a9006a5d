"""A rank's KV pool in POSIX shared memory: its file, the versions of its blocks, and copies out of
another pool on this host.

A pool is a file in /dev/shm:

    header (one page)  magic, lengths, dtype, shape [P, L, S, D], a random birth number
    versions        int64 [P], raised by the owner whenever a block is freed
    cache              [P, L, S, D], page-aligned; a block's layers lie together, so a block is one copy

The owner holds a lock on the file while it lives. A file without a lock belongs to a dead process,
and any process may unlink it. A puller reads the versions before and after the copy: a block that
was freed meanwhile makes the copy void. (The interpreter's own locks, taken between the copy and
the second read, order the loads.)

Does not depend on the content of blocks or on other hosts (runtime/transfer/kv). P: blocks, L:
layers, S: tokens per block, D: values per entry.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hadal.core.errors import ConfigError, HadalError
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.units import KvLease
from hadal.kv.runs import runs

SHM_FOLDER = Path("/dev/shm")
PREFIX = "hadal-"
Shape = tuple[int, int, int, int]

_MAGIC = b"HADALKV2"
_HEADER = struct.Struct("<8sQQ16s4Q8s")
"""magic, offset of the cache, bytes of a block, dtype, shape, birth"""
POOL_DTYPE = "float32"
"""Type of the values in the pools of serving processes."""
_MADV_POPULATE_WRITE = 23  # madvise(2); Python has no name for it.
_TOUCHED_BYTES = 4 << 20
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvPool:
    """One shared-memory file, created by its owner or opened by a puller. `cache`: the bytes of its
    blocks, which a KvCache uses as its memory.
    """

    def __init__(self, name: str, fd: int, *, is_owner: bool) -> None:
        self.name = name
        self._fd = fd
        self._is_owner = is_owner
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_owner else 0)
        self._map = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=protection)
        _, offset, self.block_bytes, dtype, *shape, birth = _HEADER.unpack_from(self._map)
        self.birth: str = birth.hex()
        """Random id that no other shared-memory file has, not even one of this name elsewhere."""
        self.dtype = dtype.rstrip(b"\0").decode("ascii")
        self.num_blocks, num_layers, block_tokens, latent = shape
        self.shape: Shape = (self.num_blocks, num_layers, block_tokens, latent)
        self.versions: NDArray[np.int64] = np.frombuffer(
            self._map, dtype=np.int64, count=self.num_blocks, offset=mmap.PAGESIZE
        )
        self.cache = memoryview(self._map)[offset : offset + self.num_blocks * self.block_bytes]
        self._address = self.versions.ctypes.data - mmap.PAGESIZE
        self.blocks: NDArray[np.uint8] = np.frombuffer(self.cache, dtype=np.uint8).reshape(
            self.num_blocks, self.block_bytes
        )
        """Bytes of all blocks, [P, block_bytes]."""
        self._toucher: threading.Thread | None = None
        """Owner's thread, which runs `_touch`. A reader has none: the thread refers to the pool, and
        would keep the reader's mapping after its last view.
        """
        if is_owner:
            self._toucher = threading.Thread(target=self._touch, name="touch", daemon=True)
            self._toucher.start()

    def _touch(self) -> None:
        """Fill the page tables, beginning with the first block, which is used first. A first touch
        in the middle of a step costs 2 us per page; touching all pages at the start takes about 1 s
        per GB. Runs without the interpreter's lock.
        """
        # Older kernels lack the advice: nothing happens.
        madvise = ctypes.CDLL(None).madvise
        for offset in range(0, len(self._map), _TOUCHED_BYTES):
            if self._fd < 0:
                return
            size = min(_TOUCHED_BYTES, len(self._map) - offset)
            address = self._address + offset
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)

    @classmethod
    def create(cls, name: str, shape: Shape, dtype: str = POOL_DTYPE) -> KvPool:
        """Make and lock a zeroed shared-memory file with all of its memory reserved.

        Raises ConfigError, with advice, if /dev/shm has too little free memory.
        """
        if dtype not in _DTYPES or min(shape) < 1 or shape[2] != BLOCK_TOKENS:
            raise ValueError(f"cannot create a KV pool of {dtype} {shape}")
        block_bytes = shape[1] * shape[2] * shape[3] * _DTYPES[dtype]
        offset = mmap.PAGESIZE * (1 + -(-shape[0] * 8 // mmap.PAGESIZE))
        size = offset + shape[0] * block_bytes
        # The file gets its name once it is whole and locked: no process sees half a pool, and a
        # crash before that leaves no file.
        fd = os.open(SHM_FOLDER, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            # Without the reservation a full /dev/shm would be a SIGBUS in the middle of a step.
            os.posix_fallocate(fd, 0, size)
            os.pwrite(
                fd,
                _HEADER.pack(
                    _MAGIC, offset, block_bytes, dtype.encode(), *shape, secrets.token_bytes(8)
                ),
                0,
            )
            _name_it(fd, name)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise ConfigError(no_room(size)) from error
            raise
        return cls(name, fd, is_owner=True)

    @classmethod
    def open(cls, name: str) -> KvPool:
        """Map another process's file for reading. Raises PoolError if it is missing or no pool."""
        if "/" in name or not name.startswith(PREFIX):
            raise PoolError(f"{name!r} is not the name of a KV pool")
        try:
            fd = os.open(SHM_FOLDER / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise PoolError(f"KV pool {name} cannot be opened ({error.strerror})") from error
        try:
            _check_header(os.pread(fd, _HEADER.size, 0), os.fstat(fd).st_size, name)
            return cls(name, fd, is_owner=False)
        except (HadalError, OSError):
            os.close(fd)
            raise

    def free(self, block_ids: tuple[int, ...]) -> None:
        """Raise the blocks' versions, which voids all copies of them under way. Owner only."""
        np.add.at(self.versions, list(block_ids), 1)

    def copy_from(self, source: KvPool, lease: KvLease, into: tuple[int, ...]) -> str | None:
        """Copy leased blocks of `source` into own blocks. Return None, or why the copy is void."""
        wrong = self.mismatch(source.name, source.shape, source.dtype, lease, into)
        if wrong is not None:
            return wrong
        if not source.holds(lease.block_ids, lease.versions):
            return FREED_BEFORE
        for at, count in runs(lease.block_ids, into):
            theirs, ours = lease.block_ids[at], into[at]
            # numpy releases the interpreter's lock while it copies.
            np.copyto(self.blocks[ours : ours + count], source.blocks[theirs : theirs + count])
        if not source.holds(lease.block_ids, lease.versions):
            return FREED_DURING
        return None

    def holds(self, block_ids: Sequence[int], versions: Sequence[int]) -> bool:
        """Return True if none of the blocks was freed since it had the given version."""
        return np.array_equal(
            self.versions[np.array(block_ids, np.int64)], np.array(versions, np.int64)
        )

    def views(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the blocks' bytes in order, shared with the pool; adjacent blocks are one view."""
        return [
            self.cache[
                block_ids[at] * self.block_bytes : (block_ids[at] + count) * self.block_bytes
            ]
            for at, count in runs(block_ids)
        ]

    def mismatch(
        self, name: str, shape: Shape, dtype: str, lease: KvLease, into: tuple[int, ...]
    ) -> str | None:
        """Return why the leased blocks of pool `name` do not fit into own blocks, or None."""
        ids = lease.block_ids
        if self.shape[1:] != shape[1:] or self.dtype != dtype:
            return f"{name} holds blocks of {dtype} {shape[1:]}, not {self.dtype} {self.shape[1:]}"
        if not len(ids) == len(into) == len(lease.versions):
            return (
                f"a lease of {len(ids)} blocks and {len(lease.versions)} versions for"
                f" {len(into)} own blocks"
            )
        if any(not 0 <= i < shape[0] for i in ids) or any(
            not 0 <= i < self.num_blocks for i in into
        ):
            return "a block id is outside its pool"
        return None

    @property
    def is_gone(self) -> bool:
        """True if the file was removed, by its owner or after its owner's end."""
        return not (SHM_FOLDER / self.name).exists()

    def close(self) -> None:
        """Close the file; the owner removes it as well. The memory is freed with the last array
        that refers to it.
        """
        if self._fd < 0:
            return
        if self._is_owner:
            (SHM_FOLDER / self.name).unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
        if self._toucher is not None:
            self._toucher.join()  # Waits for one piece at most: some milliseconds.


FREED_BEFORE = "the leased blocks were freed before the copy"
FREED_DURING = "the leased blocks were freed during the copy"


class PoolError(HadalError):
    """Failure of a pull: the pool is gone, or its file is no pool. The request is retried."""


@dataclass(frozen=True)
class PoolAddress:
    """Address of a pool in leases: NAME of the shared-memory file, or NAME#BIRTH@HOST:PORT if the
    pool has a server.
    """

    name: str
    birth: str = ""
    """Birth number; empty: any shared-memory file of the name on this host."""
    host: str = ""
    port: int = 0
    """Port of its server; 0: only its own host can read the pool."""

    def __str__(self) -> str:
        return f"{self.name}#{self.birth}@{self.host}:{self.port}" if self.port else self.name

    @property
    def unit(self) -> str:
        """Part of the name that the pool shares with its unit's later pools (see `pool_name`)."""
        return self.name.rpartition(".")[0]

    @classmethod
    def parse(cls, text: str) -> PoolAddress:
        """Parse the text of an address. Raises PoolError."""
        name, has_more, more = text.partition("#")
        birth, _, where = more.partition("@")
        host, _, port = where.rpartition(":")
        if (
            "/" in name
            or not name.startswith(PREFIX)
            or (has_more and not (birth and host and port.isdecimal()))
        ):
            raise PoolError(f"{text!r} is not the address of a KV pool")
        return cls(name, birth, host, int(port)) if has_more else cls(name)


def pool_name(run_id: str, unit: str, epoch: str) -> str:
    """Return the name of the shared-memory file of a unit or rank `unit`, new at every start. Run
    and unit come first, so that the files of a dead unit are found by their prefix.
    """
    return f"{PREFIX}{run_id}.{unit}.{epoch}"


def remove_shared_memory(run_id: str, unit: str | None = None) -> list[str]:
    """Unlink the files of a dead unit (None: any unit) of this run, and return their names. Call
    only when its process is known to be gone.
    """
    prefix = f"{PREFIX}{run_id}." + (f"{unit}." if unit else "")
    names = [name for name in _pool_names() if name.startswith(prefix)]
    for name in names:
        (SHM_FOLDER / name).unlink(missing_ok=True)
    return names


def remove_stale_shared_memory() -> list[str]:
    """Unlink unlocked shared-memory files: their owners are dead. Return the files' names."""
    removed = []
    for name in _pool_names():
        try:
            fd = os.open(SHM_FOLDER / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # Gone, or another user's.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (SHM_FOLDER / name).unlink(missing_ok=True)
            removed.append(name)
        except OSError:
            continue  # Its owner lives.
        finally:
            os.close(fd)
    return removed


def free_shm_bytes() -> int:
    """Return the free bytes of /dev/shm."""
    found = os.statvfs(SHM_FOLDER)
    return found.f_bavail * found.f_frsize


def no_room(size: int) -> str:
    """Return the error text for a /dev/shm that cannot hold `size` more bytes."""
    return (
        f"/dev/shm has {free_shm_bytes() >> 20} MiB free; the KV needs {size >> 20} MiB more. Give"
        " the container more (--shm-size), or lower kv_memory_mb (for pools below one context: set"
        " kv_blocks) under [prefill] and [decode] in the deployment file."
    )


def _name_it(fd: int, name: str) -> None:
    folder = os.open(SHM_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a folder given, Python follows the /proc link (linkat(2), AT_SYMLINK_FOLLOW).
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _pool_names() -> list[str]:
    return (
        [name for name in os.listdir(SHM_FOLDER) if name.startswith(PREFIX)]
        if SHM_FOLDER.is_dir()
        else []
    )


def _check_header(header: bytes, size: int, name: str) -> None:
    if len(header) < _HEADER.size:
        raise PoolError(f"{name} is too short to be a KV pool")
    magic, offset, block_bytes, dtype, *shape, _ = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise PoolError(f"{name} is not a KV pool of this version (it starts with {magic!r})")
    item = _DTYPES.get(dtype.rstrip(b"\0").decode("ascii", "replace"))
    num_blocks, *rest = shape
    whole = item is not None and block_bytes == rest[0] * rest[1] * rest[2] * item
    if (
        not whole
        or offset < mmap.PAGESIZE + 8 * num_blocks
        or size < offset + num_blocks * block_bytes
    ):
        raise PoolError(f"{name}: its header does not fit its {size} bytes")
