"""What the leader of a unit of many ranks and its ranks say to each other, as frozen values."""

from __future__ import annotations

from hadal.core.cache import Place
from hadal.core.messages import KvLease, Message
from hadal.core.plans import (
    BlocksLoaded,
    BlocksStored,
    Formed,
    FormPlan,
    Held,
    KvPulled,
    NamedBlocks,
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
    generation: int
    done: StepDone
    lost: tuple[int, ...] = ()
    """Peers that the rank holds responsible for the error."""


class RankFormed(Message, frozen=True):
    rank: int
    epoch: str
    formed: Formed


class RankAnswered(Message, frozen=True):
    """What came of a RankPull, a RankLoad or a RankStore."""

    rank: int
    epoch: str
    outcome: KvPulled | BlocksLoaded | BlocksStored


class RankStaged(Message, frozen=True):
    rank: int
    epoch: str
    staged: Staged


class RankBeat(Message, frozen=True):
    """Heartbeat of a rank's process, with the progress of its compute thread."""

    rank: int
    epoch: str
    generation: int
    num_ops: int
    """Ops begun since the process started: the thread moves as long as this does."""
    is_computing: bool
    """A step runs and does not wait for a peer: `num_ops` must move."""
    lost: tuple[int, ...] = ()
    """Peers of this generation whose connection broke."""


class RankHeld(Message, frozen=True):
    """The answer to RankWho of a rank that was led before. Nothing that an earlier leader asked for
    writes into its pool any more, but for a step, which the next RankForm breaks off.
    """

    up: RankUp
    plan: FormPlan
    """The newest that it has taken, with the placement as it is since."""
    held: Held


# ---- leader -> rank ----
class RankWho(Message, frozen=True):
    """It beats, and its leader does not know it: a new leader took the unit over."""

    epoch: str
    """Of the beat."""


class RankForm(Message, frozen=True):
    plan: FormPlan


class RankStep(Message, frozen=True):
    generation: int
    plan: StepPlan


class RankStage(Message, frozen=True):
    plan: StagePlan


class RankPull(Message, frozen=True):
    request_id: str
    attempt: int
    lease: KvLease
    into: tuple[int, ...]


class RankFreed(Message, frozen=True):
    block_ids: tuple[int, ...]


class RankNamed(Message, frozen=True):
    named: NamedBlocks


class RankLoad(Message, frozen=True):
    load_id: int
    names: bytes
    places: tuple[Place, ...]
    into: tuple[int, ...]


class RankStore(Message, frozen=True):
    store_id: int
    names: bytes
    positions: tuple[int, ...]
    block_ids: tuple[int, ...]
