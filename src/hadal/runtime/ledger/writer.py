"""Facts on their way into the ledger, behind the token path: `add` never waits, a thread writes and
says what is kept.

    add --queue, bounded--> thread --one transaction for all that came--> database          kept
                                   --database down--> spool, flushed; replayed when it is up again   kept
                                   --spool full or failing as well--> stays in the queue until either works
    add with the queue full: lost, counted, one log line for each spell

So what can be lost: with `kill -9`, facts added in the last `LINGER_S` and one commit (they are in
memory only); with database and spool both failing, what the queue has no room for. Facts that bill
nothing give way first, at half of it. A fact may be written twice, after a crash between commit and
answer: the ledger counts it once.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from hadal.core.errors import HadalError
from hadal.core.facts import Fact, PackedFacts, RequestFact, pack
from hadal.runtime.ledger.store import FactsRefused, Store, StoreDown
from hadal.stats.ledger import Written

# Facts that wait for their database, in an append-only file beside it, flushed before they count
# as kept.
#
#     record = length (4 bytes) | CRC-32 of the facts (4) | facts, msgpack
#
# A spool has one writer, which holds the file's lock while it lives; a dead writer's is read by
# whoever comes next. The file is there only while something waits. A record that was cut short by a
# crash was told to nobody as kept.


log = logging.getLogger("hadal.ledger")

MAX_BYTES = 64 * 1024 * 1024
"""Size of one spool at most: some 400,000 requests."""
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


LINGER_S = 0.02
"""A fact waits this long for others, so that a commit is shared."""
MAX_WAITING = 65_536
MAX_BATCH = 2_000
RETRY_S = (0.5, 30.0)
"""The first and the longest pause before a failing database is tried again; each is twice the one
before.
"""

Kept = Callable[[Sequence[Fact]], None]


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """What became of request facts since the start."""

    num_added: int = 0
    num_written: int = 0
    """Facts that are in the database, durably."""
    num_same: int = 0
    """Were there already, word for word."""
    num_refused: int = 0
    """Another fact was there under their id, or the database will not have them."""
    num_spooled: int = 0
    """Had to wait in the spool; counted as written, too, once they are."""
    num_lost: int = 0
    num_waiting: int = 0
    """Facts of all kinds that are in memory only."""
    is_down: bool = False
    """The database did not take the last write."""


class LedgerWriter:
    """One store, its spool and the thread that fills both."""

    def __init__(
        self,
        store: Store,
        spool: Spool,
        *,
        on_kept: Kept = lambda facts: None,
        max_waiting: int = MAX_WAITING,
        linger_s: float = LINGER_S,
        retry_s: tuple[float, float] = RETRY_S,
    ) -> None:
        """`on_kept` is called by the thread with facts that are durable."""
        self._store = store
        self._spool = spool
        self._orphans = spool.orphans()
        self._on_kept = on_kept
        self._max_waiting = max_waiting
        self._linger_s = linger_s
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._queue: deque[Fact] = deque()
        self._num_taken = 0
        """Facts that the thread holds."""
        self._is_closing = False
        self._was_tried_last = False
        self._is_losing = False
        self._counts = LedgerCounts()
        self._pause_s = 0.0
        """Time to wait since the database failed; 0 while it works."""
        self._retry_at_s = 0.0
        self._is_spool_down = False
        self._is_prepared = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self) -> None:
        """Begin to write. Raises LedgerError if the database is none of ours; one that is down now
        is waited for.
        """
        try:
            self._prepare()
        except StoreDown as error:
            self._down(error)
        self._thread.start()

    def add(self, fact: Fact) -> None:
        """Take a fact, from any thread; never waits and never raises."""
        is_request = isinstance(fact, RequestFact)
        is_needed = isinstance(fact, RequestFact) and fact.is_billed
        with self._changed:
            num_waiting = len(self._queue) + self._num_taken
            is_lost = num_waiting >= (self._max_waiting if is_needed else self._max_waiting // 2)
            self._count(num_added=is_request, num_lost=is_request and is_lost)
            if not is_lost:
                self._queue.append(fact)
                self._changed.notify()
            is_news = is_lost and not self._is_losing
            self._is_losing |= is_lost
        if is_news:
            log.error(
                "the ledger has %d facts waiting and loses more until its database works",
                num_waiting,
            )

    @property
    def counts(self) -> LedgerCounts:
        """Up to now."""
        with self._changed:
            return replace(
                self._counts,
                num_waiting=len(self._queue) + self._num_taken,
                is_down=self._pause_s > 0,
            )

    def close(self, timeout_s: float) -> None:
        """Write what is left, or spool it, and end the thread; whatever is not done in time is
        lost, and said so.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        num_waiting = self.counts.num_waiting
        if num_waiting:
            log.error(
                "the ledger lost %d facts: %s does not answer", num_waiting, self._store.place
            )
        elif not self._thread.is_alive():
            self._spool.close()
            self._store.close()

    # ---- the thread ----
    def _run(self) -> None:
        while (facts := self._take()) is not None:
            kept = False
            is_due = time.monotonic() >= self._retry_at_s
            # At the end a database that was down may hang: what can be kept without it comes first.
            if is_due or not facts:
                kept = self._to_store(facts)
            kept = kept or not facts or self._to_spool(facts)
            if not kept and not is_due and self._is_closing:
                kept = self._to_store(facts)
            if kept and facts:
                self._on_kept(facts)
            with self._changed:
                self._num_taken = 0
                # Facts of both kinds come mixed, so a spell ends well below where the first ones
                # are turned away.
                self._is_losing &= len(self._queue) > self._max_waiting // 4
                if not kept:
                    self._queue.extendleft(reversed(facts))
                    if self._is_closing:
                        return

    def _take(self) -> list[Fact] | None:
        """The next facts to write, none if only the spool is to be emptied; None when all is
        done.
        """
        with self._changed:
            while not self._is_closing:
                now_s = time.monotonic()
                is_up, is_due = self._pause_s == 0, now_s >= self._retry_at_s
                if self._queue and (is_up or is_due or not self._is_spool_down):
                    break
                has_left = bool(self._queue or self._orphans or not self._spool.is_empty)
                if has_left and is_due:
                    break
                self._changed.wait(max(0.0, self._retry_at_s - now_s) if has_left else None)
            if self._queue and not self._is_closing:
                self._changed.wait_for(lambda: self._is_closing, self._linger_s)
            if self._is_closing and not self._queue:
                if self._spool.is_empty or self._was_tried_last:
                    return None
                self._was_tried_last = True  # What waits in the spool has one more chance.
            facts = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            self._num_taken = len(facts)
            return facts

    def _to_store(self, facts: list[Fact]) -> bool:
        """Whether the facts are in the database, after all that waited longer."""
        try:
            self._prepare()
            self._empty_spools()
            self._write(pack(facts))
        except (HadalError, OSError) as error:
            self._down(error)
            return False
        if self._pause_s:
            log.warning("the ledger's database works again")
        self._pause_s = self._retry_at_s = 0.0
        return True

    def _to_spool(self, facts: list[Fact]) -> bool:
        """Whether the facts are in the spool."""
        try:
            has_room, why = self._spool.append(pack(facts)), "it is full"
        except (OSError, ValueError) as error:  # A text that is no text cannot be written either.
            has_room, why = False, str(error)
        if not has_room and not self._is_spool_down:
            log.error("facts cannot wait in the ledger's spool (%s); they wait in memory", why)
        self._is_spool_down = not has_room
        if has_room:
            with self._changed:
                self._count(num_spooled=sum(isinstance(fact, RequestFact) for fact in facts))
        return has_room

    def _prepare(self) -> None:
        if not self._is_prepared:
            self._store.prepare()
            self._is_prepared = True

    def _empty_spools(self) -> None:
        """Write what waited, ours and what dead writers left."""
        if not self._spool.is_empty:
            for facts in self._spool.read():
                self._write(facts)
            self._spool.clear()
            self._is_spool_down = False
        while self._orphans:
            try:
                with adopted(self._orphans[0]) as left:
                    for facts in left or ():
                        self._write(facts)
            except (
                OSError
            ) as error:  # Another user's, or a bad sector: no reason to keep new facts out.
                log.error(
                    "facts of another writer wait in %s and cannot be read: %s",
                    self._orphans[0],
                    error,
                )
            self._orphans.pop(0)

    def _write(self, facts: PackedFacts) -> None:
        try:
            self._written(self._store.write(facts))
        except FactsRefused as error:
            if len(facts.requests) + len(facts.nodes) > 1:  # Find the ones it will not have.
                for request in facts.requests:
                    self._write(PackedFacts(requests=(request,)))
                for nodes in facts.nodes:
                    self._write(PackedFacts(nodes=(nodes,)))
                return
            log.error("the ledger refuses a fact for good: %s", error)
            self._written(
                Written(refused_ids=tuple(request.request_id for request in facts.requests))
            )

    def _written(self, written: Written) -> None:
        if written.refused_ids:
            log.error(
                "the ledger knows other facts of %s; the first ones stay",
                ", ".join(written.refused_ids[:3]),
            )
        with self._changed:
            self._count(
                num_written=written.num_new,
                num_same=written.num_same,
                num_refused=len(written.refused_ids),
            )

    def _down(self, error: Exception) -> None:
        if not self._pause_s:
            log.error("the ledger cannot be written, facts wait in its spool: %s", error)
        self._is_prepared = False  # What comes back may be another database.
        self._pause_s = min(self._retry_s[1], self._pause_s * 2 or self._retry_s[0])
        self._retry_at_s = time.monotonic() + self._pause_s

    def _count(self, **more: int) -> None:
        self._counts = replace(
            self._counts,
            **{name: getattr(self._counts, name) + number for name, number in more.items()},
        )
