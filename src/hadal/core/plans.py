"""Messages between a leader (scheduler) and its Runner: plans, each one rank's part of a step, and
the results of plans.
"""

from __future__ import annotations

import msgspec

from hadal.core.cache import DiskLocation
from hadal.core.drafts import Compared


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """Constraint on a request's text (structured output). Checked by the gateway; ranks apply it
    (tokens/grammars).
    """

    text: str
    """Grammar in llguidance's form; "": the text is free, and only the reasoning's length is limited."""
    end_ids: tuple[int, ...]
    """Tokens that end a text; they can be drawn only where the grammar accepts."""
    begins_after: int = -1
    """Token that ends the reasoning before the text; -1: no reasoning. During reasoning any token
    may be drawn, except `end_ids` and `barred` if the whole output is constrained.
    """
    prefix: tuple[int, ...] = ()
    """Tokens of the text that the prompt already contains."""
    opens: tuple[int, ...] = ()
    """Tokens that open a constrained stretch of the output; each is also the stretch's first token.
    Outside of stretches, in reasoning or not, any token may be drawn. Empty: the whole output is
    constrained.
    """
    closes: int = -1
    """Token that ends a constrained stretch."""
    barred: tuple[int, ...] = ()
    """Special tokens of the text that must not be drawn in the reasoning before it."""
    begins_with: int = -1
    """Token that begins the reasoning, if the model itself opens it: any other first token begins
    the text. -1: the reasoning has already begun, or there is none.
    """
    budget: int = -1
    """Maximum number of tokens of reasoning, without its begin and end tokens; after them only
    `begins_after` may be drawn. -1: no limit.
    """
    is_lenient: bool = False
    """True: a text that the grammar cannot follow any further, because automata reach a limit, is
    free from there on. False: its request fails.
    """


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of a request. The draw at output index i depends on `seed`, i and the
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
    """Log-probabilities to return. -1: none; 0: the drawn token's; n: also the n likeliest's."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    """Constraint on the tokens drawn; log-probabilities are computed without it."""
    num_prompt_logprobs: int = -1
    """Log-probabilities of the prompt's tokens after the first, with values as in `num_logprobs`.
    All of the prompt is then computed: the prefix cache is neither read nor written.
    """


NO_FOLLOWING = -1
"""Value of `Chunk.following` if the chunk ends the prompt, or if scores are not requested."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one prompt. `sampling` is set on the prompt's last chunk only: a token
    is drawn after it.
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    """Position of tokens[0]; the KV of all positions before it is already in the blocks."""
    block_ids: tuple[int, ...]
    """Blocks of positions 0 .. start+len(tokens)-1, in order."""
    sampling: Sampling | None
    output_index: int
    """Index in the output of the token drawn after the last chunk; 0 without output so far."""
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    """Output so far. `prompt` and `output` are set on the last chunk only, if penalties or the
    grammar need them.
    """
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_scores: int = -1
    """If 0 or more: return scores of the prompt's token after each of these tokens, with this
    number of likeliest tokens.
    """
    following: int = NO_FOLLOWING
    """Prompt token after the chunk's last one."""


class LayerFlip(msgspec.Struct, frozen=True, array_like=True):
    """New expert placement of a MoE layer from this step on. All ranks of the unit get the same
    flips in the same step, and only after every rank has staged the weights it needs.
    """

    layer: int
    """Index among the MoE layers."""
    stage_id: int
    """Id of the StagePlan that loaded the weights; a rank with unchanged experts gets none."""
    slot_to_expert: bytes
    """int16 [R, S]"""
    weights: bytes = b""
    """uint8 [R, S], see Placement.weights_LRS; empty: replicas of an expert take equal parts."""


class PrefillPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One rank's part of a prefill unit's step: chunks of several prompts, computed together.

    Every rank of the unit gets a plan with the same `step_id` and `schedule`. A rank without work
    gets no chunks and joins the exchanges with empty data.
    """

    step_id: int
    chunks: tuple[Chunk, ...]
    schedule: str = "sequential"
    """Name of the overlap schedule (overlap/)."""
    second: tuple[Chunk, ...] = ()
    """Chunks of the second micro-batch. A prompt may be split: its earlier tokens are among
    `chunks`, its later ones here.
    """
    num_micro_batches: int = 1
    """1 or 2, equal on every rank of the unit; with 2, either may be empty on a rank."""
    is_traced: bool = False
    """Record when every op ran, in StepDone.events."""
    is_counted: bool = False
    """Return StepDone.expert_slot_counts."""
    flips: tuple[LayerFlip, ...] = ()
    """Placements to switch before the step."""
    fetches: tuple[int, ...] = ()
    """Blocks that were filled in the pool from the disk cache or a decode unit. If the rank
    computes in a cache separate from the pool, it must copy them from the pool before the step.
    """


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A request enters a slot of a rank's table. The rank itself then appends the tokens drawn in
    each step.
    """

    slot: int
    block_ids: tuple[int, ...]
    num_tokens: int
    """Number of valid KV tokens; the next step writes position num_tokens with `last_token`."""
    last_token: int
    output_index: int
    """Output index of the next token drawn."""
    sampling: Sampling
    attempt_id: int = 0
    """Attempt id that identifies the request's KV to a later leader of the unit."""
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    """Output so far, with `last_token`. `prompt` and `output` are set only if penalties or the
    grammar need them.
    """
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    is_pulled: bool = False
    """True: the KV is in the pool as it was pulled; a cache separate from the pool must copy it
    from there. False: the cache has what the rank computed since, and the pool is out of date.
    """


class DecodePlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One rank's part of a decode unit's step, as changes to the previous step: requests that leave
    or join, and blocks added. Slots are the rank's own.

    Leaves are applied first, then joins, then grown blocks. Then every occupied slot that does not
    rest and drew no stop id makes one token per pass, and one more for each accepted draft. Every
    rank of the unit gets a plan with the same `step_id`, `schedule`, `num_passes` and `num_drafts`,
    with or without slots.
    """

    step_id: int
    leaves: tuple[int, ...]
    joins: tuple[Join, ...]
    grown: tuple[tuple[int, int, int], ...]
    """(slot, position in its block list, block id)"""
    schedule: str = "sequential"
    second: tuple[int, ...] = ()
    """Slots of the step in the second micro-batch; all others are in the first."""
    num_micro_batches: int = 1
    is_traced: bool = False
    publishes: tuple[int, ...] = ()
    """Slots for which the pool must have the KV when the step is done, because their requests will
    move to another rank.
    """
    is_counted: bool = False
    flips: tuple[LayerFlip, ...] = ()
    publishes_full: bool = False
    """True: when the step is done, the pool must have each block in which this step writes the last
    position, for the disk cache.
    """
    num_drafts: int = 0
    """Drafts (speculative tokens) that the MTP module makes for each slot at the step's end. The
    next step that computes the slot checks them.
    """
    num_passes: int = 1
    """Passes of the model in this step, one after another. Each checks the drafts of the pass before it."""
    resting: tuple[int, ...] = ()
    """Occupied slots that the step does not compute (policy/rows). Their KV, sampler and unchecked
    drafts are unchanged.
    """


def num_positions(num_passes: int, num_before: int, num_drafts: int) -> int:
    """Return the most positions of a slot that a step may write: its first pass checks `num_before`
    drafts, and each further one the `num_drafts` of the pass before.
    """
    return num_passes + num_before + (num_passes - 1) * num_drafts


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A living rank of a unit and its address for peers."""

    rank: int
    epoch: str
    host: str
    port: int


class FormPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank's part in a new formation of its unit: the members from now on, and the experts of
    each.

    Everything of older formations is void: the rank empties its table, drops late frames, and
    connects to `members`.
    """

    formation: int
    num_ranks: int
    """Ranks of the deployment; `members` may be fewer."""
    members: tuple[Member, ...]
    slot_to_expert: bytes
    """Whole placement, int16 [L, R, S] (core/placement)."""
    num_expert_slots: int
    """Expert slots per rank and layer: S."""
    weights: bytes = b""
    """Weights of the same placement, uint8 [L, R, S]; empty: replicas of an expert take equal parts."""


class HeldKv(msgspec.Struct, frozen=True, array_like=True):
    """KV of one attempt in a rank's pool, from position 0 on, independent of the unit's leader."""

    attempt_id: int
    """Id of the attempt at the front (core/messages/units.Tokens)."""
    block_ids: tuple[int, ...]
    num_tokens: int
    """Positions that may be valid. Only positions of delivered tokens are known to be valid."""
    num_pulled: int
    """Positions pulled from another rank. If the cache is separate from the pool, the pool is out
    of date after these.
    """


class NamedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Complete blocks of a pool that can be found by name (kv/names)."""

    block_ids: tuple[int, ...]
    names: bytes
    """Concatenated names, one per block. `befores` has, for each, the name of the block before it
    in its text, NO_NAME at the text's beginning.
    """
    befores: bytes


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Contents of a rank's pool when its unit gets a new leader."""

    kv: tuple[HeldKv, ...]
    num_freed: dict[int, int]
    """Block -> number of times it was freed: its version (see KvLease). Blocks that were never
    freed are left out.
    """
    named: NamedBlocks = NamedBlocks((), b"", b"")


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Place from which an expert's weights can be loaded."""

    expert: int
    host: str = ""
    port: int = 0
    """Address of a rank that has the expert; port 0: read it from the checkpoint, as is also done
    if that rank does not answer.
    """


class StagePlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Prepare a layer for a LayerFlip in the background: load the weights of its future expert
    slots into memory.

    Weights that a rank has staged and not flipped are dropped by the next StagePlan and by any
    FormPlan.
    """

    formation: int
    stage_id: int
    """Number that the leader increments for each layer that it stages."""
    layer: int
    slot_to_expert: tuple[int, ...]
    """Expert in every expert slot of this rank, EMPTY for none."""
    sources: tuple[Source, ...]
    """Sources of those experts that the rank does not have yet."""


StepPlan = PrefillPlan | DecodePlan


# ---- results of plans ----
class Draw(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one drawn token, if requested."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Score(msgspec.Struct, frozen=True, array_like=True):
    """Probability of a prompt token, given the tokens before it."""

    logprob: float
    rank: int
    """Rank among all tokens by probability; 1: the likeliest."""
    top: tuple[tuple[int, float], ...]


FLIP = "flip"
"""Op name of the switch to a layer's new experts and placement table, done before a step."""
DRAFT = "draft"
"""Op name of the MTP module's work in a step: its cache entries and drafts."""
MASK = "mask"
"""Op name of a step's wait for grammars to compute which tokens are allowed."""


class OpTime(msgspec.Struct, frozen=True, array_like=True):
    """Time of one kind of op in a step, summed over layers and micro-batches."""

    op: str
    """Op of overlap/plan, FLIP, DRAFT, MASK or IDLE. "dispatch" and "combine" are link time; "wait" is
    the part of link time for which compute stood still.
    """
    count: int
    seconds: float


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """One interval on a lane of a rank in a traced step."""

    rank: int
    lane: str
    """"compute", "link" (bytes in flight) or "wait" (compute stands still for the link)."""
    op: str
    micro_batch: int
    layer: int
    start_s: float
    """Start on the host's monotonic clock (time.perf_counter), which all its processes share. In a
    Trace of several hosts, on the clock of the unit's leader.
    """
    end_s: float


NO_TOKEN = "no token"
"""Failure of a row, with details after a colon: the logits are finite, but the request's own
constraints leave no token to draw.
"""
NOT_FINITE = "not finite"
"""Failure of a row, with details after a colon: the model computed values that are not finite.
Every attempt would fail alike, because the weights are damaged or overflow.
"""
ByNode = tuple[int, int]
"""(bytes sent within a node, bytes sent between nodes)."""
NO_BYTES: ByNode = (0, 0)


