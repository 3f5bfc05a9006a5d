"""Moves of experts, for people and for metrics: totals, the last moves, and the present placement.

Decides nothing.

Shapes: L MoE layers, R ranks, S expert slots of a rank, E logical experts.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats
from hadal.core.overview import LayerMove, UnitExperts
from hadal.core.placement import EMPTY, Placement
from hadal.policy.experts.balance import rank_loads
from hadal.roles.experts.gain import fractions
from hadal.roles.experts.install import Installation

_NUM_MOVES = 8
"""Number of last moves that are shown."""


class ExpertMoves:
    """Totals of installations, and the last ones."""

    def __init__(self) -> None:
        self.num_replicas_moved = 0
        self.num_layers_flipped = 0
        self.num_abandoned = 0
        """Installations that did not flip."""
        self._last: deque[tuple[Installation, Placement, Placement]] = deque(maxlen=_NUM_MOVES)
        """Last installations, each with its layer's placement before and after."""

    def flipped(self, install: Installation, before: Placement, after: Placement) -> None:
        """Add an installation, with its layer's placement before and after."""
        self._last.append((install, before, after))
        self.num_layers_flipped += 1
        self.num_replicas_moved += install.num_moved

    def last(self, loads_LE: Floats) -> tuple[LayerMove, ...]:
        """Return the last moves, oldest first, with their balance under these loads."""
        first = self.num_layers_flipped - len(self._last)
        return tuple(
            LayerMove(
                first + index,
                install.step_id,
                install.layer,
                install.num_moved,
                _rows(before.slot_to_expert_LRS[0]),
                _rows(after.slot_to_expert_LRS[0]),
                _evenness(before, loads_LE[install.layer]),
                _evenness(after, loads_LE[install.layer]),
            )
            for index, (install, before, after) in enumerate(self._last)
        )


def describe(
    placement: Placement, loads_LE: Floats, loads_LR: Floats, moves: ExpertMoves
) -> UnitExperts:
    """Return placement, recent loads and last moves, for people."""
    return UnitExperts(
        _relative(loads_LR),
        _relative(loads_LE),
        tuple(
            tuple(np.bincount(held[held != EMPTY], minlength=placement.num_experts).tolist())
            for held in placement.slot_to_expert_LRS
        ),
        moves.last(loads_LE),
    )


def _rows(slot_to_expert_RS: NDArray[np.int16]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in slot_to_expert_RS.tolist())


def _relative(loads: Floats) -> tuple[tuple[float, ...], ...]:
    """Return each layer's loads divided by their mean; zeros for layers without counts."""
    means = loads.mean(axis=1, keepdims=True)
    shares = loads / np.where(means > 0, means, 1.0)
    return tuple(tuple(row) for row in np.round(shares, 3).tolist())


def _evenness(layer: Placement, loads_E: Floats) -> float:
    """Return mean over maximum of the ranks' loads in a layer; 1 without any load."""
    loads_R = rank_loads(layer, loads_E[None], fractions(layer))[0]
    most = float(loads_R.max(initial=0.0))
    return round(float(loads_R.mean()) / most, 4) if most > 0 else 1.0
