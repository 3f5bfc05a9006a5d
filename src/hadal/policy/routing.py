"""Choose the prefill unit, and later the decode unit, of a request.

Goals (DeepSeek-V3/R1 inference overview): equal prefill work, so the unit that will be done first;
equal KV use and similar request counts in decode. A unit is chosen only if the request can ever
fit; whether it fits now is the admission's question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.rates import StepRates, chunk_s
from hadal.policy.prefill_balance import UNMEASURED
from hadal.policy.views import DecodeUnitView, PrefillUnitView

# Which prefix of a prompt to take from where: what the rank's pool has, and what the disk has
# behind that, by price.
#
# What is in the pool costs nothing. Reading takes a time of its own and grows with the blocks,
# computing them grows faster (each attends to all before it): so it is all of them or none, never
# some. A read that waits behind others is as much dearer. While nothing was measured, reading is
# taken for cheaper: that is how it comes to be measured.
#
# The last position of a prompt is always computed, for the next token is drawn from it. Knows no
# names and no places.


@dataclass(frozen=True, slots=True)
class ReadRates:
    """What reading blocks from disk takes, as measured."""

    load_s: float
    """Seconds that one read from disk takes, whatever its size."""
    block_s: float

    def seconds(self, num_blocks: int) -> float:
        return self.load_s + num_blocks * self.block_s


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a prompt begins with on a rank, in blocks."""

    num_memory: int = 0
    """Found in the rank's pool."""
    num_shared: int = 0
    """Those of them that are in use already, so that they need no room."""
    num_loading: int = 0
    """Blocks behind those that are to be read from disk."""
    load_s: float = 0.0
    """What that is predicted to take; 0 while unmeasured."""
    num_recomputed: int = 0
    """Blocks behind those that are on disk and cheaper to compute."""

    @property
    def num_blocks(self) -> int:
        return self.num_memory + self.num_loading


NOTHING = Prefix()


def usable_blocks(num_tokens: int) -> int:
    """Blocks of a prompt of `num_tokens` that may come out of a cache."""
    return max(0, num_tokens - 1) // BLOCK_TOKENS


def choose_prefix(
    num_memory: int,
    num_shared: int,
    num_disk: int,
    rates: StepRates | None,
    loads: ReadRates | None,
    queued_s: float = 0.0,
) -> Prefix:
    """Decide about the `num_disk` blocks that the disk has behind the first `num_memory`.

    `rates`, `loads`: None while nothing was measured. `queued_s`: of the reads that are under way
    to this rank.
    """
    if not num_disk:
        return Prefix(num_memory, num_shared)
    load_s = queued_s + loads.seconds(num_disk) if loads is not None else 0.0
    num_tokens = num_disk * BLOCK_TOKENS
    if rates is not None and loads is not None:
        compute_s = rates.whole_s(num_memory * BLOCK_TOKENS, num_tokens)
        if compute_s < load_s:
            return Prefix(num_memory, num_shared, num_recomputed=num_disk)
    return Prefix(num_memory, num_shared, num_disk, load_s if rates is not None else 0.0)


def choose_prefill_unit(
    units: Sequence[PrefillUnitView], num_blocks_needed: int, num_tokens: int
) -> str | None:
    """The unit that has prefilled `num_tokens` first, as far as can be predicted; None if all are
    full or too small.

    What waits there is shared by its ranks; the prompt itself is on one of them. What the unit has
    in its cache is context, not work. A unit that has measured nothing yet is taken to be like the
    others.
    """
    fitting = [
        unit
        for unit in units
        if unit.num_requests < unit.num_requests_max and num_blocks_needed <= unit.num_blocks
    ]
    if not fitting:
        return None
    rates = _unknown_rates(units) if min([unit.token_s for unit in fitting]) <= 0.0 else None
    half = 0.5 * (num_tokens + 1)  # Nearly always nothing is cached, and _done_s is this.
    times_s = [
        unit.waits_s + num_tokens * (unit.token_s + unit.pair_s * half)
        if rates is None and not unit.num_cached
        else _done_s(unit, num_tokens, rates)
        for unit in fitting
    ]
    first_s = min(times_s)
    first = [unit for unit, done_s in zip(fitting, times_s, strict=True) if done_s == first_s]
    return min(first, key=lambda unit: (unit.num_requests, unit.unit)).unit


def _unknown_rates(units: Sequence[PrefillUnitView]) -> tuple[float, float]:
    """(token_s, pair_s) of a unit that has none: the mean of those that have, else the model's
    ratio.
    """
    known = [unit for unit in units if unit.token_s > 0.0]
    if not known:
        return UNMEASURED.token_s, UNMEASURED.pair_s
    return sum(unit.token_s for unit in known) / len(known), sum(
        unit.pair_s for unit in known
    ) / len(known)


def _done_s(unit: PrefillUnitView, num_tokens: int, unknown: tuple[float, float] | None) -> float:
    """Predicted seconds until the unit is done with a prompt of `num_tokens` that comes now."""
    token_s, pair_s = (
        unknown if unknown is not None and unit.token_s <= 0.0 else (unit.token_s, unit.pair_s)
    )
    num_cached = min(
        unit.num_cached, num_tokens - 1
    )  # The last position is computed in any case: a token is drawn.
    return unit.waits_at_s(token_s, pair_s) + chunk_s(
        token_s, pair_s, num_cached, num_tokens - num_cached
    )


def choose_decode_unit(
    units: Sequence[DecodeUnitView], num_blocks_needed: int, num_blocks_needed_max: int
) -> str | None:
    """The unit whose scarcer resource, KV or slots, is least used after taking the request; None if
    it fits nowhere.

    `num_blocks_needed_max` is what it holds at its longest. A full unit may be chosen: its leader
    queues.
    """
    fitting = [unit for unit in units if num_blocks_needed_max <= unit.num_blocks_request]
    if not fitting:
        return None
    return min(
        fitting, key=lambda unit: (_share(unit, num_blocks_needed), unit.num_requests, unit.unit)
    ).unit


def _share(unit: DecodeUnitView, num_blocks_needed: int) -> float:
    kv_share = (unit.num_blocks_used + num_blocks_needed) / unit.num_blocks
    return max(kv_share, (unit.num_requests + 1) / unit.num_requests_max)
