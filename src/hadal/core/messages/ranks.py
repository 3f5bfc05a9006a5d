"""Messages between the leader of a unit of several ranks and those ranks."""

from __future__ import annotations

from hadal.core.messages.base import Message
from hadal.core.messages.pools import PoolEffect
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


# ---- rank -> leader, if they are separate processes ----
class RankUp(Message, frozen=True):
    """A rank's process is ready to be a member. Repeated until a FormPlan includes it."""

    unit: str
    rank: int
    epoch: str
    host: str
    port: int
    pool: str
    """Address of its KV pool: the source of its leases."""
    expert_port: int = 0
    """Port from which other ranks load the weights of its experts; 0: none."""


class RankDone(Message, frozen=True):
    """Result of the rank's part of a step."""

    rank: int
    epoch: str
    formation: int
    done: StepDone
    lost: tuple[int, ...] = ()
    """Peers to which the rank attributes the error."""
    taken_s: float = 0.0
    """Time at which the rank received the step, on its own host's clock, not its leader's."""
    answered_s: float = 0.0
    """Time at which the rank sends this message, on the same clock as `taken_s`."""


class RankFormed(Message, frozen=True):
    rank: int
    epoch: str
    formed: Formed


class RankAnswered(Message, frozen=True):
    """Result of a RankDo that is a Pull, a ReadBlocks or a StoreBlocks."""

    rank: int
    epoch: str
    outcome: KvPulled | BlocksRead | BlocksStored


class RankStaged(Message, frozen=True):
    rank: int
    epoch: str
    staged: Staged


class RankHeartbeat(Message, frozen=True):
    """Heartbeat of a rank's process, with the progress of its compute thread."""

    rank: int
    epoch: str
    formation: int
    num_ops: int
    """Ops begun since the process started: while it grows, the thread makes progress."""
    is_computing: bool
    """True if a step runs and does not wait for a peer: then `num_ops` must grow."""
    lost: tuple[int, ...] = ()
    """Peers that caused the last failure in this formation, or have a broken connection."""


class RankHeld(Message, frozen=True):
    """Answer to RankWho of a rank that had an earlier leader. Only a running step of that leader
    may still write into the rank's pool, until the next RankForm aborts it.
    """

    up: RankUp
    plan: FormPlan
    """Newest plan that the rank has received, with its current expert placement."""
    held: Held


# ---- leader -> rank ----
class RankWho(Message, frozen=True):
    """Request of a new leader, which took over the unit, to a rank that sends heartbeats but is not
    registered with it. The answer is RankHeld.
    """

    epoch: str
    """Epoch named in the rank's heartbeat."""


class RankForm(Message, frozen=True):
    plan: FormPlan


class RankStep(Message, frozen=True):
    formation: int
    plan: StepPlan


class RankStage(Message, frozen=True):
    plan: StagePlan


class RankDo(Message, frozen=True):
    """Effect on one rank's pool or disk, requested by the unit's leader and applied by the rank's
    host. It names no formation (ranks that agreed to step together), because KV outlives them.
    """

    effect: PoolEffect
