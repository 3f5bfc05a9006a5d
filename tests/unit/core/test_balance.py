"""What every gauge of balance is."""

from __future__ import annotations

import pytest

from hadal.core.balance import mean_over_max


def test_mean_over_max() -> None:
    assert mean_over_max([2, 2, 2]) == 1.0
    assert mean_over_max([4, 0]) == pytest.approx(0.5)
    assert mean_over_max([0, 0]) is None
    assert mean_over_max([]) is None
