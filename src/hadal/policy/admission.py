"""Admit, queue or refuse a request, and decide when it may go on to the next unit.

`admit` guards the front's queue; its overflow is refused with a time to retry. `may_prefill` starts
only prompts that decode can take soon, because prefilled KV that waits under a lease is unused
memory. For a tenant with less than its share, it starts up to `num_slots` further prompts, since
tenants with more are preempted for it. `fits_decode` admits a request to a decode rank only if
blocks are left for the other requests to grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.arrays import Bools, Ints
from hadal.core.messages.generation import RateLimits
from hadal.policy.rows import BATCH_PROMISE, num_rows_within
from hadal.policy.views import AdmissionView, DownstreamView, SpareView

OVERLOADED = "overloaded"
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
HEADROOM_SHARE = 8
"""1/HEADROOM_SHARE of the slots is the number of requests prefilled before a slot is free. A rank
keeps free 1/HEADROOM_SHARE of its running requests, plus 1, as blocks for their growth.
"""
BATCH_RETRY_S = 0.05
"""Seconds after which a refused batch request is tried again."""
NO_SPARE = "no_spare_capacity"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a request, with the fields of its HTTP reply."""

    status: int
    reason: str
    retry_after_s: float
    """Seconds until a retry; 0: never, the same request will be refused again."""
    code: str = OVERLOADED
    """Machine-readable error code."""
    limits: RateLimits | None = None
    """Limits of the tenant's quota, if it has one."""

    @property
    def is_for_room(self) -> bool:
        """True if more units would have admitted the request, and always while draining."""
        return self.code == OVERLOADED


def admit(view: AdmissionView) -> Refusal | None:
    """Return a refusal, or None to admit the request."""
    if view.is_draining:
        return Refusal(503, "the server is shutting down.", RETRY_AFTER_MAX_S / 6)
    if (
        view.num_queued + view.num_wanted
        <= share_of(view.num_queued_max, view.num_tenants) + view.num_placeable
    ):
        return None
    return Refusal(
        429,
        f"the server is overloaded: {view.num_queued} generations of this tenant wait already.",
        retry_after_s(view.num_queued * view.num_tenants, view.finished_per_s),
    )


def admit_batch(view: SpareView) -> Refusal | None:
    """Return a refusal, or None to admit one more request of a batch.

    Batches use only capacity that other requests leave. In decode a batch request can be preempted,
    and its rows rest if there is no time for them (policy/rows), but prefill cannot stop within a
    step. So while other requests run, a batch request needs a free prefill rank and time in decode
    (one batch request may always take it). As many slots stay free as other requests use, or each
    of their next ones would preempt a batch request.
    """
    if view.is_draining:
        return Refusal(503, "the server is shutting down.", RETRY_AFTER_MAX_S / 6)
    num_others = view.num_placed - view.num_of_batches
    num_most, is_prefill_free = num_placed_max(view.num_slots), view.num_prefill_ranks > 0
    if num_others:
        num_most = min(max(1, view.num_slots_beside), view.num_slots - 2 * num_others)
        is_prefill_free = view.num_prefilling < view.num_prefill_ranks
    if (
        not view.num_waiting
        and is_prefill_free
        and view.num_of_batches < num_most
        and view.num_blocks_used < view.num_blocks
    ):
        return None
    return Refusal(
        429, "other requests leave no capacity for batch requests.", BATCH_RETRY_S, NO_SPARE
    )


def slots_beside(line: tuple[float, float], num_ranks: int, num_others: int, num_slots: int) -> int:
    """Return how many slots of a decode unit batch requests may fill beside `num_others` others
    without rows that rest (policy/rows). `line`: fixed seconds of a step, and seconds that each
    request of the busiest rank adds; 0 if not measured.
    """
    if line[1] <= 0.0 or not num_ranks:
        return num_slots
    num_alone = -(-num_others // num_ranks)
    return num_ranks * (num_rows_within(line, BATCH_PROMISE, num_alone) - num_alone)


def share_of(num_all: int, num_tenants: int) -> int:
    """Return the most of `num_all` that each of `num_tenants` tenants may have.

    A lone tenant may have all. That takes nothing from a tenant that arrives later, because the new
    tenant gets its share on top: k tenants have at most num_all * (1 + 1/2 + ... + 1/k) together.
    """
    return min(num_all, max(1, num_all // max(1, num_tenants)))


def num_placed_max(num_slots: int) -> int:
    """Return how many requests may be in prefill and decode together: a few are prefilled while all
    slots are taken, so that no slot stays empty.
    """
    return num_slots + num_ahead(num_slots)


def num_ahead(num_slots: int) -> int:
    """Return how many requests are prefilled ahead of a free slot."""
    return -(-num_slots // HEADROOM_SHARE)


def refuse_lengths(
    num_prompt: int, num_output: int, max_tokens: int, max_context: int
) -> str | None:
    """Return why a request of these lengths can never be served; None if it can."""
    if num_prompt == 0:
        return "the prompt is empty."
    if max_tokens <= num_output:
        return f"max_tokens is {max_tokens}; nothing is left to generate."
    if num_prompt >= max_context:
        return (
            f"the prompt has {num_prompt} tokens; fewer than {max_context} fit the model's context."
        )
    return None


def retry_after_s(num_queued: int, finished_per_s: float) -> float:
    """Return the seconds until half the queue has ended: 1 to 60 s, 10 s if the rate is unknown."""
    if finished_per_s <= 0:
        return RETRY_AFTER_MIN_S * 10
    return min(max(num_queued / 2 / finished_per_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)


def may_prefill(view: DownstreamView, num_blocks_needed: int) -> bool:
    """Return True if one more request may start its prefill. `num_blocks_needed`: blocks that it
    will hold in decode.

    A request that `has_place` need not wait for a slot: once its prompt is prefilled, a request of
    a tenant above its share is preempted for it (policy/fairness).
    """
    num_most = num_placed_max(view.num_slots) + view.num_slots * view.has_place
    if view.num_requests >= num_most or (is_jammed(view) and not view.has_place):
        return False
    return view.num_requests == 0 or view.num_blocks_used + num_blocks_needed <= view.num_blocks


def is_jammed(view: DownstreamView) -> bool:
    """Return True if prompts are prefilled faster than decode takes them."""
    return view.num_transferring > max(2 * num_ahead(view.num_slots), 2)


def fits_decode(num_blocks_free: Ints, num_blocks_needed: int, num_running: Ints) -> Bools:
    """Return, for each rank, True if it can take a request now, with head-room so that growth of
    the running requests does not preempt it right after.
    """
    headroom = (num_running > 0) * (1 + num_running // HEADROOM_SHARE)
    return num_blocks_needed + headroom <= num_blocks_free
