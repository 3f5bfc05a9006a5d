"""Let a request in, make it wait, or refuse it; and when to let one go on to the next unit.

Doors. `admit`: the front's queue, whose overflow is a reply with a time to come back.
`may_prefill`: prefill starts only what decode can take soon, as prefilled KV that waits under a
lease is memory that works for nobody; and what a tenant with less than others sends, up to as many
again as there are slots, as those others give slots up. `fits_decode`: a decode unit takes a request
only if a block is left for the others to grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.arrays import Bools, Ints
from hadal.core.messages.generation import RateLimits
from hadal.policy.rows import BATCH_PROMISE, num_rows_within
from hadal.policy.views import AdmissionView, DownstreamView, ValleyView

OVERLOADED = "overloaded"
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
HEADROOM_SHARE = 8
"""One request in so many is head-room: one more is prefilled ahead of a free slot, one more block
is kept free for growth.
"""
VALLEY_S = 0.05
"""When a batch asks again."""
NO_VALLEY = "no_valley"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in, as HTTP says it."""

    status: int
    reason: str
    retry_after_s: float
    """0: never, the same request will be refused again."""
    code: str = OVERLOADED
    """For programs."""
    limits: RateLimits | None = None
    """Of the tenant's quota, if it has one."""

    @property
    def is_for_room(self) -> bool:
        """Whether it would be let in if there were more units."""
        return self.code == OVERLOADED


def admit(view: AdmissionView) -> Refusal | None:
    """None lets the request in."""
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


def admit_batch(view: ValleyView) -> Refusal | None:
    """None lets one more request of a batch in: it takes what others leave.

    It gives its slot up to the next request that finds none, and its rows rest where others' leave them no
    time (policy/rows). Prefill cannot give a step up. So beside others' requests a batch never has all of
    prefill, begins no more than have time in decode, though one, and leaves as many slots free as others
    have: else each of their next requests would put one of a batch back.
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
    return Refusal(429, "others' requests leave no room for a batch's.", VALLEY_S, NO_VALLEY)


def slots_beside(line: tuple[float, float], num_ranks: int, num_others: int, num_slots: int) -> int:
    """How many slots of a decode unit requests of batches may fill beside so many others, so that its
    steps compute all of them (policy/rows). `line`: seconds of a step, and of each request of its busiest
    rank; not measured where it is 0.
    """
    if line[1] <= 0.0 or not num_ranks:
        return num_slots
    num_alone = -(-num_others // num_ranks)
    return num_ranks * (num_rows_within(line, BATCH_PROMISE, num_alone) - num_alone)


def share_of(num_all: int, num_tenants: int) -> int:
    """What each of so many tenants may have of `num_all`.

    A tenant alone may have all. What it has then takes nothing from another that comes: that one
    has its share beside it, so k tenants have at most num_all * (1 + 1/2 + ... + 1/k) together.
    """
    return min(num_all, max(1, num_all // max(1, num_tenants)))


def num_placed_max(num_slots: int) -> int:
    """Requests that may be on their way through prefill and decode: a few are prefilled while all
    slots are taken, so that none stays empty.
    """
    return num_slots + num_ahead(num_slots)


def num_ahead(num_slots: int) -> int:
    """How many are prefilled ahead of a free slot."""
    return -(-num_slots // HEADROOM_SHARE)


def refuse_lengths(
    num_prompt: int, num_output: int, max_tokens: int, max_context: int
) -> str | None:
    """Why a request of these lengths can never be served; None if it can."""
    if num_prompt == 0:
        return "the prompt is empty."
    if max_tokens <= num_output:
        return f"max_tokens is {max_tokens}; nothing is left to generate."
    if num_prompt >= max_context:
        return f"the prompt has {num_prompt} tokens; the model's context is {max_context}."
    return None


def retry_after_s(num_queued: int, finished_per_s: float) -> float:
    """When half the queue will be gone at the measured rate, within bounds."""
    if finished_per_s <= 0:
        return RETRY_AFTER_MIN_S * 10
    return min(max(num_queued / 2 / finished_per_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)


def may_prefill(view: DownstreamView, num_blocks_needed: int) -> bool:
    """Whether one more request may start its prefill, `num_blocks_needed` being what decode will
    hold for it.

    A request that `has_place` waits for no slot here: when its prompt is prefilled, one of a tenant that
    had more gives its slot up (policy/fairness).
    """
    num_most = num_placed_max(view.num_slots) + view.num_slots * view.has_place
    if view.num_requests >= num_most or (is_jammed(view) and not view.has_place):
        return False
    return view.num_requests == 0 or view.num_blocks_used + num_blocks_needed <= view.num_blocks


def is_jammed(view: DownstreamView) -> bool:
    """Whether prompts are prefilled faster than decode takes them."""
    return view.num_transferring > max(2 * num_ahead(view.num_slots), 2)


def fits_decode(num_blocks_free: Ints, num_blocks_needed: int, num_running: Ints) -> Bools:
    """Return, for each rank, whether it takes a request now. The head-room keeps it from being
    preempted at once.
    """
    headroom = (num_running > 0) * (1 + num_running // HEADROOM_SHARE)
    return num_blocks_needed + headroom <= num_blocks_free
