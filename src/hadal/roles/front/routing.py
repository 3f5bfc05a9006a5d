"""Routing of requests: views of the units for the policies, and the units that the policies choose.

`policy/routing` and `policy/admission` decide; this file fills their snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from hadal.core.config import DECODE, PREFILL, LimitsConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from hadal.core.request import State
from hadal.kv.blocks import blocks_for
from hadal.policy.admission import may_prefill, num_placed_max
from hadal.policy.cached_prefix import usable_blocks
from hadal.policy.routing import choose_decode_unit, choose_prefill_unit
from hadal.policy.views import DownstreamView, SpareView
from hadal.roles.front.record import Record
from hadal.roles.front.requests import FrontRequests
from hadal.roles.front.unit import num_slots_beside
from hadal.roles.front.units import FrontUnits


@dataclass(frozen=True)
class RequestRouting:
    """Routing of one request at a time. Changes no table, but `fit` may lower max_tokens."""

    requests: FrontRequests
    units: FrontUnits
    limits: LimitsConfig
    max_context: int

    def num_free(self) -> int:
        """Return how many more requests may run, by slots and `max_running`, at any lengths."""
        num_free = 0
        for fingerprint in self.units.serving():
            num_placed = self.requests.placed_under(fingerprint).num_requests
            view = self.units.downstream(fingerprint, num_placed, 0, 0)
            num_free += max(0, num_placed_max(view.num_slots) - num_placed)
        return max(0, min(self.limits.max_running - self.requests.num_placed, num_free))

    def spare(self, is_draining: bool) -> SpareView:
        """Return the load beside which a batch's next request would run, for off-peak admission."""
        requests, prefill = self.requests, self.units.of_role(PREFILL)
        decode = [unit for unit in self.units.of_role(DECODE) if unit.is_open]
        num_others = requests.num_placed - requests.num_placed_of_batches
        return SpareView(
            is_draining,
            requests.num_waiting,
            requests.num_placed,
            requests.num_placed_of_batches,
            requests.counts[State.PREFILLING],
            sum(unit.num_ranks for unit in prefill if unit.is_open),
            sum(unit.num_requests_max for unit in decode),
            sum(num_slots_beside(unit, -(-num_others // len(decode))) for unit in decode),
            requests.num_blocks_placed,
            sum(unit.num_blocks for unit in decode),
        )

    def has_room(self, generation: Generation) -> bool:
        """Return whether a new request could start now instead of being queued."""
        num_tokens = len(generation.prompt) + len(generation.output)
        return self._has_room(num_tokens, generation.tenant, self.units.serving())

    def fingerprints(self, record: Record) -> list[str]:
        """Return fingerprints that may serve the request, best first. A request with output stays
        on its fingerprint as long as a unit serves it.
        """
        serving = self.units.serving()
        is_bound = record.num_output and record.fingerprint in serving
        return [record.fingerprint] if is_bound else serving

    def _has_room(
        self,
        num_tokens: int,
        tenant: str,
        fingerprints: Sequence[str],
        without: Sequence[Record] = (),
    ) -> bool:
        """Return whether a request could start under these fingerprints if `without` ended."""
        prefilling = Counter(one.prefill_unit for one in without if one.state is State.PREFILLING)
        return any(
            self._may_prefill(num_tokens, tenant, fingerprint, without)
            and choose_prefill_unit(
                [
                    replace(view, num_requests=view.num_requests - prefilling[view.unit])
                    if prefilling[view.unit]
                    else view
                    for view in self.units.prefill_views(fingerprint)
                ],
                blocks_for(num_tokens),
                num_tokens,
            )
            is not None
            for fingerprint in fingerprints
        )

    def in_the_way(self, record: Record) -> list[Record]:
        """Return placed batch requests to preempt so that this request can start now: the latest
        ones, and no more than needed. Empty if preempting all of them would not suffice.
        """
        has_room = partial(
            self._has_room, record.num_tokens, record.generation.tenant, self.fingerprints(record)
        )
        placed = [
            one
            for one in reversed(self.requests.placed_of_batches())
            if one.decode_unit is None
            or ((unit := self.units.by_name.get(one.decode_unit)) is not None and unit.is_open)
        ]
        if not placed or not has_room(placed):
            return []
        chosen: list[Record] = []
        for one in placed:
            chosen.append(one)
            if has_room(chosen):
                break
        for one in chosen[:-1]:  # A chosen request may hold none of the needed capacity.
            others = [other for other in chosen if other is not one]
            if has_room(others):
                chosen = others
        return chosen

    def prefill_unit(self, record: Record) -> tuple[str, int, int] | None:
        """Return the prefill unit of the request's fingerprint that can start it now, how many of
        the request's positions are cached there, and how many at most in another open unit; None if
        the request must wait.
        """
        num_tokens, fingerprint = record.num_tokens, record.fingerprint
        tenant, has_place = record.generation.tenant, record.num_blocks_taken > 0
        if not self._may_prefill(num_tokens, tenant, fingerprint, has_place=has_place):
            return None
        unit_to_cached: dict[str, int] = {}
        if record.generation.chain:
            # Only open units: a request that waits for capacity repeats this at every event.
            open_units = self.units.open_prefill_units()
            unit_to_cached = self.units.cache.prefixes(record.generation.chain, open_units)
            # The last position is always computed, and a block is reused whole or not at all.
            most = usable_blocks(num_tokens) * BLOCK_TOKENS
            unit_to_cached = {
                unit: min(num_cached, most) for unit, num_cached in unit_to_cached.items()
            }
        views = self.units.prefill_views(fingerprint, unit_to_cached)
        unit = choose_prefill_unit(views, blocks_for(num_tokens), num_tokens)
        if unit is None:
            return None
        num_cached = unit_to_cached.pop(unit, 0)
        return unit, num_cached, max(unit_to_cached.values(), default=0)

    def decode_unit(self, record: Record) -> str | None:
        """Return the decode unit for the request's KV; None if it fits into none."""
        num_blocks_max = blocks_for(
            len(record.generation.prompt) + record.generation.max_tokens - 1
        )
        views = self.units.decode_views(record.fingerprint)
        return choose_decode_unit(views, record.num_blocks, num_blocks_max)

    def fit(self, record: Record) -> str | None:
        """Cap the request's output, once, by the context and by the KV that the units can hold for
        one request. Return the error if no output is possible, else None.
        """
        if record.is_fitted or (capacity_tokens := self.units.capacity_tokens()) is None:
            return None
        record.is_fitted = True
        generation = record.generation
        num_prompt = len(generation.prompt)
        # The last output token has no KV, so a sequence may have capacity + 1 tokens.
        longest = min(self.max_context, capacity_tokens + 1) - num_prompt
        if longest <= record.num_output:
            return f"the prompt has {num_prompt} tokens; a unit holds {capacity_tokens} at most."
        if longest < generation.max_tokens:
            record.generation = msgspec.structs.replace(generation, max_tokens=longest)
        return None

    def _may_prefill(
        self,
        num_tokens: int,
        tenant: str,
        fingerprint: str,
        without: Sequence[Record] = (),
        *,
        has_place: bool = False,
    ) -> bool:
        if self.requests.num_placed - len(without) >= self.limits.max_running:
            return False
        if not self.units.has_open_decode(fingerprint):
            return False
        view = self._downstream(tenant, fingerprint, without, has_place=has_place)
        return may_prefill(view, blocks_for(num_tokens + 1))

    def _downstream(
        self,
        tenant: str,
        fingerprint: str,
        without: Sequence[Record] = (),
        *,
        has_place: bool = False,
    ) -> DownstreamView:
        requests, placed = self.requests, self.requests.placed_under(fingerprint)
        left = [one for one in without if one.fingerprint == fingerprint]
        view = self.units.downstream(
            fingerprint,
            placed.num_requests - len(left),
            placed.num_blocks - sum(one.num_blocks for one in left),
            placed.num_transferring - sum(one.state is State.TRANSFERRING for one in left),
        )
        return replace(view, has_place=has_place or requests.has_fewer(tenant, fingerprint))
