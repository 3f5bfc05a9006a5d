"""KV transfers between the units of a simulated world: the duration of each, and the bytes moved.

A rank's copies run one after another over its NIC. The names of existing pools are kept here. Does
not depend on roles or requests.
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
    """NICs of all ranks, and the pools that can be copied from."""

    def __init__(self, clock: SimClock, hardware: Hardware, token_bytes: float) -> None:
        self.pools = {WARM}
        """Names of all existing pools; units add and remove their own."""
        self._clock = clock
        self._hardware = hardware
        self._token_bytes = token_bytes
        self._nic_free_s: dict[tuple[str, int], float] = {}
        """(unit, rank) -> time at which the rank's NIC finishes its queued copies."""

    def pull(self, unit: str, effect: Pull) -> tuple[float, Callable[[], KvPulled]]:
        """Begin a copy for a rank of `unit`. Return (seconds, function that makes the answer)."""
        return self._pull_s(unit, effect), partial(self._pulled, unit, effect)

    def _pull_s(self, unit: str, effect: Pull) -> float:
        num_bytes = effect.lease.num_tokens * self._token_bytes
        now_s, key = self._clock.now(), (unit, effect.rank)
        if effect.lease.source == WARM:
            return WIRE_S  # Requests that run at the start already have their KV.
        free_s = (
            max(self._nic_free_s.get(key, 0.0), now_s) + num_bytes / self._hardware.nic_bytes_per_s
        )
        self._nic_free_s[key] = free_s
        return free_s - now_s + WIRE_S

    def _pulled(self, unit: str, effect: Pull) -> KvPulled:
        """Return the answer to a copy: an error if the source's pool is gone by now."""
        error, link_bytes = None, NO_LINK_BYTES
        if effect.lease.source not in self.pools:
            error = "its source is gone"
        else:
            num_bytes = round(len(effect.into) * BLOCK_TOKENS * self._token_bytes)
            source, *rest = effect.lease.source.split(".")
            node_ranks = self._hardware.nvlink_domain
            # No node has ranks of two units, so only copies within a unit can use NVLink.
            is_near = source == unit and int(rest[0]) // node_ranks == effect.rank // node_ranks
            link_bytes = LinkBytes(kv=(num_bytes, 0) if is_near else (0, num_bytes))
        return KvPulled(effect.request_id, effect.attempt, error, link_bytes)
