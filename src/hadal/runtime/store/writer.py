"""Stores of a KV pool's blocks in the disk cache, after the steps that made them.

    pool -> private buffer, summed -> disk slots in own segments, adjacent ones in one write ->
    fdatasync -> answer

The queue is bounded: beyond its limit a store is refused immediately. For a while after a failure
of the disk all stores are refused. A store without progress is answered as well: the pool's blocks
were copied before the write, so a late write does not read them. runtime/store/own places the
blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hadal.core.cache import DiskLocation, split
from hadal.core.messages.pools import StoreBlocks
from hadal.core.plans import BlocksStored
from hadal.runtime.store.buffers import make_buffer
from hadal.runtime.store.own import Block, OwnBlocks
from hadal.runtime.store.segments import Bytes, SegmentError, sum_of
from hadal.runtime.store.troubles import Troubles
from hadal.runtime.worker import Worker

BUFFER_BYTES = 16 * 1024 * 1024
"""Bytes copied, summed and written at a time."""
BATCH_BYTES = 128 * 1024 * 1024
"""Bytes made durable at a time, by one fdatasync per segment, if that much is queued."""
SWEEP_S = 60.0
"""Time between two sweeps of the folder."""


@dataclass(frozen=True)
class WriteLimits:
    """Limits of the queue for a disk, in bytes and in time."""

    queue_bytes: int = 256 * 1024 * 1024
    """Maximum number of queued bytes; a queued block of the pool cannot be reused meanwhile."""
    deadline_s: float = 30.0
    """Longest time of a store without progress; then it is answered as failed."""
    pause_s: float = 5.0
    """Seconds without new attempts after the disk failed."""


@dataclass
class _PendingStore:
    effect: StoreBlocks
    names: list[bytes]
    moved_s: float
    locations: list[DiskLocation | None]
    dropped: bytearray = field(default_factory=bytearray)
    is_copying: bool = False
    """True while its blocks of the pool are read: the store is not given up meanwhile."""
    is_over: bool = False


@dataclass
class _Entry:
    store: _PendingStore
    index: int
    """Index of the block in its store."""
    block: Block


class _Unanswered:
    """Unanswered stores, and the sum of their bytes. The caller holds the lock."""

    def __init__(self, block_bytes: int, limits: WriteLimits) -> None:
        self._block_bytes = block_bytes
        self._limits = limits
        self._stores: deque[_PendingStore] = deque()
        """Stores in order of arrival."""
        self._num_bytes = 0

    def add(self, store: _PendingStore) -> bool:
        """Add a store. Return False if that exceeds the limit; a store alone never does."""
        num_bytes = len(store.names) * self._block_bytes
        self._stores.append(store)
        self._num_bytes += num_bytes
        return self._num_bytes <= max(self._limits.queue_bytes, num_bytes)

    def remove(self, store: _PendingStore) -> None:
        self._stores.remove(store)
        self._num_bytes -= len(store.names) * self._block_bytes

    def idle(self) -> list[_PendingStore]:
        """Return the stores without a block that is being copied now."""
        return [store for store in self._stores if not store.is_copying]

    def overdue(self, now_s: float) -> list[_PendingStore]:
        """Return the stores without progress for too long."""
        return [one for one in self.idle() if now_s - one.moved_s > self._limits.deadline_s]


class _Pause:
    """Pause in writing after the disk failed."""

    def __init__(self, pause_s: float) -> None:
        self.reason = ""
        """Reason of the last pause."""
        self._pause_s = pause_s
        self._until_s = 0.0

    def begin(self, reason: str) -> None:
        self._until_s, self.reason = time.monotonic() + self._pause_s, reason

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self._until_s


class DiskWriter:
    """Runner of StoreBlocks effects in a thread, with a helper thread that writes. submit, take and
    stop are called from the host's thread.
    """

    def __init__(
        self,
        own: OwnBlocks,
        blocks: Bytes,
        troubles: Troubles,
        wake: Callable[[], None],
        limits: WriteLimits,
    ) -> None:
        """`blocks`: the pool, [blocks, block_bytes]."""
        self._own = own
        self._blocks = blocks
        self._troubles = troubles
        self._wake = wake
        self._unanswered = _Unanswered(blocks.shape[1], limits)
        self._pause = _Pause(limits.pause_s)
        self._batch_error = ""
        """Failure since the present batch began; used by the thread alone."""
        self._has_entered = False
        self._is_late = False
        """True once `stop` waits no longer: nothing more is written."""
        self._sweep_at_s = time.monotonic()
        self._buffers = [make_buffer(blocks.shape[1], BUFFER_BYTES) for _ in range(2)]
        self._writing: list[Block] = []
        """Blocks of the piece that is written while the next is copied."""
        self._helper: Worker[tuple[list[Block], Bytes], None] = Worker(
            "disk-write", lambda piece: own.write(*piece), lambda: None, in_background=True
        )
        self._worker: Worker[list[_PendingStore], BlocksStored] = Worker(
            "disk-store", self._run, wake, pick=self._next_batch, in_background=True
        )
        self._lock = self._worker.changed
        """Lock of the worker, of the stores and of the pause."""
        self._helper.start()
        self._worker.start()

    def submit(self, effect: StoreBlocks) -> None:
        """Queue a store, or refuse it immediately; `take` returns its outcome."""
        names, now_s = list(split(effect.names)), time.monotonic()
        if not len(names) == len(effect.positions) == len(effect.block_ids):
            raise ValueError(
                f"store {effect.store_id} has {len(names)} names, {len(effect.positions)}"
                f" positions, {len(effect.block_ids)} blocks"
            )
        store = _PendingStore(effect, names, now_s, [None] * len(names))
        with self._lock:
            fits = self._unanswered.add(store)
            if self._pause.is_on:
                self._end(store, self._pause.reason)
            elif not fits:
                self._troubles.note(
                    "behind", "the disk is too slow for all new blocks; some are not stored"
                )
                self._end(store, "the disk is too slow")
            else:
                self._worker.submit([store])
                return
        self._wake()

    def take(self) -> list[BlocksStored]:
        """Return the outcomes that are ready, and give up stores that wait too long for the disk.
        Raises the exception of a thread, if any.
        """
        now_s = time.monotonic()
        with self._lock:
            for store in self._unanswered.overdue(now_s):
                self._troubles.note(
                    "hang", f"nothing was written for {now_s - store.moved_s:.0f} s"
                )
                self._end(store, "the disk hangs")
            return self._worker.take()

    def stop(self, deadline_s: float) -> None:
        """Write the queued stores and end, by `deadline_s` of time.monotonic; stores that are not
        written by then are left out.
        """
        if self._worker.stop(deadline_s - time.monotonic(), is_draining=True):
            self._helper.stop(deadline_s - time.monotonic())
            self._own.close()
        self._is_late = True
        with self._lock:
            for store in self._unanswered.idle():
                self._end(store, "stopped")

    # ---- in the thread ----
    def _run(self, batch: list[_PendingStore]) -> None:
        self._enter_if_due()
        if batch:
            self._write(batch)
            self._wake()
        self._sweep_if_due()

    def _next_batch(
        self, waiting: deque[list[_PendingStore]], running: list[list[_PendingStore]]
    ) -> list[_PendingStore] | None:
        """Return queued stores, until they have BATCH_BYTES or more. If none are queued: an empty
        batch if the folder is due to be entered or swept, else None.
        """
        batch: list[_PendingStore] = []
        num_bytes = 0
        while waiting and num_bytes < BATCH_BYTES:
            batch += waiting.popleft()
            num_bytes += len(batch[-1].names) * self._blocks.shape[1]
        is_due = not self._has_entered or time.monotonic() >= self._sweep_at_s
        return batch if batch or (is_due and not self._pause.is_on) else None

    def _write(self, batch: list[_PendingStore]) -> None:
        """Write and answer all stores, in pieces: one is copied while another is written."""
        queued = [(store, index) for store in batch for index in range(len(store.names))]
        self._batch_error = self._pause.reason if self._pause.is_on else ""
        written: list[_Entry] = []
        num_most = max(1, BATCH_BYTES // self._blocks.shape[1])
        for number, at in enumerate(range(0, len(queued), len(self._buffers[0]))):
            buffer = self._buffers[number % 2]
            piece = self._copy(queued[at : at + len(buffer)], buffer)
            self._finish_writing()
            if self._is_late or self._pause.is_on:
                break
            if len(written) >= num_most:
                self._sync(written)
                written = []
            written += self._begin_writing(piece, buffer)
        self._finish_writing()
        self._sync(written)
        with self._lock:
            for store in batch:
                self._end(
                    store,
                    (self._batch_error or "no slot is free") if None in store.locations else None,
                )

    def _copy(self, queued: list[tuple[_PendingStore, int]], buffer: Bytes) -> list[_Entry]:
        """Copy and sum blocks of stores that were not given up; none is given up meanwhile."""
        with self._lock:
            wanted = [(store, index) for store, index in queued if not store.is_over]
            for store, _ in wanted:
                store.is_copying = True
        copied, width = [], self._blocks.shape[1]
        for row, (store, index) in enumerate(wanted):
            into = buffer[row, :width]
            np.copyto(into, self._blocks[store.effect.block_ids[index]])
            block = Block(store.names[index], store.effect.positions[index], sum_of(into), row)
            copied.append(_Entry(store, index, block))
        with self._lock:
            for store, _ in wanted:
                store.is_copying, store.moved_s = False, time.monotonic()
        return copied

    def _begin_writing(self, entries: list[_Entry], buffer: Bytes) -> list[_Entry]:
        """Assign disk slots to a piece and let the helper write it. Return the entries to sync."""
        blocks = [one.block for one in entries]
        try:
            dropped = self._own.place(blocks)
        except (OSError, SegmentError) as error:
            self._stop_trying(self._troubles.note_error("write", error))
            return []
        if dropped:
            with self._lock:
                entries[0].store.dropped += dropped
        self._writing = blocks
        self._helper.submit((blocks, buffer))
        return entries

    def _finish_writing(self) -> None:
        """Wait for the helper's piece, if it has one. If the disk hangs, this thread hangs too, and
        `take` answers its stores.
        """
        self._helper.settle()
        try:
            self._helper.take()
        except (OSError, SegmentError) as error:
            self._own.fail(self._writing)
            self._stop_trying(self._troubles.note_error("write", error))

    def _sync(self, entries: list[_Entry]) -> None:
        try:
            self._own.sync([one.block for one in entries])
        except (OSError, SegmentError) as error:
            self._stop_trying(self._troubles.note_error("sync", error))
        with self._lock:
            for one in entries:
                if one.block.is_durable and not one.store.is_over:
                    one.store.locations[one.index] = one.block.location
                one.store.moved_s = time.monotonic()

    def _enter_if_due(self) -> None:
        """Adopt dead writers' segments, unless that was done. A failure is tried again."""
        if self._has_entered or self._pause.is_on:
            return
        try:
            self._own.enter()
            self._has_entered = True
        except (OSError, SegmentError) as error:
            self._stop_trying(self._troubles.note_error("open", error))

    def _sweep_if_due(self) -> None:
        if not self._has_entered or self._pause.is_on or time.monotonic() < self._sweep_at_s:
            return
        self._sweep_at_s = time.monotonic() + SWEEP_S
        try:
            self._own.sweep()
        except (OSError, SegmentError) as error:
            self._troubles.note_error("sweep", error)

    def _stop_trying(self, reason: str) -> None:
        with self._lock:
            self._pause.begin(reason)
        self._batch_error = reason

    def _end(self, store: _PendingStore, error: str | None) -> None:
        """Answer a store, once. Under the lock."""
        if store.is_over:
            return
        store.is_over = True
        self._unanswered.remove(store)
        answer = BlocksStored(
            store.effect.store_id, tuple(store.locations), bytes(store.dropped), error
        )
        self._worker.put(answer)
