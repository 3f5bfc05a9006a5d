"""The table of placements' imbalance, against the loads it was measured on where they are."""

from __future__ import annotations

import numpy as np
import pytest

from bench.expert_loads import DECODE as DECODE_LOADS
from bench.expert_loads import NUM_GROUPS, loads_folder, read_loads
from bench.expert_loads import PREFILL as PREFILL_LOADS
from hadal.core.balance import AUTO, OFF
from hadal.core.config import DECODE, PREFILL
from hadal.core.placement import spread, spread_by_node
from hadal.perf.imbalance import measured_imbalance
from hadal.perf.step import StepModel
from hadal.policy.expert_balance import Cluster, balance
from hadal.sim.placed import BALANCED, SPREAD, placed

FOLDER = loads_folder()
LOADS = {PREFILL: PREFILL_LOADS, DECODE: DECODE_LOADS}


@pytest.mark.skipif(FOLDER is None, reason="no measured expert loads: set HADAL_SHARED_DATA")
@pytest.mark.parametrize(
    ("role", "num_ranks", "num_redundant"), [(PREFILL, 32, 32), (DECODE, 144, 32), (DECODE, 96, 32)]
)
def test_the_table_is_what_the_loads_give(role: str, num_ranks: int, num_redundant: int) -> None:
    assert FOLDER is not None
    num_nodes = num_ranks // 8
    begin, best = [], []
    for name in LOADS[role]:
        loads = read_loads(FOLDER, name)
        sizes = len(loads), 256, num_ranks, num_redundant
        first = spread_by_node(*sizes, num_nodes) if role == PREFILL else spread(*sizes)
        begin.append(measured_imbalance(loads, first.slot_to_expert_LRS))
        cluster = Cluster.even(num_ranks, num_nodes, (256 + num_redundant) // num_ranks)
        mode = "hierarchical" if role == PREFILL else "global"
        best.append(np.mean(1.0 / balance(loads, cluster, mode=mode, num_groups=NUM_GROUPS).balancedness_L))
    assert np.mean(begin) == pytest.approx(SPREAD[role][num_ranks], abs=6e-4)
    assert np.mean(best) == pytest.approx(BALANCED[role, num_ranks, num_redundant], abs=6e-4)


def test_without_the_balancer_a_unit_is_less_even_and_more_so_the_more_ranks_it_has() -> None:
    for role, num_ranks, num_redundant in BALANCED:
        on, off = (placed(role, num_ranks, num_redundant, balance) for balance in (AUTO, OFF))
        assert on is not None
        assert off is not None
        assert off > on
    for role in SPREAD:
        values = [placed(role, num_ranks, 0, OFF) for num_ranks in range(1, 400)]
        assert all(one is not None for one in values)
        assert values == sorted(values)  # type: ignore[type-var]
    assert placed(DECODE, 80, 64, AUTO) is None


def test_a_step_takes_longer_without_it() -> None:
    on, off = (
        StepModel(144, placed=placed(DECODE, 144, 32, balance)).decode(88, 4989, mtp_tokens=0).seconds
        for balance in (AUTO, OFF)
    )
    assert off > 1.1 * on
