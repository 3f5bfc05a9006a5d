"""Messages between the front and the fleet, which runs in the supervisor's process.

Each may be lost, late or duplicated: every heartbeat sends the whole Demand again, and the fleet
repeats a request until a Demand shows that the front has it.
"""

from __future__ import annotations

import msgspec

from hadal.core.messages.base import Message


# ---- fleet -> front ----
class DrainUnit(Message, frozen=True):
    """Send no new requests to this unit. Its requests continue there; after `timeout_s` the rest is
    retried on other units.

    A repeat, with this number or another, does not change the deadline.
    """

    unit: str
    timeout_s: float
    number: int
    """Number of the drain, never 0 and never reused. UnitFacts repeat it, so that the fleet can
    tell them from facts of earlier drains.
    """


class KeepUnit(Message, frozen=True):
    """Cancel a drain: the unit is needed after all and accepts new requests again."""

    unit: str


class UnitsFound(Message, frozen=True):
    """Supervisor -> fleet, as its first message: these units were running before the fleet started."""

    units: tuple[str, ...]


# ---- operator -> fleet ----
class Rollout(Message, frozen=True):
    """Replace every unit, one after the other, by a newly started one (`hadal rollout`)."""

    model: str = ""
    """Folder of the checkpoint for the new units; empty: the current one."""
    model_digest: str = ""
    """Digest of the config.json and weights in `model` (runtime/fingerprint)."""
    fingerprint: str = ""
    """Digest of everything that the new units' KV depends on (runtime/fingerprint)."""


# ---- front -> fleet ----
class UnitFacts(msgspec.Struct, frozen=True, array_like=True):
    """State of a unit that is up, as counted by the front."""

    unit: str
    role: str
    num_requests: int
    """Requests on the unit. While it drains, also those with KV there, and those in prefill that no
    other decode unit could take.
    """
    drain_number: int
    """Number of the current drain; 0: the unit is not draining."""
    tokens_per_s_max: float = 0.0
    """Measured throughput at full load; 0: not known."""


class Demand(Message, frozen=True):
    """Load on the fleet. Counters grow from the front's start on, so that a lost message loses no tokens."""

    epoch: str
    """Epoch of the front: a new epoch counts from 0."""
    tokens_in: int
    """Prompt tokens of requests that were admitted, or rejected for lack of capacity."""
    tokens_out: int
    tokens_waiting: int
    """Prompt tokens not prefilled yet, whether queued or sent to a unit: the backlog of prefill."""
    outputs_waiting: int
    """Expected output tokens of queued requests, from the average per request: the backlog of decode."""
    units: tuple[UnitFacts, ...]
