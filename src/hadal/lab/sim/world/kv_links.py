"""KV copies between the units of a simulated world: the time of each, and the bytes that it moved.

A rank's copies follow one another over its NIC. Knows which pools exist, and neither roles nor
requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.pools import Pull
from hadal.core.plans import NO_LINK_BYTES, KvPulled, LinkBytes
from hadal.lab.perf.hardware import Hardware
from hadal.lab.sim.world.clock import SimClock
from hadal.lab.sim.world.process import WIRE_S
from hadal.lab.sim.world.warm import WARM


class KvLinks:
    """NICs of all ranks, and the pools from which they can copy."""

    def __init__(self, clock: SimClock, hardware: Hardware, token_bytes: float) -> None:
        self.pools = {WARM}
        """Names of all pools; units add theirs and remove them."""
        self._clock = clock
        self._hardware = hardware
        self._token_bytes = token_bytes
        self._nic_free_s: dict[tuple[str, int], float] = {}
        """Time at which each rank's NIC has finished the copies that it has begun."""

    def pull(self, unit: str, effect: Pull) -> tuple[float, Callable[[], KvPulled]]:
        """Begin a copy for a rank of `unit`. Return its time, and the function that makes its
        answer at the end.
        """
        return self._pull_s(unit, effect), partial(self._pulled, unit, effect)

    def _pull_s(self, unit: str, effect: Pull) -> float:
        num_bytes = effect.lease.num_tokens * self._token_bytes
        now_s, key = self._clock.now(), (unit, effect.rank)
        if effect.lease.source == WARM:
            return WIRE_S  # It was there before.
        free_s = (
            max(self._nic_free_s.get(key, 0.0), now_s) + num_bytes / self._hardware.nic_bytes_per_s
        )
        self._nic_free_s[key] = free_s
        return free_s - now_s + WIRE_S

    def _pulled(self, unit: str, effect: Pull) -> KvPulled:
        """Return the answer to a copy. It is void if its source has gone meanwhile."""
        error, link_bytes = None, NO_LINK_BYTES
        if effect.lease.source not in self.pools:
            error = "its source is gone"
        else:
            num_bytes = round(len(effect.into) * BLOCK_TOKENS * self._token_bytes)
            source, *rest = effect.lease.source.split(".")
            node_ranks = self._hardware.nvlink_domain
            # Units share no node.
            is_near = source == unit and int(rest[0]) // node_ranks == effect.rank // node_ranks
            link_bytes = LinkBytes(kv=(num_bytes, 0) if is_near else (0, num_bytes))
        return KvPulled(effect.request_id, effect.attempt, error, link_bytes)
