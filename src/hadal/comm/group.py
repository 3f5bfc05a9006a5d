"""The ranks of a unit as one exchange: everybody sends bytes to everybody, started and finished
apart.

Knows no tokens and no experts. A backend implements `Group`; which one is a deployment's choice
(`tcp`: comm/mesh, `gloo`, `nccl`: comm/torch_group). Every wait has a deadline, and a lost peer
fails every exchange of its formation, the one in progress included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hadal.core.errors import HadalError
from hadal.core.plans import Member, Waited


class PeerLost(HadalError):
    """Peers are gone, silent beyond the deadline, or the formation was aborted: this formation is
    over.
    """

    def __init__(self, ranks: Sequence[int], reason: str) -> None:
        super().__init__(f"rank {', '.join(map(str, ranks)) or '?'}: {reason}")
        self.ranks = tuple(ranks)
        """Empty if it was aborted from outside."""


@dataclass(frozen=True, slots=True)
class Interval:
    """When an exchange was on the link, in seconds of time.perf_counter: posted, and the last byte
    received.
    """

    start_s: float
    end_s: float


class Exchange(Protocol):
    """One exchange under way."""

    def wait(self) -> dict[int, Tensor]:
        """Return what each peer sent, uint8 [n], by rank. Raises PeerLost; never waits beyond the
        deadline.

        With `recvs` given these are the filled prefixes of those buffers.
        """
        ...

    @property
    def interval(self) -> Interval:
        """After wait."""
        ...


class Group(Protocol):
    """A rank's view of its unit. `exchange` is called by one thread, in the same order on every
    rank.
    """

    rank: int

    @property
    def members(self) -> tuple[int, ...]:
        """Living ranks of this formation, this one included, ascending."""
        ...

    def form(self, formation: int, members: Sequence[Member]) -> None:
        """Start a formation with these members: drop everything older, connect. Raises PeerLost
        naming who is not reached within the deadline.
        """
        ...

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None = None
    ) -> Exchange:
        """Send `sends[peer]` (uint8, contiguous; a key for every other member, empty tensors
        allowed).

        `recvs` None: sizes are learnt from the peers (normal mode, counts first). Else fixed
        buffers, one per other member, into which at most that much is received (low-latency mode:
        nothing is allocated). The tensors in `sends` must not change before the exchange is waited
        for.
        """
        ...

    def abort(self) -> None:
        """Fail all exchanges of this formation now. From any thread."""
        ...

    def lost(self) -> tuple[int, ...]:
        """Members of this formation whose connection broke, noticed without an exchange. From any
        thread.
        """
        ...

    def take_waits(self) -> Waited:
        """Return how long exchanges of this formation were waited for since the last call. Called by the
        thread that waits.
        """
        ...

    def close(self) -> None: ...
