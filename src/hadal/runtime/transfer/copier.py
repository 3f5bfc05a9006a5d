"""Pulls of KV: small ones from this host run in the host's thread, all others in threads of their
own, so that no copy delays tokens.

A pull never overtakes an earlier one of its request. One thread at a time pulls from a source, so a
dead source blocks one thread, and pulls from other sources go on. Of a request it uses only the id
and the attempt number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from hadal.core.messages.pools import Pull
from hadal.core.plans import NO_LINK_BYTES, KvPulled, LinkBytes
from hadal.runtime.transfer.kv import KvWire
from hadal.runtime.worker import Worker

INLINE_BYTES = 2 * 1024 * 1024
"""Largest copy that runs in the host's thread. Such a copy takes less than a millisecond; handing
it to a thread and back takes as long on busy cores.
"""
NUM_THREADS = 4
"""Number of threads, which wait for sockets or copy. With several of them, sources that die
together delay other pulls no longer than one does.
"""


class Copier:
    """Runner of Pull effects. All methods are called from the host's thread."""

    def __init__(self, wire: KvWire, block_bytes: int, wake: Callable[[], None]) -> None:
        self._wire = wire
        self._block_bytes = block_bytes
        self._num_pending: Counter[str] = Counter()
        """Request -> number of its pulls that were submitted and not yet taken."""
        self._worker = Worker("copy", self._pull, wake, pick=_next_pull, num_threads=NUM_THREADS)
        self._worker.start()

    def submit(self, pull: Pull) -> None:
        """Begin a pull; `take` returns its outcome."""
        is_inline = (
            not self._num_pending[pull.request_id]
            and len(pull.into) * self._block_bytes <= INLINE_BYTES
            and self._wire.is_near(pull.lease.source)
        )
        self._num_pending[pull.request_id] += 1
        if is_inline:
            self._worker.put(self._pull(pull))
        else:
            self._worker.submit(pull)

    def take(self) -> list[KvPulled]:
        """Return the outcomes that are ready. Raises the exception of a copying thread, if any."""
        self._wire.unmap_ended()
        done = self._worker.take()
        for result in done:
            self._num_pending[result.request_id] -= 1
            if not self._num_pending[result.request_id]:
                del self._num_pending[result.request_id]
        return done

    def stop(self, timeout_s: float) -> None:
        """Finish the running pulls, and begin no queued one."""
        self._worker.stop(timeout_s)

    def _pull(self, pull: Pull) -> KvPulled:
        error = self._wire.pull(pull.lease, pull.into)
        link_bytes = NO_LINK_BYTES
        if error is None:
            num_bytes = len(pull.into) * self._block_bytes
            is_on_node = self._wire.is_on_node(pull.lease.source)
            link_bytes = LinkBytes(kv=(num_bytes, 0) if is_on_node else (0, num_bytes))
        return KvPulled(pull.request_id, pull.attempt, error, link_bytes)


def _next_pull(waiting: deque[Pull], running: list[Pull]) -> Pull | None:
    """Take the first queued pull that has a free source and overtakes no pull of its request."""
    held = {one for pull in running for one in (pull.request_id, pull.lease.source)}
    for index, pull in enumerate(waiting):
        if held.isdisjoint((pull.request_id, pull.lease.source)):
            del waiting[index]
            return pull
        held.add(pull.request_id)
    return None
