"""What travels between a leader and its Runner: plans, each one rank's part of a step, and what
comes of them.
"""

from __future__ import annotations

import msgspec

from hadal.core.cache import DiskLocation
from hadal.core.drafts import Compared


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What a request's text must be. Checked by the gateway; ranks follow it (tokens/grammars)."""

    text: str
    """In llguidance's form; "" where any text may follow the reasoning, which alone is bounded."""
    end_ids: tuple[int, ...]
    """Tokens that end a text: drawn only where the grammar accepts."""
    begins_after: int = -1
    """The token that ends the reasoning before the text; -1: there is none. In that reasoning any
    token may be drawn but those of `end_ids` and `barred`.
    """
    prefix: tuple[int, ...] = ()
    """Tokens of the text that are in the prompt already."""
    opens: tuple[int, ...] = ()
    """Tokens that begin a stretch of output which is such a text, each its first token; outside of
    them any token may be drawn, in a reasoning or not. Empty: all of the output is the text.
    """
    closes: int = -1
    """The token that ends a stretch."""
    barred: tuple[int, ...] = ()
    """Marks of the text that mean nothing in the reasoning before it."""
    begins_with: int = -1
    """The token that begins the reasoning, where the model opens it itself: anything else is the text
    already. -1: the reasoning has begun, or there is none.
    """
    budget: int = -1
    """Most tokens of the reasoning, without its marks: behind that many, `begins_after` alone may be
    drawn. -1: no limit.
    """


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a request's next token is drawn. The draw at output index i depends on `seed`, i and the
    logits alone.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    num_logprobs: int = -1
    """-1: none; 0: the chosen token's; n: also the n best alternatives."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    """Of the tokens that it does not allow none is drawn. Log-probabilities do not know it."""
    num_prompt_logprobs: int = -1
    """Of the prompt's own tokens, behind the first: as `num_logprobs`. All of the prompt is computed
    then, and nothing of it is found or kept by name.
    """


NO_FOLLOWING = -1
"""Behind the chunk's last token there is none of the prompt, or nobody asks how likely it is."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Some consecutive tokens of one prompt. `sampling` is set on the last chunk: a token is drawn
    after it.
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    """Position of tokens[0]; everything before it is already in the blocks."""
    block_ids: tuple[int, ...]
    """Blocks of positions 0 .. start+len(tokens)-1, in order."""
    sampling: Sampling | None
    output_index: int
    """Index in the output of the token drawn after the last chunk (0 unless it is a retry)."""
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    """History, for penalties and the grammar; set on the last chunk only, and only as far as one of
    them asks for it.
    """
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_scores: int = -1
    """At least 0: say how likely the prompt's tokens behind each of these are, and so many that are
    likelier.
    """
    following: int = NO_FOLLOWING
    """The prompt's token behind the last one of the chunk."""


class LayerFlip(msgspec.Struct, frozen=True, array_like=True):
    """A MoE layer's experts lie elsewhere from this step on. All ranks of the unit get the same
    flips in the same step, none of them before every rank has staged what it needs.
    """

    layer: int
    """Among the MoE layers."""
    stage_id: int
    """The StagePlan that brought the weights. A rank whose experts stay where they are was sent
    none.
    """
    slot_to_expert: bytes
    """int16 [R, S]"""
    weights: bytes = b""
    """uint8 [R, S], see Placement.weights_LRS; empty: replicas of an expert take equal parts."""


class PrefillPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One rank's part of a prefill unit's step: chunks of several prompts, computed together.

    Every rank of the unit gets a plan with the same `step_id` and `schedule`; one without work gets
    no chunks and joins the exchanges with nothing.
    """

    step_id: int
    chunks: tuple[Chunk, ...]
    schedule: str = "sequential"
    """Name of the overlap schedule (overlap/)."""
    second: tuple[Chunk, ...] = ()
    """The second micro-batch. A prompt may be split: its earlier tokens are among `chunks`, its
    later ones here.
    """
    num_micro_batches: int = 1
    """1 or 2, the same on every rank of the unit; with 2 each may be empty."""
    is_traced: bool = False
    """Record when every op ran: StepDone.events."""
    is_counted: bool = False
    """Answer with StepDone.expert_slot_counts."""
    flips: tuple[LayerFlip, ...] = ()
    """Done before the step."""
    fetches: tuple[int, ...] = ()
    """Blocks that were filled in the pool (out of the disk cache): where the cache is not the pool,
    they have to be fetched from there before the step.
    """


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A request enters a slot of a rank's table. From then on the rank advances it by itself, with
    each step by the tokens that it drew.
    """

    slot: int
    block_ids: tuple[int, ...]
    num_tokens: int
    """Valid KV tokens; the next step writes position num_tokens with `last_token`."""
    last_token: int
    output_index: int
    """Index in the output of the next token drawn."""
    sampling: Sampling
    attempt_id: int = 0
    """The attempt id by which its KV is known, should the unit get another leader."""
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    """History, for penalties and the grammar; set only as far as one of them asks for it. `output`
    includes `last_token`.
    """
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    is_pulled: bool = False
    """The KV is as it was pulled: where the cache is not the pool, it has to be fetched from there.
    Else the cache has what the rank computed since, and the pool is behind it.
    """


class DecodePlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One rank's part of a decode unit's step as a difference to the step before: who leaves, who
    joins, which blocks were added. Slots are the rank's own.

    Leaves are applied first, then joins, then grown blocks. Then every occupied slot that does not rest
    makes a token in each pass, and one more for each of its drafts that turns out to be what is drawn.
    Every rank of the unit gets a plan with the same `step_id`, `schedule`, `num_passes` and
    `num_drafts`, with or without slots.
    """

    step_id: int
    leaves: tuple[int, ...]
    joins: tuple[Join, ...]
    grown: tuple[tuple[int, int, int], ...]
    """(slot, position in its block list, block id)"""
    schedule: str = "sequential"
    second: tuple[int, ...] = ()
    """Slots of the step that form the second micro-batch; all others are the first."""
    num_micro_batches: int = 1
    is_traced: bool = False
    publishes: tuple[int, ...] = ()
    """Slots whose KV has to be in the pool when the step is done: their requests are about to move
    to another rank.
    """
    is_counted: bool = False
    flips: tuple[LayerFlip, ...] = ()
    publishes_full: bool = False
    """Blocks whose last position this step writes have to be in the pool when it is done, for the
    disk cache.
    """
    num_drafts: int = 0
    """How many tokens of each slot of the step the MTP module drafts at its end: the next step that
    computes the slot checks them.
    """
    num_passes: int = 1
    """Passes of the model that the step has, one after another. Each checks what the one before it
    drafted.
    """
    resting: tuple[int, ...] = ()
    """Occupied slots that the step does not compute (policy/rows). They stay as they are: KV, sampler
    and unchecked drafts.
    """


def num_positions(num_passes: int, num_before: int, num_drafts: int) -> int:
    """Return how many positions of a slot a step may write at most: its first pass checks `num_before`
    drafts, and each further one the `num_drafts` of the pass before.
    """
    return num_passes + num_before + (num_passes - 1) * num_drafts


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A living rank of a unit and where its peers reach it."""

    rank: int
    epoch: str
    host: str
    port: int


class FormPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank's part in forming its unit anew: who is in it from now on, and which experts it holds.

    Everything of older formations is void: the rank empties its table, drops late frames, and
    connects to `members`.
    """

    formation: int
    num_ranks: int
    """Ranks of the deployment; `members` may be fewer."""
    members: tuple[Member, ...]
    slot_to_expert: bytes
    """The whole placement, int16 [L, R, S] (core/placement)."""
    num_expert_slots: int
    """S"""
    weights: bytes = b""
    """Weights of the same placement, uint8 [L, R, S]; empty: equal parts."""


class HeldKv(msgspec.Struct, frozen=True, array_like=True):
    """KV of one attempt in a rank's pool, from position 0 on, whoever leads the unit."""

    attempt_id: int
    """By which the front knows the attempt (core/messages.Tokens)."""
    block_ids: tuple[int, ...]
    num_tokens: int
    """Positions that may be valid: those of tokens that were delivered are, if they are fewer."""
    num_pulled: int
    """Positions of them that were pulled from another rank: where the cache is not the pool, the
    pool is behind from there on.
    """


class NamedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of a pool that are complete and can be found by name (kv/names)."""

    block_ids: tuple[int, ...]
    names: bytes
    """One behind the other, as `befores`: each block's own, and that of the block before it in its
    text, NO_NAME at the text's beginning.
    """
    befores: bytes


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's pool holds when its unit gets a new leader."""

    kv: tuple[HeldKv, ...]
    num_freed: dict[int, int]
    """Block -> how often it was freed: its version (see KvLease). Those that never were are left
    out.
    """
    named: NamedBlocks = NamedBlocks((), b"", b"")


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Where an expert's weights can be had."""

    expert: int
    host: str = ""
    port: int = 0
    """Address of a rank that holds it; port 0: read it from the checkpoint, as when that rank does
    not answer.
    """


class StagePlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Get a layer ready for a LayerFlip in the background: have the weights of its future expert
    slots in memory.

    What a rank has staged and not flipped is dropped by the next StagePlan and by any FormPlan.
    """

    formation: int
    stage_id: int
    """Raised by the leader with each layer that it stages."""
    layer: int
    slot_to_expert: tuple[int, ...]
    """Expert in every expert slot of this rank, EMPTY for none."""
    sources: tuple[Source, ...]
    """Where the experts among them come from that the rank does not hold."""


StepPlan = PrefillPlan | DecodePlan


# ---- what comes of them ----
class Draw(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one drawn token, where they were asked for."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Score(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token of a prompt is behind those before it."""

    logprob: float
    rank: int
    """1: it is the likeliest."""
    top: tuple[tuple[int, float], ...]


FLIP = "flip"
"""Among the op times of a step: a layer's experts and its table were exchanged before it."""
DRAFT = "draft"
"""Among the op times of a step: the module's entries and drafts."""
MASK = "mask"
"""Among the op times of a step: it stood still for what grammars allow."""


class OpTime(msgspec.Struct, frozen=True, array_like=True):
    """What one kind of op took in a step, summed over layers and micro-batches."""

    op: str
    """An op of overlap/plan; "dispatch" and "combine" are link time; "wait" is what of it compute
    stood still for.
    """
    count: int
    seconds: float


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of a lane of a rank in a traced step."""

    rank: int
    lane: str
    """"compute", "link" (bytes under way) or "wait" (compute stands still for the link:
    exposed).
    """
    op: str
    micro_batch: int
    layer: int
    start_s: float
    """Start on the host's monotonic clock (time.perf_counter), which all its processes share. In a
    Trace of several hosts, on the clock of the unit's leader.
    """
    end_s: float


NO_TOKEN = "no token"
"""A row's failure, with details behind a colon: its logits are finite, and what the request itself
adds to them leaves nothing to draw.
"""
NOT_FINITE = "not finite"
"""A row's failure, with details behind a colon: the model computed numbers that are none. It would for
every attempt, as its weights are damaged or overflow.
"""
ByNode = tuple[int, int]
"""What went within a node, and what went between two."""
NO_BYTES: ByNode = (0, 0)


class LinkBytes(msgspec.Struct, frozen=True, array_like=True):
    """What ranks sent to each other. What a rank keeps for itself went nowhere."""

    dispatch: ByNode = NO_BYTES
    combine: ByNode = NO_BYTES
    kv: ByNode = NO_BYTES
    """KV that was copied out of another rank's pool: hand-overs, and requests that moved."""

    def plus(self, other: LinkBytes) -> LinkBytes:
        """Both together."""
        return LinkBytes(
            _both(self.dispatch, other.dispatch),
            _both(self.combine, other.combine),
            _both(self.kv, other.kv),
        )


