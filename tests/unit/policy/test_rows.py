"""Resting rows: the promise by the predicted line, equal shares, turns, and no starvation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from hadal.core.arrays import Bools
from hadal.policy.rows import (
    BATCH_PROMISE,
    BATCH_STEPS,
    RowsView,
    num_rows_within,
    requeued,
    resting_rows,
)
from tests.fresh import seeds
from tests.levels import MORE

TINY = (0.00012, 0.000043)
MID = (0.0019, 0.0005)
GPU = (0.03, 0.00002)
LINES = (TINY, MID, GPU)
BATCH = 100
"""Tenants with this number or a higher one run batches."""


@dataclass
class Unit:
    """Rows of (rank, tenant), computed step by step."""

    rows: list[tuple[int, int]]
    line: tuple[float, float] = MID
    promise: float = 2.0
    weights: dict[int, float] = field(default_factory=dict)
    turns: list[int] = field(default_factory=list)
    step_id: int = 1

    def __post_init__(self) -> None:
        self.turns += [0] * (len(self.rows) - len(self.turns))

    def view(self) -> RowsView:
        tenants = np.array([tenant for _, tenant in self.rows], np.int64)
        return RowsView(
            np.array([rank for rank, _ in self.rows], np.int64),
            tenants,
            np.array([self.weights.get(tenant, 1.0) for _, tenant in self.rows]),
            tenants >= BATCH,
            np.array(self.turns, np.int64),
        )

    def step(self) -> Bools:
        """Return a mask of the rows that the next step computes."""
        found = resting_rows(self.view(), self.line, self.promise, self.step_id)
        computed = np.ones(len(self.rows), np.bool_) if found is None else ~found
        self.turns = requeued(np.array(self.turns, np.int64), computed).tolist()
        self.step_id += 1
        return computed

    def counts(self, computed: Bools, rank: int = 0) -> Counter[int]:
        """Return the number of rows of each tenant that a rank computes."""
        return Counter(
            self.rows[row][1]
            for row in np.flatnonzero(computed).tolist()
            if self.rows[row][0] == rank
        )


def unit_of(*counts: int, **options: object) -> Unit:
    """Return one rank with `counts` rows of tenants 0, 1, ..."""
    rows = [(0, tenant) for tenant, count in enumerate(counts) for _ in range(count)]
    return Unit(rows, **options)  # type: ignore[arg-type]


def test_a_tenant_alone_has_all_its_rows() -> None:
    assert unit_of(64).step().all()
    assert Unit([(0, BATCH)] * 64).step().all()
    assert Unit([(0, BATCH)] * 32 + [(0, BATCH + 1)] * 32).step().all(), "batches among themselves"
    assert resting_rows(unit_of().view(), MID, 2.0, 1) is None


def test_all_rows_are_computed_where_they_cost_nothing_or_nothing_was_measured() -> None:
    assert unit_of(1, 63, line=GPU).step().all()
    assert unit_of(1, 63, line=(0.0, 0.0)).step().all()
    assert unit_of(1, 63, promise=1000.0).step().all()


def test_others_fill_what_the_promise_leaves_and_take_turns() -> None:
    unit = unit_of(2, 30, line=MID, promise=2.0)
    num_within = num_rows_within(MID, 2.0, 2)
    assert num_within == 7
    seen: Counter[int] = Counter()
    for _ in range(6):
        computed = unit.step()
        assert unit.counts(computed) == {0: 2, 1: 5}
        seen.update(np.flatnonzero(computed).tolist())
    assert seen == {row: 6 if row < 2 else 1 for row in range(32)}, "each row once in six steps"


def test_rows_of_a_tenant_are_computed_equally_often() -> None:
    unit = unit_of(1, 7, line=MID, promise=2.0)
    computed = np.sum([unit.step() for _ in range(7 * 4)], axis=0)
    assert computed.tolist() == [28] + [16] * 7


def test_equal_shares_come_before_the_promise() -> None:
    unit = unit_of(30, 32, promise=1.1)
    assert unit.counts(unit.step()) == {0: 30, 1: 30}
    unit = unit_of(1, 1, 1, 1, 32, promise=1.1)
    assert unit.counts(unit.step()) == dict.fromkeys(range(5), 1)


def test_what_is_left_is_shared_by_weights() -> None:
    unit = unit_of(1, 30, 30, weights={2: 2.0}, promise=4.0)
    seen: Counter[int] = Counter()
    for _ in range(60):
        seen += unit.counts(unit.step())
    assert seen[0] == 60
    assert abs(seen[2] - 2 * seen[1]) <= 60, "to a row of a step"


def test_a_heavier_weight_makes_a_tenant_the_lighter_one() -> None:
    unit = unit_of(4, 6, weights={1: 3.0}, promise=1.0)
    assert unit.counts(unit.step()) == {0: 2, 1: 6}


def test_a_batch_gives_way_at_the_next_step_and_has_all_of_it_alone() -> None:
    rows = [(0, BATCH)] * 30
    assert Unit(rows).step().all()
    unit = Unit([*rows, (0, 0), (0, 0)])
    assert unit.counts(unit.step()) == {0: 2}
    counts = [unit.counts(unit.step()) for _ in range(BATCH_STEPS * 30)]
    assert all(each[0] == 2 for each in counts)
    assert sum(each[BATCH] for each in counts) == 30, "one row in BATCH_STEPS steps"
    unit = Unit([(0, BATCH)] * 30 + [(0, 0)] * 20)
    assert unit.counts(unit.step()) == {0: 20, BATCH: 2}, "a tenth of the step"


def drawn(random: Random) -> Unit:
    """Draw tenants with few and many rows, batches, and several ranks."""
    num_ranks = random.choice([1, 1, 1, 2, 4])
    rows = []
    for tenant in [
        *range(random.randint(1, 5)),
        *range(BATCH, BATCH + random.choice([0, 0, 1, 2])),
    ]:
        for _ in range(random.choice([1, 1, 2, 4, random.randint(1, 32)])):
            rows.append((random.randrange(num_ranks), tenant))
    weights = {tenant: random.choice([1.0, 1.0, 2.0, 0.5]) for _, tenant in rows}
    promise = random.choice([1.0, 1.1, 1.6, 2.0, 4.0])
    return Unit(rows, random.choice(LINES), promise, weights)


def longest_s(unit: Unit, computed: Bools, *, is_batch: bool | None = None) -> float:
    """Return the seconds of a step by the line. `is_batch`: True counts rows of batches only, False others only."""
    counts = Counter(
        unit.rows[row][0]
        for row in np.flatnonzero(computed).tolist()
        if is_batch is None or (unit.rows[row][1] >= BATCH) is is_batch
    )
    return unit.line[0] + unit.line[1] * max(counts.values(), default=0)


def check_promise(unit: Unit, computed: Bools) -> None:
    """Check that all rows of the lightest tenant are computed, and that the step is as short as promised,
    or as equal shares allow.
    """
    held = Counter((rank, tenant) for rank, tenant in unit.rows if tenant < BATCH)
    if not held:
        assert computed.all()
        return
    tenant_to_num = {
        tenant: max(num for (_, other), num in held.items() if other == tenant)
        for _, tenant in held
    }
    share = {tenant: num / unit.weights[tenant] for tenant, num in tenant_to_num.items()}
    least = min(share, key=lambda tenant: share[tenant])
    assert all(computed[row] for row, (_, tenant) in enumerate(unit.rows) if tenant == least)
    equal = Counter(
        {
            rank: sum(
                min(num, int(np.ceil(share[least] * unit.weights[tenant])))
                for (at, tenant), num in held.items()
                if at == rank
            )
            for rank, _ in held
        }
    )
    step_s, row_s = unit.line
    alone_s = step_s + row_s * tenant_to_num[least]
    equal_s = step_s + row_s * max(equal.values())
    direct_s = longest_s(unit, computed, is_batch=False)
    lights = [num for tenant, num in tenant_to_num.items() if share[tenant] == share[least]]
    allowed_s = unit.promise * max(alone_s, step_s + row_s * max(lights))
    assert direct_s <= max(allowed_s, equal_s) * (1 + 1e-9)
    if (unit.step_id - 1) % BATCH_STEPS:
        assert longest_s(unit, computed) <= BATCH_PROMISE * direct_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(1, 1))
def test_the_promise_holds_by_the_line_and_no_row_starves(seed: int) -> None:
    print("seed", seed)
    random = Random(seed)
    for _ in range(200 if MORE else 30):
        unit = drawn(random)
        held = Counter(unit.rows)
        batch_rows = Counter(rank for rank, tenant in unit.rows if tenant >= BATCH)
        rested = [0] * len(unit.rows)
        for _ in range(80):
            computed = unit.step()
            check_promise(unit, computed)
            rested = [0 if is_in else num + 1 for num, is_in in zip(rested, computed, strict=True)]
            for (rank, tenant), num in zip(unit.rows, rested, strict=True):
                if tenant < BATCH:
                    assert num < held[rank, tenant]
                else:
                    assert num <= BATCH_STEPS * batch_rows[rank]


def test_a_row_that_comes_passes_no_row_of_its_tenant() -> None:
    """Add one new row per step that ends with its first token: no older row is kept waiting."""
    unit = unit_of(1, 8, line=MID, promise=1.0)
    last = dict.fromkeys(range(1, 9), 0)
    for step in range(1, 40):
        unit.rows.append((0, 1))
        unit.turns.append(max(unit.turns) + 1)
        computed = unit.step()
        for row in last:
            last[row] = step if computed[row] else last[row]
            assert step - last[row] <= 8
        while len(unit.rows) > 9:
            gone = len(unit.rows) - 1
            unit.rows.pop(gone)
            unit.turns.pop(gone)
