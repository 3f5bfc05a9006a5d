"""What processes say to each other, as frozen values.

They travel on the Wire between gateways, front, leaders, ranks, supervisor and fleet. A step's
plans and results, which leaders and ranks exchange in them, are in core/plans. Token ids are tuples
here: short, hashable and cheap to encode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

import msgspec
from msgspec import Meta

from hadal.core.cache import DiskLocation
from hadal.core.config import ROLES
from hadal.core.plans import (
    NO_LINK_BYTES,
    BlocksRead,
    BlocksStored,
    Draw,
    Formed,
    FormPlan,
    Held,
    KvPulled,
    LinkBytes,
    NamedBlocks,
    Sampling,
    Score,
    Staged,
    StagePlan,
    StepDone,
    StepPlan,
    TraceEvent,
)

BLOCK_TOKENS = 64
"""Tokens of KV in one block (DeepSeek's storage unit and FlashMLA's page)."""
SCRATCH_BLOCK = 0
"""Padded rows of a batch write there, so nobody ever owns it."""
SUPERVISOR = "supervisor"
"""Name of the supervisor on the wire."""
LENDER = "ray"
"""Name of the process that has nodes from Ray."""
FRONT = "front"
"""Name on the wire of the gateway that holds the front."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything on the wire; the tag is the class's name."""


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """One generation as the units see it. `output` is non-empty after a retry: what was already
    streamed.
    """

    request_id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int
    """Total output tokens, `output` included."""
    stop_ids: tuple[int, ...]
    min_tokens: int
    """Stop ids are forbidden before this many output tokens."""
    sampling: Sampling
    attempt: int
    """Counts retries. A reply about an older attempt is stale and is dropped."""
    priority: int = 0
    """Larger is sooner. Worth a bounded time of waiting, so nobody starves."""
    arrived_s: float = 0.0
    """When it came to the front, by the front's clock: for the order among those that wait."""
    salt: bytes = b""
    """The tenant's: KV is shared only under the same salt."""
    num_public: int = 0
    """Number of first tokens that are shared under kv/names.PUBLIC instead, as far as they fill
    blocks.
    """
    chain: bytes = b""
    """Names of the full blocks of prompt + output, as the front fills them in; empty where nothing
    is to be cached.
    """
    attempt_id: int = 0
    """The front gives it with Decode. By this number it knows the attempt's tokens again, and no
    other front does.
    """
    tenant: str = ""
    """The tenant's name, whatever its salt: what is scarce is shared among tenants."""
    fingerprint: str = ""
    """Of the KV that this attempt is made of (UnitUp), under which `chain` names its blocks. Empty:
    any.
    """
    weight: float = 1.0
    """The tenant's, by which what is scarce is shared (policy/fairness)."""


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One new token of one request. `index` says how many came before it, so a duplicate or a gap
    is noticed.
    """

    request_id: str
    attempt: int
    index: int
    token: int
    finish: str | None = None
    """None while it goes on; "stop" (a stop id) or "length"."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Closing(msgspec.Struct, frozen=True, array_like=True):
    """Where a request was worked on, for the ledger."""

    prefill_unit: str
    """Prefill unit of its last attempt, as `decode_unit`; empty: it got to none."""
    decode_unit: str
    num_retries: int


class RateLimits(msgspec.Struct, frozen=True, array_like=True):
    """What is left of a tenant's quota, as a reply's headers say it. None: there is no such limit."""

    requests: int | None = None
    """At once."""
    requests_left: int = 0
    tokens: int | None = None
    """A minute."""
    tokens_left: int = 0
    requests_reset_s: float = 0.0
    """When all of it can be had again, as far as that is known."""
    tokens_reset_s: float = 0.0


