"""Choice of the next layer to examine, and of the changes of its experts to try.

The first try is a new split of the layer's tokens, which moves nothing. The second is a placement
within the whole budget of moves. If that has a gain but does not pay, the third is a placement
within a part of the budget. If nothing pays, the layer rests: it is not examined for a while.
Depends on loads and costs, but not on ranks' processes or steps.

Shapes: T intervals, L MoE layers, R ranks, S expert slots of a rank, E logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats
from hadal.core.placement import EMPTY, Placement, parts_of
from hadal.policy.experts.balance import Cluster, balance, rank_loads
from hadal.policy.experts.splits import split_loads
from hadal.roles.experts.gain import ExpertTerms, MoveCosts, fractions, heaviest, pays, sure_gain
from hadal.roles.experts.window import CountsWindow

_FEW = 0.25
"""Share of the budget of moves that is tried if the whole budget has a gain but does not pay."""


@dataclass(frozen=True, eq=False, slots=True)
class LayerChange:
    """New placement of a layer's experts. `weights_RS` None: replicas take equal parts."""

    layer: int
    slot_to_expert_RS: NDArray[np.int16]
    weights_RS: NDArray[np.uint8] | None
    num_moved: int
    """Number of experts that are new to a rank, summed over ranks."""


class LayerRests:
    """Layers that are not examined for some intervals of the window."""

    def __init__(self, window: CountsWindow, num_layers: int) -> None:
        self._window = window
        self._until = np.zeros(num_layers, np.int64)
        """Per layer, the number of the interval until which it rests."""
        self._lack = np.ones(num_layers)
        """Per layer, the lack of balance (1 - balancedness) above which its rest ends early."""

    def rest(self, layer: int, num_intervals: int, lack: float = 1.0) -> None:
        """Skip the layer for some intervals, or until it lacks more balance than `lack`."""
        self._until[layer] = self._window.number + num_intervals
        self._lack[layer] = lack

    def are_over(self, lack_L: Floats) -> NDArray[np.bool_]:
        """Return a mask of layers that may be examined. `lack_L`: 1 - balancedness of each layer."""
        return np.asarray((self._until <= self._window.number) | (lack_L > self._lack))


