"""What a rank's pool holds, as the plans that go by tell it: so that a new leader can go on with
what an old one led.

    join   the ticket's KV is in these blocks     grown  and in this one     step  one position more for all who joined
    leave  the KV stays as it is                  freed  it is gone        name  a block can be found, whoever owns it

Nothing is decided here, and nothing is certain about the last steps: they may not have been done.
Whoever goes on knows which tokens were delivered, and those positions were computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hadal.core.placement import Placement, flip_arrays
from hadal.core.plans import (
    DecodePlan,
    FormPlan,
    Held,
    HeldKv,
    Join,
    LayerFlip,
    NamedBlocks,
    StepPlan,
)
from hadal.roles.rank_pools import named_blocks, names_of


@dataclass(slots=True)
class _Kv:
    """Of one attempt."""

    block_ids: list[int]
    num_tokens: int
    """When it joined; once it has left, in all."""
    num_pulled: int
    joined_at: int | None
    """Plans that went by before it joined; None: it has left."""


class RankHoldings:
    """`plan`: the newest FormPlan, with the placement as flips have made it; None before the
    first.
    """

    def __init__(self) -> None:
        self.plan: FormPlan | None = None
        self._ticket_to_kv: dict[int, _Kv] = {}
        self._slot_to_ticket: dict[int, int] = {}
        """Who is in the rank's table."""
        self._block_to_ticket: dict[int, int] = {}
        self._block_to_name: dict[int, tuple[bytes, bytes]] = {}
        self._unfetched: set[int] = set()
        """Blocks read from disk that no plan has fetched yet: where the cache is not the pool, they
        are not in it.
        """
        self._num_freed: Counter[int] = Counter()
        self._num_plans = 0

    def form(self, plan: FormPlan) -> None:
        """A new generation: the rank's table is empty."""
        self.plan = plan
        for slot in list(self._slot_to_ticket):
            self._leave(slot)

    def step(self, plan: StepPlan) -> None:
        """A plan goes to the Runner."""
        for flip in plan.flips:
            self._flip(flip)
        if not isinstance(plan, DecodePlan):
            self._unfetched.difference_update(plan.fetches)
            return
        for slot in plan.leaves:
            self._leave(slot)
        for join in plan.joins:
            self._join(join)
        for slot, _, block_id in plan.grown:
            ticket = self._slot_to_ticket[slot]
            self._ticket_to_kv[ticket].block_ids.append(block_id)
            self._block_to_ticket[block_id] = ticket
        self._num_plans += 1

    def freed(self, block_ids: Sequence[int]) -> None:
        """What was in these blocks is gone, and with it the KV that they were a part of."""
        self._num_freed.update(block_ids)
        self._unfetched.difference_update(block_ids)
        for block_id in block_ids:
            self._block_to_name.pop(block_id, None)
            ticket = self._block_to_ticket.get(block_id)
            if ticket is not None:
                self._drop(ticket)

    def loaded(self, block_ids: Sequence[int]) -> None:
        """Blocks are being read from disk."""
        self._unfetched.update(block_ids)

    def name(self, named: NamedBlocks) -> None:
        """Blocks can be found from now on."""
        self._block_to_name.update(names_of(named))

    def held(self) -> Held:
        """All of it."""
        return Held(
            tuple(
                HeldKv(ticket, tuple(kv.block_ids), self._num_tokens(kv), kv.num_pulled)
                for ticket, kv in self._ticket_to_kv.items()
            ),
            dict(self._num_freed),
            named_blocks(
                {
                    block: name
                    for block, name in self._block_to_name.items()
                    if block not in self._unfetched
                }
            ),
        )

    def _join(self, join: Join) -> None:
        before = self._ticket_to_kv.get(join.ticket)
        num_before = before.num_pulled if before is not None else 0
        num_pulled = join.num_tokens if join.is_pulled else num_before
        self._drop(join.ticket)
        self._ticket_to_kv[join.ticket] = _Kv(
            list(join.block_ids), join.num_tokens, num_pulled, self._num_plans
        )
        self._slot_to_ticket[join.slot] = join.ticket
        self._block_to_ticket.update(dict.fromkeys(join.block_ids, join.ticket))

    def _leave(self, slot: int) -> None:
        ticket = self._slot_to_ticket.get(slot)
        if ticket is not None:  # To leave an empty slot does nothing.
            kv = self._ticket_to_kv[ticket]
            kv.num_tokens, kv.joined_at = self._num_tokens(kv), None
            del self._slot_to_ticket[slot]

    def _num_tokens(self, kv: _Kv) -> int:
        return kv.num_tokens + (0 if kv.joined_at is None else self._num_plans - kv.joined_at)

    def _drop(self, ticket: int) -> None:
        kv = self._ticket_to_kv.pop(ticket, None)
        for block_id in kv.block_ids if kv else ():
            self._block_to_ticket.pop(block_id, None)
        for slot in [slot for slot, other in self._slot_to_ticket.items() if other == ticket]:
            del self._slot_to_ticket[slot]

    def _flip(self, flip: LayerFlip) -> None:
        plan = self.plan
        assert plan is not None, "a step of no generation"
        placement = Placement.from_bytes(
            plan.slot_to_expert, 0, plan.num_ranks, plan.num_slots, plan.weights
        )
        placement = placement.with_layer(flip.layer, *flip_arrays(flip, plan.num_slots))
        self.plan = msgspec.structs.replace(
            plan, slot_to_expert=placement.to_bytes(), weights=placement.weights_bytes()
        )
