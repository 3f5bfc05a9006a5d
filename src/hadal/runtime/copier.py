"""Pulls of KV: small ones on this host at once, all others in threads, so that no copy delays
anybody's tokens.

A pull never overtakes an earlier one of its request, and a source is pulled from by one thread at a
time: a source that is dead holds up one thread, and pulls from the others go on. Knows leases and
own block ids, nothing of requests.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from hadal.core.plans import KvPulled
from hadal.core.seams import Pull
from hadal.runtime.kv_wire import KvWire

INLINE_BYTES = 2 * 1024 * 1024
"""Up to this a copy takes less than a millisecond: what handing it to a thread and back costs on
busy cores.
"""
NUM_THREADS = 4
"""They wait for sockets or copy; several sources that die together hold up the others no longer
than one does.
"""
_WAIT_S = 1.0


class Copier:
    """Runs Pull effects. All methods are called from the host's thread."""

    def __init__(self, wire: KvWire, block_bytes: int, wake: Callable[[], None]) -> None:
        self._wire = wire
        self._block_bytes = block_bytes
        self._wake = wake
        self._results: deque[KvPulled | BaseException] = deque()
        self._num_pending: Counter[str] = Counter()
        """By request: submitted and not taken."""
        self._changed = threading.Condition()
        self._waiting: deque[Pull] = deque()
        self._busy: list[Pull] = []
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"copy-{i}", daemon=True)
            for i in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pull: Pull) -> None:
        """Begin a pull; its outcome is among `take`'s. A pull never overtakes an earlier one of its
        request.
        """
        is_inline = (
            not self._num_pending[pull.request_id]
            and len(pull.into) * self._block_bytes <= INLINE_BYTES
            and self._wire.is_near(pull.lease.source)
        )
        self._num_pending[pull.request_id] += 1
        if is_inline:
            self._results.append(self._pulled(pull))
            return
        with self._changed:
            self._waiting.append(pull)
            self._changed.notify()

    def take(self) -> list[KvPulled]:
        """Return the outcomes that are ready. Raises what broke a copying thread, if anything
        did.
        """
        done = []
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BaseException):
                raise result
            self._num_pending[result.request_id] -= 1
            if not self._num_pending[result.request_id]:
                del self._num_pending[result.request_id]
            done.append(result)
        return done

    def stop(self, timeout_s: float) -> None:
        """What waits is not begun any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s / NUM_THREADS)

    def _pulled(self, pull: Pull) -> KvPulled:
        return KvPulled(pull.request_id, pull.attempt, self._wire.pull(pull.lease, pull.into))

    def _run(self) -> None:
        while (pull := self._next()) is not None:
            try:
                self._results.append(self._pulled(pull))
            except BaseException as error:
                self._results.append(error)
            with self._changed:
                self._busy.remove(pull)
                self._changed.notify_all()
            self._wake()

    def _next(self) -> Pull | None:
        """The first pull that may begin, once there is one; None: stop."""
        with self._changed:
            while not self._stopping:
                held = {pull.request_id for pull in self._busy} | {
                    pull.lease.source for pull in self._busy
                }
                for index, pull in enumerate(self._waiting):
                    if held.isdisjoint((pull.request_id, pull.lease.source)):
                        del self._waiting[index]
                        self._busy.append(pull)
                        return pull
                    held.add(pull.request_id)
                self._changed.wait(_WAIT_S)
            return None
