"""Let a request in, make it wait, or refuse it; and when to let one go on to the next unit.

Doors. `admit`: the front's queue, whose overflow is a reply with a time to come back.
`may_prefill`: prefill starts only what decode can take soon, as prefilled KV that waits under a
lease is memory that works for nobody. `fits_decode`: a decode unit takes a request only if a block
is left for the others to grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadal.core.messages import RateLimits
from hadal.policy.views import AdmissionView, DownstreamView, Ints, PromptView, ValleyView

Bools = NDArray[np.bool_]

OVERLOADED = "overloaded"
RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
HEADROOM_SHARE = 8
"""One request in so many is head-room: one more is prefilled ahead of a free slot, one more block
is kept free for growth.
"""
BATCH_SHARE = 2
"""Batches have one of so many of the slots that are shared, while others have one less each."""
VALLEY_S = 0.05
"""When a batch asks again."""
NO_VALLEY = "no_valley"
SLOWER = 1.6
"""A request's steps in decode may take so many times as long beside others' as alone. Twice as long
is what a tenant is promised from end to end: the rest is left to prefill and to the gateway.
"""


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
    """None lets one more request of a batch in: into valleys of the load alone.

    Others neither wait nor have all of prefill, and what batches hold of decode is so little that
    those which come meanwhile have their slots and hardly slower steps.
    """
    if view.is_draining:
        return Refusal(503, "the server is shutting down.", RETRY_AFTER_MAX_S / 6)
    num_slots = view.num_slots_shared
    if (
        not view.num_waiting
        and view.num_prefilling < view.num_prefill_ranks
        and view.num_placed < num_slots
        and view.num_of_batches < max(1, num_slots // BATCH_SHARE)
        and view.num_blocks_used < view.num_blocks // BATCH_SHARE
    ):
        return None
    return Refusal(429, "others' requests leave no room for a batch's.", VALLEY_S, NO_VALLEY)


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
    """
    if view.num_requests >= num_placed_max(view.num_slots) or is_jammed(view):
        return False
    share = share_of(view.num_slots_shared, view.num_tenants)
    if (
        view.num_tenants_absent
        and view.num_requests >= view.num_slots_shared
        and view.num_of_tenant >= share
        and (view.num_slots_shared < view.num_slots or view.num_waiting_of_tenant > share)
    ):
        # Another tenant's request that comes now shall not crawl beside these; nor shall those of
        # one that floods be before it where it waits for a slot.
        return False
    return view.num_requests == 0 or view.num_blocks_used + num_blocks_needed <= view.num_blocks


def is_jammed(view: DownstreamView) -> bool:
    """Whether prompts are prefilled faster than decode takes them."""
    return view.num_transferring > max(2 * num_ahead(view.num_slots), 2)


def shared_slots(num_slots: int, num_ranks: int, step_s: float, request_s: float) -> int:
    """How many slots of a decode unit tenants that have their share may fill while others may come.

    A step takes step_s, and request_s more for each request of its busiest rank. The slots are so
    many that beside them one request's steps take at most SLOWER times as long as alone. On a GPU,
    whose steps hardly depend on how many requests are in them, these are all slots. On a CPU they
    are few, which costs little, as batching gains little there. They are few, too, while nothing
    was measured.
    """
    if step_s <= 0.0:
        return max(1, num_slots // HEADROOM_SHARE)
    if request_s <= 0.0:
        return num_slots
    return max(
        1, min(num_slots, int(num_ranks * (SLOWER - 1.0) * (step_s + request_s) / request_s))
    )


def fits_decode(num_blocks_free: Ints, num_blocks_needed: int, num_running: Ints) -> Bools:
    """Return, for each rank, whether it takes a request now. The head-room keeps it from being
    preempted at once.
    """
    headroom = (num_running > 0) * (1 + num_running // HEADROOM_SHARE)
    return num_blocks_needed + headroom <= num_blocks_free


# The order of those that wait, and chunks of them packed into one step of a prefill rank under a
# token budget.
#
# Whose turn it is among tenants, policy/fairness says. Within a tenant the order is that of arrival,
# and priority is worth a bounded time of waiting, so whoever waits longer than that by more than
# another is ahead of it whatever the priority: nobody starves.
#
# Sarathi's chunked prefill (arXiv 2308.16369): a step never computes more than `chunk_tokens`, so a
# long prompt costs the others one bounded step at a time. Nobody is overtaken: a prompt whose
# blocks are not free stops everybody behind it, so the largest prompt waits no longer than for
# those before it. A unit of several ranks cuts its steps by cost instead (policy/prefill_balance);
# a rank alone keeps nobody waiting, and the token budget fills its step.


AGE_S = 5.0
"""Seconds of waiting that a level of priority is worth: about a mean time to first token at a unit
three quarters full (bench/balance_prefill), so that a level shows there and eight of them keep
nobody waiting for a minute.
"""


def turn_s(arrived_s: float, priority: int) -> float:
    """Return the place among those that wait, the smallest first; the caller breaks ties by
    sequence.
    """
    return arrived_s - AGE_S * priority


def pack_chunks(
    prompts: Sequence[PromptView], chunk_tokens: int, num_blocks_free: int, num_starts_max: int
) -> list[int]:
    """Return how many tokens of prompts[0], prompts[1], ... to compute now; it ends where packing
    stopped.

    `prompts` come in the order of arrival, those that have started first. `num_starts_max` limits
    how many may start.
    """
    budget, blocks, starts = chunk_tokens, num_blocks_free, num_starts_max
    sizes: list[int] = []
    for prompt in prompts:
        if budget == 0 or prompt.num_blocks_needed > blocks:
            break
        if prompt.num_blocks_needed:
            if starts == 0:
                break
            starts -= 1
            blocks -= prompt.num_blocks_needed
        size = min(prompt.num_tokens, budget)
        budget -= size
        sizes.append(size)
    return sizes