class Deliver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Front only: new tokens, or the end, for the stream of one request. Exactly one of a request
    is `final`. An effect (core/seams), and sent on where the stream is in another process.
    """

    request_id: str
    tokens: tuple[Token, ...]
    final: bool = False
    error: str | None = None
    """Why a final delivery ended it without finishing."""
    error_status: int = 500
    retry_after_s: float | None = None
    """When to try again; it comes with 429 and 503."""
    num_cached: int = 0
    """Prompt tokens that were not computed; they come with the first token."""
    closing: Closing | None = None
    """Where it was worked on; it comes with the final delivery of a request that was let in."""
    limits: RateLimits | None = None
    """Of a tenant with a quota: with the first delivery, which has no token if it was let in."""
    error_code: str = ""
    """For programs; empty: the status says it."""
    scores: tuple[Score, ...] = ()
    """Of the prompt's tokens from the second on; they come with the first token, where they were
    asked for.
    """


def text_of(generation: Generation) -> tuple[int, ...]:
    """Prompt and output. Where nobody reads the text, as in a simulation, the prompt is a range and
    so is this: only its length means something.
    """
    prompt: Sequence[int] = generation.prompt
    if isinstance(prompt, range):
        return cast("tuple[int, ...]", range(len(prompt) + len(generation.output)))
    return generation.prompt + generation.output


Key = tuple[str, int]
"""An attempt: its request's id and its number."""


# ---- gateway -> front (one process, but the message is the same as between two) ----
class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Admission of the generations of one request."""

    is_admitted: bool = False
    """True if a front admitted them all; False: the front that gets them decides."""
    most_pico_usd: tuple[int, ...] = ()
    """Highest cost of each generation; empty: their tenant has no budget."""

    def cost(self, index: int) -> int:
        """Return the highest cost of one generation, pico-dollars."""
        return self.most_pico_usd[index] if self.most_pico_usd else 0


class Submit(Message, frozen=True):
    """One generation, new or resumed after the end of another front."""

    generation: Generation
    is_admitted: bool = False
    """As its ticket has it."""
    most_pico_usd: int = 0
    """Highest cost, reserved from the tenant's budget."""


class TurnedAway(Message, frozen=True):
    """Generations were refused before they were submitted, as the front would have refused them: it
    counts them, for the fleet grows with all that is asked for.
    """

    num_generations: int
    num_tokens: int = 0
    """Tokens of their prompts. 0: nobody has read them."""


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant may have at most. 0: as much as there is."""

    tenant: str
    tokens_per_minute: int = 0
    requests: int = 0
    """Generations at once, those that wait included."""
    day_pico_usd: int = 0
    """To be charged in a day of UTC, in 10^-12 dollars."""


class Quotas(Message, frozen=True):
    """The tenants that have quotas, all of them, and the time of day."""

    unix_s: float
    quotas: tuple[Quota, ...]


class Charged(Message, frozen=True):
    """A generation has ended, and a gateway wrote down what it was charged. Said again, it counts
    once.
    """

    request_id: str
    tenant: str
    day: int
    """Days of UTC since 1970."""
    pico_usd: int


class Counted(Message, frozen=True):
    """Tokens of a prompt that a tenant had counted, without a generation. They are drawn from its
    tokens per minute.
    """

    tenant: str
    num_tokens: int


class Spent(Message, frozen=True):
    """What the ledger and its outbox hold of a day, read at one instant."""

    day: int
    tenant_to_pico_usd: dict[str, int]
    """Of tenants that were asked for; those with nothing are in it as well."""
    request_ids: tuple[str, ...]
    """Of those facts that are not old: a gateway may say them again."""


# ---- front -> every leader ----
class FrontUp(Message, frozen=True):
    """A new front started: what the leader holds belongs to streams that are gone. Free it all,
    answer with UnitUp.
    """

    epoch: str


# ---- front -> prefill leader ----
class Prefill(Message, frozen=True):
    """Prefill `generation.prompt + generation.output`, emit one token, hold the KV for a
    hand-over.
    """

    generation: Generation


class Release(Message, frozen=True):
    """This attempt needs nothing of the prefill leader any more: its KV was pulled, or it was
    cancelled or lost.
    """

    request_id: str
    attempt: int


class Cancel(Message, frozen=True):
    """Stop working on this attempt and free what it holds. Unknown ids are ignored.

    From the gateway to the front, which stops whatever attempt runs, and from the front to a decode
    leader.
    """

    request_id: str
    attempt: int


# ---- prefill leader -> front ----
class KvLease(msgspec.Struct, frozen=True, array_like=True):
    """A promise that blocks stay as they are until the prefill unit's `lease_s` is over, unless
    released. The puller checks `versions` once more after copying.
    """

    source: str
    """Address of the pool that holds them, as its owner gave it out: nothing to those in
    between.
    """
    block_ids: tuple[int, ...]
    versions: tuple[int, ...]
    """Counter of each block, raised whenever the block is freed: a changed counter means the copy
    is void.
    """
    num_tokens: int
    """Tokens of KV that are valid, from position 0."""


class PrefillDone(Message, frozen=True):
    """The prompt is prefilled: its first token, and the lease on its KV (None when that token
    already finished it).
    """

    unit: str
    token: Token
    lease: KvLease | None
    num_cached: int = 0
    """Positions that were not computed: their KV was in the cache."""
    scores: tuple[Score, ...] = ()
    """Of the prompt's tokens from the second on, where they were asked for."""


