"""Does another placement of a layer's experts pay? The terms of that decision, and its arithmetic.

    gain = growing seconds of the layer's experts in a step * (1 - heaviest new / heaviest now) *
    steps it will hold cost = most replicas that a rank gets * seconds of staging one * share by
    which that slows steps + pause of the flip

Ranks stage side by side, and a step is slowed as long as any of them does; how many replicas travel
in all is bounded by a budget instead. The heaviest rank is what a step waits for, so both heaviest
loads are means of the intervals' own maxima. They are judged on intervals that the plan has not
seen; the difference must stand out of what it varies by from one interval to the next, or chance
would move experts to and fro. Knows no ranks' processes and no steps.

Shapes: T intervals, E logical experts, R ranks, S expert slots of a rank, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats
from hadal.core.placement import EMPTY, Placement
from hadal.policy.experts.tables import held_loads

_SMOOTHING = 0.2
"""Weight of a new measurement of a pause or a replica: the last five count for two thirds."""
_OUTLIER = 3.0
"""What took so many times what is known counts as that at most. They are measured only when layers
move: one hiccup must not make moving look too dear ever to be measured again.
"""


@dataclass(frozen=True, slots=True)
class ExpertTerms:
    """What is assumed where nothing is measured, and how careful to be."""

    count_every_steps: int = 16
    """An interval. Counts cost a rank a copy of [L, S] numbers; a V3 decode step of 50 ms makes
    this 0.8 s.
    """
    num_intervals: int = 32
    """The window: 512 steps. Serving systems count over some hundred to a thousand (vLLM and
    SGLang: 1000).
    """
    half_life: float = 8.0
    """Intervals after which loads count half, so that a change of regime is most of the window
    after 128 steps.
    """
    num_intervals_min: int = 6
    """Three to plan by and three to judge by: fewer have no spread to speak of."""
    tokens_per_expert_min: float = 16.0
    """Tokens of the window for a mean expert of a layer. An expert's count then has a sampling
    error of a quarter: what is planned by less is mostly noise.
    """
    horizon_steps: float = 1000.0
    """How long a plan is thought to hold: others plan anew as often (SGLang after 1000 steps, vLLM
    after 3000).
    """
    gain_min: float = 0.01
    """Least gain, as a part of the heaviest rank's load. Sampling of a step alone takes .7 points
    from a perfect plan of 32 prefill ranks and five of 144 decode ranks, so less cannot be seen.
    """
    num_sigmas: float = 3.0
    """A gain must exceed so many standard errors of its mean. Layers are looked at hundreds of
    times.
    """
    payback: float = 2.0
    """A gain must exceed its cost so many times: both are estimates."""
    moves_share: float = 0.1
    """Share of a layer's expert slots that may change in one installation: better placements are
    within a tenth of the expert slots under drift, and what is left comes with the next one.
    """
    target: float = 0.98
    """Balancedness at which an incremental plan stops to look for moves."""
    background_share: float = 0.1
    """How much staging slows the steps that run beside it: it may take a tenth of a core
    (runtime/worker).
    """
    replica_s: float = 0.003
    """Staging of a replica before one was measured: 44 MB of a V3 expert in FP8 through a NIC of 25
    GB/s are 2 ms.
    """
    pause_s: float = 0.002
    """A flip before one was measured: pointers and a table of 256 experts."""
    stage_timeout_s: float = 60.0
    """Three replicas for one rank (a tenth of 288 expert slots, on ten ranks at least) from the
    slowest of disks.
    """
    backoff_s: float = 10.0
    """After a failure nothing is staged for so long, and for twice as long after each further
    one.
    """
    backoff_max_s: float = 600.0
    plan_every_steps: int = 4
    """One planning call in so many steps. Measured with E = 256 on a shared core: 11 ms for a
    split, 12 to 20 ms for moves (bench/balance_experts, `1 layer ms`), 33 ms at worst (144 ranks of
    2 expert slots and 32 of 9 alike). It begins when the step's plans are sent: with two steps in
    flight, the ranks do not wait for it while a step takes longer.
    """
    rest_intervals: int = 32
    """A layer for which nothing paid is looked at again when the whole window is another, or once
    its balancedness is worse than it was by `worse_min`.
    """
    worse_min: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "count_every_steps",
            "num_intervals_min",
            "plan_every_steps",
            "stage_timeout_s",
            "half_life",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive.")
        if not 2 <= self.num_intervals_min <= self.num_intervals:
            raise ValueError(
                "num_intervals_min is 2 at least (a half to plan by, one to judge by) and in the"
                " window."
            )


PREFILL_TERMS = ExpertTerms(count_every_steps=4)
"""A prefill step has hundreds of times a decode step's tokens and takes several times as long:
fewer say as much.
"""


class MoveCosts:
    """Seconds that it takes to move experts, measured whenever some move."""

    def __init__(self, terms: ExpertTerms) -> None:
        self.replica_s = terms.replica_s
        """Seconds of staging a replica."""
        self.pause_s = terms.pause_s
        """Seconds of a flip."""

    def staged(self, replica_s: float) -> None:
        """Take in the seconds per replica of a rank that staged some."""
        self.replica_s = _toward(self.replica_s, replica_s)

    def paused(self, pause_s: float) -> None:
        """Take in the seconds of a flip."""
        self.pause_s = _toward(self.pause_s, pause_s)


def _toward(known_s: float, measured_s: float) -> float:
    return known_s + _SMOOTHING * (min(measured_s, _OUTLIER * known_s) - known_s)


def fractions(placement: Placement) -> Floats:
    """Share of its expert's tokens that each expert slot takes [L, R, S]; empty ones take 0."""
    table = placement.slot_to_expert_LRS.astype(np.int64)
    weights = (
        np.ones(table.shape)
        if placement.weights_LRS is None
        else placement.weights_LRS.astype(np.float64)
    )
    total = held_loads(table, placement.by_expert(weights))
    return np.asarray(np.where(table == EMPTY, 0.0, weights) / np.where(total > 0, total, 1.0))


