"""Pulls with NIXL (UCX): one-sided reads of the owner's pool, which the owner has registered.

A read that was given up may still write: over TCP, a frozen owner that resumes sends into the
reader's memory, even after the reader released the handle and removed the agent. So reads go into a
buffer of the reader, and complete reads are copied from there into the pool. A buffer with an
unfinished read is never used again. After the data, the versions are read from the owner: if they
equal those of the lease, the data is what was leased.

An agent is made when first needed, which takes a while. Its threads sleep in poll(2) up to POLL_US;
the library's own Python wrapper leaves that at 0, which occupies a whole core as long as the
process lives.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import mmap
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadal.core.errors import ConfigError
from hadal.core.messages.units import KvLease
from hadal.kv.runs import runs
from hadal.runtime.transfer.peers import deadline_of
from hadal.runtime.transfer.pool import FREED_BEFORE, FREED_DURING, KvPool
from hadal.runtime.transfer.tcp import AboutNixl, TcpTransfer
from hadal.runtime.transfer.transport import NIXL, CannotPull

log = logging.getLogger(__name__)

POLL_US = 100_000
"""Longest sleep of the progress thread without an event, microseconds."""
HALF_BYTES = 4 << 20
"""Size of half a buffer, at least one block. Reads fill one half while the other is copied."""
MAX_RETIRED = 16
"""Maximum number of buffers set aside (`retire`, `forget`); then this process pulls over TCP."""
_PACKAGES = ("nixl_cu13", "nixl_cu12")
_SPINS = 50
_NAP_S, _NAP_MAX_S = 20e-6, 1e-3

INSTALL = (
    "pip install 'hadal[nixl]' (the package nixl), or set handover to \"tcp\" in the deployment"
    " file"
)


class NixlError(CannotPull):
    """Failure of NIXL; a pull over TCP may still succeed."""


def package() -> str | None:
    """Return the name of the installed NIXL build; None if there is none."""
    return next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), None)


def require_nixl() -> None:
    """Raise ConfigError if NIXL is not installed."""
    if package() is None:
        raise ConfigError(f'handover is "nixl", and NIXL is not installed here: {INSTALL}.')


class NixlAgent:
    """NIXL agent of this process, for reads of its pool and of others' pools. From any thread."""

    def __init__(self, name: str) -> None:
        """`name`: unique among the agents that it meets."""
        self._name = name
        self._lock = threading.Lock()
        self._agent: Any = None
        self._about: AboutNixl | None = None
        self._pool: KvPool | None = None
        """The registered pool: its memory has to stay as long as the agent."""
        self._retired: list[Buffer] = []
        self.library: Any = None

    def about(self, pool: KvPool) -> AboutNixl:
        """Register the pool at the first call, and return the data that a reader needs."""
        with self._lock:
            if self._about is None:
                self._pool = pool
                try:
                    agent = self._open()
                    self.register(pool.versions.ctypes.data, pool.versions.nbytes)
                    self.register(pool.blocks.ctypes.data, pool.blocks.nbytes)
                    # Only now: before the registration, the metadata lacks the memory's address.
                    self._about = AboutNixl(
                        agent.getLocalMD(), pool.blocks.ctypes.data, pool.versions.ctypes.data
                    )
                except self.errors() as error:
                    log.warning("the KV pool cannot be read with NIXL: %s", error)
                    self._about = AboutNixl(error=str(error) or type(error).__name__)
            return self._about

    def reader(self, about: AboutNixl, block_bytes: int, num_blocks: int) -> NixlReader:
        """Make a reader of the pool that `about` describes. Raises NixlError."""
        with self._lock:
            agent = self._open()
            half_bytes = max(HALF_BYTES // block_bytes, 1) * block_bytes
            buffer = Buffer(2 * half_bytes + 8 * num_blocks, half_bytes)
            try:
                self.register(buffer.address, buffer.size)
            except self.errors() as error:
                raise NixlError(f"{type(error).__name__}: {error}") from error
        try:
            peer = agent.loadRemoteMD(about.agent)
        except self.errors() as error:
            self.forget(
                agent, buffer
            )  # If memory is freed while it is registered, later reads land elsewhere.
            raise NixlError(f"{type(error).__name__}: {error}") from error
        return NixlReader(self, agent, peer, about, buffer)

    @property
    def is_full(self) -> bool:
        """True if too many buffers are set aside: no read may start any more."""
        return len(self._retired) >= MAX_RETIRED

    def retire(self, buffer: Buffer) -> None:
        """Set aside a buffer, still registered, to which an unfinished read may still write."""
        with self._lock:
            self._retired.append(buffer)
        log.warning("a NIXL read did not end; %d buffers are set aside", len(self._retired))

    def forget(self, agent: Any, buffer: Buffer) -> None:
        """Unregister a buffer to which no read can write."""
        try:
            agent.deregisterMem(_regions(self.library, buffer.address, buffer.size))
        except self.errors() as error:
            log.warning("a NIXL buffer could not be unregistered: %s", error)
            with self._lock:
                self._retired.append(buffer)

    def register(self, address: int, num_bytes: int) -> None:
        self._agent.registerMem(_regions(self.library, address, num_bytes))

    def errors(self) -> tuple[type[Exception], ...]:
        """Return the library's exceptions; they have no common base."""
        names = [name for name in dir(self.library) if name.endswith("Error")]
        return (NixlError, *(getattr(self.library, name) for name in names))

    def _open(self) -> Any:
        if self._agent is None:
            name = package()
            if name is None:
                raise NixlError("NIXL is not installed")
            try:
                self.library = library = importlib.import_module(f"{name}._bindings")
            except ImportError as error:
                raise NixlError(f"{name} does not load: {error}") from error
            config = library.nixlAgentConfig()
            config.useProgThread = True  # Reads over TCP need the owner's process to answer them.
            config.pthrDelay = POLL_US
            config.syncMode = library.NIXL_THREAD_SYNC_STRICT
            try:
                agent = library.nixlAgent(self._name, config)
                agent.createBackend("UCX", {})
            except self.errors() as error:
                raise NixlError(f"UCX is not available: {type(error).__name__} {error}") from error
            self._agent = agent
        return self._agent


class Buffer:
    """Memory for reads: two halves, and space for the versions of a whole pool."""

    def __init__(self, size: int, half_bytes: int) -> None:
        self.size = size
        self.half_bytes = half_bytes
        self._map = mmap.mmap(-1, size)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.versions: NDArray[np.int64] = self.bytes[2 * half_bytes :].view(np.int64)


class NixlReader:
    """Reader of one pool of another process, for one thread at a time. After an error, close it."""

    def __init__(
        self, agent: NixlAgent, handle: Any, peer: Any, about: AboutNixl, buffer: Buffer
    ) -> None:
        self._nixl = agent
        self._agent = handle
        self._peer = peer
        self._about = about
        self._buffer = buffer
        self._under_way: list[int] = []
        """Handles of reads that are not known to have ended."""
        self._is_closed = False

    def pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        """Copy leased blocks and verify their versions. Return None, or why the copy is void.

        Raises NixlError and TimeoutError; the reader is unusable afterwards.
        """
        try:
            return self._pull(own, lease, into, deadline_s)
        except TimeoutError:
            raise
        except self._nixl.errors() as error:
            raise NixlError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Release the owner's agent, and the buffer if no read can still write to it."""
        if self._is_closed:
            return
        self._is_closed = True
        is_quiet = not self._under_way
        for handle in self._under_way:
            try:
                self._agent.releaseXferReq(handle)
            except self._nixl.errors() as error:
                log.debug("a NIXL read cannot be cancelled: %s", error)
        self._under_way.clear()
        try:
            self._agent.invalidateRemoteMD(self._peer)
        except self._nixl.errors() as error:
            log.debug("the other NIXL agent has ended already: %s", error)
        if is_quiet:
            self._nixl.forget(self._agent, self._buffer)
        else:
            self._nixl.retire(self._buffer)

    def _pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        per_half = self._buffer.half_bytes // own.block_bytes
        is_long = len(into) > per_half
        if is_long and not self._holds(lease, deadline_s):
            return FREED_BEFORE
        before: tuple[int, int, slice] | None = None
        for number, start in enumerate(range(0, len(into), per_half)):
            part = slice(start, start + per_half)
            half = number % 2
            handle = self._read(self._descriptors(own.block_bytes, lease.block_ids[part], half))
            if before is not None:
                self._land(before, own, into, deadline_s)
            before = (handle, half, part)
        if before is not None:
            self._land(before, own, into, deadline_s)
        return None if self._holds(lease, deadline_s) else FREED_DURING

    def _land(
        self, read: tuple[int, int, slice], own: KvPool, into: tuple[int, ...], deadline_s: float
    ) -> None:
        handle, half, part = read
        ids = into[part]
        self._wait(handle, len(ids) * own.block_bytes, deadline_s)
        start = half * self._buffer.half_bytes
        for view in own.views(ids):
            np.copyto(
                np.frombuffer(view, np.uint8), self._buffer.bytes[start : start + view.nbytes]
            )
            start += view.nbytes

    def _holds(self, lease: KvLease, deadline_s: float) -> bool:
        """Return True if the owner freed none of the blocks, by the versions in its memory now."""
        first, last = min(lease.block_ids), max(lease.block_ids)
        count = last - first + 1
        there = (self._about.versions + 8 * first, 8 * count)
        here = (int(self._buffer.versions.ctypes.data), 8 * count)
        self._wait(self._read(([here], [there])), 8 * count, deadline_s)
        ids = np.array(lease.block_ids, np.int64) - first
        return np.array_equal(self._buffer.versions[ids], np.array(lease.versions, np.int64))

    def _descriptors(
        self, block_bytes: int, ids: Sequence[int], half: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (address, bytes) of the pieces to read into, and from; adjacent blocks are one."""
        begin = self._buffer.address + half * self._buffer.half_bytes
        here, there = [], []
        for at, count in runs(ids):
            here.append((begin + at * block_bytes, count * block_bytes))
            there.append((self._about.cache + ids[at] * block_bytes, count * block_bytes))
        return here, there

    def _read(self, pieces: tuple[list[tuple[int, int]], list[tuple[int, int]]]) -> int:
        library = self._nixl.library
        here, there = (
            library.nixlXferDList(
                library.DRAM_SEG, [(address, num_bytes, 0) for address, num_bytes in side]
            )
            for side in pieces
        )
        handle = int(self._agent.createXferReq(library.NIXL_READ, here, there, self._peer, b"", []))
        self._under_way.append(handle)
        self._agent.postXferReq(handle, b"")
        return handle

    def _wait(self, handle: int, num_bytes: int, deadline_s: float) -> None:
        library, nap_s = self._nixl.library, _NAP_S
        deadline_s = min(deadline_s, deadline_of(num_bytes))
        num_looks = 0
        while (status := self._agent.getXferStatus(handle)) == library.NIXL_IN_PROG:
            num_looks += 1
            if num_looks > _SPINS:
                if time.monotonic() > deadline_s:
                    raise TimeoutError("a NIXL read did not end in time")
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _NAP_MAX_S)
        if status != library.NIXL_SUCCESS:
            raise NixlError(f"a NIXL read ended with status {status}")
        self._under_way.remove(handle)
        self._agent.releaseXferReq(handle)


class NixlTransfer:
    """A transfer out of a pool that its owner has registered; the owner's server describes it over
    TCP. One thread at a time may use it.
    """

    name = NIXL

    def __init__(self, agent: NixlAgent, tcp: TcpTransfer) -> None:
        self.peer = tcp.peer
        self._agent = agent
        self._tcp = tcp
        self._reader: NixlReader | None = None

    @property
    def is_usable(self) -> bool:
        return not self._agent.is_full

    def open(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        """Check that the blocks fit, and make the reader. Return None, or why they do not fit.
        Raises OSError, BadPeer, PoolError, NixlError.
        """
        about = self._tcp.about(deadline_s)
        wrong = own.mismatch(about.name, about.shape, about.dtype, lease, into)
        if wrong is not None or self._reader is not None:
            return wrong
        if not about.has_nixl:
            raise NixlError("its owner has no NIXL")
        answer = self._tcp.ask_nixl(deadline_s)
        if answer.error:
            raise NixlError(f"its owner's NIXL: {answer.error}")
        self._reader = self._agent.reader(answer, own.block_bytes, about.shape[0])
        return None

    def pull(
        self, own: KvPool, lease: KvLease, into: tuple[int, ...], deadline_s: float
    ) -> str | None:
        assert self._reader is not None
        return self._reader.pull(own, lease, into, deadline_s)

    def close(self) -> None:
        """Close the reader, which may set its buffer aside. TcpTransfer closes the connection."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _regions(library: Any, address: int, num_bytes: int) -> Any:
    return library.nixlRegDList(library.DRAM_SEG, [(address, num_bytes, 0, "")])
