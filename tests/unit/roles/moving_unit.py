"""Provide a decode unit of two uneven ranks, stopped at a moment of a request's move."""

from __future__ import annotations

from collections import deque
from typing import Any

from hadal.core.messages.pools import Pull
from hadal.core.messages.units import Cancel, Returned, Tokens
from hadal.core.plans import DecodePlan, Join, KvPulled
from hadal.core.seams import Effect, Event, Execute, RankReset
from hadal.roles.decode.table import SlotState
from tests.columns import key_of, rows_of
from tests.unit.roles.driving import decode, decode_leader, done, of, sent

POOLS = ("p0", "p1")
PER_RANK = 4


class Unit:
    """Unit of two ranks: requests "a" and "c" are on the first, and the second is empty."""

    def __init__(self, prompt: int = 640, **options: Any) -> None:
        self.leader = decode_leader(
            60, 2, num_slots=PER_RANK, num_waiting_max=9, max_context=3000, **options
        )
        self.plans: deque[tuple[DecodePlan, ...]] = deque()
        self.table: set[int] = set()
        self.pulls: list[Pull] = []
        self.returned: list[str] = []
        self.tokens: dict[str, list[tuple[int, int]]] = {}
        self.feed(RankReset((), (0, 1), POOLS, 1))
        for name in "abcd":
            self.feed(decode(name, prompt, max_tokens=400, stop_ids=(9,)))
            self.feed(KvPulled(name, 0, None))
        self.pulls.clear()
        assert [self.slot(name) // PER_RANK for name in "abcd"] == [0, 1, 0, 1]
        for name in "bd":
            self.feed(Cancel(name, 0))

    def slot(self, name: str) -> int:
        return self.leader.slots.key_to_slot[name, 0]

    def state(self, slot: int) -> int:
        return int(self.leader.table.state[slot])

    def feed(self, event: Event) -> list[Effect]:
        effects = self.leader.handle(0.0, event)
        assert self.leader.audit() == []
        self.plans += [execute.plans for execute in of(effects, Execute)]  # type: ignore[misc]
        self.pulls += of(effects, Pull)
        self.returned += [message.request_id for message in sent(effects, Returned)]
        for message in sent(effects, Tokens):
            for attempt_id, index, value, _ in rows_of(message):
                self.tokens.setdefault(key_of(attempt_id)[0], []).append((index, value))
        return effects

    def step(self, values: dict[int, int] | None = None, **options: Any) -> list[Effect]:
        """Complete the oldest plan: each slot draws 5, or `values` by slot."""
        plans = self.plans.popleft()
        for rank, plan in enumerate(plans):
            self.table -= {rank * PER_RANK + slot for slot in plan.leaves}
            joins = {rank * PER_RANK + join.slot for join in plan.joins}
            assert not joins & self.table
            self.table |= joins
        if "error" in options:
            return self.feed(done(plans[0].step_id, **options))
        drawn = {slot: (values or {}).get(slot, 5) for slot in sorted(self.table)}
        return self.feed(done(plans[0].step_id, drawn, **options))

    def reset(self, lost: tuple[int, ...] = ()) -> None:
        self.plans.clear()
        self.table.clear()
        self.feed(
            RankReset(lost, (), tuple("" if rank in lost else POOLS[rank] for rank in (0, 1)), 2)
        )

    def joins(self) -> list[tuple[int, Join]]:
        return [
            (rank, join)
            for plans in self.plans
            for rank, plan in enumerate(plans)
            for join in plan.joins
        ]

    def move(self, moment: str = "filling") -> tuple[str, int, int]:
        """Step until a request moves and reaches this moment; return (its name, source, target)."""
        for _ in range(20):
            if self.plans[-1][0].publishes:
                break
            self.step()
        (slot,) = self.plans[-1][0].publishes
        name = next(name for name in "ac" if self.slot(name) == slot)
        target = self.leader.slots.moving.arriving[name, 0]
        assert target // PER_RANK == 1
        if moment != "reserved":
            self.step()
        assert (self.state(slot), self.state(target)) == (SlotState.MOVING, SlotState.RESERVED)
        if moment == "filling":
            self.step()
            assert (self.state(slot), self.state(target)) == (SlotState.MOVING, SlotState.FILLING)
        return name, slot, target

    def end_copy(self, name: str, moment: str, error: str | None = None) -> None:
        if moment == "filling":
            self.feed(KvPulled(name, 0, error))

    def finish(self, name: str) -> None:
        """Check that the request continues without a gap, and that no block has an owner at the end."""
        count = len(self.tokens[name])
        for _ in range(6):
            self.step()
        assert len(self.tokens[name]) > count
        found = [index for index, _ in self.tokens[name]]
        assert found == list(range(1, len(self.tokens[name]) + 1))
        self.empty()

    def empty(self) -> None:
        for name, _ in list(self.leader.slots.key_to_slot):
            self.feed(Cancel(name, 0))
        for name, _ in list(self.leader.slots.moving.arriving):
            if self.state(self.leader.slots.moving.arriving[name, 0]) == SlotState.FILLING:
                self.feed(KvPulled(name, 0, None))
        while self.plans:
            self.step()
        assert (self.leader.num_requests, self.leader.blocks.num_used) == (0, 0)
