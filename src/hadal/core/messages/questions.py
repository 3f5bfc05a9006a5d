"""Questions of an operator to units and their answers: audits, experts, traces."""

from __future__ import annotations

import msgspec

from hadal.core.messages.base import Message
from hadal.core.plans import NO_LINK_BYTES, LinkBytes, TraceEvent


class AuditRequest(Message, frozen=True):
    """Ask a leader to run `check()` on every ledger it keeps and answer with Audit. For tests and
    operators.
    """

    reply_id: int


class Audit(Message, frozen=True):
    """The ledgers' answer. `problems` is empty when everything adds up."""

    unit: str
    reply_id: int
    num_blocks_used: int
    num_requests: int
    problems: tuple[str, ...]


class ExpertsRequest(Message, frozen=True):
    """The front asks a unit of many ranks where its experts lie and what they bear."""

    reply_id: int


class ExpertsAnswer(Message, frozen=True):
    """The answer."""

    unit: str
    reply_id: int
    body: bytes
    """A UnitExperts (core/overview) as JSON: whoever hands it on need not read it."""


class TraceRequest(Message, frozen=True):
    """Ask a leader to trace its next `num_steps` steps and answer with Trace. Who asks waits
    `wait_s`.
    """

    reply_id: int
    num_steps: int
    wait_s: float


class TracedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step that was recorded while it ran, of all its ranks."""

    step_id: int
    schedule: str
    num_micro_batches: int
    num_tokens: int
    events: tuple[TraceEvent, ...]
    balance: dict[str, float] = {}
    """Objective (core/balance) -> mean over maximum of the ranks in this step."""
    link_bytes: LinkBytes = NO_LINK_BYTES
    """Bytes between its ranks."""


class HostClock(msgspec.Struct, frozen=True):
    """What is known of a host's clock, against that of the unit's leader."""

    host: str
    """Its address."""
    ranks: tuple[int, ...]
    """Ranks that were traced there."""
    offset_s: float
    """What its clock is ahead: times of its events are lessened by that."""
    error_s: float
    """What the offset may be wrong by, either way."""


class Trace(Message, frozen=True):
    """The traced steps."""

    unit: str
    reply_id: int
    steps: tuple[TracedStep, ...]
    clocks: tuple[HostClock, ...] = ()
    """Where there are ranks on several hosts, whose times are the leader's clock's here."""
