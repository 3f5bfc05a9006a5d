"""Inputs of policies: frozen snapshots, built by a role and dropped after the decision.

A policy never holds a role's state, so it can be tested, simulated and replayed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hadal.core.arrays import Ints


@dataclass(frozen=True)
class PrefillUnitView:
    """Prefill unit as the front counts it. Derived values are cached: many requests share a view."""

    unit: str
    num_blocks: int
    """Usable KV blocks of one rank: a longer prompt never fits."""
    num_tokens_waiting: int
    """Prompt tokens sent to the unit and not yet prefilled, without cached ones."""
    num_requests: int
    num_requests_max: int
    num_pairs_waiting: int = 0
    """(token, position it attends to) pairs of `num_tokens_waiting`."""
    num_ranks: int = 1
    """Living ranks."""
    token_s: float = 0.0
    """Measured seconds per token on one rank of this unit; 0: not known yet."""
    pair_s: float = 0.0
    num_cached: int = 0
    """Positions of the request's prompt that this unit has in its cache."""

    @cached_property
    def waits_s(self) -> float:
        """Predicted seconds until the unit's queue is done, shared by its ranks; 0 for a unit
        without measured rates.
        """
        return self.waits_at_s(self.token_s, self.pair_s)

    def waits_at_s(self, token_s: float, pair_s: float) -> float:
        """Return the predicted seconds until the unit's queue is done, at the given rates."""
        return (self.num_tokens_waiting * token_s + self.num_pairs_waiting * pair_s) / max(
            1, self.num_ranks
        )


@dataclass(frozen=True, slots=True)
class DecodeUnitView:
    """Decode unit as the front counts it, with all requests sent to it, started or not."""

    unit: str
    num_blocks: int
    """Blocks of all its living ranks."""
    num_blocks_used: int
    num_requests: int
    num_requests_max: int
    num_blocks_request: int
    """Maximum number of blocks that one request can hold: those of one rank."""


@dataclass(frozen=True, slots=True)
class DecodeRanksView:
    """Living ranks of a decode unit as its leader counts them: one row each, all arrays [ranks]."""

    ranks: Ints
    """Rank numbers in the unit."""
    num_blocks: Ints
    num_blocks_used: Ints
    num_blocks_worst: Ints
    """Blocks that requests hold if all run to their longest. Ignored if the caller preempts."""
    num_requests: Ints
    num_requests_max: Ints


@dataclass(frozen=True, slots=True)
class PrefillRankView:
    """Living rank of a prefill unit while its leader plans a step by token budgets."""

    rank: int
    work: float
    """Cost of prompts that started on the rank, at unmeasured rates (policy/prefill_rates.cost_s)."""
    num_tokens_free: int
    """Tokens that the step can still take on this rank."""
    num_blocks_free: int
    num_starts_free: int


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """State of the front's queue when a new request of a tenant arrives."""

    is_draining: bool
    num_placeable: int
    """Generations that could be placed without queueing."""
    num_queued: int
    """Queued generations of the request's tenant."""
    num_queued_max: int
    """Maximum number of generations that may be queued, over all tenants."""
    finished_per_s: float
    """Finished requests per second, measured and smoothed; 0 if unknown."""
    num_wanted: int = 1
    """Generations of the request: all are admitted, or none."""
    num_tenants: int = 1
    """Tenants with queued requests, the request's own included."""


@dataclass(frozen=True, slots=True)
class DownstreamView:
    """Requests in prefill and decode, and the capacity of decode."""

    num_slots: int
    """Requests that all living decode units can work on at once."""
    num_blocks: int
    num_requests: int
    """Requests placed: prefilling, transferring or decoding."""
    num_blocks_used: int
    """Blocks that the placed requests will hold in decode."""
    num_transferring: int
    has_place: bool = False
    """True if the tenant has fewer placed requests over its weight than another tenant, or if
    another's request was requeued for this one. False for a batch.
    """


@dataclass(frozen=True, slots=True)
class TenantView:
    """Tenant with queued or placed requests while a request waits for capacity (policy/fairness)."""

    tenant: str
    service: float
    """Served cost over the tenant's weight (policy/fairness)."""
    weight: float
    num_placed: int
    """Requests of the tenant that units work on."""
    is_waiting: bool
    """True if more of its requests are queued."""


@dataclass(frozen=True, slots=True)
class SpareView:
    """Load on the fleet when one more batch request asks for spare capacity."""

    is_draining: bool
    num_waiting: int
    """Queued requests that are not of batches: users wait for their answers."""
    num_placed: int
    """Requests that units work on, of batches and others."""
    num_of_batches: int
    """Placed requests that are of batches."""
    num_prefilling: int
    """Prompts that are being computed."""
    num_prefill_ranks: int
    num_slots: int
    """Requests that all living decode units can work on at once."""
    num_slots_beside: int
    """Slots that batches may fill beside others' requests (policy/admission.slots_beside)."""
    num_blocks_used: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PromptView:
    """Prompt that waits for its next chunk."""

    num_tokens: int
    """Tokens still to be planned."""
    num_blocks_needed: int
    """Blocks to reserve at the prompt's start; 0 once it has started: it owns all its blocks."""
    num_context: int = 0
    """Positions before the tokens still to be planned, computed or cached: what these attend to."""
    num_loading: int = 0
    """Context blocks still to be read from disk; until then nothing of the prompt is computed."""
    load_s: float = 0.0
    """Predicted seconds to read `num_loading` blocks; 0 if not measured."""


@dataclass(frozen=True, slots=True)
class HolderView:
    """Request that holds blocks in a decode unit."""

    slot: int
    arrival: int
    """Sequence number: larger is later."""
    num_blocks: int
    tenant: str = ""
