"""Messages between the leader of a unit of many ranks and those ranks."""

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


# ---- rank -> leader, where they are apart ----
class RankUp(Message, frozen=True):
    """A rank's process is ready to be a member. Repeated until a FormPlan names it."""

    unit: str
    rank: int
    epoch: str
    host: str
    port: int
    pool: str
    """Address of its KV pool: the source of its leases."""
    expert_port: int = 0
    """Where other ranks get the weights of experts that it holds; 0: nowhere."""


class RankDone(Message, frozen=True):
    """The rank's part of a step."""

    rank: int
    epoch: str
    formation: int
    done: StepDone
    lost: tuple[int, ...] = ()
    """Peers that the rank holds responsible for the error."""
    taken_s: float = 0.0
    """When the rank heard of the step, by its host's clock, which is not its leader's ..."""
    said_s: float = 0.0
    """... and when it says this."""


class RankFormed(Message, frozen=True):
    rank: int
    epoch: str
    formed: Formed


class RankAnswered(Message, frozen=True):
    """What came of a RankDo that is a Pull, a ReadBlocks or a StoreBlocks."""

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
    """Ops begun since the process started: the thread moves as long as this does."""
    is_computing: bool
    """A step runs and does not wait for a peer: `num_ops` must move."""
    lost: tuple[int, ...] = ()
    """Peers of this formation whose connection broke."""


class RankHeld(Message, frozen=True):
    """The answer to RankWho of a rank that was led before. Nothing that an earlier leader asked for
    writes into its pool any more, but for a step, which the next RankForm breaks off.
    """

    up: RankUp
    plan: FormPlan
    """The newest plan that it has taken, with the placement that it has now."""
    held: Held


# ---- leader -> rank ----
class RankWho(Message, frozen=True):
    """A rank sends heartbeats, and its leader does not know it: a new leader took the unit over."""

    epoch: str
    """The epoch that its heartbeat named."""


class RankForm(Message, frozen=True):
    plan: FormPlan


class RankStep(Message, frozen=True):
    formation: int
    plan: StepPlan


class RankStage(Message, frozen=True):
    plan: StagePlan


class RankDo(Message, frozen=True):
    """What the unit's leader asks of one rank's pool or disk, to be done by the rank's host. It
    belongs to no formation, for KV outlives them.
    """

    effect: PoolEffect