class Cached(Message, frozen=True):
    """Which blocks a unit can take out of its pools changed. Says all of them the first time a
    front hears of it.
    """

    unit: str
    epoch: str
    added: bytes
    dropped: bytes
    is_whole: bool = False
    """`added` is all there is; whatever was said before is void."""


# ---- front -> decode leader ----
class Decode(Message, frozen=True):
    """Pull the KV under `lease` and go on from `generation.output`, whose last token has no KV
    yet.
    """

    generation: Generation
    lease: KvLease
    service: float = 0.0
    """Served to its tenant, over its weight (policy/fairness): the least is first where slots are short."""


class Resume(Message, frozen=True):
    """Go on with attempts whose KV the unit's ranks hold since another leader led them, each from
    the last token of its output, as it was delivered. What is held and was not named when `is_last`
    came is nobody's.
    """

    generations: tuple[Generation, ...]
    is_last: bool


# ---- decode leader -> front ----
class Pulled(Message, frozen=True):
    """KV is here; the prefill side may free its copy (the front sends it Release)."""

    unit: str
    request_id: str
    attempt: int


class Filled(Message, frozen=True):
    """Full blocks that a generation's tokens filled in a decode unit's pool. Goes to the front when the
    attempt ends, and from there to a prefill unit that has the text before them: it copies them, so
    that the next turn finds them. A hint: nobody has to answer it.
    """

    unit: str
    request_id: str
    attempt: int
    chain: bytes
    """Names of all full blocks of its text."""
    lease: KvLease
    """The last of those blocks. Nothing is promised: a copy is void if they made room meanwhile."""


class Tokens(Message, frozen=True):
    """All tokens of one step of one unit, by column: row i is the token `values[i]` of the attempt
    with the id `attempt_ids[i]`. `indices[i]` says how many came before it, so a duplicate or a gap
    is noticed. Several rows of an attempt stand in the order of its text, not always side by side.
    """

    unit: str
    attempt_ids: bytes
    """int64 [N]"""
    indices: bytes
    """int64 [N]"""
    values: bytes
    """int64 [N]"""
    finishes: tuple[tuple[int, str], ...] = ()
    """(row, "stop" or "length") of those that end."""
    draws: dict[int, Draw] = {}
    """row -> log-probabilities, where they were asked for."""


class Returned(Message, frozen=True):
    """A leader gives an attempt back: the front retries it elsewhere (RETRYING -> QUEUED). From
    either leader.
    """

    unit: str
    request_id: str
    attempt: int
    reason: str
    """"preempted" (no blocks left), "pull failed", "lease expired", "queue full" ..."""


