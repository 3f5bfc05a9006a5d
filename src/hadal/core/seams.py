"""The seams between what can be replayed and what cannot: the effects a role asks for, and the
Protocols of Clock and Runner.

The Wire seam is the effects Send and Pull (live: runtime/wire and runtime/transfer/kv), the Disk
seam ReadBlocks and StoreBlocks (live: runtime/store/disk), UsedBlocks and the event DiskNews (live:
runtime/store/view).

Roles never call a seam. A role is a pure state machine, `handle(now_s, event) -> list[Effect]`; a
host (live: runtime/host and gateway/desk/host) applies the effects through the seams and feeds back what
comes of them.
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
"""One runs, one waits behind it: the Runner never waits for a plan, and a plan is never long out of
date.
"""


# ---- effects: what a role asks its host to do ----
class Send(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Put `message` on the wire to the process named `to` ("front", "prefill-0", "decode-0",
    "supervisor").
    """

    to: str
    message: AnyMessage


class Execute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a step: plans[r] on rank r. A leader may have MAX_STEPS_IN_FLIGHT of them under way; they
    run in order.

    A dead rank's plan is empty and is sent nowhere. In a rank's own process the tuple has the one
    plan of that rank.
    """

    plans: tuple[StepPlan, ...]


class Form(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Break off whatever the Runner does, then let it execute the FormPlan. A rank's own process
    asks for it.
    """

    plan: FormPlan


class Stage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Have the plan's experts in memory, beside the steps that run, and answer with Staged. A
    rank's own process asks for it.
    """

    plan: StagePlan


class UsedBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A prompt used these blocks, out of memory or disk: whoever keeps them there wants to know."""

    locations: tuple[DiskLocation, ...]


class WakeAt(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Call handle(now, Tick()) no later than shortly after `time_s`. A later WakeAt replaces an
    earlier one.
    """

    time_s: float


class StartUnit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fleet only: start this unit on free nodes, and say UnitUp when it works, or UnitDown if it
    does not.
    """

    unit: str
    role: str


class StopUnit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fleet only: end this unit, which nobody needs any more, and say UnitDown when its nodes are
    free.
    """

    unit: str


class OfferNodes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fleet only: these nodes are free for other work until they are withdrawn."""

    num_nodes: int


class WithdrawNodes(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Fleet only: other work has to leave these nodes. What is started on them waits for that."""

    num_nodes: int


FleetEffect = Send | StartUnit | StopUnit | OfferNodes | WithdrawNodes | WakeAt
"""What roles/fleet asks for. Nodes are those of this deployment's units, by number and not by
name.
"""

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
    """What can be found on disk changed, by whomever; a leader hears it. The first one says all
    there is.
    """

    added: bytes
    locations: tuple[DiskLocation, ...]
    """Locations of `added`, name by name. A name that is known already has another location now."""
    dropped: bytes = b""


class RankReset(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The unit formed anew, says the membership of its ranks (roles/ranks) to its leader; steps in flight
    will not be done.

    Everything on `lost` ranks is gone; the living ones keep their KV and have empty tables. A rank
    in `fresh` has just (re)joined with an empty pool.
    """

    lost: tuple[int, ...]
    fresh: tuple[int, ...]
    pools: tuple[str, ...] = ()
    """Address of each rank's KV pool, "" where the rank is dead. Empty: addresses stay as they are.
    """
    formation: int = 0
    """Number of the unit's formation from now on."""
    held: dict[int, Held] = {}
    """What the pools of fresh ranks hold that an earlier leader led, by rank."""


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
    """Executes one rank's plans in the order given, one at a time. Completion comes back as an
    event.
    """

    def execute(self, plan: StepPlan | FormPlan) -> StepDone | Formed: ...

    def abort(self) -> None:
        """Make the running step fail soon, if it waits for peers. From any thread."""
        ...

    def close(self) -> None: ...
