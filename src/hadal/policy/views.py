"""What policies see: frozen snapshots, built by a role, forgotten after the decision.

A policy never holds a role's state, so it can be tested, simulated and replayed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hadal.core.arrays import Ints


@dataclass(frozen=True)
class PrefillUnitView:
    """A prefill unit as the front counts it. Many requests may see the same one: it keeps what it
    was asked once.
    """

    unit: str
    num_blocks: int
    """Usable KV blocks of one rank: a longer prompt never fits."""
    num_tokens_waiting: int
    """Tokens sent there whose prompts are not yet prefilled, those out of a cache aside."""
    num_requests: int
    num_requests_max: int
    num_pairs_waiting: int = 0
    """(token, position it attends to) pairs of those tokens."""
    num_ranks: int = 1
    """Living ranks."""
    token_s: float = 0.0
    """Measured there: seconds of a token on its rank. 0: not known yet."""
    pair_s: float = 0.0
    num_cached: int = 0
    """Positions of the request in question that this unit has already."""

    @cached_property
    def waits_s(self) -> float:
        """Predicted seconds until what waits there is done, shared by its ranks; 0 of a unit that
        measured nothing.
        """
        return self.waits_at_s(self.token_s, self.pair_s)

    def waits_at_s(self, token_s: float, pair_s: float) -> float:
        """The same at rates that are not its own."""
        return (self.num_tokens_waiting * token_s + self.num_pairs_waiting * pair_s) / max(
            1, self.num_ranks
        )


@dataclass(frozen=True, slots=True)
class DecodeUnitView:
    """A decode unit as the front counts it: what was sent there, whether it has started or not."""

    unit: str
    num_blocks: int
    """Blocks of all its living ranks."""
    num_blocks_used: int
    num_requests: int
    num_requests_max: int
    num_blocks_request: int
    """What one request can hold at most: a rank's blocks."""


@dataclass(frozen=True, slots=True)
class DecodeRanksView:
    """The living ranks of a decode unit as its leader counts them: one row each, all arrays
    [ranks].
    """

    ranks: Ints
    """Their numbers in the unit."""
    num_blocks: Ints
    num_blocks_used: Ints
    num_blocks_worst: Ints
    """What their requests hold if all run to their longest. Not looked at where the caller
    preempts.
    """
    num_requests: Ints
    num_requests_max: Ints


@dataclass(frozen=True, slots=True)
class PrefillRankView:
    """A living rank of a prefill unit while its leader plans a step by token budgets."""

    rank: int
    work: float
    """Cost of the prompts that started there, at unmeasured rates (policy/prefill_rates.cost_s).
    """
    num_tokens_free: int
    """What the step still takes there."""
    num_blocks_free: int
    num_starts_free: int


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """The front's queue when a new request of some tenant knocks."""

    is_draining: bool
    num_placeable: int
    """Generations that would not have to wait at all."""
    num_queued: int
    """Generations of the request's tenant that wait."""
    num_queued_max: int
    """Most generations that may wait, all tenants' together."""
    finished_per_s: float
    """Measured: requests that ended, smoothed. 0 when unknown."""
    num_wanted: int = 1
    """Generations of the request: all are let in, or none."""
    num_tenants: int = 1
    """Tenants that wait, its own included."""


@dataclass(frozen=True, slots=True)
class DownstreamView:
    """What is on its way through prefill and decode, and what decode can hold."""

    num_slots: int
    """Requests all living decode units can work on at once."""
    num_blocks: int
    num_requests: int
    """Requests placed: prefilling, transferring or decoding."""
    num_blocks_used: int
    """Blocks those will hold in decode."""
    num_transferring: int
    has_place: bool = False
    """Whether the tenant in question has fewer requests placed than another, over their weights, or
    another's request was put back for the one that asks. False for a batch.
    """


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant where one's request waits for what others' requests have."""

    tenant: str
    service: float
    """What it was served, over its weight (policy/fairness)."""
    weight: float
    num_placed: int
    """Its requests that units work on."""
    is_waiting: bool
    """Whether more of its requests wait."""


@dataclass(frozen=True, slots=True)
class ValleyView:
    """What one more request of a batch would come to lie beside."""

    is_draining: bool
    num_waiting: int
    """Requests that wait and are no batches': somebody waits for their answers."""
    num_placed: int
    """Requests that units work on, of batches and others."""
    num_of_batches: int
    """Those of them that are of batches."""
    num_prefilling: int
    """Prompts that are being computed."""
    num_prefill_ranks: int
    num_slots: int
    """Requests all living decode units can work on at once."""
    num_slots_beside: int
    """Slots that batches may fill beside others' requests (policy/admission.slots_beside)."""
    num_blocks_used: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PromptView:
    """A prompt that waits for its next chunk, in the order of arrival."""

    num_tokens: int
    """Tokens still to be planned."""
    num_blocks_needed: int
    """0 once it has started: the blocks of a whole prompt are taken at its first chunk."""
    num_context: int = 0
    """Positions before those tokens, computed or out of a cache: what is still to be planned
    attends to them too.
    """
    num_loading: int = 0
    """Blocks of the context that come from disk first: until they are here, nothing of it is
    computed.
    """
    load_s: float = 0.0
    """What that takes, as far as it was measured."""


@dataclass(frozen=True, slots=True)
class HolderView:
    """A request that holds blocks in a decode unit."""

    slot: int
    arrival: int
    """Sequence number: larger is later."""
    num_blocks: int
    tenant: str = ""