def _both(one: ByNode, other: ByNode) -> ByNode:
    return one[0] + other[0], one[1] + other[1]


NO_LINK_BYTES = LinkBytes()


class Waited(msgspec.Struct, frozen=True, array_like=True):
    """For how long a rank waited for its peers in a step."""

    seconds: float = 0.0
    """In all exchanges."""
    alone_s: dict[str, float] = {}
    """Other host of the unit -> seconds in which no rank of another host was missing. Empty where the
    transport does not tell (gloo, nccl).
    """


NO_WAIT = Waited()


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step's tokens: row i is the token `tokens[i]` of `keys[i]`. Prefill: the index of the chunk
    that drew, once each. Decode: the slot, as often as its request got a token; those of one slot
    stand in the order of the text, not always side by side.
    """

    step_id: int
    keys: tuple[int, ...]
    tokens: tuple[int, ...]
    draws: dict[int, Draw]
    """row -> log-probabilities, only where asked for."""
    elapsed_s: float
    """Time inside the Runner."""
    error: str | None = None
    """Set when the step failed as a whole: the leader gives every request in it back to the
    front.
    """
    failed: dict[int, str] = {}
    """key -> why its token is void though the step ran (logits not finite; NO_TOKEN): that request
    alone is given back.
    """
    op_times: tuple[OpTime, ...] = ()
    """Where the step's time went, of this rank (of several ranks together: the slowest one's, op by
    op).
    """
    events: tuple[TraceEvent, ...] = ()
    """Events of a traced plan."""
    expert_slot_counts: bytes = b""
    """Tokens that the rank's expert slots received since the last counted plan, int64 [L, S]; only
    a counted plan has them. A flip lets its layer's counts begin anew. A leader of many ranks reads
    them itself; the leader of steps inside it does not get them.
    """
    scores: dict[int, tuple[Score, ...]] = {}
    """Index of a chunk that asks for them -> scores of the prompt's tokens behind each of its own."""
    link_bytes: LinkBytes = NO_LINK_BYTES
    """What the rank's own tokens sent to its peers and got back, since the last step that answered
    (of several ranks together: the sum).
    """
    waited: Waited = NO_WAIT
    """Of this rank alone. A leader of many ranks reads it itself."""
    drafts: Compared = ()
    """Of all passes (of several ranks together: the sum)."""


class Formed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outcome of a FormPlan. `error` None: the rank is connected to all members and holds its
    experts.
    """

    formation: int
    error: str | None
    lost: tuple[int, ...] = ()
    """Members that could not be reached."""
    num_loaded: int = 0
    """Expert replicas read from the checkpoint for it."""


class Staged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outcome of a StagePlan. `error` None: the rank can flip the layer."""

    formation: int
    stage_id: int
    layer: int
    error: str | None = None
    num_received: int = 0
    """Replicas that came from another rank."""
    num_read: int = 0
    """Replicas read from the checkpoint."""
    elapsed_s: float = 0.0


class KvPulled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outcome of a Pull effect. `error` None: the blocks are filled and verified."""

    request_id: str
    attempt: int
    error: str | None
    link_bytes: LinkBytes = NO_LINK_BYTES


class BlocksRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outcome of a ReadBlocks effect: the first `num_loaded` blocks are filled and verified."""

    read_id: int
    num_loaded: int
    num_damaged: int = 0
    """1 if the block after those was there and was not what its name says; 0 if it was gone or
    could not be read.
    """
    error: str | None = None
    """Why there are not more."""


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outcome of a StoreBlocks effect. What it names is durable: a new process finds it after
    `kill -9`.
    """

    store_id: int
    locations: tuple[DiskLocation | None, ...]
    """Where each block is now; None if it was not written."""
    dropped: bytes = b""
    """Names of blocks that made room."""
    error: str | None = None
    """Why a block was not written."""
