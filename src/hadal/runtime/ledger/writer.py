"""Writer of the ledger, off the token path: `add` never waits, a thread writes and reports facts.

    add --queue, bounded--> thread --one transaction for up to MAX_BATCH--> database    kept
                                   --database down--> outbox, a commit; written when it is up again  kept
                                   --outbox full or failing as well--> stays in the queue until either works
    add with the queue full: lost, counted, one log line per series of losses

Losses: `kill -9` loses the facts added in the last `LINGER_S` and one commit, which are in memory
only. If database and outbox both fail, facts beyond the queue's limit are lost; the limit is half
as high for facts that bill nothing. After a crash between commit and answer, a fact may be written
twice: the ledger counts it once.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hadal.core.errors import HadalError
from hadal.core.facts import Fact, PackedFacts, RequestFact, pack
from hadal.runtime.ledger.outbox import LedgerOutbox
from hadal.runtime.ledger.store import FactsRefused, Store, StoreDown
from hadal.stats.ledger import Written

log = logging.getLogger("hadal.ledger")

LINGER_S = 0.02
"""Seconds that a fact waits for others, so that they share a commit."""
MAX_WAITING = 65_536
MAX_BATCH = 2_000
RETRY_S = (0.5, 30.0)
"""First and longest pause before a failing database is tried again; pauses double in between."""

Kept = Callable[[Sequence[Fact]], None]


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Outcomes of request facts since the start."""

    num_added: int = 0
    num_written: int = 0
    """Facts that were written to the database, durably."""
    num_same: int = 0
    """Facts that were in the database already, with the same values."""
    num_refused: int = 0
    """Facts rejected for good, or with the id of a recorded fact that has other values."""
    num_delayed: int = 0
    """Facts that had to wait in the outbox; once written, they are in `num_written`, too."""
    num_lost: int = 0
    num_waiting: int = 0
    """Facts of all kinds that are in memory only."""
    is_down: bool = False
    """True if the database failed the last write."""


class _Database:
    """The store, and the time of the next try while it is down. One thread at a time changes it."""

    def __init__(self, store: Store, retry_s: tuple[float, float]) -> None:
        self.store = store
        self.retry_at_s = 0.0
        self._retry_s = retry_s
        self._pause_s = 0.0
        """Pause before the next try; 0 while the database works."""
        self._is_prepared = False

    @property
    def is_down(self) -> bool:
        """True if the database failed the last write."""
        return self._pause_s > 0

    def prepare(self) -> None:
        """Prepare the database, unless that was done."""
        if not self._is_prepared:
            self.store.prepare()
            self._is_prepared = True

    def works(self) -> None:
        """Note that a write succeeded."""
        if self._pause_s:
            log.warning("the ledger's database works again")
        self._pause_s = self.retry_at_s = 0.0

    def failed(self, error: Exception) -> None:
        """Note that the database failed, and plan the next try."""
        if not self._pause_s:
            log.error("the ledger cannot be written; facts are queued in its outbox: %s", error)
        self._is_prepared = False  # The next one there may be another database.
        self._pause_s = min(self._retry_s[1], self._pause_s * 2 or self._retry_s[0])
        self.retry_at_s = time.monotonic() + self._pause_s


