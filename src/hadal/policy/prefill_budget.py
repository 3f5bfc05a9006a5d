"""Choose the length of a prefill step: a budget of seconds for each rank, and the most tokens that
a rank may take.

Each step's choice is the one with the best predicted efficiency. Ranks with dense prompts (long
contexts) delay the others in time; ranks with light prompts delay them in dispatch. Input is each
rank's queue, oldest first; how ranks are then cut is not decided here.

Shapes: S scales of the nominal budget, C caps, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from hadal.core.rates import StepRates
from hadal.policy.views import PromptView

CAPS = (1.0, 1.25, 1.5, 2.0)
"""Candidates for a rank's maximum number of tokens, in multiples of `num_tokens_mean`, up to
`num_tokens_max` (StepLimits).
"""
DRAIN = 0.25
"""Largest share of the queued work in one step, so that the last dense prompts do not delay new
arrivals for long.
"""
FIXED_SHARE = 0.1
"""Largest share of a step's time that its fixed cost may take while more work is queued."""
SCALES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4)
"""Candidates for a step's budget, relative to the nominal one."""
WORTH = 0.002
"""Predicted efficiency that a wider cap or a shorter step must gain over those before it."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Token limits of a step: the intended mean per rank, and the most that any rank may take."""

    num_tokens_mean: int
    num_tokens_max: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens_mean <= self.num_tokens_max:
            raise ValueError(f"{self}: the mean must be between 1 and the maximum.")


def step_budget_s(
    prompts: Iterable[PromptView], num_ranks: int, rates: StepRates, num_tokens_mean: int
) -> float:
    """Return the nominal seconds per rank: `num_tokens_mean` tokens at the mean cost of queued
    ones.

    The result is at most `DRAIN` of all queued work, so that a few dense prompts do not delay short
    ones that arrive meanwhile. It is at least half of the time of a fresh prompt of that many
    tokens, or up to all of that time if the fixed cost would exceed FIXED_SHARE of the step.
    """
    num_tokens, num_pairs = 0, 0.0
    for prompt in prompts:
        n = prompt.num_tokens
        num_tokens += n
        num_pairs += n * (prompt.num_context + 0.5 * (n + 1))
    total_s = rates.token_s * num_tokens + rates.pair_s * num_pairs
    nominal_s = num_tokens_mean * total_s / num_tokens if num_tokens else 0.0
    fresh_s = rates.chunk_s(0, num_tokens_mean)
    # The share of the whole step's time, not only of a rank's own work.
    share = rates.step_s * (1.0 / FIXED_SHARE - 1.0) / rates.whole_s(0, num_tokens_mean)
    least_s = fresh_s * min(max(0.5, share), 1.0)
    return max(least_s, min(nominal_s, DRAIN * total_s / num_ranks))


def choose_budget(
    prompts: Sequence[Sequence[PromptView]], rates: StepRates, nominal_s: float, limits: StepLimits
) -> tuple[float, int]:
    """Return the (seconds, most tokens of a rank) of `SCALES` x `CAPS` with the best predicted
    efficiency.

    While few ranks have dense prompts, the others would wait for them, so a shorter step is chosen
    and dense prompts accumulate. When every rank has one, the whole budget is used. A rank is
    estimated from two points: its time for the mean and for the most tokens, oldest first. Below
    the first it is assumed to mix prompts (prefill_balance.cut_rank), between them to be linear.
    """
    num_mean, num_max = limits.num_tokens_mean, limits.num_tokens_max
    points = [_two_points(of_rank, rates, num_mean, num_max) for of_rank in prompts if of_rank]
    if not points:
        return nominal_s, num_max
    mean_s_R, most_s_R, mean_R, most_R, others_R = np.array(points).T
    caps = sorted({min(int(cap * num_mean), num_max) for cap in CAPS})
    cap_C1 = np.array(caps, dtype=float)[:, None]
    share_CR = (np.minimum(cap_C1, most_R) - mean_R) / np.maximum(most_R - mean_R, 1.0)
    cap_s_CR = mean_s_R + np.clip(share_CR, 0.0, 1.0) * (most_s_R - mean_s_R)
    budget_s_S11 = nominal_s * np.array(SCALES)[:, None, None]
    own_s_SCR = np.minimum(cap_s_CR, budget_s_S11)
    dense_S1R = np.minimum(mean_R, mean_R * budget_s_S11 / mean_s_R + others_R)
    rise_R = (most_R - mean_R) / np.maximum(most_s_R - mean_s_R, 1e-30)
    tokens_SCR = np.where(own_s_SCR < mean_s_R, dense_S1R, mean_R + rise_R * (own_s_SCR - mean_s_R))
    # Mean over all ranks: those without prompts compute experts as well.
    experts_s_SC = rates.mean_s * tokens_SCR.sum(axis=2) / len(prompts)
    step_s_SC = (
        rates.step_s
        + own_s_SCR.max(axis=2)
        + rates.dispatch_s * tokens_SCR.max(axis=2)
        + experts_s_SC
    )
    done_s_SC = (
        own_s_SCR.sum(axis=2)
        + rates.dispatch_s * tokens_SCR.sum(axis=2)
        + len(prompts) * experts_s_SC
    )
    best = (-inf, nominal_s, caps[0])
    for scale, efficiencies in zip(
        SCALES, (done_s_SC / step_s_SC / len(prompts)).tolist(), strict=True
    ):
        for cap, efficiency in zip(caps, efficiencies, strict=True):
            if efficiency > best[0] + WORTH:
                best = (efficiency, scale * nominal_s, cap)
    return best[1], best[2]


def _two_points(
    prompts: Sequence[PromptView], rates: StepRates, num_mean: int, num_max: int
) -> tuple[float, float, int, int, int]:
    """Return a rank's seconds for the mean and for the most tokens, those two token counts, and how
    many tokens belong to other prompts than the oldest.
    """
    mean_s = most_s = 0.0
    left_mean, left_most, num_tokens = num_mean, num_max, 0
    for prompt in prompts:
        num_tokens += prompt.num_tokens
        if left_most:
            most = min(prompt.num_tokens, left_most)
            seconds = rates.chunk_s(prompt.num_context, most)
            most_s += seconds
            left_most -= most
            if left_mean:  # The mean never exceeds the cap.
                size = min(most, left_mean)
                mean_s += seconds if size == most else rates.chunk_s(prompt.num_context, size)
                left_mean -= size
    return (
        mean_s,
        most_s,
        num_mean - left_mean,
        num_max - left_most,
        num_tokens - prompts[0].num_tokens,
    )


def predict(rank_to_work: Sequence[tuple[float, int]], rates: StepRates) -> float:
    """Return the predicted efficiency of a step: its time with mean work on every rank, over its
    time with the slowest rank.

    `rank_to_work`: (seconds, tokens) of each rank. The fixed cost of a step is no work, so only the
    second time includes it.
    """
    seconds, tokens = zip(*rank_to_work, strict=True)
    if not any(tokens):
        return 1.0
    num_ranks = len(rank_to_work)
    experts_s = rates.mean_s * sum(tokens) / num_ranks
    step_s = rates.step_s + max(seconds) + rates.dispatch_s * max(tokens) + experts_s
    return float(((sum(seconds) + rates.dispatch_s * sum(tokens)) / num_ranks + experts_s) / step_s)