class UnitReport(Message, frozen=True):
    """What a unit holds now. Sent by leaders after every event that changed it, and as a heartbeat.

    `num_blocks` and `num_requests_max` are those of the living ranks: they shrink while a rank is
    lost.
    """

    unit: str
    epoch: str
    num_blocks: int
    num_blocks_used: int
    num_requests: int
    num_requests_max: int
    num_tokens_waiting: int
    """Prefill: prompt tokens not yet computed. Decode: 0."""
    num_steps: int = 0
    step_ms: float = 0.0
    """Smoothed duration of a step in the Runner, all passes of the model in it."""
    overhead_ms: float = 0.0
    """Smoothed time per step that the Runner stood idle though work was there: scheduling and
    messages.
    """
    num_ranks: int = 1
    """Living ranks. A death shows here first: capacities follow when the unit has formed
    without the dead.
    """
    formation: int = 0
    """Raised whenever the unit formed anew."""
    num_blocks_request: int = 0
    """Usable blocks of its largest living rank: what one request can hold at most."""
    token_s: float = 0.0
    """Measured: seconds that a token takes on its rank; in decode, that a request adds to a pass.
    0: not known yet.
    """
    pair_s: float = 0.0
    """Prefill, measured: seconds of a token and a position that it attends to."""
    balance: dict[str, float] = {}
    """Objective (core/balance) -> mean over maximum of the ranks, smoothed; objectives without data
    are left out.
    """
    num_replicas_moved: int = 0
    """Expert replicas whose weights travelled because the balancer wanted it."""
    num_layers_flipped: int = 0
    num_requests_moved: int = 0
    """Decode: requests that went on on another rank."""
    cache: dict[str, int] = {}
    """What the unit's KV cache counted since its start, by the names in core/cache."""
    absent: tuple[int, ...] = ()
    """Ranks that are not among the living, by number."""
    idle_s: float = 0.0
    """Seconds since the unit last had anything to do: what was measured of its steps is as old."""
    step_s: float = 0.0
    """Decode, measured: seconds that a pass takes besides what its requests add. 0: not known
    yet.
    """
    num_drafts: int = 0
    """Decode: tokens that the last plan drafts for each request."""
    drafts_tried: tuple[int, ...] = ()
    """Drafts by place that were compared with what was drawn: those before them were right."""
    drafts_accepted: tuple[int, ...] = ()
    """Those that were what was drawn."""
    link_bytes: LinkBytes = NO_LINK_BYTES
    """Bytes between its ranks, and of KV that they copied out of others' pools."""


# ---- every process that listens -> gateway ----
class Refused(Message, frozen=True):
    """Connections that a process refused since it started: whoever made them did not prove that it
    belongs here.
    """

    process: str
    kind_to_num: dict[str, int]
    """What was asked for (kv, experts or mesh) -> how many connections; 0 for what it listens for."""


# ---- supervisor / units -> front ----
class UnitUp(Message, frozen=True):
    """A unit is ready to work. `epoch` is new at every start of the process."""

    unit: str
    role: str
    """"prefill" or "decode"."""
    epoch: str
    num_blocks: int
    """Usable blocks of all living ranks together."""
    num_requests_max: int
    num_blocks_request: int = 0
    """Usable blocks of one rank: what one request can hold at most. 0: `num_blocks`."""
    held: tuple[int, ...] = ()
    """Decode, of a leader that took its ranks over: the ids of attempts whose KV they hold. It
    waits for Resume.
    """
    fingerprint: str = ""
    """Stands for all that its KV depends on besides the text (kv/names): units of equal ones can
    use each other's. Empty: the unit makes none, as in a simulation.
    """


class LeaderDown(Message, frozen=True):
    """A unit's leader ended, and its ranks live. Sent by the supervisor to the front: a successor
    takes them over with their KV, or UnitDown follows.
    """

    unit: str
    reason: str


class UnitDown(Message, frozen=True):
    """A unit's process ended or was given up. Sent by the supervisor; everything it held is lost.

    To the front about a unit, to a leader about one of its ranks ("decode-0.2"), and from a leader
    to the supervisor about a rank that is silent or stuck and has to be killed.
    """

    unit: str
    reason: str
    with_it: tuple[str, ...] = ()
    """Other ranks of that unit which ended at the same moment, as those of one node do."""


class Suspect(Message, frozen=True):
    """A process is silent or stuck: what is to be seen of it? From its judge, the front of a unit
    and a leader of its ranks, to the supervisor, who is on its host.
    """

    process: str


class Sighting(Message, frozen=True):
    """The supervisor's answer. A process that ended in the meantime is answered for by UnitDown
    alone.
    """

    process: str
    waited_s: float
    """Time since its start in which it was ready to run without a processor, its threads together.
    """
    is_stopped: bool


class Stop(Message, frozen=True):
    """Tokens came of attempts that nobody waits for: free what they hold. From the front to a
    decode leader.
    """

    attempt_ids: tuple[int, ...]


class Drain(Message, frozen=True):
    """Finish what runs, take nothing new (SIGTERM). To the front."""


class AuditRequest(Message, frozen=True):
    """Ask a leader to run `check()` on every ledger it keeps and answer with Audit. For tests and
    operators.
    """

    reply_id: int


