"""Plans by rank: the unit's slots become the ranks' own, and how even they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from hadal.core.balance import KV, REQUESTS
from hadal.core.plans import DecodePlan, Join, Sampling
from hadal.roles.decode.leader import make_plans, step_balance
from hadal.roles.unit.schedule import ScheduleChoice


def test_every_rank_gets_its_own_slots() -> None:
    join = Join(1, (3,), 9, 1, 1, Sampling())
    choice = ScheduleChoice("sequential", 2, ())
    plans = make_plans(
        7,
        2,
        4,
        [0, 6],
        [(5, join)],
        [(2, 1, 8), (5, 0, 3)],
        [3],
        choice,
        ((1,), (2,)),
        is_traced=True,
        publishes_full=True,
        num_drafts=2,
        num_passes=3,
    )
    same: dict[str, Any] = {"publishes_full": True, "num_drafts": 2, "num_passes": 3}
    assert plans == (
        DecodePlan(7, (0,), (), ((2, 1, 8),), "sequential", (1,), 2, True, (3,), **same),
        # The join has its grown block already.
        DecodePlan(7, (2,), (join,), (), "sequential", (2,), 2, True, (), **same),
    )


def test_balance_is_of_living_ranks_and_of_a_step_with_work() -> None:
    assert step_balance([0, 2], np.array([(2, 100), (0, 0), (4, 100)])) == {KV: 1.0, REQUESTS: 0.75}
    assert step_balance([0, 1], np.array([(0, 0), (0, 0)])) == {}
    assert step_balance([], np.array([(0, 0)])) == {}
