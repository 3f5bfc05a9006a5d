"""Exchange between the ranks of a unit: each sends bytes to every other, with separate calls to
start and to finish.

Does not depend on tokens or experts. A backend implements `Group`; the deployment chooses it
(`tcp`: comm/mesh, `gloo`, `nccl`: comm/torch_group). Every wait has a deadline. A lost peer fails
every exchange of its formation, including the current one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hadal.core.errors import HadalError
from hadal.core.plans import Member, Waited


class PeerLost(HadalError):
    """The formation is over: peers are gone or silent beyond the deadline, or it was aborted."""

    def __init__(self, ranks: Sequence[int], reason: str) -> None:
        super().__init__(f"rank {', '.join(map(str, ranks)) or '?'}: {reason}")
        self.ranks = tuple(ranks)
        """Lost ranks; empty if none is known to be lost, as after an abort."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Time of an exchange on the link, in seconds of time.perf_counter: from its start to the last
    byte received.
    """

    start_s: float
    end_s: float


class Exchange(Protocol):
    """One running exchange."""

    def wait(self) -> dict[int, Tensor]:
        """Return each peer's bytes, uint8 [n], by rank. Raises PeerLost; never waits beyond the
        deadline.

        If `recvs` was given, these are the filled prefixes of its buffers.
        """
        ...

    @property
    def interval(self) -> Interval:
        """Return the time on the link; valid after `wait`."""
        ...


class Group(Protocol):
    """One rank's access to its unit. One thread calls `exchange`, in the same order on every rank."""

    rank: int

    @property
    def members(self) -> tuple[int, ...]:
        """Return the living ranks of this formation, including this one, ascending."""
        ...

    def form(self, formation: int, members: Sequence[Member]) -> None:
        """Start a formation with these members: drop the state of older ones and connect. Raises
        PeerLost naming the members not reached within the deadline.
        """
        ...

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None = None
    ) -> Exchange:
        """Send `sends[peer]` (uint8, contiguous; a key for every other member, empty tensors
        allowed).

        `recvs` None: sizes are received from the peers first (normal mode). Otherwise fixed
        buffers, one per other member, that limit the received bytes (low-latency mode: none is
        allocated here). The tensors in `sends` must not change before `wait` has returned.
        """
        ...

    def abort(self) -> None:
        """Fail all exchanges of this formation now. May be called from any thread."""
        ...

    def lost(self) -> tuple[int, ...]:
        """Return members of this formation with a broken connection, also without an exchange. May
        be called from any thread.
        """
        ...

    def take_waits(self) -> Waited:
        """Return the time spent waiting for exchanges of this formation since the last call. Called
        by the thread that waits.
        """
        ...

    def close(self) -> None: ...
