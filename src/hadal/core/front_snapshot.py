"""The front at one instant, for /metrics and /health. Values only."""

from __future__ import annotations

import msgspec

from hadal.core.config import ROLES
from hadal.core.messages import Load


class Totals(msgspec.Struct):
    """Counted since the start."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    tokens_in: int = 0
    """Prompt tokens of requests let in."""
    tokens_refused: int = 0
    """Prompt tokens of requests that there was no room for (429)."""
    tokens_out: int = 0
    tokens_hit: int = 0
    """Of the prompts that were answered: tokens that a cache had, as the unit said that drew the
    first token.
    """
    tokens_miss: int = 0
    """The rest of those prompts."""
    retries: int = 0
    """Attempts that ended before their request did, preemptions among them."""
    preemptions: int = 0


class FrontSnapshot(msgspec.Struct, frozen=True):
    """Cheap to make: no request is looked at."""

    is_draining: bool
    state_to_count: dict[str, int]
    unit_to_load: dict[str, Load]
    """Units that are up and have reported."""
    role_to_units: dict[str, dict[str, int]]
    """Units that are up, and how many ranks of each live."""
    totals: Totals

    @property
    def can_serve(self) -> bool:
        """A request can be answered from end to end: each role has a unit with a rank that
        lives.
        """
        return all(any(self.role_to_units.get(role, {}).values()) for role in ROLES)
