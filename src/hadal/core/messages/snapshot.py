"""State of the front at one instant, for /metrics and /health. Values only."""

from __future__ import annotations

import msgspec

from hadal.core.config import ROLES
from hadal.core.messages.units import UnitReport


class Totals(msgspec.Struct):
    """Counters since the front's start."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    tokens_in: int = 0
    """Prompt tokens of admitted requests."""
    tokens_refused: int = 0
    """Prompt tokens of requests rejected for lack of capacity (429); unread ones are estimated."""
    tokens_out: int = 0
    """Tokens that units have drawn for requests. Tokens delivered in replies are counted separately
    (gateway/desk/metrics).
    """
    tokens_hit: int = 0
    """Prompt tokens of answered requests found in a cache, as reported with the first token."""
    tokens_miss: int = 0
    """Prompt tokens of answered requests that were computed."""
    retries: int = 0
    """Attempts that ended before their request did, including preemptions, but not those counted in
    `requeued`.
    """
    preemptions: int = 0
    requeued: int = 0
    """Attempts preempted and requeued to make room for other requests: those of batches, or of
    tenants above their share.
    """


class FrontSnapshot(msgspec.Struct, frozen=True):
    """State of the front. Cheap to make: it does not iterate over requests."""

    is_draining: bool
    state_to_count: dict[str, int]
    unit_to_report: dict[str, UnitReport]
    """Units that are up and have reported."""
    role_to_units: dict[str, dict[str, int]]
    """Role -> units that are up -> number of living ranks."""
    totals: Totals
    unit_to_fingerprint: dict[str, str] = {}
    """Unit -> fingerprint of its KV. Two values during a rollout of new weights."""
    fingerprint: str = ""
    """Fingerprint under which the front would place a new prompt."""

    @property
    def can_serve(self) -> bool:
        """True if a request can be answered from end to end: each role has a unit with a living rank."""
        return all(any(self.role_to_units.get(role, {}).values()) for role in ROLES)
