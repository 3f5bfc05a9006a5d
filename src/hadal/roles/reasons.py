"""Why a leader gives an attempt back (`Returned.reason`); the front treats them differently.

A reason may go on after ": " with details for a person.
"""

from __future__ import annotations

PREEMPTED = "preempted"
"""No blocks were left for it to grow. Nobody's fault: does not count as a retry."""
QUEUE_FULL = "queue full"
"""The unit took no more. Comes again a little later; does not count as a retry."""
LEASE_EXPIRED = "lease expired"
"""Decode had no room for it in time. As QUEUE_FULL."""
PULL_FAILED = "pull failed"
STEP_FAILED = "step failed"
TOO_LONG = "too long"
"""It can never fit in this unit. The front ends it with an error."""


def kind_of(reason: str) -> str:
    """The part the front decides on."""
    return reason.split(":", 1)[0]
