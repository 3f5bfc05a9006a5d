"""Messages between the front and leaders: attempts, KV, tokens, reports, start and end of a unit."""

from __future__ import annotations

import msgspec

from hadal.core.messages.base import Message
from hadal.core.messages.generation import Generation, Token
from hadal.core.plans import NO_LINK_BYTES, Draw, LinkBytes, Score


# ---- front -> every leader ----
class FrontUp(Message, frozen=True):
    """A new front started: the leader's requests belong to streams that are gone. Free them all,
    but not KV that Resume may still name, and answer with UnitUp.
    """

    epoch: str


# ---- front -> prefill leader ----
class Prefill(Message, frozen=True):
    """Prefill `generation.prompt + generation.output`, emit one token, and lease the KV to decode."""

    generation: Generation


class Release(Message, frozen=True):
    """An attempt no longer needs the prefill leader: its KV was pulled, or it was cancelled or lost."""

    request_id: str
    attempt: int


class Cancel(Message, frozen=True):
    """Stop working on this attempt and free its resources. Unknown ids are ignored.

    Sent from the gateway to the front, which stops any running attempt, and from the front to a
    decode leader.
    """

    request_id: str
    attempt: int


# ---- prefill leader -> front ----
class KvLease(msgspec.Struct, frozen=True, array_like=True):
    """Lease on blocks: they do not change until the prefill unit's `lease_s` is over, unless
    released. The puller checks `versions` again after copying.
    """

    source: str
    """Address of the blocks' pool, as issued by its owner; opaque to processes in between."""
    block_ids: tuple[int, ...]
    versions: tuple[int, ...]
    """Counter of each block, raised whenever the block is freed: a changed counter means that the
    copy is void.
    """
    num_tokens: int
    """Number of valid tokens of KV, from position 0."""


class PrefillDone(Message, frozen=True):
    """Result of Prefill: the first token, and the lease on the prompt's KV (None if that token
    already finished the request).
    """

    unit: str
    token: Token
    lease: KvLease | None
    num_cached: int = 0
    """Positions that were not computed because their KV was in the cache."""
    scores: tuple[Score, ...] = ()
    """Scores of the prompt's tokens from the second on, if requested."""
    num_recomputed: int = 0
    """Positions that were on disk, but computed, since computing was predicted to be faster."""


class Cached(Message, frozen=True):
    """Change in the blocks that a unit can reuse from its pools. A front first gets a complete list."""

    unit: str
    epoch: str
    added: bytes
    dropped: bytes
    is_whole: bool = False
    """True if `added` is the complete list and replaces all earlier ones."""


# ---- front -> decode leader ----
class Decode(Message, frozen=True):
    """Pull the KV under `lease` and continue after `generation.output`; its last token has no KV yet."""

    generation: Generation
    lease: KvLease
    service: float = 0.0
    """Service that the tenant has received, divided by its weight (policy/fairness). If slots are
    short, the request with the lowest value starts first.
    """


class Resume(Message, frozen=True):
    """Continue attempts for which the unit's ranks still hold KV from an earlier leader, each from
    the last delivered token of its output. KV that no Resume has named when `is_last` arrives is
    freed.
    """

    generations: tuple[Generation, ...]
    is_last: bool


# ---- decode leader -> front ----
class Pulled(Message, frozen=True):
    """The KV has arrived. The prefill side may free its copy (the front sends it Release)."""

    unit: str
    request_id: str
    attempt: int


class Filled(Message, frozen=True):
    """Full blocks in a decode unit's pool, made by a generation's tokens. Sent to the front when
    the attempt ends, and from there to a prefill unit that has the text before them. That unit
    copies them, so that the next turn finds them. It is only a hint, and is not answered.
    """

    unit: str
    request_id: str
    attempt: int
    chain: bytes
    """Names of all full blocks of the generation's text."""
    lease: KvLease
    """Last blocks of `chain`, filled by decode. Not pinned: a copy is void if they are evicted."""


class Tokens(Message, frozen=True):
    """All tokens of one step of one unit, by column: row i is the token `values[i]` of the attempt
    with the id `attempt_ids[i]`. `indices[i]` is the number of tokens before it, so that a
    duplicate or a gap is detected. Several rows of an attempt are in the order of its text, not
    always adjacent.
    """

    unit: str
    attempt_ids: bytes
    """int64 [N]"""
    indices: bytes
    """int64 [N]"""
    values: bytes
    """int64 [N]"""
    finishes: tuple[tuple[int, str], ...] = ()
    """(row, "stop" or "length") of tokens that end their request."""
    draws: dict[int, Draw] = msgspec.field(default_factory=dict)
    """row -> log-probabilities, if requested."""


class Returned(Message, frozen=True):
    """An attempt that a leader, of prefill or decode, returns: the front requeues it (RETRYING ->
    QUEUED), or ends it for a reason that is final (roles/reasons).
    """

    unit: str
    request_id: str
    attempt: int
    reason: str
    """"preempted" (no blocks left), "pull failed", "lease expired", "queue full" ..."""


