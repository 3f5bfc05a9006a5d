"""Messages between the front and the leaders of units: attempts, KV, tokens, reports, and a unit's life."""

from __future__ import annotations

import msgspec

from hadal.core.messages.base import Message
from hadal.core.messages.generation import Generation, Token
from hadal.core.plans import NO_LINK_BYTES, Draw, LinkBytes, Score


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
    draws: dict[int, Draw] = msgspec.field(default_factory=dict)
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
    """What a unit holds now. Sent by leaders as a heartbeat, and at once when what the front decides by
    has changed (roles/unit/reporter).

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
    balance: dict[str, float] = msgspec.field(default_factory=dict)
    """Objective (core/balance) -> mean over maximum of the ranks, smoothed; objectives without data
    are left out.
    """
    num_replicas_moved: int = 0
    """Expert replicas whose weights travelled because the balancer wanted it."""
    num_layers_flipped: int = 0
    num_requests_moved: int = 0
    """Decode: requests that went on on another rank."""
    cache: dict[str, int] = msgspec.field(default_factory=dict)
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
