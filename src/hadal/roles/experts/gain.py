"""Gain and cost of another placement of a layer's experts, and the terms of the decision to install
it.

    gain = growing seconds of the layer's experts per step * (1 - heaviest new / heaviest now) * steps it lasts
    cost = most replicas that a rank stages * seconds per replica * share by which that slows steps + pause of the flip

Ranks stage in parallel, and steps are slowed while any rank stages. The total number of replicas
sent is bounded by a budget instead. A step waits for its heaviest rank, so both heaviest loads are
means of the intervals' own maxima. They are judged on intervals that the plan was not made from. The
difference must exceed its variation between intervals; otherwise chance would move experts back and
forth. Independent of ranks' processes and of steps.

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
"""Weight of a new measurement of a pause or a replica: the last five weigh two thirds together."""
_OUTLIER = 3.0
"""Largest ratio of a measurement to the known value; a larger measurement is capped. Costs are
measured only when layers move: one hiccup must not make moves look too expensive to try again.
"""


@dataclass(frozen=True, slots=True)
class ExpertTerms:
    """Assumptions until costs are measured, and safety margins of the decision."""

    count_every_steps: int = 16
    """Length of an interval, steps. A count costs each rank a copy of [L, S] numbers. With V3
    decode steps of 50 ms an interval lasts 0.8 s.
    """
    num_intervals: int = 32
    """Intervals in the window: 512 steps. Other serving systems count over several hundred to a
    thousand steps (vLLM and SGLang: 1000).
    """
    half_life: float = 8.0
    """Age at which loads count half, intervals. After 128 steps, a changed load makes up
    about half of the window.
    """
    num_intervals_min: int = 6
    """Minimum for a plan: three intervals to plan by and three to judge by, for a usable spread."""
    tokens_per_expert_min: float = 16.0
    """Minimum tokens in the window per expert of a layer, on average. An expert's count then has a
    sampling error of 25 %; a plan from fewer tokens would be mostly noise.
    """
    horizon_steps: float = 1000.0
    """Steps for which a plan is assumed to hold. Others replan at similar periods (SGLang after
    1000 steps, vLLM after 3000).
    """
    gain_min: float = 0.01
    """Minimum gain, as a fraction of the heaviest rank's load. Smaller gains cannot be measured:
    the sampling of a step alone costs a perfect plan 0.7 percentage points with 32 prefill ranks,
    and five with 144 decode ranks.
    """
    num_sigmas: float = 3.0
    """Number of its standard errors that a mean gain must exceed. Layers are examined hundreds of
    times, so chance alone must rarely pass.
    """
    payback: float = 2.0
    """Minimum ratio of gain to cost. It exceeds 1 because both are estimates."""
    moves_share: float = 0.1
    """Share of a layer's expert slots that may change in one installation. When loads drift, better
    placements are within a tenth of the slots; the next installation moves the rest.
    """
    target: float = 0.98
    """Balancedness at which an incremental plan stops searching for moves."""
    background_share: float = 0.1
    """Fraction by which staging slows concurrent steps: it may use 0.1 cores (runtime/worker)."""
    replica_s: float = 0.003
    """Assumed seconds to stage a replica, until one is measured. A V3 expert in FP8 has 44 MB: 2 ms
    through a NIC of 25 GB/s.
    """
    pause_s: float = 0.002
    """Assumed seconds of a flip, until measured: it sets pointers and a table of 256 experts."""
    stage_timeout_s: float = 60.0
    """Deadline of a staging, seconds: enough for three replicas of one rank (a tenth of 288 expert
    slots, over at least ten ranks) from the slowest disks.
    """
    backoff_s: float = 10.0
    """Seconds without staging after a failure; doubled with each further failure."""
    backoff_max_s: float = 600.0
    plan_every_steps: int = 4
    """Steps per planning call. Measured with E = 256 on a shared core: 11 ms for a split, 12 to 20
    ms for moves (bench/balance_experts, `1 layer ms`), 33 ms at worst (with 144 ranks of 2 expert
    slots as with 32 of 9). A call begins after a step's plans are sent. With two steps in flight,
    it does not delay ranks if a step takes longer than the call.
    """
    rest_intervals: int = 32
    """Intervals until a layer without a paying change is examined again: a whole new window, or
    fewer while the window is shorter. It is examined earlier if its balancedness falls by
    `worse_min`.
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
                "num_intervals_min must be at least 2 (half for the plan, half to judge it), at"
                " most num_intervals."
            )


PREFILL_TERMS = ExpertTerms(count_every_steps=4)
"""Terms of prefill units. A prefill step has hundreds of times a decode step's tokens and takes
several times as long, so fewer steps give as good a measurement.
"""


class MoveCosts:
    """Measured costs of moving experts, updated with each move."""

    def __init__(self, terms: ExpertTerms) -> None:
        self.replica_s = terms.replica_s
        """Seconds to stage a replica."""
        self.pause_s = terms.pause_s
        """Seconds of a flip."""

    def staged(self, replica_s: float) -> None:
        """Add a measurement: seconds per replica of a rank that staged some."""
        self.replica_s = _toward(self.replica_s, replica_s)

    def paused(self, pause_s: float) -> None:
        """Add a measurement: seconds of a flip."""
        self.pause_s = _toward(self.pause_s, pause_s)


def _toward(known_s: float, measured_s: float) -> float:
    return known_s + _SMOOTHING * (min(measured_s, _OUTLIER * known_s) - known_s)


def fractions(placement: Placement) -> Floats:
    """Return each expert slot's share of its expert's tokens [L, R, S]; 0 for empty slots."""
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
    """Return the load of each interval's heaviest rank [T]."""
    num_ranks, num_expert_slots = slot_to_expert_RS.shape
    share_ER = np.zeros((loads_TE.shape[1], num_ranks))
    ranks = np.repeat(np.arange(num_ranks), num_expert_slots)
    flat = slot_to_expert_RS.ravel().astype(np.int64)
    held = flat != EMPTY
    np.add.at(share_ER, (flat[held], ranks[held]), fractions_RS.ravel()[held])
    result: Floats = (loads_TE @ share_ER).max(axis=1)
    return result


def sure_gain(now_T: Floats, new_T: Floats, terms: ExpertTerms) -> float:
    """Return the fraction by which the heaviest rank's load falls; 0 if tiny or possibly chance."""
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
    """Return whether a gain exceeds its cost. `layer_s`: growing seconds of the layer's experts per
    step. `num_staged`: most replicas that one rank stages.
    """
    cost_s = num_staged * replica_s * terms.background_share + pause_s
    return gain > 0.0 and gain * layer_s * terms.horizon_steps > terms.payback * cost_s