class UnitReport(Message, frozen=True):
    """Load of a unit. Sent by leaders as a heartbeat, and at once after a change that affects the
    front's decisions (roles/unit/reporter).

    `num_blocks` and `num_requests_max` are totals of the living ranks: they shrink while a rank is
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
    """Smoothed duration of a step in the Runner, including all its passes of the model, ms."""
    overhead_ms: float = 0.0
    """Smoothed time per step in which the Runner was idle although there was work: scheduling and
    messages, ms.
    """
    num_ranks: int = 1
    """Number of living ranks. It drops as soon as a rank dies; capacities follow when the unit has
    formed without that rank.
    """
    formation: int = 0
    """Number of the formation, raised whenever the unit forms anew."""
    num_blocks_request: int = 0
    """Usable blocks of the largest living rank: the most that one request can hold."""
    token_s: float = 0.0
    """Measured: seconds that a token takes on its rank; in decode, seconds that a request adds to a
    pass. 0: not known yet.
    """
    pair_s: float = 0.0
    """Prefill, measured: seconds per pair of a token and a position that it attends to."""
    balance: dict[str, float] = msgspec.field(default_factory=dict)
    """Objective (core/balance) -> mean over maximum of the ranks, smoothed; objectives without data
    are left out.
    """
    num_replicas_moved: int = 0
    """Expert replicas that the balancer placed on a rank that lacked the expert's weights."""
    num_layers_flipped: int = 0
    """Changes of a layer's expert placement during service."""
    num_requests_moved: int = 0
    """Decode: requests that continued on another rank of the unit."""
    cache: dict[str, int] = msgspec.field(default_factory=dict)
    """Counts of the unit's KV cache since its start, by the names in core/cache."""
    absent: tuple[int, ...] = ()
    """Indices of ranks that are not living members."""
    idle_s: float = 0.0
    """Seconds since the unit last had work, which is the age of its measurements."""
    step_s: float = 0.0
    """Decode, measured: fixed seconds of a pass, without the share of its requests. 0: not known yet."""
    num_drafts: int = 0
    """Decode: drafts (speculative tokens) per request in the last plan."""
    drafts_tried: tuple[int, ...] = ()
    """Per position: drafts that were compared with the drawn token, because all drafts before them
    were right.
    """
    drafts_accepted: tuple[int, ...] = ()
    """Per position: drafts that were equal to the drawn token (accepted)."""
    link_bytes: LinkBytes = NO_LINK_BYTES
    """Bytes sent between the unit's ranks, and KV bytes that they copied out of other pools."""


# ---- every process that listens -> gateway ----
class Refused(Message, frozen=True):
    """Connections that a process has refused since its start, because the other end did not prove
    that it belongs to this deployment.
    """

    process: str
    kind_to_num: dict[str, int]
    """Kind of connection (kv, experts or mesh) -> refused ones; 0 if none was."""


# ---- supervisor / units -> front ----
class UnitUp(Message, frozen=True):
    """The unit is ready to work. `epoch` is new at every start of the process."""

    unit: str
    role: str
    """"prefill" or "decode"."""
    epoch: str
    num_blocks: int
    """Usable blocks of all living ranks together."""
    num_requests_max: int
    num_blocks_request: int = 0
    """Usable blocks of the largest rank: the most that one request can hold. 0: `num_blocks`."""
    held: tuple[int, ...] = ()
    """Decode, from a leader that took over running ranks: ids of attempts with KV on those ranks.
    The leader waits for Resume.
    """
    fingerprint: str = ""
    """Digest of everything that its KV depends on besides the text (kv/names): units with equal
    fingerprints can use each other's KV. Empty: the unit makes no KV, as in a simulation.
    """


class LeaderDown(Message, frozen=True):
    """A unit's leader ended, but its ranks live. Sent by the supervisor to the front: a successor
    takes over the ranks with their KV, or UnitDown follows.
    """

    unit: str
    reason: str


class UnitDown(Message, frozen=True):
    """A process of a unit ended or was given up; everything in it is lost.

    The supervisor sends it to the front about a unit, and to a leader about one of its ranks
    ("decode-0.2"). To the supervisor, the front sends it about a frozen unit, and a leader about a
    silent or stuck rank; the process is then killed.
    """

    unit: str
    reason: str
    with_it: tuple[str, ...] = ()
    """Other ranks of that unit that ended at the same moment, such as those on one node."""


class Suspect(Message, frozen=True):
    """A process is silent or stuck. Sent by its failure detector (the front for a unit, a leader
    for its ranks) to the supervisor, which observes the process on its host and answers with
    Sighting.
    """

    process: str


class Sighting(Message, frozen=True):
    """Answer to Suspect. If the process has ended in the meantime, only UnitDown is sent."""

    process: str
    waited_s: float
    """Seconds since its start in which its threads were runnable without a processor, summed."""
    is_stopped: bool


class Stop(Message, frozen=True):
    """The front received tokens of unknown attempts: free their resources. Sent to a decode leader."""

    attempt_ids: tuple[int, ...]


class Drain(Message, frozen=True):
    """Finish running requests and accept no new ones (SIGTERM). Sent to the front."""
