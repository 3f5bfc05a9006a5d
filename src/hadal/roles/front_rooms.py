"""Where a request of the front may go: its books put before the policies, one request at a time.

Looks, and changes neither book. The front applies what comes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hadal.core.config import LimitsConfig
from hadal.core.messages import BLOCK_TOKENS, Generation
from hadal.core.request import State
from hadal.kv.blocks import blocks_for
from hadal.policy.admission import may_prefill, num_placed_max
from hadal.policy.cached_prefix import usable_blocks
from hadal.policy.routing import choose_decode_unit, choose_prefill_unit
from hadal.roles.front_record import Record
from hadal.roles.front_requests import RequestBook
from hadal.roles.front_units import UnitBook


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
