"""Leases on prefilled KV, each with an owner and a deadline. Does not depend on a clock and frees
no blocks: it returns the ended leases, and the prefill leader frees their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hadal.core.messages.generation import Key


@dataclass(frozen=True, slots=True)
class HeldLease:
    """Lease on blocks, which do not change until `deadline_s` or until the lease is released."""

    request_id: str
    attempt: int
    block_ids: tuple[int, ...]
    deadline_s: float
    rank: int = 0
    """Rank that owns the blocks."""


class Leases:
    """Leases of one prefill unit. All have the same duration, so they are opened in the order of
    their deadlines.
    """

    def __init__(self) -> None:
        self._leases: dict[Key, HeldLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: Key) -> bool:
        return key in self._leases

    @property
    def next_deadline_s(self) -> float | None:
        return next(iter(self._leases.values())).deadline_s if self._leases else None

    def open(self, lease: HeldLease) -> None:
        """Start a lease. Raises ValueError if its attempt has a lease, or if one ends after it."""
        key = (lease.request_id, lease.attempt)
        if key in self._leases:
            raise ValueError(f"attempt {lease.attempt} of {lease.request_id} has a lease already.")
        if self._leases and next(reversed(self._leases.values())).deadline_s > lease.deadline_s:
            raise ValueError("leases must be opened in the order of their deadlines.")
        self._leases[key] = lease

    def release(self, request_id: str, attempt: int) -> HeldLease | None:
        """End a lease and return it; None if there is none, because it expired or was released before."""
        return self._leases.pop((request_id, attempt), None)

    def expired(self, now_s: float) -> list[HeldLease]:
        """End every lease with a passed deadline and return them, the oldest first."""
        ended = []
        for lease in self._leases.values():
            if lease.deadline_s > now_s:
                break
            ended.append(lease)
        for lease in ended:
            del self._leases[lease.request_id, lease.attempt]
        return ended

    def clear(self) -> list[HeldLease]:
        """End all leases and return them."""
        ended = list(self._leases.values())
        self._leases.clear()
        return ended

    def lose(self, rank: int) -> list[HeldLease]:
        """End the leases on a rank's blocks, which are gone, and return them."""
        ended = [lease for lease in self._leases.values() if lease.rank == rank]
        for lease in ended:
            del self._leases[lease.request_id, lease.attempt]
        return ended

    def owners(self, rank: int = 0) -> list[tuple[Key, tuple[int, ...]]]:
        """Return the leases on a rank's blocks, by attempt. A block may be under several leases,
        because a lease only permits reading.
        """
        return [(key, lease.block_ids) for key, lease in self._leases.items() if lease.rank == rank]

    def check(self) -> list[str]:
        """Return problems; empty if no lease has a block twice and deadlines are in order."""
        problems = []
        leases = list(self._leases.values())
        if any(len(set(lease.block_ids)) != len(lease.block_ids) for lease in leases):
            problems.append("a lease has a block twice")
        if any(early.deadline_s > late.deadline_s for early, late in pairwise(leases)):
            problems.append("leases are not in the order of their deadlines")
        return problems
