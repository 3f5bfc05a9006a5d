"""Test plans by rank: slot numbers of the unit become those of each rank. Also the balance of a step."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from hadal.core.balance import KV, REQUESTS
from hadal.core.plans import DecodePlan, Join, Sampling
from hadal.roles.decode.plans import StepNews, make_plans, step_balance


def test_every_rank_gets_its_own_slots() -> None:
    join = Join(1, (3,), 9, 1, 1, Sampling())
    same = DecodePlan(
        7, (), (), (), "sequential", (), 2, True, publishes_full=True, num_drafts=2, num_passes=3
    )
    second = ((1,), (2,), (), ())
    news = StepNews([0, 6], [(5, join)], [(2, 1, 8), (5, 0, 3)], [3], [2, 7, 9], second)
    assert make_plans(same, 4, 4, news) == (
        replace(same, leaves=(0,), grown=((2, 1, 8),), second=(1,), publishes=(3,), resting=(2,)),
        # The join includes its grown block already.
        replace(same, leaves=(2,), joins=(join,), second=(2,), resting=(3,)),
        replace(same, resting=(1,)),
        same,
    )


def test_balance_is_of_living_ranks_and_of_a_step_with_work() -> None:
    assert step_balance([0, 2], np.array([(2, 100), (0, 0), (4, 100)])) == {KV: 1.0, REQUESTS: 0.75}
    assert step_balance([0, 1], np.array([(0, 0), (0, 0)])) == {}
    assert step_balance([], np.array([(0, 0)])) == {}
