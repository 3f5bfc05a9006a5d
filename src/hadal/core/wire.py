"""Everything that travels on the wire, as one type: what a decoder is told to expect."""

from __future__ import annotations

from hadal.core.fleet import Demand, DrainUnit, KeepUnit
from hadal.core.messages import (
    Ahead,
    Audit,
    AuditRequest,
    Cached,
    Cancel,
    Decode,
    Drain,
    FrontUp,
    Load,
    Prefill,
    PrefillAhead,
    PrefillDone,
    Pulled,
    Release,
    Returned,
    Stop,
    Submit,
    Tokens,
    Trace,
    TraceRequest,
    UnitDown,
    UnitUp,
)
from hadal.core.rank_messages import (
    RankAnswered,
    RankBeat,
    RankDone,
    RankForm,
    RankFormed,
    RankFreed,
    RankLoad,
    RankPull,
    RankStage,
    RankStaged,
    RankStep,
    RankStore,
    RankUp,
)

AnyMessage = (
    Submit | FrontUp | Prefill | Release | Cancel | PrefillDone | Decode | Pulled | Tokens | Returned | Load | UnitUp
    | UnitDown | Drain | AuditRequest | Audit | RankUp | RankDone | RankFormed | RankAnswered | RankBeat | RankForm
    | RankStep | RankStage | RankStaged | RankPull | RankFreed | TraceRequest | Trace | PrefillAhead | Cached | Ahead
    | RankLoad | RankStore | Stop | DrainUnit | KeepUnit | Demand
)
