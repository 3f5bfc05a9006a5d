"""Let a request in, make it wait, or refuse it; and when to let one go on to the next unit.

Doors. `admit`: the front's queue, whose overflow is a reply with a time to come back. `may_prefill`: prefill
starts only what decode can take soon, as prefilled KV that waits under a lease is memory that works for nobody.
`fits_decode`: a decode unit takes a request only if a block is left for the others to grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadal.policy.views import AdmissionView, DownstreamView, Ints

Bools = NDArray[np.bool_]

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60.0
HEADROOM_SHARE = 8
"""Per so many requests: one more prefilled ahead of a free slot, one more block kept free for growth."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in, as HTTP says it."""

    status: int
    reason: str
    retry_after_s: float


def admit(view: AdmissionView) -> Refusal | None:
    """None lets the request in."""
    if view.is_draining:
        return Refusal(503, "the server is shutting down", RETRY_AFTER_MAX_S / 6)
    if view.num_queued < view.num_queued_max or view.is_placeable:
        return None
    return Refusal(
        429, f"the server is overloaded: {view.num_queued} requests wait already",
        retry_after_s(view.num_queued, view.finished_per_s),
    )  # fmt: skip


def refuse_lengths(num_prompt: int, num_output: int, max_tokens: int, max_context: int) -> str | None:
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
    """Whether one more request may start its prefill, `num_blocks_needed` being what decode will hold for it."""
    ahead = -(-view.num_slots // HEADROOM_SHARE)  # Prefilled while the slots are full, so that none stays empty.
    if view.num_requests >= view.num_slots + ahead or view.num_transferring > max(2 * ahead, 2):
        return False
    return view.num_requests == 0 or view.num_blocks_used + num_blocks_needed <= view.num_blocks


def fits_decode(num_blocks_free: Ints, num_blocks_needed: int, num_running: Ints) -> Bools:
    """By rank, whether it takes a request now. The head-room keeps it from being preempted at once."""
    headroom = (num_running > 0) * (1 + num_running // HEADROOM_SHARE)
    return num_blocks_needed + headroom <= num_blocks_free
