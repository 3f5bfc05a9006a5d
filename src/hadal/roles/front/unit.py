"""One unit in the front's tables, and its views for policies."""

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
    """Blocks of the unit's living ranks, from UnitUp or the last report; so is `num_requests_max`.
    """
    num_blocks_request: int
    """Maximum number of blocks that one request can have on the unit; 0 while no rank lives."""
    num_requests_max: int
    seen_s: float
    fingerprint: str = ""
    """KV fingerprint (UnitUp). A request is decoded under the fingerprint of its prefill."""
    num_requests: int = 0
    num_tokens: int = 0
    """Prefill: uncached tokens of requests that were sent to the unit and are not prefilled yet."""
    num_pairs: int = 0
    """Prefill: (token, attended position) pairs of the tokens in `num_tokens`."""
    num_blocks_used: int = 0
    """Decode: blocks of the requests sent to the unit."""
    tokens_step: float = 1.0
    """Decode: tokens per step and request, smoothed; above 1 with several passes per step, or with
    accepted drafts (speculative decoding).
    """
    load: UnitReport | None = None
    prefill_view: PrefillUnitView | None = None
    decode_view: DecodeUnitView | None = None
    """Cached view for policies; None after a change."""
    drain_number: int = 0
    drain_by_s: float | None = None
    """Deadline until which requests of a draining unit may stay; None if it does not drain."""
    orphan_s: float | None = None
    """Time at which the unit lost its leader, while its ranks keep requests; None: it has one."""

    @property
    def num_ranks(self) -> int:
        """Number of living ranks; 0 without a leader. 1 before the first report: UnitUp implies one."""
        if self.orphan_s is not None:
            return 0
        return self.load.num_ranks if self.load is not None else 1

    @property
    def is_open(self) -> bool:
        """True if new requests may be sent to the unit."""
        return self.drain_by_s is None and self.orphan_s is None

    def changed(self) -> None:
        """Drop the cached views after a change."""
        self.prefill_view = self.decode_view = None


def prefill_work(record: Record) -> tuple[int, int]:
    """Return tokens and (token, position) pairs that the prefill unit computes for a request.
    Cached positions are only attended to.
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
    """Return how many slots of a decode unit batch requests may fill beside `num_others` others."""
    load, num_slots = unit.load, unit.num_requests_max
    if load is None:
        return num_slots
    return slots_beside((load.step_s, load.token_s), load.num_ranks, num_others, num_slots)


def prefill_view(unit: Unit) -> PrefillUnitView:
    """Return the unit's view for a request without cached positions there."""
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
