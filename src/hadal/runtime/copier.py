"""Pulls of KV: small ones at once, big ones in a thread, so that a long prompt's copy delays nobody's tokens.

Knows leases and own block ids, nothing of requests.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from hadal.core.plans import KvPulled
from hadal.core.seams import Pull
from hadal.runtime.kv_wire import KvWire

INLINE_BYTES = 2 * 1024 * 1024
"""Up to this a copy takes less than a millisecond: what handing it to a thread and back costs on busy cores."""
_WAIT_S = 1.0


class Copier:
    """Runs Pull effects in order. All methods are called from the host's thread."""

    def __init__(self, wire: KvWire, block_bytes: int, wake: Callable[[], None]) -> None:
        self._wire = wire
        self._block_bytes = block_bytes
        self._wake = wake
        self._pulls: queue.SimpleQueue[Pull | None] = queue.SimpleQueue()
        self._results: deque[KvPulled | BaseException] = deque()
        self._num_pending = 0
        self._thread = threading.Thread(target=self._run, name="copy", daemon=True)
        self._thread.start()

    def submit(self, pull: Pull) -> None:
        """Begin a pull; its outcome is among `take`'s. A pull never overtakes an earlier one."""
        is_inline = self._num_pending == 0 and len(pull.into) * self._block_bytes <= INLINE_BYTES
        self._num_pending += 1
        if not is_inline:
            self._pulls.put(pull)
        else:
            self._results.append(self._pulled(pull))

    def take(self) -> list[KvPulled]:
        """Return the outcomes that are ready. Raises what broke the copying thread, if anything did."""
        done = []
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BaseException):
                raise result
            self._num_pending -= 1
            done.append(result)
        return done

    def stop(self, timeout_s: float) -> None:
        self._pulls.put(None)
        self._thread.join(timeout_s)

    def _pulled(self, pull: Pull) -> KvPulled:
        return KvPulled(pull.request_id, pull.attempt, self._wire.pull(pull.lease, pull.into))

    def _run(self) -> None:
        while True:
            try:
                pull = self._pulls.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
            if pull is None:
                break
            try:
                self._results.append(self._pulled(pull))
            except BaseException as error:
                self._results.append(error)
            self._wake()