class LedgerWriter:
    """One store, its outbox and the thread that fills both."""

    def __init__(
        self,
        store: Store,
        outbox: LedgerOutbox,
        *,
        on_kept: Kept = lambda facts: None,
        max_waiting: int = MAX_WAITING,
        linger_s: float = LINGER_S,
        retry_s: tuple[float, float] = RETRY_S,
    ) -> None:
        self._database = _Database(store, retry_s)
        self._outbox = outbox
        self.on_kept = on_kept
        """Callback for facts that are durable or were rejected for good, called in the thread."""
        self._max_waiting = max_waiting
        self._linger_s = linger_s
        self._changed = threading.Condition()
        self._queue: deque[Fact] = deque()
        self._num_taken = 0
        """Number of facts that the thread is writing."""
        self._is_closing = False
        self._was_tried_last = False
        self._is_losing = False
        self._counts = LedgerCounts()
        self._is_outbox_down = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self) -> None:
        """Begin to write. Raises LedgerError if the database is not a ledger of ours; one that is
        down now is tried again later.
        """
        try:
            self._database.prepare()
        except StoreDown as error:
            self._database.failed(error)
        self._thread.start()

    def add(self, fact: Fact) -> None:
        """Queue a fact, from any thread; never waits and never raises."""
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
                "the ledger's queue has %d facts and is full; further facts are lost until the database works",
                num_waiting,
            )

    @property
    def counts(self) -> LedgerCounts:
        """Counts up to now."""
        with self._changed:
            return replace(
                self._counts,
                num_waiting=len(self._queue) + self._num_taken,
                is_down=self._database.is_down,
            )

    def close(self, timeout_s: float) -> None:
        """Write the remaining facts, or store them in the outbox, and end the thread. Facts not
        written in time are lost, and that is logged.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        num_waiting = self.counts.num_waiting
        if num_waiting:
            log.error(
                "the ledger lost %d facts: %s does not answer",
                num_waiting,
                self._database.store.place,
            )
        elif not self._thread.is_alive():
            self._outbox.close()
            self._database.store.close()

    # ---- the thread ----
    def _run(self) -> None:
        while (facts := self._take()) is not None:
            kept = False
            is_due = time.monotonic() >= self._database.retry_at_s
            # While closing, a database that was down may hang: try the outbox first.
            if is_due or not facts:
                kept = self._to_store(facts)
            kept = kept or not facts or self._to_outbox(facts)
            if not kept and not is_due and self._is_closing:
                kept = self._to_store(facts)
            if kept and facts:
                self.on_kept(facts)
            with self._changed:
                self._num_taken = 0
                # Billed and other facts arrive mixed: losing ends only well below the lower limit.
                self._is_losing &= len(self._queue) > self._max_waiting // 4
                if not kept:
                    self._queue.extendleft(reversed(facts))
                    if self._is_closing:
                        return

    def _take(self) -> list[Fact] | None:
        """Take the next facts to write; [] if only the outbox has facts, None if all is done."""
        with self._changed:
            while not self._is_closing:
                now_s = time.monotonic()
                is_up, is_due = not self._database.is_down, now_s >= self._database.retry_at_s
                if self._queue and (is_up or is_due or not self._is_outbox_down):
                    break
                has_left = bool(self._queue or self._outbox.may_hold)
                if has_left and is_due:
                    break
                self._changed.wait(
                    max(0.0, self._database.retry_at_s - now_s) if has_left else None
                )
            if self._queue and not self._is_closing:
                self._changed.wait_for(lambda: self._is_closing, self._linger_s)
            if self._is_closing and not self._queue:
                if not self._outbox.may_hold or self._was_tried_last:
                    return None
                self._was_tried_last = True  # Facts in the outbox get one more try.
            facts = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
            self._num_taken = len(facts)
            return facts

    def _to_store(self, facts: list[Fact]) -> bool:
        """Write the outbox's facts to the database, then these. Return True if that succeeded."""
        try:
            self._database.prepare()
            self._empty_outbox()
            self._write(pack(facts))
        except (HadalError, OSError, sqlite3.Error) as error:
            self._database.failed(error)
            return False
        self._database.works()
        return True

    def _to_outbox(self, facts: list[Fact]) -> bool:
        """Append the facts to the outbox. Return True if that succeeded."""
        try:
            has_room, why = self._outbox.append(pack(facts)), "it is full"
        except (OSError, sqlite3.Error, ValueError) as error:  # A string may not be encodable.
            has_room, why = False, str(error)
        if not has_room and not self._is_outbox_down:
            log.error(
                "facts cannot be written to the ledger's outbox (%s); they are queued in memory",
                why,
            )
        self._is_outbox_down = not has_room
        if has_room:
            with self._changed:
                self._count(num_delayed=sum(isinstance(fact, RequestFact) for fact in facts))
        return has_room

    def _empty_outbox(self) -> None:
        """Write the outbox's facts, ours and dead writers'. An outbox that cannot be read must not
        block new facts.
        """
        if not self._outbox.may_hold:
            return
        try:
            for ids, facts in self._outbox.waiting():
                self._write(facts)
                self._outbox.remove(ids)
            self._is_outbox_down = False
        except (OSError, sqlite3.Error) as error:  # The next writer tries it again.
            log.error("queued facts in %s cannot be read or removed: %s", self._outbox.path, error)
        self._outbox.may_hold = False

    def _write(self, facts: PackedFacts) -> None:
        try:
            self._written(self._database.store.write(facts))
        except FactsRefused as error:
            if len(facts.requests) + len(facts.nodes) > 1:  # Find the refused facts one by one.
                for request in facts.requests:
                    self._write(PackedFacts(requests=(request,)))
                for nodes in facts.nodes:
                    self._write(PackedFacts(nodes=(nodes,)))
                return
            log.error("the ledger's database rejects a fact, which is not retried: %s", error)
            self._written(
                Written(refused_ids=tuple(request.request_id for request in facts.requests))
            )

    def _written(self, written: Written) -> None:
        if written.refused_ids:
            log.error(
                "requests are recorded already, with different values, which are kept: %s",
                ", ".join(written.refused_ids[:3]),
            )
        with self._changed:
            self._count(
                num_written=written.num_new,
                num_same=written.num_same,
                num_refused=len(written.refused_ids),
            )

    def _count(self, **more: int) -> None:
        self._counts = replace(
            self._counts,
            **{name: getattr(self._counts, name) + number for name, number in more.items()},
        )