class LinkBytes(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that ranks sent to each other. Data that a rank keeps for itself is not counted."""

    dispatch: ByNode = NO_BYTES
    combine: ByNode = NO_BYTES
    kv: ByNode = NO_BYTES
    """KV copied from another rank's pool: KV transfers from prefill, and requests moved between ranks."""

    def plus(self, other: LinkBytes) -> LinkBytes:
        """Return the sum of both, field by field."""
        return LinkBytes(
            _both(self.dispatch, other.dispatch),
            _both(self.combine, other.combine),
            _both(self.kv, other.kv),
        )


def _both(one: ByNode, other: ByNode) -> ByNode:
    return one[0] + other[0], one[1] + other[1]


NO_LINK_BYTES = LinkBytes()


class Waited(msgspec.Struct, frozen=True, array_like=True):
    """Time that a rank waited for its peers in a step."""

    seconds: float = 0.0
    """Seconds in all exchanges."""
    alone_s: dict[str, float] = {}
    """Other host of the unit -> seconds in which only that host's ranks were missing. Empty if the
    transport does not report it (gloo, nccl).
    """


NO_WAIT = Waited()


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step's tokens: row i is the token `tokens[i]` of `keys[i]`. Prefill: the key is the index
    of the chunk that drew, once each. Decode: the key is the slot, once for each token of its
    request. Tokens of one slot are in the order of the text, not always adjacent.
    """

    step_id: int
    keys: tuple[int, ...]
    tokens: tuple[int, ...]
    draws: dict[int, Draw]
    """row -> log-probabilities, only if requested."""
    elapsed_s: float
    """Time inside the Runner."""
    error: str | None = None
    """Set if the step failed as a whole: the leader returns every request in it to the front."""
    failed: dict[int, str] = {}
    """key -> why its token is void although the step ran (logits not finite; NO_TOKEN). Only that
    request is returned to the front.
    """
    op_times: tuple[OpTime, ...] = ()
    """Times of this rank's ops; of several ranks: the slowest's, for exchanges the fastest's."""
    events: tuple[TraceEvent, ...] = ()
    """Events of a traced plan."""
    expert_slot_counts: bytes = b""
    """Tokens that the rank's expert slots received since the last counted plan, int64 [L, S]; only
    set for a counted plan. A flip resets its layer's counts. Read by roles/ranks, which
    does not pass them on to the leader that plans steps.
    """
    scores: dict[int, tuple[Score, ...]] = {}
    """Index of a chunk with `num_scores` >= 0 -> score of the prompt token after each chunk token."""
    link_bytes: LinkBytes = NO_LINK_BYTES
    """Bytes exchanged with peers for the rank's own tokens, both ways, since the last step that
    succeeded (of several ranks together: the sum).
    """
    waited: Waited = NO_WAIT
    """Waiting time of this rank alone, read by roles/ranks."""
    drafts: Compared = ()
    """Drafts compared and accepted in all passes (of several ranks together: the sum)."""


class Formed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Result of a FormPlan. `error` None: the rank is connected to all members and has its experts."""

    formation: int
    error: str | None
    lost: tuple[int, ...] = ()
    """Members that the rank could not connect to."""
    num_loaded: int = 0
    """Expert replicas read from the checkpoint for this formation."""


class Staged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Result of a StagePlan. `error` None: the rank can flip the layer."""

    formation: int
    stage_id: int
    layer: int
    error: str | None = None
    num_received: int = 0
    """Replicas received from another rank."""
    num_read: int = 0
    """Replicas read from the checkpoint."""
    elapsed_s: float = 0.0


class KvPulled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Result of a Pull effect. `error` None: the blocks are filled and verified."""

    request_id: str
    attempt: int
    error: str | None
    link_bytes: LinkBytes = NO_LINK_BYTES


class BlocksRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Result of a ReadBlocks effect: the first `num_loaded` blocks are filled and verified."""

    read_id: int
    num_loaded: int
    num_damaged: int = 0
    """1 if the first block not loaded exists but does not match its name, else 0."""
    error: str | None = None
    """Reason for which a block was not read; None: all were."""


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Result of a StoreBlocks effect. The blocks that it names are durable: a new process finds
    them after `kill -9`.
    """

    store_id: int
    locations: tuple[DiskLocation | None, ...]
    """Location of each block now; None if it was not written."""
    dropped: bytes = b""
    """Names of blocks evicted to write these."""
    error: str | None = None
    """Reason for which a block was not written."""
