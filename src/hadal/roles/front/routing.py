"""Where a request of the front may go: its books put before the policies, one request at a time.

Looks, and changes neither book. The front applies what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from hadal.core.config import LimitsConfig
from hadal.core.messages import BLOCK_TOKENS, Generation, PrefillAhead
from hadal.core.request import State
from hadal.kv.blocks import blocks_for
from hadal.policy.admission import may_prefill, num_placed_max
from hadal.policy.routing import choose_decode_unit, choose_prefill_unit, usable_blocks
from hadal.roles.front.requests import Record, RequestBook
from hadal.roles.front.units import UnitBook

# The front's part of the hand-over: which decode unit a prompt's KV goes to, and from when on.
#
#     PREFILLING     hint: choose a unit, count the request there, Ahead | more hints: Ahead to the same unit
#     TRANSFERRING   Decode to that unit; without a hint, or if the unit died since, one is chosen now
#
# From the first hint on the request owns its decode unit, so whatever takes it away from its units
# tells that one too. Losing it costs a request nothing while its prompt is being prefilled. Knows
# no messages but the hint.


STEP_SHARE = 16
"""A hint is passed on if it has one of so many parts of the prompt more than the one before: it
carries the prompt.
"""


class Handover:
    """Changes `decode_unit` of the records it is asked about, and the counts in `units` with it."""

    def __init__(
        self, units: UnitBook, choose: Callable[[Record], str | None], *, is_early: bool
    ) -> None:
        """`choose` says which decode unit would be best for a request now; None if it fits into
        none.
        """
        self._units = units
        self._choose = choose
        self._is_early = is_early

    def is_wanted(self, record: Record, hint: PrefillAhead) -> bool:
        """Whether to pass a hint on: not if it is late, was there before, has little news, or if no
        decode follows.
        """
        if (
            not self._is_early
            or record.state is not State.PREFILLING
            or record.prefill_unit != hint.unit
        ):
            return False
        attempt, num_tokens = record.ahead
        num_more = hint.lease.num_tokens - (num_tokens if attempt == record.attempt else 0)
        is_last = record.num_output + 1 >= record.generation.max_tokens
        if is_last or num_more * STEP_SHARE < record.num_tokens:
            return False
        record.ahead = (record.attempt, hint.lease.num_tokens)
        return True

    def unit_for(self, record: Record) -> str | None:
        """The decode unit of a request, chosen and counted there if it has none yet; None if it
        fits nowhere.
        """
        if record.decode_unit is None:
            unit = self._choose(record)
            if unit is None:
                return None
            record.decode_unit = unit
            record.last_units = record.last_units[0], unit
            self._units.sent_to_decode(unit, record.num_blocks)
        return record.decode_unit

    def lost(self, record: Record, unit: str) -> bool:
        """A unit let a request go: True if that was only where its KV would have gone, so that
        nothing is lost.
        """
        if (
            record.state is not State.PREFILLING
            or record.decode_unit != unit
            or record.prefill_unit == unit
        ):
            return False
        self._units.left_decode(unit, record.num_blocks)
        record.decode_unit, record.ahead = None, (-1, 0)
        return True


@dataclass(frozen=True)
class Rooms:
    """The books that are looked into, and the limits beside them."""

    requests: RequestBook
    units: UnitBook
    limits: LimitsConfig
    max_context: int

    def num_free(self) -> int:
        """How many more requests units could work on, as far as they are not too long."""
        view = self.units.downstream(self.requests.num_placed, 0, 0)
        return max(
            0, min(self.limits.max_running, num_placed_max(view.num_slots)) - view.num_requests
        )

    def has_room(self, generation: Generation) -> bool:
        """Whether a new request could start now; else it has to wait."""
        num_tokens = len(generation.prompt) + len(generation.output)
        if not self._may_prefill(num_tokens, generation.tenant):
            return False
        return (
            choose_prefill_unit(self.units.prefill_views(), blocks_for(num_tokens), num_tokens)
            is not None
        )

    def prefill_unit(self, record: Record) -> tuple[str, int] | None:
        """The prefill unit it starts on now, and how many of its positions that has already; None
        if it waits.
        """
        num_tokens = record.num_tokens
        if not self._may_prefill(num_tokens, record.generation.tenant):
            return None
        unit_to_cached: dict[str, int] = {}
        if record.generation.chain:
            # Only where it could go now: one that waits for room asks again at every event.
            open_units = self.units.open_prefill_units()
            unit_to_cached = self.units.cache.prefixes(record.generation.chain, open_units)
            # The last position is computed in any case, and a block is taken whole or not at all.
            most = usable_blocks(num_tokens) * BLOCK_TOKENS
            unit_to_cached = {
                unit: min(num_cached, most) for unit, num_cached in unit_to_cached.items()
            }
        views = self.units.prefill_views(unit_to_cached)
        unit = choose_prefill_unit(views, blocks_for(num_tokens), num_tokens)
        return None if unit is None else (unit, unit_to_cached.get(unit, 0))

    def decode_unit(self, record: Record) -> str | None:
        """The decode unit for its KV; None if it fits into none."""
        num_blocks_max = blocks_for(
            len(record.generation.prompt) + record.generation.max_tokens - 1
        )
        return choose_decode_unit(self.units.decode_views(), record.num_blocks, num_blocks_max)

    def fit(self, record: Record) -> str | None:
        """Cap its output, once, by the context and by what one request can hold in the units; why
        it can have none.
        """
        if record.is_fitted or (capacity_tokens := self.units.capacity_tokens()) is None:
            return None
        record.is_fitted = True
        generation = record.generation
        num_prompt = len(generation.prompt)
        # The last token of an output has no KV, so capacity + 1 tokens can be known.
        longest = min(self.max_context, capacity_tokens + 1) - num_prompt
        if longest <= record.num_output:
            return f"the prompt has {num_prompt} tokens; a unit holds {capacity_tokens} at most."
        if longest < generation.max_tokens:
            record.generation = msgspec.structs.replace(generation, max_tokens=longest)
        return None

    def _may_prefill(self, num_tokens: int, tenant: str) -> bool:
        requests = self.requests
        if requests.num_placed >= self.limits.max_running:
            return False
        view = self.units.downstream(
            requests.num_placed,
            requests.num_blocks_placed,
            requests.counts[State.TRANSFERRING],
            requests.tenant_to_placed[tenant],
            len(requests.tenant_to_seen_s),
            requests.num_tenants_absent(tenant),
        )
        return may_prefill(view, blocks_for(num_tokens + 1))
