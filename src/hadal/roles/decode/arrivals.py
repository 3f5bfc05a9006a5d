"""Requests on their way into a decode unit: they wait for a slot, and their KV is pulled.

    prefill    | chunk 1 | chunk 2 | chunk 3 = the rest, first token |
    hints         PullEarly PullEarly          Decode
    here            a slot,  pull 1.. | pull 2..       | pull the rest .. | READY: Pulled

A hint takes a slot only if no prefilled request waits and there is room for the whole prompt; otherwise
it is ignored. The slot is freed, without a message, when a request in decode needs the blocks, when
a prefilled request waits, and when no further hint came within the time of a lease. Decode then finds
what it would have found without a hint. Blocks that a lease names are complete, so each is pulled once;
a copy that failed is made again, with Decode at the latest.

Knows neither plans nor tokens.
"""

from __future__ import annotations

from hadal.core.errors import InvariantError
from hadal.core.messages import BLOCK_TOKENS, Decode, Key, KvLease, PullEarly, Pulled
from hadal.core.plans import KvPulled
from hadal.core.seams import Effect, Pull, Send
from hadal.kv.blocks import blocks_for
from hadal.policy.fairness import OUTPUT_COST, Claim, in_turns, share_weight
from hadal.roles.decode.slots import DecodeSlots
from hadal.roles.decode.table import SlotState
from hadal.roles.ranks.pools import RankPools
from hadal.roles.reasons import OTHER_WEIGHTS, PULL_FAILED, QUEUE_FULL, TOO_LONG
from hadal.roles.unit.unit import given_back, has_other_weights


