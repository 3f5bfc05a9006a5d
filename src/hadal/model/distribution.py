"""From logits to a token: the pure arithmetic of sampling, a row at a time but vectorised over rows. Keeps no state.

Ties are never broken by the order of a sort: a threshold keeps all tokens as likely as the last one kept, so a row's
draw does not depend on which other rows are in the batch. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_NUM_CANDIDATES = 1024
"""Most nuclei are smaller than this; only if one is not are whole rows sorted."""


def uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) that depend on (seed, index) alone: splitmix64 (Steele, Lea, Flood 2014) at counter `index`.

    Both uint64; the result is float64 with 53 random bits.
    """
    # The seed is mixed first: neighbouring seeds would otherwise be the same stream, shifted.
    with np.errstate(over="ignore"):
        z = _mix(seeds + np.uint64(0x9E3779B97F4A7C15)) + (indices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits: np.ndarray = _mix(z) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def penalise_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty_B: Tensor) -> Tensor:
    """Make tokens of prompt and output less likely: divide positive logits, multiply negative ones (CTRL, 2019)."""
    penalty = penalty_B[:, None]
    return torch.where(seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def penalise_counts(logits_BV: Tensor, counts_BV: Tensor, frequency_B: Tensor, presence_B: Tensor) -> Tensor:
    """Subtract frequency * count and, once it occurred, presence. Counted over the output alone (as OpenAI does)."""
    return logits_BV - frequency_B[:, None] * counts_BV - presence_B[:, None] * (counts_BV > 0)


def truncate(p_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """Set to 0 what top-k, then top-p of the rest, then min-p leave out. 0, 1 and 0 leave out nothing.

    `p_BV` are probabilities up to a factor per row.
    """
    threshold_B = min_p_B.to(p_BV.dtype) * p_BV.amax(-1)
    if bool(((top_k_B > 0) | (top_p_B < 1)).any()):
        threshold_B = torch.maximum(threshold_B, _rank_threshold(p_BV, top_k_B, top_p_B))
    return p_BV.where(p_BV >= threshold_B[:, None], 0.0)


def _rank_threshold(p_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """The smallest probability that top-k and top-p keep."""
    vocabulary = p_BV.shape[-1]
    width = min(vocabulary, max(_NUM_CANDIDATES, int(top_k_B.max())))
    limit_B = torch.where(top_k_B > 0, top_k_B.clamp(max=vocabulary), vocabulary)
    while True:
        # The few largest do, unless a nucleus reaches beyond them.
        largest_BW = p_BV.topk(width, dim=-1).values
        rank_W = torch.arange(width, device=p_BV.device)
        kept_BW = largest_BW.where(rank_W < limit_B[:, None], 0.0)
        sums_BW = kept_BW.cumsum(-1, dtype=torch.float64)
        total_B = torch.where(limit_B < vocabulary, sums_BW[:, -1], p_BV.sum(-1, dtype=torch.float64))
        wanted_B = top_p_B * total_B
        is_cut_B = (limit_B > width) & (top_p_B < 1) & (sums_BW[:, -1] < wanted_B)
        if width == vocabulary or not bool(is_cut_B.any()):
            break
        width = vocabulary
    # A token is in the nucleus if those before it do not reach the wanted mass; the first always is.
    before_BW = sums_BW - kept_BW
    inside_BW = (before_BW < wanted_B[:, None]) | (rank_W == 0)
    inside_BW |= (top_p_B >= 1)[:, None]
    last_B = (inside_BW & (rank_W < limit_B[:, None])).sum(-1) - 1
    threshold_B = largest_BW.gather(-1, last_B[:, None])[:, 0]
    return torch.where((top_k_B > 0) | (top_p_B < 1), threshold_B, 0.0)


def pick(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Invert the cumulative distribution at `uniform_B`: tokens [B]. A token of probability 0 is never picked."""
    sums_BV = p_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = (uniform_B * sums_BV[:, -1])[:, None]
    index_B = torch.searchsorted(sums_BV, target_B1, right=True)[:, 0]
    # Rounding may put the target on the total itself: then the last token of positive probability.
    last_B = torch.searchsorted(sums_BV, sums_BV[:, -1:].contiguous())[:, 0]
    return torch.minimum(index_B, last_B)
