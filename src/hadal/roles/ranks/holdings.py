"""KV in a rank's pool, derived from the plans that the rank receives, so that a new leader
(scheduler) can take it over.

    join   the attempt's KV is in these blocks    grown  and in this one
    step   more positions of joined attempts      freed  the KV is gone
    leave  the KV stays                           name   a block can be found, owned or not

Decides nothing. The last steps are uncertain: they may not have run. The front knows which tokens
were delivered, and the positions of these were computed.
"""

from __future__ import annotations

from collections import Counter, deque
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
    num_positions,
)
from hadal.roles.ranks.pools import named_blocks, names_of


@dataclass(slots=True)
class _Kv:
    """KV of one attempt."""

    block_ids: list[int]
    num_tokens: int
    """Positions when the attempt joined, or, once it has left, all its positions."""
    num_pulled: int
    joined_at: int | None
    """`RankHoldings._num_written` when the attempt joined; None: it has left."""


class RankHoldings:
    """KV and block names in one rank's pool. `plan`: the newest FormPlan, with the expert placement
    as flips have changed it; None before the first.
    """

    def __init__(self) -> None:
        self.plan: FormPlan | None = None
        self._attempt_id_to_kv: dict[int, _Kv] = {}
        self._slot_to_attempt_id: dict[int, int] = {}
        """Attempts in the rank's table."""
        self._block_to_attempt_id: dict[int, int] = {}
        self._block_to_name: dict[int, tuple[bytes, bytes]] = {}
        self._unfetched: set[int] = set()
        """Blocks read or copied into the pool, or about to be, that no step has fetched yet. A KV
        cache separate from the pool lacks them.
        """
        self._fetching: deque[set[int]] = deque()
        """Blocks that each step in flight fetches, oldest step first. A step may never run."""
        self._num_freed: Counter[int] = Counter()
        self._num_written = 0
        """Maximum number of positions that may be written for a slot that joined before the first step."""
        self._num_drafts = 0
        """Speculative tokens (drafts) per slot, which the next plan verifies."""

    def form(self, plan: FormPlan) -> None:
        """Begin a new formation, which empties the rank's table."""
        self.plan = plan
        for slot in list(self._slot_to_attempt_id):
            self._leave(slot)

    def step(self, plan: StepPlan) -> None:
        """Note a plan that is sent to the Runner."""
        for flip in plan.flips:
            self._flip(flip)
        self._fetching.append(set() if isinstance(plan, DecodePlan) else set(plan.fetches))
        if not isinstance(plan, DecodePlan):
            return
        for slot in plan.leaves:
            self._leave(slot)
        for join in plan.joins:
            self._join(join)
        for slot, _, block_id in plan.grown:
            attempt_id = self._slot_to_attempt_id[slot]
            self._attempt_id_to_kv[attempt_id].block_ids.append(block_id)
            self._block_to_attempt_id[block_id] = attempt_id
        self._num_written += num_positions(plan.num_passes, self._num_drafts, plan.num_drafts)
        self._num_drafts = plan.num_drafts

    def stepped(self, *, has_run: bool) -> None:
        """Note that the oldest step in flight ended. `has_run`: without an error."""
        fetched = self._fetching.popleft()
        if has_run:
            self._unfetched -= fetched

    def freed(self, block_ids: Sequence[int]) -> None:
        """Forget the contents of these blocks, and all KV of the attempts that owned one."""
        self._num_freed.update(block_ids)
        for blocks in (self._unfetched, *self._fetching):
            blocks.difference_update(block_ids)
        for block_id in block_ids:
            self._block_to_name.pop(block_id, None)
            attempt_id = self._block_to_attempt_id.get(block_id)
            if attempt_id is not None:
                self._drop(attempt_id)

    def loaded(self, block_ids: Sequence[int]) -> None:
        """Note blocks that are being read from disk or copied from another pool."""
        self._unfetched.update(block_ids)

    def name(self, named: NamedBlocks, *, are_all: bool = False) -> None:
        """Note blocks that can be found from now on. `are_all`: no others can be found."""
        if are_all:
            self._block_to_name.clear()
        self._block_to_name.update(names_of(named))

    def held(self) -> Held:
        """Return the pool's contents, for a new leader."""
        return Held(
            tuple(
                HeldKv(attempt_id, tuple(kv.block_ids), self._num_tokens(kv), kv.num_pulled)
                for attempt_id, kv in self._attempt_id_to_kv.items()
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
        before = self._attempt_id_to_kv.get(join.attempt_id)
        num_before = before.num_pulled if before is not None else 0
        num_pulled = join.num_tokens if join.is_pulled else num_before
        self._drop(join.attempt_id)
        self._attempt_id_to_kv[join.attempt_id] = _Kv(
            list(join.block_ids), join.num_tokens, num_pulled, self._num_written
        )
        self._slot_to_attempt_id[join.slot] = join.attempt_id
        self._block_to_attempt_id.update(dict.fromkeys(join.block_ids, join.attempt_id))

    def _leave(self, slot: int) -> None:
        attempt_id = self._slot_to_attempt_id.get(slot)
        if attempt_id is not None:  # A leave of an empty slot does nothing.
            kv = self._attempt_id_to_kv[attempt_id]
            kv.num_tokens, kv.joined_at = self._num_tokens(kv), None
            del self._slot_to_attempt_id[slot]

    def _num_tokens(self, kv: _Kv) -> int:
        return kv.num_tokens + (0 if kv.joined_at is None else self._num_written - kv.joined_at)

    def _drop(self, attempt_id: int) -> None:
        kv = self._attempt_id_to_kv.pop(attempt_id, None)
        for block_id in kv.block_ids if kv else ():
            self._block_to_attempt_id.pop(block_id, None)
        for slot in [
            slot for slot, other in self._slot_to_attempt_id.items() if other == attempt_id
        ]:
            del self._slot_to_attempt_id[slot]

    def _flip(self, flip: LayerFlip) -> None:
        plan = self.plan
        assert plan is not None, "a step of no formation"
        placement = Placement.from_bytes(
            plan.slot_to_expert, 0, plan.num_ranks, plan.num_expert_slots, plan.weights
        )
        placement = placement.with_layer(flip.layer, *flip_arrays(flip, plan.num_expert_slots))
        self.plan = msgspec.structs.replace(
            plan, slot_to_expert=placement.to_bytes(), weights=placement.weights_bytes()
        )
