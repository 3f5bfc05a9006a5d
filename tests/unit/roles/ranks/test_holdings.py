"""Test the record that a rank keeps of its pool while plans pass."""

from __future__ import annotations

import numpy as np

from hadal.core.cache import NAME_BYTES, NO_NAME
from hadal.core.placement import Placement, spread
from hadal.core.plans import (
    DecodePlan,
    FormPlan,
    Held,
    HeldKv,
    Join,
    LayerFlip,
    NamedBlocks,
    PrefillPlan,
    Sampling,
)
from hadal.roles.ranks.holdings import RankHoldings

PLACEMENT = spread(2, 8, 2)
FORM = FormPlan(3, 2, (), PLACEMENT.to_bytes(), PLACEMENT.num_expert_slots)


def join(
    slot: int, attempt_id: int, blocks: tuple[int, ...], num_tokens: int, *, is_pulled: bool = True
) -> Join:
    return Join(
        slot, blocks, num_tokens, 5, 1, Sampling(), attempt_id=attempt_id, is_pulled=is_pulled
    )


def plan(
    step_id: int,
    *joins: Join,
    leaves: tuple[int, ...] = (),
    grown: tuple[tuple[int, int, int], ...] = (),
) -> DecodePlan:
    return DecodePlan(step_id, leaves, joins, grown)


def holdings(*plans: DecodePlan) -> RankHoldings:
    made = RankHoldings()
    made.form(FORM)
    for one in plans:
        made.step(one)
    return made


def test_kv_grows_with_every_step_and_stays_when_its_request_leaves() -> None:
    made = holdings(
        plan(0, join(0, 70, (4, 5), 100), join(1, 71, (6,), 10)),
        plan(1, grown=((1, 1, 9),)),
        plan(2, leaves=(0,)),
        plan(3),
    )
    assert made.held() == Held((HeldKv(70, (4, 5), 102, 100), HeldKv(71, (6, 9), 14, 10)), {})


def test_kv_grows_by_all_passes_of_a_plan_and_may_be_less_where_a_slot_rests() -> None:
    made = holdings(plan(0, join(0, 70, (4, 5), 100)))
    made.step(DecodePlan(1, (), (), (), num_passes=8))
    made.step(DecodePlan(2, (), (), (), resting=(0,)))
    assert made.held().kv == (HeldKv(70, (4, 5), 110, 100),), "positions that may be valid"


def test_kv_grows_by_all_that_passes_may_write_of_right_drafts() -> None:
    made = holdings(
        DecodePlan(0, (), (join(0, 70, (4, 5), 100),), (), num_drafts=2),
        DecodePlan(1, (), (), (), num_drafts=2, num_passes=4),
    )
    # One position, then four passes that check two drafts each.
    assert made.held().kv[0].num_tokens == 100 + 1 + 4 * (1 + 2)


def test_a_slot_may_be_anothers_while_the_first_ones_kv_is_still_there() -> None:
    made = holdings(
        plan(0, join(0, 70, (4,), 10)), plan(1, join(0, 71, (6,), 20), leaves=(0,)), plan(2)
    )
    assert {kv.attempt_id: kv.num_tokens for kv in made.held().kv} == {70: 11, 71: 22}


def test_what_is_freed_is_gone_and_counted() -> None:
    made = holdings(plan(0, join(0, 70, (4, 5), 100), join(1, 71, (6,), 10)), plan(1, leaves=(0,)))
    made.freed((5, 8))
    made.freed((5,))
    assert made.held() == Held((HeldKv(71, (6,), 12, 10),), {5: 2, 8: 1})


def test_one_that_joins_again_has_what_it_was_pulled_with_and_computed_since() -> None:
    made = holdings(plan(0, join(0, 70, (4, 5), 100)), plan(1), plan(2))
    made.form(FORM)
    assert made.held().kv == (HeldKv(70, (4, 5), 103, 100),)
    made.step(plan(0, join(3, 70, (4, 5), 102, is_pulled=False)))
    assert made.held().kv == (HeldKv(70, (4, 5), 103, 100),)


def test_the_placement_follows_flips() -> None:
    made = holdings()
    other = np.roll(PLACEMENT.slot_to_expert_LRS[1], 1, axis=0)
    made.step(PrefillPlan(0, (), flips=(LayerFlip(1, 1, other.astype(np.int16).tobytes()),)))
    assert made.plan is not None
    placement = Placement.from_bytes(made.plan.slot_to_expert, 8, 2, made.plan.num_expert_slots)
    assert (placement.slot_to_expert_LRS[1] == other).all()
    assert (placement.slot_to_expert_LRS[0] == PLACEMENT.slot_to_expert_LRS[0]).all()


def test_named_blocks_are_held_until_they_are_freed_and_not_before_they_are_fetched() -> None:
    made = holdings()
    first, second = bytes([1]) * NAME_BYTES, bytes([2]) * NAME_BYTES
    made.loaded((5,))
    made.name(NamedBlocks((4, 5), first + second, NO_NAME + first))
    assert made.held().named == NamedBlocks((4,), first, NO_NAME)
    for has_run in (False, True):  # A failed step may not have fetched yet.
        made.step(PrefillPlan(0, (), fetches=(5,)))
        assert made.held().named == NamedBlocks((4,), first, NO_NAME)
        made.stepped(has_run=has_run)
    assert made.held().named == NamedBlocks((4, 5), first + second, NO_NAME + first)
    made.freed((4,))
    assert made.held().named == NamedBlocks((5,), second, first)
    made.name(NamedBlocks((), b"", b""), are_all=True)
    assert made.held().named == NamedBlocks((), b"", b"")
    made.loaded((6,))
    made.freed((6,))  # The read was not used after all; the block is computed now.
    made.name(NamedBlocks((6,), first, NO_NAME))
    assert 6 in made.held().named.block_ids


def test_what_is_read_anew_is_not_what_an_older_step_fetched() -> None:
    made, name = holdings(), bytes([1]) * NAME_BYTES
    made.loaded((5,))
    made.step(PrefillPlan(0, (), fetches=(5,)))
    made.freed((5,))
    made.loaded((5,))
    made.name(NamedBlocks((5,), name, NO_NAME))
    made.stepped(has_run=True)
    assert not made.held().named.block_ids
