"""Requests of an operator to units and their answers: audits, experts, traces."""

from __future__ import annotations

import msgspec

from hadal.core.messages.base import Message
from hadal.core.plans import NO_LINK_BYTES, LinkBytes, TraceEvent


class AuditRequest(Message, frozen=True):
    """Ask a leader to run `check()` on all its ledgers and answer with Audit. For tests and operators."""

    reply_id: int


class Audit(Message, frozen=True):
    """Result of an AuditRequest. `problems` is empty if all ledgers add up."""

    unit: str
    reply_id: int
    num_blocks_used: int
    num_requests: int
    problems: tuple[str, ...]


class ExpertsRequest(Message, frozen=True):
    """Request of the front to a unit of several ranks for the placement and load of its experts."""

    reply_id: int


class ExpertsAnswer(Message, frozen=True):
    """Result of an ExpertsRequest."""

    unit: str
    reply_id: int
    body: bytes
    """A UnitExperts (core/overview) as JSON, so that it can be forwarded without decoding."""


class TraceRequest(Message, frozen=True):
    """Ask a leader to trace its next `num_steps` steps and answer with Trace. The sender waits
    `wait_s` seconds.
    """

    reply_id: int
    num_steps: int
    wait_s: float


class TracedStep(msgspec.Struct, frozen=True, array_like=True):
    """Recording of a step on all its ranks."""

    step_id: int
    schedule: str
    num_micro_batches: int
    num_tokens: int
    events: tuple[TraceEvent, ...]
    balance: dict[str, float] = {}
    """Objective (core/balance) -> mean over maximum of the ranks in this step."""
    link_bytes: LinkBytes = NO_LINK_BYTES
    """Bytes sent between the unit's ranks."""


class HostClock(msgspec.Struct, frozen=True):
    """Offset of a host's clock against that of the unit's leader."""

    host: str
    """Address of the host."""
    ranks: tuple[int, ...]
    """Traced ranks on this host."""
    offset_s: float
    """Seconds that its clock is ahead; they are subtracted from the times of its events."""
    error_s: float
    """Largest error of the offset in either direction, seconds."""


class Trace(Message, frozen=True):
    """Result of a TraceRequest."""

    unit: str
    reply_id: int
    steps: tuple[TracedStep, ...]
    clocks: tuple[HostClock, ...] = ()
    """Known clocks of the hosts, if ranks are on several of them. Times in `steps` of these hosts
    are on the leader's clock.
    """
