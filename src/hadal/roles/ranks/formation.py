"""One formation of a unit: its members, their answers to RankForm, and the links that they lost.

Decides nothing: the membership (roles/ranks/membership) judges which reports to act on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from hadal.core.plans import Formed


class Formation:
    """Formation `number`, before or after all members formed it. `members`: rank -> epoch."""

    def __init__(self, number: int, members: Mapping[int, str]) -> None:
        self.number = number
        self.members = dict(members)
        self.failed_s: float | None = None
        """Time at which the first member failed to form it; None: none failed."""
        self._answers: dict[int, Formed] = {}
        self._lost_by: dict[int, set[int]] = {}
        """Rank -> members that lost their connection to it, in the order of the first reports."""

    def answered(self, rank: int, formed: Formed) -> None:
        """Note a member's answer."""
        self._answers[rank] = formed

    def failed(self, now_s: float, rank: int, lost: Collection[int]) -> None:
        """Note that a member could not form because it lost these peers."""
        self.lost(rank, lost)
        self.failed_s = now_s if self.failed_s is None else self.failed_s

    @property
    def missing(self) -> set[int]:
        """Members that have not answered."""
        return self.members.keys() - self._answers.keys()

    @property
    def num_loaded(self) -> int:
        """Copies of experts that members read from files."""
        return sum(formed.num_loaded for formed in self._answers.values())

    def lost(self, observer: int, lost: Collection[int]) -> None:
        """Note links that a member lost. Reports about itself or about non-members do not count."""
        for rank in lost:
            if rank in self.members and rank != observer:
                self._lost_by.setdefault(rank, set()).add(observer)

    @property
    def blamed(self) -> list[int]:
        """Ranks that others lost, in the order of the first reports."""
        return list(self._lost_by)

    def observers(self, rank: int) -> set[int]:
        """Return the members that lost a rank."""
        return self._lost_by.get(rank, set())

    def most_lost(self) -> int | None:
        """Return the rank that most members lost; of equals, the one reported first."""
        counts = Counter({rank: len(observers) for rank, observers in self._lost_by.items()})
        return counts.most_common(1)[0][0] if counts else None


def name_peers(lost: Collection[int]) -> str:
    """Return what a member lost, in words."""
    return "its connection to rank " + ", ".join(map(str, lost)) if lost else "a peer"
