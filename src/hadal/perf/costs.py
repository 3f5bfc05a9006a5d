"""Learn the times of a step's ops from past steps, and choose the cheapest way to run the next one.

    seconds of an op on one micro-batch in one layer = fixed + per_token * tokens  (+ per_pair * pairs for attn_core)

The fixed part does not shrink when a batch is halved: launches, and reading weights. Steps of
similar size share a bin with the recent mean, and the line is fitted to the bins, so a size that
runs a thousand times in a row does not displace the others. If only one size was seen, the split
into fixed and per token is a guess (`_SHARES`), close to "half the tokens, half the time": so the
halves are tried once, and their times are then known. Independent of any clock: op times come in
StepDone.

Shapes: B bins, C columns of the fit (fixed, per token, per pair).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats
from hadal.core.plans import OpTime
from hadal.core.rates import StepRates
from hadal.overlap.plan import (
    ATTN_CORE,
    ATTN_IN,
    COMBINE,
    DISPATCH,
    EXPERTS,
    GATE,
    SEQUENTIAL,
    SHARED,
    Schedule,
)
from hadal.perf.price import OpSeconds, price

POST = "post"
EVERY_LAYER = (ATTN_IN, ATTN_CORE, SHARED)
"""Ops that dense layers have too; a dense layer's network runs as `shared`. Their time is spread
evenly over all layers.
"""
OPS = (*EVERY_LAYER, GATE, DISPATCH, EXPERTS, COMBINE, POST)
NUM_POSTS = 4
"""Starts and finishes in a layer."""

MAX_BINS = 16
_GAIN = 0.2
"""Weight of a new step in its bin, once five are in the bin."""
_OUTLIER = 3.0
"""Largest ratio of a time to its bin's mean; a longer time is capped, as other work delayed it."""
_AGE_STEPS = 2000.0
"""Steps after which an unused bin counts half."""
_PRIOR = 0.003
_SHARES = (0.1, 0.9, 0.0)
_SHARES_CORE = (0.1, 0.3, 0.6)
"""Assumed (fixed, per token, per pair) parts of an op's time where measurements cannot separate them."""
_RECENT = 0.05
"""Weight of a new step in the mean step size: about 20 count, so a long prompt hardly shows."""
_EXACT_LAYERS = 8
_REFIT_STEPS = 8
"""Maximum number of steps between two fits; a new size is fitted at once."""


@dataclass(frozen=True, slots=True)
class MicroBatchWork:
    """Work of one micro-batch on the rank with the most of it."""

    num_tokens: float
    num_pairs: float
    """(token, attended position) pairs: for a decode row, its context length."""


def halve_works(work: MicroBatchWork) -> tuple[MicroBatchWork, MicroBatchWork]:
    """Return the halves of an ideal split."""
    first = (work.num_tokens + 1) // 2
    return MicroBatchWork(first, work.num_pairs / 2), MicroBatchWork(
        work.num_tokens - first, work.num_pairs / 2
    )


@dataclass(slots=True)
class _Bin:
    """Recent means of steps of similar size."""

    num_tokens: float = 0.0
    num_pairs: float = 0.0
    num_steps: int = 0
    touched: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, work: MicroBatchWork, op_to_seconds: dict[str, float], step: int) -> None:
        self.num_steps += 1
        self.touched = step
        gain = max(_GAIN, 1.0 / self.num_steps)
        self.num_tokens += gain * (work.num_tokens - self.num_tokens)
        self.num_pairs += gain * (work.num_pairs - self.num_pairs)
        for op, seconds in op_to_seconds.items():
            mean_s = self.seconds.get(op)
            if mean_s is None:
                self.seconds[op] = seconds
                continue
            if mean_s > 0.0:
                seconds = min(seconds, _OUTLIER * mean_s)
            self.seconds[op] = mean_s + gain * (seconds - mean_s)


