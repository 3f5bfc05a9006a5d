"""One unit as the front knows it, and the views of it that policies get."""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.messages.units import UnitReport
from hadal.overlap.split import num_pairs_of
from hadal.policy.admission import slots_beside
from hadal.policy.views import DecodeUnitView, PrefillUnitView
from hadal.roles.front.record import Record


@dataclass(slots=True)
class Unit:
    """One unit that is up."""

    name: str
    role: str
    epoch: str
    num_blocks: int
    """Blocks of its living ranks, as `num_requests_max` is of theirs: both follow its reports as
    ranks come and go.
    """
    num_blocks_request: int
    """What one request can hold there at most; 0 while no rank of it lives."""
    num_requests_max: int
    seen_s: float
    fingerprint: str = ""
    """Of its KV (UnitUp): what is prefilled under it is decoded under it."""
    num_requests: int = 0
    num_tokens: int = 0
    """Prefill: tokens sent there whose prompts are not yet prefilled, those out of its cache
    aside.
    """
    num_pairs: int = 0
    """Prefill: (token, position it attends to) pairs of those."""
    num_blocks_used: int = 0
    """Decode: blocks of the requests sent there."""
    tokens_step: float = 1.0
    """Decode: tokens that a step draws for a request, smoothed; more than 1 where it has several passes
    or drafts are right.
    """
    load: UnitReport | None = None
    prefill_view: PrefillUnitView | None = None
    decode_view: DecodeUnitView | None = None
    """The view that the policies saw last, unless something changed since."""
    drain_number: int = 0
    drain_by_s: float | None = None
    """Until when what it holds may stay, while nothing new is sent there (roles/front/front); None:
    it does not drain.
    """
    orphan_s: float | None = None
    """Since when what its ranks hold is kept for a new leader; None: they have one."""

    @property
    def num_ranks(self) -> int:
        """Ranks that live and are led. One that has not reported said that it is up, which it is
        with one at least.
        """
        if self.orphan_s is not None:
            return 0
        return self.load.num_ranks if self.load is not None else 1

    @property
    def is_open(self) -> bool:
        """New requests may be sent there."""
        return self.drain_by_s is None and self.orphan_s is None

    def changed(self) -> None:
        """The unit is not as the policies saw it any more."""
        self.prefill_view = self.decode_view = None


def prefill_work(record: Record) -> tuple[int, int]:
    """Tokens and pairs that its prefill unit computes for a request: what is cached there is
    context only.
    """
    num_tokens = record.num_tokens - record.num_cached
    return num_tokens, num_pairs_of(record.num_cached, num_tokens)


def decode_view(unit: Unit) -> DecodeUnitView:
    """Return a decode unit as policies see it."""
    return DecodeUnitView(
        unit.name,
        unit.num_blocks,
        unit.num_blocks_used,
        unit.num_requests,
        unit.num_requests_max,
        unit.num_blocks_request,
    )


def num_slots_beside(unit: Unit, num_others: int) -> int:
    """Return the number of slots of a decode unit beside `num_others` other requests."""
    load, num_slots = unit.load, unit.num_requests_max
    if load is None:
        return num_slots
    return slots_beside((load.step_s, load.token_s), load.num_ranks, num_others, num_slots)


def prefill_view(unit: Unit) -> PrefillUnitView:
    """The unit as a request sees it of which it has nothing."""
    load = unit.load
    return PrefillUnitView(
        unit.name,
        unit.num_blocks_request,
        unit.num_tokens,
        unit.num_requests,
        unit.num_requests_max,
        unit.num_pairs,
        unit.num_ranks,
        load.token_s if load else 0.0,
        load.pair_s if load else 0.0,
    )