class Audit(Message, frozen=True):
    """The ledgers' answer. `problems` is empty when everything adds up."""

    unit: str
    reply_id: int
    num_blocks_used: int
    num_requests: int
    problems: tuple[str, ...]


class ExpertsRequest(Message, frozen=True):
    """The front asks a unit of many ranks where its experts lie and what they bear."""

    reply_id: int


class ExpertsAnswer(Message, frozen=True):
    """The answer."""

    unit: str
    reply_id: int
    body: bytes
    """A UnitExperts (core/overview) as JSON: whoever hands it on need not read it."""


class TraceRequest(Message, frozen=True):
    """Ask a leader to trace its next `num_steps` steps and answer with Trace. Who asks waits
    `wait_s`.
    """

    reply_id: int
    num_steps: int
    wait_s: float


class TracedStep(msgspec.Struct, frozen=True, array_like=True):
    """A step that was recorded while it ran, of all its ranks."""

    step_id: int
    schedule: str
    num_micro_batches: int
    num_tokens: int
    events: tuple[TraceEvent, ...]
    balance: dict[str, float] = {}
    """Objective (core/balance) -> mean over maximum of the ranks in this step."""
    link_bytes: LinkBytes = NO_LINK_BYTES
    """Bytes between its ranks."""


class HostClock(msgspec.Struct, frozen=True):
    """What is known of a host's clock, against that of the unit's leader."""

    host: str
    """Its address."""
    ranks: tuple[int, ...]
    """Ranks that were traced there."""
    offset_s: float
    """What its clock is ahead: times of its events are lessened by that."""
    error_s: float
    """What the offset may be wrong by, either way."""


class Trace(Message, frozen=True):
    """The traced steps."""

    unit: str
    reply_id: int
    steps: tuple[TracedStep, ...]
    clocks: tuple[HostClock, ...] = ()
    """Where there are ranks on several hosts, whose times are the leader's clock's here."""


# Effects on one rank's pool (the others are in core/seams): the leader of a unit asks for them, and
# where the rank is another process they travel to it.


