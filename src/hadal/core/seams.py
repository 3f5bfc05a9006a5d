"""The seams between what can be replayed and what cannot: the effects a role asks for, and the Protocols of Clock and
Runner.

The Wire seam is the effects Send and Pull (live: runtime/wire and runtime/kv_wire). Disk comes with the cache on disk.

Roles never call a seam. A role is a pure state machine, `handle(now_s, event) -> list[Effect]`; a host (live:
runtime/host and gateway/host) applies the effects through the seams and feeds back what comes of them.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from hadal.core.messages import AnyMessage, KvLease, KvPulled, StepDone, StepPlan, Token

MAX_STEPS_IN_FLIGHT = 2
"""One runs, one waits behind it: the Runner never waits for a plan, and a plan is never long out of date."""


# ---- effects: what a role asks its host to do ----
class Send(msgspec.Struct, frozen=True):
    """Put `message` on the wire to the process named `to` ("front", "prefill-0", "decode-0", "supervisor")."""

    to: str
    message: AnyMessage


class Execute(msgspec.Struct, frozen=True):
    """Give a plan to the Runner. A leader may have MAX_STEPS_IN_FLIGHT of them there; they run in order."""

    plan: StepPlan


class Pull(msgspec.Struct, frozen=True):
    """Copy the leased blocks into own blocks `into`, verify, and answer with KvPulled."""

    request_id: str
    attempt: int
    lease: KvLease
    into: tuple[int, ...]


class WakeAt(msgspec.Struct, frozen=True):
    """Call handle(now, Tick()) no later than shortly after `time_s`. A later WakeAt replaces an earlier one."""

    time_s: float


class Freed(msgspec.Struct, frozen=True):
    """These blocks of the own pool were freed: raise their generation before they are used again (see KvLease)."""

    block_ids: tuple[int, ...]


class Deliver(msgspec.Struct, frozen=True):
    """Front only: new tokens, or the end, for the stream of one request. Exactly one of a request is `final`."""

    request_id: str
    tokens: tuple[Token, ...]
    final: bool = False
    error: str | None = None
    """With final: why it ended without finishing."""
    error_status: int = 500
    retry_after_s: float | None = None
    """With 429 and 503: when to try again."""


Effect = Send | Execute | Pull | WakeAt | Freed | Deliver


# ---- events that are not messages ----
class Tick(msgspec.Struct, frozen=True):
    """Time passed (answer to WakeAt)."""


Event = AnyMessage | StepDone | KvPulled | Tick


class Clock(Protocol):
    """Time in seconds from an arbitrary origin, monotone."""

    def now(self) -> float: ...


class Runner(Protocol):
    """Executes step plans in the order given, one at a time. Completion comes back as a StepDone event."""

    def execute(self, plan: StepPlan) -> StepDone: ...

    def close(self) -> None: ...
