"""The seams between code that can be replayed and code that cannot: the effects that a role
requests, the events that it receives, and the Protocols of Clock and Runner.

The Wire seam is the effects Send and Pull (live: runtime/wire and runtime/transfer/kv). The Disk
seam is ReadBlocks and StoreBlocks (live: runtime/store/disk), UsedBlocks and the event DiskNews
(live: runtime/store/view).

Roles never call a seam. A role is a pure state machine, `handle(now_s, event) -> list[Effect]`. A
host (live: runtime/host and gateway/desk/host) applies the effects through the seams and passes the
results back as events.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from hadal.core.cache import DiskLocation
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Closing as Closing
from hadal.core.messages.generation import Deliver as Deliver
from hadal.core.messages.pools import Freed as Freed
from hadal.core.messages.pools import Named as Named
from hadal.core.messages.pools import Pull as Pull
from hadal.core.messages.pools import ReadBlocks as ReadBlocks
from hadal.core.messages.pools import StoreBlocks as StoreBlocks
from hadal.core.plans import (
    BlocksRead,
    BlocksStored,
    Formed,
    FormPlan,
    Held,
    KvPulled,
    Staged,
    StagePlan,
    StepDone,
    StepPlan,
)

MAX_STEPS_IN_FLIGHT = 2
"""One step runs and one is queued, so that the Runner need not wait for a plan. A queued plan is at
most one step out of date.
"""


# ---- effects: what a role asks its host to do ----
class Send(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Send `message` to the process named `to` ("front", "prefill-0", "decode-0", "supervisor")."""

    to: str
    message: AnyMessage


class Execute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a step: plans[r] on rank r. A leader may have MAX_STEPS_IN_FLIGHT steps in flight; they
    run in order.

    A dead rank's plan is empty and is not sent. In a rank's own process the tuple holds only that
    rank's plan.
    """

    plans: tuple[StepPlan, ...]


class Form(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Abort what the Runner does now, then have it execute the FormPlan. Requested by a rank in its
    own process.
    """

    plan: FormPlan


class Stage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load the plan's experts into memory while steps run, and answer with Staged. Requested by a
    rank in its own process.
    """

    plan: StagePlan


class UsedBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A prompt used these blocks, from memory or disk: the use is reported to the disk store, which
    evicts by use.
    """

    locations: tuple[DiskLocation, ...]


class WakeAt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call handle(now, Tick()) soon after `time_s`, or earlier. Replaces an earlier WakeAt."""

    time_s: float


class StartUnit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fleet only: start this unit on free nodes. The answer is UnitUp when it is ready, or UnitDown
    if the start fails.
    """

    unit: str
    role: str


class StopUnit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fleet only: end this unit. The answer is UnitDown when its nodes are free."""

    unit: str


class OfferNodes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fleet only: offer these free nodes for other work until they are withdrawn."""

    num_nodes: int


class WithdrawNodes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fleet only: take these nodes back from other work. Units that start on them wait until that
    work has left.
    """

    num_nodes: int


FleetEffect = Send | StartUnit | StopUnit | OfferNodes | WithdrawNodes | WakeAt
"""Effects that roles/fleet requests. Nodes of this deployment's units are counted, not named."""

Effect = (
    Send
    | Execute
    | Form
    | Stage
    | Pull
    | ReadBlocks
    | StoreBlocks
    | UsedBlocks
    | WakeAt
    | Freed
    | Named
    | Deliver
)


# ---- events that are not messages ----
class Tick(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Time passed (answer to WakeAt)."""


class DiskNews(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Change in the blocks available on disk, made by any process; sent to a leader. The first ones
    together list all blocks.
    """

    added: bytes
    locations: tuple[DiskLocation, ...]
    """Location of each name in `added`; a name that was known before has moved there."""
    dropped: bytes = b""


class RankReset(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The unit has a new formation: sent by the membership of its ranks (roles/ranks) to its
    leader. Steps in flight will not complete.

    Everything on `lost` ranks is gone; the living ones keep their KV and have empty tables. A rank
    in `fresh` has just (re)joined; its pool is empty except for `held`.
    """

    lost: tuple[int, ...]
    fresh: tuple[int, ...]
    pools: tuple[str, ...] = ()
    """Address of each rank's KV pool, "" for a dead rank. Empty: addresses are unchanged."""
    formation: int = 0
    """Number of the unit's formation from now on."""
    held: dict[int, Held] = {}
    """Rank -> KV that the pool of a fresh rank still holds from an earlier leader."""


Event = (
    AnyMessage
    | StepDone
    | Formed
    | Staged
    | KvPulled
    | BlocksRead
    | BlocksStored
    | DiskNews
    | RankReset
    | Tick
)


class Clock(Protocol):
    """Time in seconds from an arbitrary origin, monotone."""

    def now(self) -> float: ...


class Runner(Protocol):
    """Executor of one rank's plans, one at a time in the order given. Its results return to the
    role as events.
    """

    def execute(self, plan: StepPlan | FormPlan) -> StepDone | Formed: ...

    def abort(self) -> None:
        """Make the running step fail soon if it waits for peers. May be called from any thread."""
        ...

    def close(self) -> None: ...
