"""Reasons for which a leader returns an attempt (`Returned.reason`), and the front's reactions.

A reason may have details for people, after ": ".
"""

from __future__ import annotations

from typing import NamedTuple

from hadal.core.plans import NO_TOKEN, NOT_FINITE

BACKOFF_S = 0.05
"""Seconds before the first retry after a failed pull or step, doubled up to BACKOFF_MAX_S. After
QUEUE_FULL, LEASE_EXPIRED or OTHER_WEIGHTS, each retry waits 2 * BACKOFF_S.
"""
BACKOFF_MAX_S = 2.0

PREEMPTED = "preempted"
"""The attempt's rank ran short of blocks. Does not count as a retry, since nothing failed."""
QUEUE_FULL = "queue full"
"""The unit has no capacity for it now. Retried a little later; does not count as a retry."""
LEASE_EXPIRED = "lease expired"
"""No decode unit pulled the attempt's KV in time. Handled like QUEUE_FULL."""
PULL_FAILED = "pull failed"
STEP_FAILED = "step failed"
RANK_LOST = "rank lost"
"""The attempt's KV is lost with its rank, or a new leader cannot resume it. Counts as a retry."""
OTHER_WEIGHTS = "other weights"
"""The attempt was sent for a KV fingerprint that is not the unit's, such as the one before a
rollout. Handled like QUEUE_FULL.
"""
TOO_LONG = "too long"
"""The request can never fit in this unit. The front ends it with an error."""
VOID = frozenset({NO_TOKEN, NOT_FINITE})
"""Reasons for which no token can be drawn. The front ends the request with an error."""


def void(why: str) -> str:
    """Return the reason for returning a request without a valid token, from the Runner's error."""
    return why if kind_of(why) in VOID else f"{STEP_FAILED}: {why}"


def kind_of(reason: str) -> str:
    """Return the part of a reason that the front decides by."""
    return reason.split(":", 1)[0]


class Remedy(NamedTuple):
    """Reaction of the front to a reason."""

    is_final: bool
    """True if the request ends with an error."""
    is_counted: bool
    """True if the attempt counts against `limits.max_retries`."""
    delay_s: float


def answer_to(reason: str, num_retries: int) -> Remedy:
    """Return whether and when the front retries. `num_retries`: retries counted before."""
    kind = kind_of(reason)
    if kind == TOO_LONG or kind in VOID:
        return Remedy(True, False, 0.0)
    if kind == PREEMPTED:
        return Remedy(False, False, 0.0)
    if kind in (QUEUE_FULL, LEASE_EXPIRED, OTHER_WEIGHTS):
        return Remedy(False, False, 2 * BACKOFF_S)
    if kind == RANK_LOST:
        return Remedy(False, True, 0.0)  # Other ranks live: nothing to wait for.
    return Remedy(False, True, min(BACKOFF_S * 2.0**num_retries, BACKOFF_MAX_S))
