"""Requests on their way into a decode unit: the queue for slots, and pulls of their KV.

Independent of plans and tokens.
"""

from __future__ import annotations

from hadal.core.errors import InvariantError
from hadal.core.messages.generation import Key
from hadal.core.messages.pools import Pull
from hadal.core.messages.units import Decode, Pulled
from hadal.core.plans import KvPulled
from hadal.core.seams import Effect, Send
from hadal.kv.blocks import blocks_for
from hadal.policy.fairness import OUTPUT_COST, Claim, in_turns, share_weight
from hadal.roles.decode.slots import DecodeSlots
from hadal.roles.decode.table import SlotState
from hadal.roles.ranks.pools import RankPools
from hadal.roles.reasons import OTHER_WEIGHTS, PULL_FAILED, QUEUE_FULL, TOO_LONG
from hadal.roles.unit.tokens import has_other_weights, returned


class DecodeArrivals:
    """Queue for slots, and pulls of KV. `out`: the leader's list of effects, to append to."""

    def __init__(
        self,
        unit: str,
        slots: DecodeSlots,
        pools: RankPools,
        *,
        num_waiting_max: int,
        out: list[Effect],
        fingerprint: str = "",
    ) -> None:
        self.waiting: dict[Key, Decode] = {}
        """Prefilled requests without a slot, in order of arrival."""
        self._unit = unit
        self._slots = slots
        self._table = slots.table
        self._pools = pools
        self._num_waiting_max = num_waiting_max
        self._out = out
        self._fingerprint = fingerprint
        self._is_full = False
        """True if requests stayed queued when slots were last filled."""

    # ---- messages of the front ----
    def accept(self, decode: Decode) -> None:
        """Queue a prefilled request, or return it to the front with the reason."""
        generation, lease = decode.generation, decode.lease
        key = (generation.request_id, generation.attempt)
        if key in self.waiting or key in self._slots:
            return  # A duplicate message.
        num_known = len(generation.prompt) + len(generation.output)
        fits = lease.num_tokens == num_known - 1 and len(lease.block_ids) == blocks_for(
            lease.num_tokens
        )
        problem = None
        if has_other_weights(generation, self._fingerprint):
            problem = OTHER_WEIGHTS
        elif not fits or not generation.output:
            problem = (
                f"{PULL_FAILED}: a lease on {lease.num_tokens} tokens does not fit {num_known}"
                " known tokens"
            )
        elif self._is_too_long(decode):
            problem = f"{TOO_LONG}: {len(generation.prompt)} + {generation.max_tokens} tokens"
        elif (
            len(self.waiting) >= self._num_waiting_max + self._num_slots_left
            or not self._pools.num_living
        ):
            problem = QUEUE_FULL
        if problem is None:
            self.waiting[key] = decode
        else:
            self._out.append(returned(self._unit, key, problem))

    @property
    def _num_slots_left(self) -> int:
        """Free slots that a new arrival may take without queueing, even if no queue is allowed. 0
        if requests stayed queued, or if the next plan waits for blocks.
        """
        if self._is_full or self._slots.is_starved:
            return 0
        return self._slots.per_rank * self._pools.num_living - len(self._slots.key_to_slot)

    def _is_too_long(self, decode: Decode) -> bool:
        generation = decode.generation
        num_positions = len(generation.prompt) + generation.max_tokens - 1
        return blocks_for(num_positions) > self._table.num_blocks_max

    def cancel(self, key: Key) -> None:
        """Drop a request from the queue. If it has a slot, the slot's owner releases that."""
        self.waiting.pop(key, None)

    def clear(self) -> None:
        """Drop all queued requests: their front is gone."""
        self.waiting.clear()

    def refuse_all(self) -> None:
        """Return all queued requests, because no rank lives: another unit may have capacity."""
        for key in self.waiting:
            self._out.append(returned(self._unit, key, QUEUE_FULL))
        self.waiting.clear()

    # ---- slots ----
    def fill_slots(self) -> None:
        """Give slots and blocks to queued requests and start to pull their KV. Tenants take turns,
        so that a flood prefilled ahead delays no other tenant.
        """
        self._fill_slots()
        self._is_full = bool(self.waiting)

    def _fill_slots(self) -> None:
        while self.waiting:
            # A resumed request may be queued here as well, if its Decode arrived twice.
            ready = [
                decode for key, decode in self.waiting.items() if key not in self._slots.key_to_slot
            ]
            # A tenant's latest message has its current service; earlier ones are outdated.
            services = {one.generation.tenant: one.service for one in self.waiting.values()}
            for slot in self._slots.assign([*in_turns(ready, _claim, services, {})]):
                del self.waiting[self._table.occupant(slot).key]
                self._slots.cache.placed(slot)
                self._pull(slot)
            if not self.waiting or not ready or not self._slots.make_room():
                return

    # ---- pulls ----
    def _pull(self, slot: int) -> None:
        """Start to copy the KV under a slot's lease."""
        occupant, rank = self._table.occupant(slot), slot // self._slots.per_rank
        into = self._table.blocks_of(slot)[: len(occupant.lease.block_ids)]
        self._out.append(Pull(*occupant.key, occupant.lease, into, rank))

    def pulled(self, pulled: KvPulled) -> None:
        """Handle the end of a copy from another unit."""
        key, table = (pulled.request_id, pulled.attempt), self._table
        slot = self._slots.key_to_slot.get(key)
        if slot is None or table.state[slot] != SlotState.PULLING:
            raise InvariantError(f"{self._unit}: KV of {key} was pulled without a request.")
        if table.is_muted[slot] or table.is_preempted[slot]:
            self._slots.vacate(slot)
        elif pulled.error is None:
            table.state[slot] = SlotState.READY
            self._out.append(Send("front", Pulled(self._unit, *key)))
        else:
            self._out.append(returned(self._unit, key, f"{PULL_FAILED}: {pulled.error}"))
            table.is_muted[slot] = True
            self._slots.vacate(slot)


def _claim(decode: Decode) -> Claim:
    generation = decode.generation
    num_tokens = generation.max_tokens - len(generation.output)
    weight = share_weight(generation.weight, generation.priority)
    return Claim(generation.tenant, OUTPUT_COST * num_tokens / weight)