class ExpertPlanner:
    """Planner of one unit's expert changes.

    `nodes`: rank -> its node. `num_groups`: number of the gate's groups, if each group should stay
    on one node as far as balance allows; 0: nodes do not matter.
    """

    def __init__(
        self,
        window: CountsWindow,
        rests: LayerRests,
        costs: MoveCosts,
        terms: ExpertTerms,
        nodes: tuple[int, ...],
        num_groups: int,
    ) -> None:
        self._window = window
        self._rests = rests
        self._costs = costs
        self._terms = terms
        self._nodes = nodes
        self._num_groups = num_groups
        self._num_unplanned = 0
        """Steps since the last planning call."""
        self._next_try: tuple[int, float] | None = None
        """(layer, share of the budget of moves) to try next, after a smaller change did not pay or
        a larger one was too expensive.
        """

    def done(self) -> None:
        """Count a step that all ranks did."""
        self._num_unplanned += 1

    @property
    def is_due(self) -> bool:
        """True if enough steps and intervals have passed to examine a layer."""
        return (
            self._num_unplanned >= self._terms.plan_every_steps
            and len(self._window) >= self._terms.num_intervals_min
        )

    def look(
        self, placement: Placement, fractions_LRS: Floats, growing_s: float
    ) -> LayerChange | None:
        """Examine one layer. Return another split or placement of it if that pays, else None.

        `growing_s`: part of one MoE layer's expert time in a step that grows with tokens, seconds.
        """
        self._num_unplanned = 0
        loads_LR = rank_loads(placement, self._window.summed(), fractions_LRS)
        layer_s = _layer_seconds(loads_LR, growing_s)
        layer, share = self._next_try or (
            self._most_promising(loads_LR, layer_s, placement.num_experts),
            0.0,
        )
        self._next_try = None
        if layer is None:
            return None
        to_plan, to_judge = self._window.halves(layer)
        slot_to_expert_RS, weights_RS = (
            self._moved(placement, layer, to_plan, share)
            if share
            else _split(placement, layer, to_plan)
        )
        now = placement.slot_to_expert_LRS[layer]
        new = Placement(
            placement.num_experts,
            slot_to_expert_RS[None],
            None if weights_RS is None else weights_RS[None],
        )
        before_and_after = zip(now.tolist(), slot_to_expert_RS.tolist(), strict=True)
        num_new = [len(set(after) - set(before) - {EMPTY}) for before, after in before_and_after]
        costs = self._costs
        gain = sure_gain(
            heaviest(to_judge, now, fractions_LRS[layer]),
            heaviest(to_judge, slot_to_expert_RS, fractions(new)[0]),
            self._terms,
        )
        if pays(
            gain, float(layer_s[layer]), max(num_new), costs.replica_s, costs.pause_s, self._terms
        ):
            return LayerChange(layer, slot_to_expert_RS, weights_RS, sum(num_new))
        if not share:
            self._next_try = (layer, 1.0)
        elif share > _FEW and gain > 0.0:
            self._next_try = (layer, _FEW)  # Too expensive, but the first moves save most.
        else:
            lack = 1.0 - float(loads_LR[layer].mean()) / max(float(loads_LR[layer].max()), 1e-12)
            # By then the window has twice as many intervals, or only new ones.
            num_intervals = min(self._terms.rest_intervals, len(self._window))
            self._rests.rest(layer, num_intervals, lack + self._terms.worse_min)
        return None

    def _most_promising(self, loads_LR: Floats, layer_s: Floats, num_experts: int) -> int | None:
        """Return the layer in which perfect balance would save most; None if no layer is due."""
        heaviest_L = loads_LR.max(axis=1)
        lack_L = np.where(
            heaviest_L > 0,
            1.0 - loads_LR.mean(axis=1) / np.where(heaviest_L > 0, heaviest_L, 1.0),
            0.0,
        )
        saved_L = lack_L * layer_s * self._terms.horizon_steps
        is_due = self._rests.are_over(lack_L)
        is_due &= lack_L >= self._terms.gain_min
        is_due &= saved_L > self._terms.payback * self._costs.pause_s
        tokens_min = self._terms.tokens_per_expert_min * num_experts
        for layer in np.argsort(-saved_L, kind="stable").tolist():
            if is_due[layer] and self._window.num_tokens(layer) >= tokens_min:
                return int(layer)
        return None

    def _moved(
        self, placement: Placement, layer: int, loads_TE: Floats, share: float
    ) -> tuple[NDArray[np.int16], NDArray[np.uint8] | None]:
        """Return a better placement of the layer within a share of the move budget, and its parts."""
        slots = placement.slot_to_expert_LRS[layer : layer + 1]
        num_moves = max(
            2, int(share * self._terms.moves_share * int((slots != EMPTY).sum()))
        )  # At least two moves, so that two ranks can swap experts.
        plan = balance(
            loads_TE[:, None],
            Cluster((slots.shape[2],) * slots.shape[1], self._nodes),
            target=self._terms.target,
            mode="hybrid" if self._num_groups else "global",
            num_groups=max(self._num_groups, 1),
            current=Placement(placement.num_experts, slots),
            max_moves=num_moves,
            weighted=True,
        )
        slot_to_expert_RS = plan.placement.slot_to_expert_LRS[0]
        assert plan.split_LRS is not None
        return slot_to_expert_RS, _weights(slot_to_expert_RS, plan.split_LRS[0])


def _split(
    placement: Placement, layer: int, loads_TE: Floats
) -> tuple[NDArray[np.int16], NDArray[np.uint8] | None]:
    """Return the layer's unchanged expert slots, and the parts that balance its ranks."""
    slot_to_expert_RS = placement.slot_to_expert_LRS[layer]
    split = split_loads(slot_to_expert_RS[None].astype(np.int64), loads_TE.sum(axis=0)[None])
    return slot_to_expert_RS, _weights(slot_to_expert_RS, split[0])


def _layer_seconds(loads_LR: Floats, growing_s: float) -> Floats:
    """Return each layer's growing seconds [L]: `growing_s` times its heaviest rank's load over the
    mean of all layers' heaviest loads.
    """
    heaviest_L = loads_LR.max(axis=1)
    mean = float(heaviest_L.mean())
    return np.asarray(growing_s * heaviest_L / mean if mean > 0 else np.zeros(len(heaviest_L)))


def _weights(slot_to_expert_RS: NDArray[np.int16], split_RS: Floats) -> NDArray[np.uint8] | None:
    """Return a split as integer parts; None if all replicas take equal parts."""
    parts = parts_of(slot_to_expert_RS, split_RS)
    return None if (parts[slot_to_expert_RS != EMPTY] == 1).all() else parts