def heaviest(
    loads_TE: Floats, slot_to_expert_RS: NDArray[np.int16], fractions_RS: Floats
) -> Floats:
    """Load of each interval's heaviest rank [T]."""
    num_ranks, num_expert_slots = slot_to_expert_RS.shape
    share_ER = np.zeros((loads_TE.shape[1], num_ranks))
    ranks = np.repeat(np.arange(num_ranks), num_expert_slots)
    flat = slot_to_expert_RS.ravel().astype(np.int64)
    held = flat != EMPTY
    np.add.at(share_ER, (flat[held], ranks[held]), fractions_RS.ravel()[held])
    result: Floats = (loads_TE @ share_ER).max(axis=1)
    return result


def sure_gain(now_T: Floats, new_T: Floats, terms: ExpertTerms) -> float:
    """Fraction by which the heaviest rank becomes lighter; 0 if that is too little or may be
    chance.
    """
    total = float(now_T.sum())
    if len(now_T) < 2 or total <= 0.0:
        return 0.0
    saved_T = now_T - new_T
    error = float(saved_T.std(ddof=1)) / float(np.sqrt(len(saved_T)))
    gain = float(saved_T.sum()) / total
    is_sure = float(saved_T.mean()) > terms.num_sigmas * error
    return gain if is_sure and gain >= terms.gain_min else 0.0


def pays(
    gain: float,
    layer_s: float,
    num_staged: int,
    replica_s: float,
    pause_s: float,
    terms: ExpertTerms,
) -> bool:
    """`layer_s`: growing seconds of the layer's experts in a step; `num_staged`: most that one rank
    stages.
    """
    cost_s = num_staged * replica_s * terms.background_share + pause_s
    return gain > 0.0 and gain * layer_s * terms.horizon_steps > terms.payback * cost_s