class Pull(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copy the leased blocks into own blocks `into`, verify, and answer with KvPulled."""

    request_id: str
    attempt: int
    lease: KvLease
    into: tuple[int, ...]
    rank: int = 0
    """Whose blocks `into` are."""


class ReadBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read blocks of the disk cache into own blocks `into`, verify them, and answer with
    BlocksRead. Until then `into` must be nobody else's.
    """

    read_id: int
    """Never used twice by a leader."""
    names: bytes
    locations: tuple[DiskLocation, ...]
    into: tuple[int, ...]
    rank: int = 0
    """Whose blocks `into` are."""


class StoreBlocks(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write own blocks to the disk cache when there is time, and answer with BlocksStored. Until
    then they must stay as they are.
    """

    store_id: int
    """Never used twice by a leader."""
    names: bytes
    positions: tuple[int, ...]
    """Index of each block among its text's blocks: the first is 0."""
    block_ids: tuple[int, ...]
    rank: int = 0


class Named(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These blocks of a rank can be found by name from now on, until they are freed. It tells
    another leader, should the unit get one.
    """

    named: NamedBlocks
    rank: int
    are_all: bool = False
    """What could be found before can be found no more."""


class Freed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These blocks of a rank's pool were freed: raise their version before they are used again
    (see KvLease).
    """

    block_ids: tuple[int, ...]
    rank: int = 0


PoolEffect = Pull | ReadBlocks | StoreBlocks | Freed | Named


# What the leader of a unit of many ranks and its ranks say to each other, as frozen values.


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


# The front at one instant, for /metrics and /health. Values only.


class Totals(msgspec.Struct):
    """Counted since the start."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    tokens_in: int = 0
    """Prompt tokens of requests let in."""
    tokens_refused: int = 0
    """Prompt tokens of requests that there was no room for (429)."""
    tokens_out: int = 0
    """Tokens that units have drawn for requests. Replies count what they give out of it
    (gateway/desk/metrics).
    """
    tokens_hit: int = 0
    """Prompt tokens of answered requests that a cache had, as the unit said that drew the first
    token.
    """
    tokens_miss: int = 0
    """The rest of those prompts."""
    retries: int = 0
    """Attempts that ended before their request did, preemptions among them, those that gave way
    apart.
    """
    preemptions: int = 0
    gave_way: int = 0
    """Attempts put back so that others' requests have their room: of batches, or of tenants that
    had more.
    """


class FrontSnapshot(msgspec.Struct, frozen=True):
    """Cheap to make: no request is looked at."""

    is_draining: bool
    state_to_count: dict[str, int]
    unit_to_report: dict[str, UnitReport]
    """Units that are up and have reported."""
    role_to_units: dict[str, dict[str, int]]
    """Units that are up, and how many ranks of each live."""
    totals: Totals
    unit_to_fingerprint: dict[str, str] = {}
    """Of the KV of those units: two, while others with new weights take their places one by one."""
    fingerprint: str = ""
    """Under which the front would place a prompt that comes now."""

    @property
    def can_serve(self) -> bool:
        """A request can be answered from end to end: each role has a unit with a rank that
        lives.
        """
        return all(any(self.role_to_units.get(role, {}).values()) for role in ROLES)


# What gateways say to the supervisor and, where there are several, to the one whose process holds
# the front.
#
#     another gateway --Open--> front's gateway --Delivered ...--> another gateway        Leave: its client is gone
#     front's gateway --FrontHeartbeat--> another gateway    a new epoch: it is another front
#
# An Open that a front does not live to answer is sent again to the next one, with what was
# delivered so far.


# ---- gateway -> supervisor, and the others' to the front's ----
class GatewayHeartbeat(Message, frozen=True):
    """The event loop of a gateway, or of the console, turns, and its port is served. The first one
    says that it is ready.
    """

    gateway: str
    pid: int
    units: tuple[str, ...] = ()
    """Those that the front here heard to be up."""


# ---- another gateway -> front's gateway ----
class Open(Message, frozen=True):
    """Generations of one HTTP request. Each is answered by Delivered, its last delivery being
    final; one that is open already is not begun twice.
    """

    gateway: str
    generations: tuple[Generation, ...]
    ticket: Ticket = Ticket()
    log_id: str = ""
    """The HTTP request's id, by which logs name it."""


class Leave(Message, frozen=True):
    """Nobody waits for these generations any more: stop them. Their last deliveries say where they
    were worked on.
    """

    gateway: str
    request_ids: tuple[str, ...]


# ---- front's gateway -> another ----
class FrontHeartbeat(Message, frozen=True):
    """The front lives."""

    epoch: str
    snapshot: FrontSnapshot
    gateways: tuple[str, ...] = ()
    """Names of the gateways that are there."""


class Delivered(Message, frozen=True):
    """What a batch of messages brought the generations of one gateway."""

    delivers: tuple[Deliver, ...]


# ---- either way ----
class Query(Message, frozen=True):
    """What does the other process have under this path, such as "/audit"?"""

    gateway: str
    reply_id: int
    path: str
    query: dict[str, str]


class QueryReply(Message, frozen=True):
    """The answer as HTTP has it."""

    gateway: str
    reply_id: int
    status: int
    body: bytes


# What the front and the fleet say to each other; the fleet lives beside the supervisor. Any of it
# may be lost, late or doubled: Demand is said again at every heartbeat and says all there is, and
# the fleet repeats what the last Demand does not show to have been heard.


# ---- fleet -> front ----
class DrainUnit(Message, frozen=True):
    """Send nothing new to this unit. What it holds goes on there; after `timeout_s` the rest is
    tried elsewhere.

    Said again, with this number or another, it leaves the deadline as it is.
    """

    unit: str
    timeout_s: float
    number: int
    """The drain's number, never 0 and never used twice: it tells what was counted in this drain
    from what was counted before.
    """


class KeepUnit(Message, frozen=True):
    """The unit is wanted after all: it takes new requests again."""

    unit: str


class UnitsFound(Message, frozen=True):
    """Supervisor -> fleet, first of all: these units run since before the fleet was there."""

    units: tuple[str, ...]


# ---- operator -> fleet ----
class Rollout(Message, frozen=True):
    """Replace every unit, one after the other, by one that is started anew (`hadal rollout`)."""

    model: str = ""
    """Folder of the checkpoint that the new ones serve; empty: the one that they serve now."""
    model_digest: str = ""
    """Of its config.json and weights (runtime/fingerprint)."""
    fingerprint: str = ""
    """Of what its KV depends on (runtime/fingerprint)."""


# ---- front -> fleet ----
class UnitFacts(msgspec.Struct, frozen=True, array_like=True):
    """A unit that is up, as the front counts it."""

    unit: str
    role: str
    num_requests: int
    """Requests that would lose something with the unit, prompts whose KV lies there included."""
    drain_number: int
    """0: it does not drain."""
    tokens_per_s_max: float = 0.0
    """What it would do if it were full, as far as it has measured itself; 0: not known."""


class Demand(Message, frozen=True):
    """What is asked of the fleet. Counters grow from the front's start on, so that a lost message
    loses no tokens.
    """

    epoch: str
    """The front's: another one counts from 0."""
    tokens_in: int
    """Prompt tokens of the requests that came, those that were refused for want of room among
    them.
    """
    tokens_out: int
    tokens_waiting: int
    """Prompt tokens that are not prefilled yet, be they queued or sent to a unit: a backlog of
    prefill.
    """
    outputs_waiting: int
    """Output tokens that queued requests will ask of decode, at what requests have brought on
    average.
    """
    units: tuple[UnitFacts, ...]


# ---- supervisor <-> agents, one on each node of a cluster ----
class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a process listens for those of other hosts, in its `life`-th life."""

    life: int
    endpoint: Annotated[str, Meta(pattern="^tcp://")]
    """As zmq writes it: tcp://10.0.0.1:40001."""


class KeepNodes(Message, frozen=True):
    """Supervisor -> lender, again and again: have an agent on every node of these groups, and on no
    other. The nodes of a group are had together or not at all.
    """

    groups: tuple[tuple[int, ...], ...]


class NodesKept(Message, frozen=True):
    """Lender -> supervisor, again and again: it looks after the nodes."""

    complaint: str
    """Why nodes that are wanted are not found; empty while they are, or may soon be."""
    found: tuple[tuple[int, ...], ...] = ()
    """Groups whose nodes were found, so that an agent may be expected on each."""
    is_superseded: bool = False
    """Another supervisor has taken the run over."""


Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,40}(\.[0-9]{1,6})?\Z")]
"""Of a process, where it becomes part of a file's name."""
NodeNumber = Annotated[int, Meta(ge=0)]
"""Of the nodes that a deployment takes, from 0 on."""


class ProcessOrder(msgspec.Struct, frozen=True, array_like=True):
    """A process that a node is to run."""

    name: Name
    life: int
    arguments: tuple[str, ...]
    """A module, and what it is given besides its folder and its life."""
    threads: int
    signal: Annotated[int, Meta(ge=0, le=64)] = 0
    """The last that it is to get; 0: none."""


class NodeOrders(Message, frozen=True):
    """All that a node is to run, at every change and every beat: what runs and is not named is
    killed. So a node that was given up and comes back ends what others do by now.
    """

    processes: tuple[ProcessOrder, ...]
    addresses: dict[Name, Address] | None = None
    """Of all processes elsewhere that its own may speak to; None: as it was said last."""
    is_over: bool = False
    """The run ends, or another agent has taken this one's place: it is to end all and leave."""
    num_rollouts: int = 0
    """At another number than before, what is started runs the code that is installed by then."""


class ProcessNews(msgspec.Struct, frozen=True, array_like=True):
    """How a process of a node fares."""

    name: Name
    life: int
    pid: int
    code: int | None = None
    """Its exit code, negative: by that signal; None while it runs."""
    waited_s: float = 0.0
    """How long its threads were ready to run and had no processor."""
    address: Address | None = None
    """Of the name that it has on the wire; None while it does not listen."""


class NodeNews(Message, frozen=True):
    """How a node fares: its agent says it every AGENT_BEAT_S, and at once when something changed."""

    node: NodeNumber
    boot: Name
    """Drawn by the agent's process when it starts."""
    agent: Address
    host: str
    """The node's name."""
    processes: tuple[ProcessNews, ...]
    versions: dict[str, str]


class Printed(Message, frozen=True):
    """Lines that a process of a node has printed."""

    node: NodeNumber
    process: Name
    life: int
    lines: tuple[bytes, ...]


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
    | TurnedAway
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
"""Every message there is: what a process expects to read."""
