"""Why a leader gives an attempt back (`Returned.reason`); the front treats them differently.

A reason may go on after ": " with details for a person.
"""

from __future__ import annotations

from typing import NamedTuple

from hadal.core.plans import NO_TOKEN, NOT_FINITE

BACKOFF_S = 0.05
"""Before the first retry of an attempt that a unit gave back; doubled at each, up to
BACKOFF_MAX_S.
"""
BACKOFF_MAX_S = 2.0

PREEMPTED = "preempted"
"""No blocks were left for it to grow. Nobody's fault: does not count as a retry."""
QUEUE_FULL = "queue full"
"""The unit took no more. Comes again a little later; does not count as a retry."""
LEASE_EXPIRED = "lease expired"
"""Decode had no room for it in time. As QUEUE_FULL."""
PULL_FAILED = "pull failed"
STEP_FAILED = "step failed"
RANK_LOST = "rank lost"
"""The rank that held it is gone, and its KV with it. Counts as a retry."""
OTHER_WEIGHTS = "other weights"
"""The unit is another by now than the one it was sent to, and cannot use its KV. As QUEUE_FULL."""
TOO_LONG = "too long"
"""It can never fit in this unit. The front ends it with an error."""
VOID = frozenset({NO_TOKEN, NOT_FINITE})
"""Nothing can be drawn, for the request's own numbers or for the model's. The front ends it with an
error.
"""


def void(why: str) -> str:
    """The reason to give back a request whose token is void."""
    return why if kind_of(why) in VOID else f"{STEP_FAILED}: {why}"


def kind_of(reason: str) -> str:
    """The part the front decides on."""
    return reason.split(":", 1)[0]


class Remedy(NamedTuple):
    """What the front does about a reason."""

    is_final: bool
    is_counted: bool
    """It uses up a retry."""
    delay_s: float


def answer_to(reason: str, num_retries: int) -> Remedy:
    """Try again, and when; or never. `num_retries` were counted before."""
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
