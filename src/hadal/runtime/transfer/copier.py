"""Pulls of KV: small ones on this host at once, all others in threads, so that no copy delays any
tokens.

A pull never overtakes an earlier one of its request, and a source is pulled from by one thread at
a time: a source that is dead holds up one thread, and pulls from the others go on. Knows leases
and own block ids, nothing of requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from hadal.core.messages.pools import Pull
from hadal.core.plans import NO_LINK_BYTES, KvPulled, LinkBytes
from hadal.runtime.transfer.kv import KvWire
from hadal.runtime.worker import Worker

INLINE_BYTES = 2 * 1024 * 1024
"""Up to this a copy takes less than a millisecond: what handing it to a thread and back costs on
busy cores.
"""
NUM_THREADS = 4
"""They wait for sockets or copy; several sources that die together hold up the others no longer
than one does.
"""


class Copier:
    """Runs Pull effects. All methods are called from the host's thread."""

    def __init__(self, wire: KvWire, block_bytes: int, wake: Callable[[], None]) -> None:
        self._wire = wire
        self._block_bytes = block_bytes
        self._num_pending: Counter[str] = Counter()
        """Request -> pulls that were submitted and not taken."""
        self._worker = Worker("copy", self._pull, wake, pick=_next_pull, num_threads=NUM_THREADS)
        self._worker.start()

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
            self._worker.put(self._pull(pull))
        else:
            self._worker.submit(pull)

    def take(self) -> list[KvPulled]:
        """Return the outcomes that are ready. Raises what broke a copying thread, if anything
        did.
        """
        self._wire.let_go()
        done = self._worker.take()
        for result in done:
            self._num_pending[result.request_id] -= 1
            if not self._num_pending[result.request_id]:
                del self._num_pending[result.request_id]
        return done

    def stop(self, timeout_s: float) -> None:
        """Let what is being pulled finish; what waits is not begun."""
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
    """The first pull that may begin."""
    held = {one for pull in running for one in (pull.request_id, pull.lease.source)}
    for index, pull in enumerate(waiting):
        if held.isdisjoint((pull.request_id, pull.lease.source)):
            del waiting[index]
            return pull
        held.add(pull.request_id)
    return None
