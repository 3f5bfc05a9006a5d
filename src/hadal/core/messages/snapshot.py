"""The front at one instant, for /metrics and /health. Values only."""

from __future__ import annotations

import msgspec

from hadal.core.config import ROLES
from hadal.core.messages.units import UnitReport


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
    """Tokens that units have drawn for requests. Replies count what they give out of it
    (gateway/desk/metrics).
    """
    tokens_hit: int = 0
    """Prompt tokens of answered requests that a cache had, as the unit said that drew the first
    token.
    """
    tokens_miss: int = 0
    """The rest of those prompts."""
    retries: int = 0
    """Attempts that ended before their request did, preemptions among them, those that gave way
    apart.
    """
    preemptions: int = 0
    gave_way: int = 0
    """Attempts put back so that others' requests have their room: of batches, or of tenants that
    had more.
    """


class FrontSnapshot(msgspec.Struct, frozen=True):
    """Cheap to make: no request is looked at."""

    is_draining: bool
    state_to_count: dict[str, int]
    unit_to_report: dict[str, UnitReport]
    """Units that are up and have reported."""
    role_to_units: dict[str, dict[str, int]]
    """Units that are up, and how many ranks of each live."""
    totals: Totals
    unit_to_fingerprint: dict[str, str] = {}
    """Of the KV of those units: two, while others with new weights take their places one by one."""
    fingerprint: str = ""
    """Under which the front would place a prompt that comes now."""

    @property
    def can_serve(self) -> bool:
        """A request can be answered from end to end: each role has a unit with a rank that
        lives.
        """
        return all(any(self.role_to_units.get(role, {}).values()) for role in ROLES)