class StepCosts:
    """Cost estimator of a unit. Until its first step, costs are 0 and `choose` returns sequential."""

    def __init__(self, num_layers: int, num_moe_layers: int) -> None:
        if not 0 <= num_moe_layers <= num_layers:
            raise ValueError(f"num_moe_layers is {num_moe_layers}; there are {num_layers} layers.")
        self.num_layers = num_layers
        self.num_moe_layers = num_moe_layers
        self._bins: dict[tuple[int, int], _Bin] = {}
        self._num_steps = 0
        self._step_tokens = 0.0
        """Recent mean tokens of a step on the rank with most work, over its micro-batches."""
        self._models: dict[str, tuple[float, ...]] | None = None
        self._fitted_at = 0

    @property
    def num_steps(self) -> int:
        """Number of observed steps."""
        return self._num_steps

    def observe(self, works: Sequence[MicroBatchWork], op_times: Sequence[OpTime]) -> None:
        """Learn from a step of 1 or 2 micro-batches. Ignores empty steps, and ops not in OPS."""
        num = len(works)
        # The model is linear, so the mean over a step's executions is the time of a micro-batch of
        # mean size.
        mean = MicroBatchWork(
            sum(w.num_tokens for w in works) / max(num, 1),
            sum(w.num_pairs for w in works) / max(num, 1),
        )
        if mean.num_tokens <= 0.0:
            return
        op_to_seconds = {}
        for time in op_times:
            runs = num * (self.num_layers if time.op in EVERY_LAYER else self.num_moe_layers)
            if time.op == POST:
                runs *= NUM_POSTS
            if time.op in OPS and runs and time.seconds >= 0.0:
                op_to_seconds[time.op] = time.seconds / runs
        if not op_to_seconds:
            return
        self._num_steps += 1
        gain = max(_RECENT, 1.0 / self._num_steps)
        self._step_tokens += gain * (num * mean.num_tokens - self._step_tokens)
        key = (int(2.0 * mean.num_tokens).bit_length(), int(mean.num_pairs).bit_length())
        if key not in self._bins:
            if len(self._bins) >= MAX_BINS:
                del self._bins[min(self._bins, key=lambda k: self._bins[k].touched)]
            self._bins[key] = _Bin()
            self._models = None
        self._bins[key].add(mean, op_to_seconds, self._num_steps)
        if self._num_steps - self._fitted_at >= min(_REFIT_STEPS, self._bins[key].num_steps):
            self._models = None

    def op_seconds(self, work: MicroBatchWork) -> OpSeconds:
        """Return the estimated op times of one micro-batch in one MoE layer; all 0 before any step
        was observed.
        """
        if self._models is None:
            self._models = self._fit()
        seconds = {}
        for op in OPS:
            fixed, per_token, per_pair = self._models.get(op, (0.0, 0.0, 0.0))
            seconds[op] = fixed + per_token * work.num_tokens + per_pair * work.num_pairs
        return OpSeconds(
            seconds[ATTN_IN],
            seconds[ATTN_CORE],
            seconds[GATE],
            seconds[DISPATCH],
            seconds[SHARED],
            seconds[EXPERTS],
            seconds[COMBINE],
            seconds[POST],
        )

    def rates(
        self, schedule: Schedule = SEQUENTIAL, num_micro_batches: int = 1
    ) -> StepRates | None:
        """Return the rates of a step's time over all layers, run this way at the sizes seen; None
        before any step, and if all costs seem to be 0.
        """
        if not self._bins:
            return None
        if self._models is None:
            self._models = self._fit()
        token_s = pair_s = 0.0
        for op in (*EVERY_LAYER, GATE):
            _, per_token, per_pair = self._models.get(op, (0.0, 0.0, 0.0))
            num_layers = self.num_layers if op in EVERY_LAYER else self.num_moe_layers
            token_s += per_token * num_layers
            pair_s += per_pair * num_layers
        token_s = max(token_s, pair_s)  # A token attends at least to itself.
        bins = self._bins.values()
        num_tokens, num_pairs = (
            sum(b.num_tokens for b in bins) / len(bins),
            sum(b.num_pairs for b in bins) / len(bins),
        )
        _, per_token, per_pair = self._models.get(EXPERTS, (0.0, 0.0, 0.0))
        # Experts do no work per pair: the pair cost of the fit belongs to the tokens.
        mean_s = self.num_moe_layers * (per_token + per_pair * num_pairs / num_tokens)
        if (
            token_s <= 0.0
        ):  # In small steps attention time is constant: count the experts' time per token.
            token_s, mean_s = mean_s, 0.0
        if token_s <= 0.0:
            return None
        # Exposed time is not linear in the size, so it is linearised around the mean size.
        small_s, large_s = (
            step_s(
                self,
                schedule,
                [MicroBatchWork(num_tokens * by, num_pairs * by)] * num_micro_batches,
                self.num_layers,
            )
            for by in (0.5, 1.5)
        )
        compute_s = num_micro_batches * ((token_s + mean_s) * num_tokens + pair_s * num_pairs)
        others_s = max(0.0, large_s - small_s - compute_s)
        fixed_s = small_s - 0.5 * (compute_s + others_s)
        return StepRates(
            token_s, pair_s, others_s / (num_micro_batches * num_tokens), max(0.0, fixed_s), mean_s
        )

    def growing_s(self, op: str) -> float:
        """Return the seconds of an op in one layer that grow with tokens, for a step of the recent
        mean size.

        For `experts`: the part that falls when the rank with most tokens gets fewer. The time to
        read weights does not fall.
        """
        if self._models is None:
            self._models = self._fit()
        _, per_token, _ = self._models.get(op, (0.0, 0.0, 0.0))
        return per_token * self._step_tokens

    def _fit(self) -> dict[str, tuple[float, ...]]:
        self._fitted_at = self._num_steps
        bins = list(self._bins.values())
        if not bins:
            return {}
        # Columns are scaled to mean 1, so that the prior has the same weight on each.
        tokens = sum(b.num_tokens for b in bins) / len(bins)
        pairs = max(sum(b.num_pairs for b in bins) / len(bins), 1e-9)
        rows_BC = np.array([(1.0, b.num_tokens / tokens, b.num_pairs / pairs) for b in bins])
        ages_B = np.array([self._num_steps - b.touched for b in bins])
        # Errors grow with the size of a batch.
        weights_B = 1.0 / ((0.1 + rows_BC[:, 1]) ** 2 * (1.0 + ages_B / _AGE_STEPS))
        weighted_CB = rows_BC.T * weights_B
        gram_CC = weighted_CB @ rows_BC
        right_CO = weighted_CB @ np.array([[b.seconds.get(op, 0.0) for op in OPS] for b in bins])
        # Weighted like the rows: the largest batch would dominate a plain mean.
        scale_s_O = right_CO[1] / gram_CC[1, 1]
        # The prior pulls each column towards the guess, in proportion to its measurements.
        pull_C = _PRIOR * gram_CC.diagonal()
        matrix_CC = gram_CC + np.diag(pull_C)
        models: dict[str, tuple[float, ...]] = {}
        for op, right_C, scale_s in zip(OPS, right_CO.T, scale_s_O, strict=True):
            if scale_s <= 0.0:
                continue
            guess_C = scale_s * np.array(_SHARES_CORE if op == ATTN_CORE else _SHARES)
            fixed, per_token, per_pair = _non_negative(
                matrix_CC, right_C + pull_C * guess_C, np.flatnonzero(guess_C)
            )
            models[op] = (fixed, per_token / tokens, per_pair / pairs)
        return models


