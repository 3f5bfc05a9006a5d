"""From logits to a token: the pure arithmetic of sampling, a row at a time but vectorised over
rows. Keeps no state.

Ties are never broken by the order of a sort: a threshold keeps all tokens as likely as the last one
kept, so a row's draw does not depend on which other rows are in the batch. Shapes: B rows, V
vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_NUM_CANDIDATES = 16
"""Likeliest tokens looked at first; more only if a nucleus reaches beyond them."""


def uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) that depend on (seed, index) alone: splitmix64 (Steele, Lea, Flood 2014) at
    counter `index`.

    Both uint64; the result is float64 with 53 random bits.
    """
    # The seed is mixed first: neighbouring seeds would otherwise be the same stream, shifted.
    with np.errstate(over="ignore"):
        z = _mix(seeds + np.uint64(0x9E3779B97F4A7C15)) + (indices + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        bits: np.ndarray = _mix(z) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def penalise_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty_B: Tensor) -> Tensor:
    """Make tokens of prompt and output less likely: divide positive logits, multiply negative ones
    (CTRL, 2019).
    """
    penalty = penalty_B[:, None]
    return torch.where(
        seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV
    )


def penalise_counts(
    logits_BV: Tensor, counts_BV: Tensor, frequency_B: Tensor, presence_B: Tensor
) -> Tensor:
    """Subtract frequency * count and, once it occurred, presence. Counted over the output alone (as
    OpenAI does).
    """
    return logits_BV - frequency_B[:, None] * counts_BV - presence_B[:, None] * (counts_BV > 0)


def draw(
    p_BV: Tensor,
    top_k_B: np.ndarray,
    top_p_B: np.ndarray,
    min_p_B: np.ndarray,
    uniform_B: np.ndarray,
) -> Tensor:
    """Draw a token [B] of what top-k, then top-p of the rest, then min-p leave; 0, 1 and 0 leave
    out nothing.

    `p_BV` are probabilities up to a factor per row. Whole rows are walked only where neither top-k
    nor top-p is set. What is to be done is decided by arrays of the host, so that nothing waits for
    the device.
    """
    is_ranked_B = (top_k_B > 0) | (top_p_B < 1)
    if is_ranked_B.any() and not is_ranked_B.all():
        tokens_B = torch.empty(len(p_BV), dtype=torch.int64, device=p_BV.device)
        for part_B in (is_ranked_B, ~is_ranked_B):
            at_B = torch.from_numpy(part_B).to(p_BV.device)
            settings = (x[part_B] for x in (top_k_B, top_p_B, min_p_B, uniform_B))
            tokens_B[at_B] = draw(p_BV[at_B], *settings)
        return tokens_B
    u_B, least_B = (torch.from_numpy(x).to(p_BV.device) for x in (uniform_B, min_p_B))
    if is_ranked_B.all():
        most_B, mass_B = (torch.from_numpy(x).to(p_BV.device) for x in (top_k_B, top_p_B))
        ids_BW, kept_BW = nucleus(p_BV, most_B, mass_B, least_B)
        return ids_BW.gather(-1, pick(kept_BW, u_B)[:, None])[:, 0]
    if min_p_B.any():
        p_BV = p_BV.where(p_BV >= (least_B * p_BV.amax(-1))[:, None], 0.0)
    return pick(p_BV, u_B)


def nucleus(
    p_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (ids [B, W] ascending, their probabilities [B, W] or 0): all tokens that stay are
    among the W.

    Ascending, so that a draw is the same as over the whole row, whatever W is. Every row has top-k
    or top-p set.
    """
    vocabulary = p_BV.shape[-1]
    limit_B = torch.where(top_k_B > 0, top_k_B.clamp(max=vocabulary), vocabulary)
    total_B = p_BV.sum(-1, dtype=torch.float64)
    width = min(vocabulary, max(_NUM_CANDIDATES, int(top_k_B.max()) + 1))
    while True:
        largest_BW, ids_BW = p_BV.topk(width, dim=-1)
        is_within_BW = torch.arange(width, device=p_BV.device) < limit_B[:, None]
        sums_BW = largest_BW.where(is_within_BW, 0.0).cumsum(-1, dtype=torch.float64)
        wanted_B = top_p_B * torch.where(top_k_B > 0, sums_BW[:, -1], total_B)
        # A token is in the nucleus if those before it do not reach the wanted mass; the first
        # always is.
        is_inside_BW = is_within_BW & (
            (sums_BW - largest_BW < wanted_B[:, None]) | (top_p_B >= 1)[:, None]
        )
        last_B = is_inside_BW.sum(-1).clamp(min=1) - 1
        threshold_B = largest_BW.gather(-1, last_B[:, None])[:, 0]
        # The last one kept may have equals beyond the candidates, or not be reached yet; 0 is
        # nobody's equal.
        is_open_B = (threshold_B <= largest_BW[:, -1]) & (threshold_B > 0)
        if width == vocabulary or not bool(is_open_B.any()):
            break
        width = min(vocabulary, width * 8)
    threshold_B = torch.maximum(threshold_B, min_p_B * largest_BW[:, 0])
    kept_BW = largest_BW.where(largest_BW >= threshold_B[:, None], 0.0)
    ids_BW, order_BW = ids_BW.sort(-1)
    return ids_BW, kept_BW.gather(-1, order_BW)


def pick(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Invert the cumulative distribution at `uniform_B`: tokens [B]. A token of probability 0 is
    never picked.
    """
    sums_BV = p_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = (uniform_B * sums_BV[:, -1])[:, None]
    index_B = torch.searchsorted(sums_BV, target_B1, right=True)[:, 0]
    # Rounding may put the target on the total itself: then the last token of positive probability.
    last_B = torch.searchsorted(sums_BV, sums_BV[:, -1:].contiguous())[:, 0]
    return torch.minimum(index_B, last_B)
