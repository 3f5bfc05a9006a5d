"""Recent loads of a unit's experts and their balance over its ranks, from counts alone.

An interval covers all tokens that ranks received between two counted steps, or several such parts.
Loads of logical experts are kept for the last intervals and fade with age; the load under any other
placement follows from them. Balancedness is measured on the ranks' actual loads. Independent of
time; decides nothing.

Shapes: T intervals, L MoE layers, R ranks, S expert slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np

from hadal.core.arrays import Floats, Ints
from hadal.core.balance import EXPERTS, EXPERTS_WORST
from hadal.core.placement import Placement

GAUGE_FADE = 0.8
"""Weight of an interval relative to the next one in reported balancedness: about 5 matter."""


class CountsWindow:
    """Window of `num_intervals` intervals. An interval's weight halves every `half_life` intervals."""

    def __init__(
        self, num_layers: int, num_experts: int, num_intervals: int, half_life: float
    ) -> None:
        self.number = 0
        """Intervals added so far."""
        self._sizes = (num_layers, num_experts)
        self._fade = 0.5 ** (1.0 / half_life)
        self._loads: deque[Floats] = deque(maxlen=num_intervals)
        self._numbers: deque[int] = deque(maxlen=num_intervals)
        self._part: tuple[Floats, Floats] | None = None
        """(loads [L, E], received [L, ranks]) of the incomplete interval; None without one."""
        self._mean_L = np.zeros(num_layers)
        self._heaviest_L = np.zeros(num_layers)

    def __len__(self) -> int:
        return len(self._loads)

    def add(
        self,
        placement: Placement,
        counts_LRS: Ints,
        ranks: Collection[int],
        *,
        is_whole: bool = True,
    ) -> dict[str, float]:
        """Add a part of an interval; `is_whole`: this part completes it.

        Returns the balancedness of these counts over `ranks`; empty if no tokens were received.
        """
        received_LR = counts_LRS.sum(axis=2)[:, sorted(ranks)].astype(np.float64)
        loads_LE, all_LR = placement.by_expert(counts_LRS.astype(np.float64)), received_LR
        if self._part is not None:
            loads_LE, all_LR = loads_LE + self._part[0], all_LR + self._part[1]
        self._part = None if is_whole else (loads_LE, all_LR)
        if is_whole and loads_LE.any():
            self._loads.append(loads_LE)
            self._numbers.append(self.number)
            self.number += 1
            self._mean_L = GAUGE_FADE * self._mean_L + all_LR.mean(axis=1)
            self._heaviest_L = GAUGE_FADE * self._heaviest_L + all_LR.max(axis=1)
        return _objectives(received_LR.mean(axis=1), received_LR.max(axis=1))

    def drop_part(self) -> None:
        """Drop the incomplete interval, because the ranks have changed."""
        self._part = None

    def balance(self) -> dict[str, float]:
        """Return measured balancedness by objective, smoothed; empty until tokens were counted."""
        return _objectives(self._mean_L, self._heaviest_L)

    def summed(self) -> Floats:
        """Return the sum of all intervals' faded loads [L, E]."""
        total = np.zeros(self._sizes)
        for loads in self._loads:
            total = self._fade * total + loads
        return total

    def halves(self, layer: int) -> tuple[Floats, Floats]:
        """Return a layer's faded loads [T, E] of even-numbered and of odd-numbered intervals: one
        half to plan by, one to judge by.

        A plan looks too good on the counts that it was made from. An interval never changes halves.
        """
        ages = np.arange(len(self._loads))[::-1]
        loads = (
            np.array([one[layer] for one in self._loads]).reshape(len(ages), -1)
            * (self._fade**ages)[:, None]
        )
        is_even = np.array(self._numbers, np.int64) % 2 == 0
        return loads[is_even], loads[~is_even]

    def num_tokens(self, layer: int) -> float:
        """Return the tokens counted in a layer over the window, not faded."""
        return float(sum(loads[layer].sum() for loads in self._loads))


def _objectives(mean_L: Floats, heaviest_L: Floats) -> dict[str, float]:
    some = heaviest_L > 0
    if not some.any():
        return {}
    by_layer = mean_L[some] / heaviest_L[some]
    return {EXPERTS: float(by_layer.mean()), EXPERTS_WORST: float(by_layer.min())}
