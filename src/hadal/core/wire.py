"""Everything that travels on the wire, as one type: what a decoder is told to expect."""

from __future__ import annotations

from hadal.core.fleet import Demand, DrainUnit, KeepUnit
from hadal.core.messages import (
    Audit,
    AuditRequest,
    Cached,
    Cancel,
    Decode,
    Delivered,
    Drain,
    FrontHeartbeat,
    FrontUp,
    GatewayHeartbeat,
    LeaderDown,
    Leave,
    Open,
    Prefill,
    PrefillDone,
    PrefilledEarly,
    PullEarly,
    Pulled,
    Query,
    QueryReply,
    RankAnswered,
    RankDo,
    RankDone,
    RankForm,
    RankFormed,
    RankHeartbeat,
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
    UnitReport,
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
    | UnitReport
    | UnitUp
    | UnitDown
    | Drain
    | AuditRequest
    | Audit
    | RankUp
    | RankDone
    | RankFormed
    | RankAnswered
    | RankHeartbeat
    | RankForm
    | RankStep
    | RankStage
    | RankStaged
    | RankDo
    | TraceRequest
    | Trace
    | PrefilledEarly
    | Cached
    | PullEarly
    | Stop
    | DrainUnit
    | KeepUnit
    | Demand
    | GatewayHeartbeat
    | Open
    | Leave
    | FrontHeartbeat
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
