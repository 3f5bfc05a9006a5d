"""Messages between processes, as frozen values.

Sent on the Wire between gateways, front, leaders, ranks, supervisor, fleet, node provider and node
agents. A step's plans and results, which messages between leaders and ranks contain, are in
core/plans. Token ids are tuples: short, hashable, cheap to encode; only Tokens has int64 columns.
"""

from __future__ import annotations

from hadal.core.messages.fleet import Demand, DrainUnit, KeepUnit, Rollout, UnitsFound
from hadal.core.messages.gateways import (
    Delivered,
    FrontHeartbeat,
    GatewayHeartbeat,
    Leave,
    Open,
    Query,
    QueryReply,
)
from hadal.core.messages.nodes import KeepNodes, NodeNews, NodeOrders, NodesKept, Printed
from hadal.core.messages.questions import (
    Audit,
    AuditRequest,
    ExpertsAnswer,
    ExpertsRequest,
    Trace,
    TraceRequest,
)
from hadal.core.messages.ranks import (
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
)
from hadal.core.messages.requests import Charged, Counted, Quotas, RejectedEarly, Spent, Submit
from hadal.core.messages.units import (
    Cached,
    Cancel,
    Decode,
    Drain,
    Filled,
    FrontUp,
    LeaderDown,
    Prefill,
    PrefillDone,
    Pulled,
    Refused,
    Release,
    Resume,
    Returned,
    Sighting,
    Stop,
    Suspect,
    Tokens,
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
    | Filled
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
    | Cached
    | Stop
    | DrainUnit
    | KeepUnit
    | UnitsFound
    | Demand
    | Rollout
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
    | RejectedEarly
    | Quotas
    | Charged
    | Counted
    | Spent
    | RankHeld
    | RankWho
    | LeaderDown
    | Resume
    | NodeOrders
    | KeepNodes
    | NodesKept
    | NodeNews
    | Printed
    | ExpertsRequest
    | ExpertsAnswer
)
"""Union of all messages: the type that a process decodes."""
