"""Messages between the front and the fleet, which lives beside the supervisor.

Each may be lost, late or doubled: every heartbeat sends Demand again, whole, and the fleet repeats a
request until a Demand shows that the front has it.
"""

from __future__ import annotations

import msgspec

from hadal.core.messages.base import Message


# ---- fleet -> front ----
class DrainUnit(Message, frozen=True):
    """Send nothing new to this unit. What it holds goes on there; after `timeout_s` the rest is
    tried elsewhere.

    Said again, with this number or another, it leaves the deadline as it is.
    """

    unit: str
    timeout_s: float
    number: int
    """The drain's number, never 0 and never used twice: it tells what was counted in this drain
    from what was counted before.
    """


class KeepUnit(Message, frozen=True):
    """The unit is wanted after all: it takes new requests again."""

    unit: str


class UnitsFound(Message, frozen=True):
    """Supervisor -> fleet, first of all: these units run since before the fleet was there."""

    units: tuple[str, ...]


# ---- operator -> fleet ----
class Rollout(Message, frozen=True):
    """Replace every unit, one after the other, by one that is started anew (`hadal rollout`)."""

    model: str = ""
    """Folder of the checkpoint that the new ones serve; empty: the one that they serve now."""
    model_digest: str = ""
    """Of its config.json and weights (runtime/fingerprint)."""
    fingerprint: str = ""
    """Of what its KV depends on (runtime/fingerprint)."""


# ---- front -> fleet ----
class UnitFacts(msgspec.Struct, frozen=True, array_like=True):
    """A unit that is up, as the front counts it."""

    unit: str
    role: str
    num_requests: int
    """Requests that would lose something with the unit, prompts whose KV lies there included."""
    drain_number: int
    """0: it does not drain."""
    tokens_per_s_max: float = 0.0
    """What it would do if it were full, as far as it has measured itself; 0: not known."""


class Demand(Message, frozen=True):
    """What is asked of the fleet. Counters grow from the front's start on, so that a lost message
    loses no tokens.
    """

    epoch: str
    """The front's: another one counts from 0."""
    tokens_in: int
    """Prompt tokens of the requests that came, those that were refused for want of room among
    them.
    """
    tokens_out: int
    tokens_waiting: int
    """Prompt tokens that are not prefilled yet, be they queued or sent to a unit: a backlog of
    prefill.
    """
    outputs_waiting: int
    """Output tokens that queued requests will ask of decode, at what requests have brought on
    average.
    """
    units: tuple[UnitFacts, ...]
