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
    Delivered,
    Drain,
    FrontBeat,
    FrontUp,
    GatewayBeat,
    LeaderDown,
    Leave,
    Load,
    Open,
    Prefill,
    PrefillAhead,
    PrefillDone,
    Pulled,
    Query,
    QueryReply,
    RankAnswered,
    RankBeat,
    RankDo,
    RankDone,
    RankForm,
    RankFormed,
    RankHeld,
    RankStage,
    RankStaged,
    RankStep,
    RankUp,
    RankWho,
    Refused,
    Release,
    Resume,
    Returned,
    Sighting,
    Stop,
    Submit,
    Suspect,
    Tokens,
    Trace,
    TraceRequest,
    TurnedAway,
    UnitDown,
    UnitUp,
)

AnyMessage = (
    Submit
    | FrontUp
    | Prefill
    | Release
    | Cancel
    | PrefillDone
    | Decode
    | Pulled
    | Tokens
    | Returned
    | Load
    | UnitUp
    | UnitDown
    | Drain
    | AuditRequest
    | Audit
    | RankUp
    | RankDone
    | RankFormed
    | RankAnswered
    | RankBeat
    | RankForm
    | RankStep
    | RankStage
    | RankStaged
    | RankDo
    | TraceRequest
    | Trace
    | PrefillAhead
    | Cached
    | Ahead
    | Stop
    | DrainUnit
    | KeepUnit
    | Demand
    | GatewayBeat
    | Open
    | Leave
    | FrontBeat
    | Delivered
    | Query
    | QueryReply
    | Refused
    | Suspect
    | Sighting
    | TurnedAway
    | RankHeld
    | RankWho
    | LeaderDown
    | Resume
)
