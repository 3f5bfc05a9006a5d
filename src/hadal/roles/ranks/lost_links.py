"""Which members of a formation others have lost their connection to. Who is to be believed is the
membership's to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator


class LostLinks:
    """Links that members of one formation lost; cleared with the next."""

    def __init__(self) -> None:
        self._lost_by: dict[int, set[int]] = {}

    def add(self, observer: int, lost: Collection[int], members: Collection[int]) -> None:
        """A member lost others. What it says of itself, or of those who do not belong, does not
        count.
        """
        for rank in lost:
            if rank in members and rank != observer:
                self._lost_by.setdefault(rank, set()).add(observer)

    def clear(self) -> None:
        self._lost_by.clear()

    def __iter__(self) -> Iterator[int]:
        """Those who are blamed, in the order in which they were first."""
        return iter(list(self._lost_by))

    def observers(self, rank: int) -> set[int]:
        return self._lost_by.get(rank, set())

    def most_lost(self) -> int | None:
        """Whom most members lost; the first of equals."""
        counts = Counter({rank: len(observers) for rank, observers in self._lost_by.items()})
        return counts.most_common(1)[0][0] if counts else None


def name_peers(lost: Collection[int]) -> str:
    """What a member lost, in words."""
    return "its connection to rank " + ", ".join(map(str, lost)) if lost else "a peer"