class DecodeArrivals:
    """`out` is the leader's list of effects, which this appends to."""

    def __init__(
        self,
        unit: str,
        slots: DecodeSlots,
        pools: RankPools,
        *,
        num_waiting_max: int,
        lease_s: float,
        out: list[Effect],
        fingerprint: str = "",
    ) -> None:
        self.waiting: dict[Key, Decode] = {}
        """Prefilled, in the order in which they came."""
        self._unit = unit
        self._slots = slots
        self._table = slots.table
        self._pools = pools
        self._num_waiting_max = num_waiting_max
        self._lease_s = lease_s
        self._out = out
        self._fingerprint = fingerprint
        self._is_full = False
        """Whether not all who waited had a slot, when they were last looked at."""
        self._deadlines: dict[Key, float] = {}
        """Slots that are EARLY, and of some that were; the earliest first."""

    @property
    def next_deadline_s(self) -> float | None:
        return next(iter(self._deadlines.values()), None)

    # ---- what comes from the front ----
    def accept(self, decode: Decode) -> None:
        """A request whose prompt is prefilled: it goes on in the slot that a hint took, or waits
        for one.
        """
        generation, lease = decode.generation, decode.lease
        key = (generation.request_id, generation.attempt)
        slot = self._slots.key_to_slot.get(key)
        is_early = slot is not None and self._table.state[slot] == SlotState.EARLY
        if (
            key in self.waiting
            or key in self._slots.moving.arriving
            or (slot is not None and not is_early)
        ):
            return  # The same message twice.
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
        elif slot is not None and not self._table.is_muted[slot]:
            self._go_on(slot, decode)
            return
        elif (
            len(self.waiting) >= self._num_waiting_max + self._num_slots_left
            or not self._pools.num_living
        ):
            problem = QUEUE_FULL
        if problem is None:
            self.waiting[key] = decode
            return
        if slot is not None:
            self._let_go(slot)
        self._out.append(given_back(self._unit, key, problem))

    def hint(self, now_s: float, hint: PullEarly) -> None:
        """Some of a prompt is prefilled: take a slot for it if that harms nobody, and begin to
        pull.
        """
        generation, table = hint.generation, self._table
        key = (generation.request_id, generation.attempt)
        slot = self._slots.key_to_slot.get(key)
        if slot is None:
            if (
                self.waiting
                or has_other_weights(generation, self._fingerprint)
                or key in self._slots.moving.arriving
                or self._slots.is_starved
                or self._is_too_long(hint)
            ):
                return
            if not self._pools.num_living or not (placed := self._slots.assign([hint])):
                return
            slot = placed[0]
        elif table.state[slot] != SlotState.EARLY:
            return  # Decode overtook it.
        elif _num_full(hint.lease) > _num_full(table.occupant(slot).lease):
            table.set_lease(slot, hint.lease)
        self._deadlines.pop(key, None)  # The newest is the last.
        self._deadlines[key] = now_s + self._lease_s
        self._pull(slot)

    @property
    def _num_slots_left(self) -> int:
        """Slots for those who come now: they are not queued, even where nobody may be. None while
        others wait, for then blocks are short.
        """
        if self._is_full or self._slots.is_starved:
            return 0
        return self._slots.per_rank * self._pools.num_living - len(self._slots.key_to_slot)

    def _is_too_long(self, message: Decode | PullEarly) -> bool:
        generation = message.generation
        num_positions = len(generation.prompt) + generation.max_tokens - 1
        return blocks_for(num_positions) > self._table.num_blocks_max

    def cancel(self, key: Key) -> None:
        """Nobody waits for it any more; its slot is its owner's affair."""
        self.waiting.pop(key, None)
        self._deadlines.pop(key, None)

    def clear(self) -> None:
        """All who wait belong to a front that is gone."""
        self.waiting.clear()
        self._deadlines.clear()

    def refuse_all(self) -> None:
        """No rank lives. Another unit may have room; this one has none for long."""
        for key in self.waiting:
            self._out.append(given_back(self._unit, key, QUEUE_FULL))
        self.waiting.clear()

    def expire(self, now_s: float) -> None:
        """Free the slots of prompts that sent no hint for too long."""
        while self._deadlines:
            key, deadline_s = next(iter(self._deadlines.items()))
            if deadline_s > now_s:
                return
            del self._deadlines[key]
            slot = self._slots.key_to_slot.get(key)
            if slot is not None and self._table.state[slot] == SlotState.EARLY:
                self._let_go(slot)

    # ---- slots ----
    def fill_slots(self) -> None:
        """Give slots and blocks to those who wait, in the turns of their tenants, and start to pull their
        KV: what of a flood is prefilled ahead of a slot keeps no other tenant waiting.
        """
        self._fill_slots()
        self._is_full = bool(self.waiting)

    def _fill_slots(self) -> None:
        while self.waiting:
            # One whose earlier slot is still being written waits for that, and so do those behind
            # it.
            ready = []
            for key, decode in self.waiting.items():
                if key in self._slots.key_to_slot:
                    break
                ready.append(decode)
            # A tenant's latest message has its current service; that of the others is out of date.
            services = {one.generation.tenant: one.service for one in self.waiting.values()}
            for slot in self._slots.assign([*in_turns(ready, _claim, services, {})]):
                self._go_on(slot, self.waiting.pop(self._table.occupant(slot).key))
            if not self.waiting or not ready or not self._make_room():
                return

    def _make_room(self) -> bool:
        """Take what can be spared for the first who waits: one who is prefilled goes before those
        who are not. Whether there is more room now.
        """
        slots = self._slots
        has_slot = any(slots.num_free_slots(rank) for rank in self._pools.living)
        if has_slot:  # Then it is blocks that are short.
            num_freed = sum(
                slots.cache.stores.give_up(rank, self._pools.num_usable)
                for rank in self._pools.living
            )
            if num_freed:
                return True
        early = [slot for rank in self._pools.living for slot in slots.early_of(rank)]
        if not early or any(self._table.is_muted[slot] for slot in early):
            # Nobody can be spared; or somebody goes already, as soon as the copy for him has ended.
            return False
        latest = max(early, key=lambda slot: self._table.occupant(slot).arrival)
        self._let_go(latest)
        return bool(self._table.state[latest] == SlotState.FREE)

    def _let_go(self, slot: int) -> None:
        self._slots.close(slot, -1)  # No plan ever had it.

    # ---- pulls ----
    def _go_on(self, slot: int, decode: Decode) -> None:
        """A slot's prompt is prefilled: pull what is not here yet."""
        table = self._table
        self._deadlines.pop(table.occupant(slot).key, None)
        table.prefilled(slot, decode.generation, decode.lease)
        self._slots.cache.placed(slot)
        self._pull(slot)

    def _pull(self, slot: int) -> None:
        """Copy what the lease has and is not here, one copy at a time."""
        table = self._table
        if table.num_pulling[slot]:
            return
        occupant, is_whole = table.occupant(slot), table.state[slot] == SlotState.PULLING
        lease, first = occupant.lease, int(table.num_pulled[slot])
        end = len(lease.block_ids) if is_whole else _num_full(lease)
        if end > first:
            table.num_pulling[slot] = end - first
            num_tokens = min(lease.num_tokens, end * BLOCK_TOKENS) - first * BLOCK_TOKENS
            part = KvLease(
                lease.source, lease.block_ids[first:end], lease.versions[first:end], num_tokens
            )
            into = table.blocks_of(slot)[first:end]
            self._out.append(Pull(*occupant.key, part, into, slot // self._slots.per_rank))
        elif is_whole:
            table.state[slot] = SlotState.READY
            self._out.append(Send("front", Pulled(self._unit, *occupant.key)))

    def pulled(self, pulled: KvPulled) -> None:
        """A copy from another unit ended."""
        key, table = (pulled.request_id, pulled.attempt), self._table
        slot = self._slots.key_to_slot.get(key)
        if slot is None or not table.num_pulling[slot]:
            raise InvariantError(f"{self._unit}: KV of {key} was pulled, but nobody asked for it.")
        num_blocks = int(table.num_pulled[slot] + table.num_pulling[slot])
        # Of a request that is prefilled, the copy of the rest is its last: the one before it only
        # had a part.
        is_last = table.state[slot] == SlotState.PULLING and num_blocks == len(
            table.occupant(slot).lease.block_ids
        )
        table.num_pulling[slot] = 0
        if table.is_muted[slot] or table.is_preempted[slot]:
            self._slots.vacate(slot)
        elif pulled.error is None:
            table.num_pulled[slot] = num_blocks
            self._pull(slot)
        elif is_last:
            reason = f"{PULL_FAILED}: {pulled.error}"
            self._out.append(given_back(self._unit, key, reason))
            table.is_muted[slot] = True
            self._slots.vacate(slot)
        elif table.state[slot] == SlotState.PULLING:
            self._pull(slot)


def _claim(decode: Decode) -> Claim:
    generation = decode.generation
    num_tokens = generation.max_tokens - len(generation.output)
    weight = share_weight(generation.weight, generation.priority)
    return Claim(generation.tenant, OUTPUT_COST * num_tokens / weight)


def _num_full(lease: KvLease) -> int:
    """Blocks of it that are complete, whatever else it names."""
    return min(lease.num_tokens // BLOCK_TOKENS, len(lease.block_ids))