def _non_negative(matrix_CC: Floats, right_C: Floats, active: NDArray[np.intp]) -> list[float]:
    """Solve the `active` normal equations without negative results: drop the most negative column,
    which is then 0, until none is negative.
    """
    found_C = np.zeros(len(right_C))
    while active.size:
        solution = np.linalg.solve(matrix_CC[active[:, None], active], right_C[active])
        if solution.min() >= 0.0:
            found_C[active] = solution
            break
        active = np.delete(active, solution.argmin())
    return found_C.tolist()


def step_s(
    costs: StepCosts, schedule: Schedule, works: Sequence[MicroBatchWork], num_layers: int
) -> float:
    """Return the predicted seconds of a step of `num_layers` layers, dense ones included."""
    times = [costs.op_seconds(work) for work in works]
    num_moe_layers = min(costs.num_moe_layers, num_layers)
    dense_s = sum(time.attn_in + time.attn_core + time.shared for time in times)
    return _moe_s(schedule, times, num_moe_layers) + (num_layers - num_moe_layers) * dense_s


def _moe_s(schedule: Schedule, times: Sequence[OpSeconds], num_layers: int) -> float:
    """Price the MoE layers from two short stacks: in a full pipeline every layer adds equal time."""
    if num_layers <= _EXACT_LAYERS:
        return price(schedule, times, num_layers).total_s
    short = price(schedule, times, _EXACT_LAYERS - 2).total_s
    long = price(schedule, times, _EXACT_LAYERS).total_s
    return long + (num_layers - _EXACT_LAYERS) * (long - short) / 2


def choose(
    costs: StepCosts,
    whole: MicroBatchWork,
    halves: tuple[MicroBatchWork, MicroBatchWork],
    *,
    num_layers: int,
    allowed: Sequence[Schedule],
    hysteresis: float,
    current: Schedule | None = None,
) -> tuple[Schedule, int]:
    """Return the cheapest (schedule, number of micro-batches); sequential with one is always a
    candidate.

    A schedule other than `current` (None: sequential) must be cheaper by the fraction `hysteresis`,
    so that noise does not make a unit alternate. Among equally cheap ones, sequential is chosen,
    else the first of `allowed`. Schedules without an offset are skipped.
    """
    incumbent = SEQUENTIAL if current is None or current.offset is None else current
    best, best_s = (SEQUENTIAL, 1), step_s(costs, SEQUENTIAL, [whole], num_layers)
    if incumbent is not SEQUENTIAL:
        best_s *= 1.0 + hysteresis
    if min(half.num_tokens for half in halves) <= 0 or costs.num_moe_layers == 0:
        return best
    for schedule in allowed:
        if schedule.offset is None:
            continue
        seconds = step_s(costs, schedule, halves, num_layers)
        if schedule.name != incumbent.name:
            seconds *= 1.0 + hysteresis
        if seconds < best_s:
            best, best_s = (schedule, 2), seconds
    return best
