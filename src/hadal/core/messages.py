"""Everything that crosses a process or a seam, as frozen values: what roles are told, and what they ask for.

Two families. *Messages* travel on the Wire between processes (front, prefill leader, decode leader). *Plans* and
*results* travel between a leader and its Runner. Token ids are tuples here: short, hashable and cheap to encode.
"""

from __future__ import annotations

import msgspec

BLOCK_TOKENS = 64
"""Tokens of KV in one block (DeepSeek's storage unit and FlashMLA's page)."""
SCRATCH_BLOCK = 0
"""Padded rows of a batch write there, so nobody ever owns it."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything on the wire; the tag is the class's name."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a request's next token is drawn. The draw at output index i depends on `seed`, i and the logits alone."""

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


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """One generation as the units see it. `output` is non-empty after a retry: what was already streamed."""

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


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One new token of one request. `index` is its place in the output, so a duplicate or a gap is noticed."""

    request_id: str
    attempt: int
    index: int
    token: int
    finish: str | None = None
    """None while it goes on; "stop" (a stop id) or "length"."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


# ---- gateway -> front (one process, but the front is told as if it were another) ----
class Submit(Message, frozen=True):
    """A new generation. Answered by Deliver effects, exactly one of them final."""

    generation: Generation


# ---- front -> every leader ----
class FrontUp(Message, frozen=True):
    """A new front started: what the leader holds belongs to streams that are gone. Free it all, answer with UnitUp."""

    epoch: str


# ---- front -> prefill leader ----
class Prefill(Message, frozen=True):
    """Prefill `generation.prompt + generation.output`, emit one token, hold the KV for a hand-over."""

    generation: Generation


class Release(Message, frozen=True):
    """This attempt needs nothing of the prefill leader any more: its KV was pulled, or it was cancelled or lost."""

    request_id: str
    attempt: int


class Cancel(Message, frozen=True):
    """Stop working on this attempt and free what it holds. Unknown ids are ignored.

    From the gateway to the front, which stops whatever attempt runs, and from the front to a decode leader.
    """

    request_id: str
    attempt: int


# ---- prefill leader -> front ----
class KvLease(msgspec.Struct, frozen=True, array_like=True):
    """A promise that blocks stay as they are until its end unless released. The puller checks `generations` once more
    after copying."""

    source: str
    """Name of the pool that holds them (a shared-memory segment on a host)."""
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    """Counter of each block, raised whenever the block is freed: a changed counter means the copy is void."""
    num_tokens: int
    """Tokens of KV that are valid, from position 0."""
    duration_s: float
    """How long the prefill side holds them after PrefillDone was sent."""


class PrefillDone(Message, frozen=True):
    """The prompt is prefilled: its first token, and the lease on its KV (None when that token already finished it)."""

    unit: str
    token: Token
    lease: KvLease | None


# ---- front -> decode leader ----
class Decode(Message, frozen=True):
    """Pull the KV under `lease` and go on from `generation.output`, whose last token has no KV yet."""

    generation: Generation
    lease: KvLease
    prefill_unit: str


# ---- decode leader -> front ----
class Pulled(Message, frozen=True):
    """KV is here; the prefill side may free its copy (the front sends it Release)."""

    unit: str
    request_id: str
    attempt: int


class Tokens(Message, frozen=True):
    """All tokens of one step of one unit."""

    unit: str
    tokens: tuple[Token, ...]


class Returned(Message, frozen=True):
    """A leader gives an attempt back: the front retries it elsewhere (RETRYING -> QUEUED). From either leader."""

    unit: str
    request_id: str
    attempt: int
    reason: str
    """"preempted" (no blocks left), "pull failed", "lease expired", "queue full" ..."""


class Load(Message, frozen=True):
    """What a unit holds now. Sent by leaders after every event that changed it, and as a heartbeat."""

    unit: str
    role: str
    epoch: str
    num_blocks: int
    num_blocks_used: int
    num_requests: int
    num_requests_max: int
    num_tokens_waiting: int
    """Prefill: prompt tokens not yet computed. Decode: 0."""
    num_steps: int = 0
    step_ms: float = 0.0
    """Smoothed duration of a step in the Runner."""
    overhead_ms: float = 0.0
    """Smoothed time per step that the Runner stood idle though work was there: scheduling and messages."""


# ---- supervisor / units -> front ----
class UnitUp(Message, frozen=True):
    """A unit is ready to work. `epoch` is new at every start of the process."""

    unit: str
    role: str
    """"prefill" or "decode"."""
    epoch: str
    num_blocks: int
    num_requests_max: int


class UnitDown(Message, frozen=True):
    """A unit's process ended or was given up. Sent by the supervisor; everything it held is lost."""

    unit: str
    reason: str


class Drain(Message, frozen=True):
    """Finish what runs, take nothing new (SIGTERM). To the front."""


class AuditRequest(Message, frozen=True):
    """Ask a leader to run `check()` on every ledger it keeps and answer with Audit. For tests and operators."""

    reply_id: int


class Audit(Message, frozen=True):
    """The ledgers' answer. `problems` is empty when everything adds up."""

    unit: str
    reply_id: int
    num_blocks_used: int
    num_requests: int
    problems: tuple[str, ...]


# ---- leader -> Runner: plans ----
class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Some consecutive tokens of one prompt. `sampling` is set on the last chunk: a token is drawn after it."""

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
    """History for the penalties; set on the last chunk only, and only if a penalty is on."""
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0


class PrefillPlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step of a prefill unit: chunks of several prompts, computed together."""

    step_id: int
    chunks: tuple[Chunk, ...]


class Join(msgspec.Struct, frozen=True, array_like=True):
    """A request enters a slot of a rank's table. From then on the rank advances it one token a step by itself."""

    slot: int
    block_ids: tuple[int, ...]
    num_tokens: int
    """Valid KV tokens; the next step writes position num_tokens with `last_token`."""
    last_token: int
    output_index: int
    """Index in the output of the next token drawn."""
    sampling: Sampling
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    """History for the penalties; set only if a penalty is on. `output` includes `last_token`."""
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0


class DecodePlan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step of a decode unit as a difference to the step before: who leaves, who joins, which blocks were added.

    Leaves are applied first, then joins, then grown blocks; then every occupied slot makes one token.
    """

    step_id: int
    leaves: tuple[int, ...]
    joins: tuple[Join, ...]
    grown: tuple[tuple[int, int, int], ...]
    """(slot, position in its block list, block id)"""


StepPlan = PrefillPlan | DecodePlan


# ---- Runner -> leader: results ----
class Draw(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one drawn token, where they were asked for."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class StepDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step's tokens. Prefill: `keys[i]` is the index of the chunk that drew; decode: the slot."""

    step_id: int
    keys: tuple[int, ...]
    tokens: tuple[int, ...]
    draws: dict[int, Draw]
    """key -> log-probabilities, only where asked for."""
    elapsed_s: float
    """Time inside the Runner."""
    error: str | None = None
    """Set when the step failed as a whole: the leader gives every request in it back to the front."""
    failed: dict[int, str] = {}
    """key -> why its token is void though the step ran (logits not finite): that request alone is given back."""


class KvPulled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outcome of a Pull effect. `error` None: the blocks are filled and verified."""

    request_id: str
    attempt: int
    error: str | None


AnyMessage = (
    Submit | FrontUp | Prefill | Release | Cancel | PrefillDone | Decode | Pulled | Tokens | Returned | Load | UnitUp
    | UnitDown | Drain | AuditRequest | Audit
)
