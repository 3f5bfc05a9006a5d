"""The number of passes in a decode plan."""

from __future__ import annotations

import pytest

from hadal.policy.passes import PASSES_MAX, PLAN_S, passes_of


@pytest.mark.parametrize(
    ("pass_s", "num"),
    [
        (0.0, 1),
        (PLAN_S, 1),
        (0.03, 1),
        (PLAN_S / 2, 2),
        (PLAN_S / 2.9, 2),
        (1e-6, PASSES_MAX),
    ],
)
def test_a_plan_lasts_as_long_as_a_leader_needs(pass_s: float, num: int) -> None:
    assert passes_of(pass_s) == num
