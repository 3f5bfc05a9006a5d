"""Reference definition of sampling: bias, penalties, masks, top-k, top-p, min-p, log-probabilities.

Depends on slots, not on requests. `hadal.kernels.sampling` draws the same tokens; this runs where
the kernels cannot. A row's draw depends only on its logits and mask, and its slot's parameters,
history and output index. Ties are not broken: top-k and top-p keep all tokens as likely as the last
one kept.

To verify drafts (speculative tokens) a slot has several rows: the row of its last token, then a row
per draft. It draws from the rows in order as long as each drawn token equals the next row's input
token, so drafts change no output.

Shapes: B rows or slots, R rows of all slots, S slots, V vocabulary, K best tokens, N drawn tokens,
M masks, W 32-bit words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SLOT = np.dtype(
    [
        ("top_p", np.float64),
        ("seed", np.uint64),
        ("index", np.int64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("top_k", np.int32),
        ("num_logprobs", np.int32),
        ("bias_begin", np.int32),
        ("num_bias", np.int32),
        ("num_forbidden", np.int32),
        ("min_tokens", np.int32),
    ],
    align=True,
)
"""Sampling parameters of one slot; kernels/cpu/sample.h has the same layout. temperature 0 is
greedy, top_k 0 keeps all; 0 <= top_k < V. num_logprobs is at most V; -1: none. `index`: position of
the next token in the output. The `num_forbidden` biases after the first `num_bias` apply while index
< min_tokens.
"""

TOKEN_VALUE = np.dtype([("token", np.int32), ("value", np.float32)])
"""Token with a bias of its logit (-inf forbids it), or token with its log-probability."""
ROW = np.dtype([("token", np.int64), ("logprob", np.float32), ("status", np.int32)])
"""Result of a row. The token is 0 unless the status is DRAWN; the log-probability is valid only if
the slot requests log-probabilities.
"""

DRAWN, NOT_FINITE, NOTHING_LEFT = range(3)
"""Status of a row: a token was drawn; the logits have NaN or +inf, or only -inf; or they do after
bias, penalties and masks.
"""


@dataclass
class SlotTable:
    """Sampling parameters and histories of all slots."""

    slots_S: np.ndarray
    """[S] of SLOT."""
    bias: np.ndarray
    """Array of TOKEN_VALUE, concatenated over slots; each token is below V."""
    counts_SV: Tensor | None = None
    """int32, count of each token in the output; None until a slot has a penalty."""
    seen_SV: Tensor | None = None
    """bool, True if the token is in prompt or output; None until a slot has a penalty."""


@dataclass(frozen=True)
class RowMasks:
    """Tokens that rows may draw."""

    bits_MW: np.ndarray
    """uint32: bit v % 32 of word v // 32 allows token v."""
    of_R: np.ndarray
    """int64: index of each row's mask; -1: any token is allowed."""


def uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) that depend on (seed, index) alone: splitmix64 (Steele, Lea, Flood
    2014) at counter `index`. Arguments are uint64, the result is float64 with 53 random bits.
    """
    # Mix the seed first: otherwise neighbouring seeds would give the same stream, shifted.
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


def sample(
    logits_RV: Tensor,
    slots_B: np.ndarray,
    num_B: np.ndarray,
    fed_R: np.ndarray,
    table: SlotTable,
    masks: RowMasks | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw tokens for each slot `slots_B[b]` from its `num_B[b]` adjacent rows (at least one), given
    their input tokens `fed_R`. These three are int64, and no slot may be listed twice. A row's mask
    assumes that the row's input token was drawn.

    Advances the slots' indices and histories. The logits may have any float type and are not changed.
    Returns (num_drawn_B, at_N, rows_N of ROW, best_NK of TOKEN_VALUE): number of tokens per slot, and
    of each token the row, result and best tokens. A slot's last token may have failed. K is the
    largest number of best tokens that a slot requests; entries beyond a slot's number are undefined;
    among equals the lower id is first. Raises ValueError if a slot is listed twice or rows are
    missing.
    """
    if len(np.unique(slots_B)) < len(slots_B):
        raise ValueError("a slot appears twice.")
    if (num_B < 1).any() or int(num_B.sum()) != len(fed_R):
        raise ValueError(f"{num_B.tolist()} rows per slot are below 1, or not {len(fed_R)} in all.")
    first_B = num_B.cumsum() - num_B
    num_drawn_B = np.zeros_like(num_B)
    num_best = max(int(table.slots_S["num_logprobs"][slots_B].max(initial=0)), 0)
    rows_R = np.zeros(len(fed_R), ROW)
    best_RK = np.empty((len(fed_R), num_best), TOKEN_VALUE)
    going = np.arange(len(slots_B))
    while len(going):
        at, slots = first_B[going] + num_drawn_B[going], slots_B[going]
        of_rows = None if masks is None else RowMasks(masks.bits_MW, masks.of_R[at])
        rows, best = sample_rows(logits_RV[_on(logits_RV, at)], slots, table, of_rows)
        rows_R[at] = rows
        best_RK[at, : best.shape[1]] = best
        num_drawn_B[going] += 1
        is_drawn = rows["status"] == DRAWN
        _advance(slots[is_drawn], rows["token"][is_drawn], table)
        has_next = num_drawn_B[going] < num_B[going]
        fed = fed_R[np.where(has_next, at + 1, at)]
        going = going[is_drawn & has_next & (fed == rows["token"])]
    within_R = np.arange(len(fed_R)) - np.repeat(first_B, num_B)
    at_N = np.flatnonzero(within_R < np.repeat(num_drawn_B, num_B))
    return num_drawn_B, at_N, rows_R[at_N], best_RK[at_N]


def _advance(slots: np.ndarray, tokens: np.ndarray, table: SlotTable) -> None:
    table.slots_S["index"][slots] += 1
    if table.counts_SV is not None and table.seen_SV is not None:
        # Slots without a penalty are updated too; their histories are never read.
        at = _on(table.counts_SV, slots), _on(table.counts_SV, tokens)
        table.counts_SV[at] += 1
        table.seen_SV[at] = True


def sample_rows(
    logits_BV: Tensor, slots_B: np.ndarray, table: SlotTable, masks: RowMasks | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw row b with the parameters of slot `slots_B[b]`, without advancing the slot. Returns
    (rows [B] of ROW, best [B, K] of TOKEN_VALUE).
    """
    logits_BV, slot_B = logits_BV.float(), table.slots_S[slots_B]
    adjusted_BV = adjust(logits_BV, slots_B, table)
    if masks is not None:
        adjusted_BV = allowed(adjusted_BV, masks)
    best_B, tokens_B = adjusted_BV.max(-1)
    is_random_B = slot_B["temperature"] > 0
    if is_random_B.any():
        u_B = uniform(slot_B["seed"], slot_B["index"].astype(np.uint64))
        rows = _on(logits_BV, np.flatnonzero(is_random_B))
        p_BV = kept(adjusted_BV[rows], slot_B[is_random_B])
        tokens_B[rows] = pick(p_BV, _on(p_BV, u_B[is_random_B]))
    is_finite_B, is_left_B = logits_BV.amax(-1).isfinite(), best_B.isfinite()
    status_B = torch.where(is_left_B, DRAWN, NOTHING_LEFT).where(is_finite_B, NOT_FINITE)
    tokens_B = tokens_B.where(status_B == DRAWN, 0)
    num_best = int(slot_B["num_logprobs"].max(initial=-1))
    rows_B, best_BK = (
        np.zeros(len(slots_B), ROW),
        np.empty((len(slots_B), max(num_best, 0)), TOKEN_VALUE),
    )
    rows_B["token"], rows_B["status"] = tokens_B.cpu(), status_B.cpu()
    if num_best >= 0:
        # The model's own distribution: before bias, penalties, masks and temperature.
        logprobs_BV = logits_BV.log_softmax(-1, dtype=torch.float64)
        rows_B["logprob"] = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0].cpu()
        # A stable sort puts the lower id first among equals.
        ids_BK = logits_BV.argsort(dim=-1, descending=True, stable=True)[:, :num_best]
        best_BK["token"], best_BK["value"] = ids_BK.cpu(), logprobs_BV.gather(-1, ids_BK).cpu()
    return rows_B, best_BK


def adjust(logits_BV: Tensor, slots_B: np.ndarray, table: SlotTable) -> Tensor:
    """Return a copy after bias and penalties, in this order, as in vLLM and transformers. The
    repetition penalty divides positive logits and multiplies negative ones of tokens in prompt or
    output (CTRL, 2019). The frequency penalty is subtracted once per occurrence of a token in the
    output, the presence penalty once per token in it (as in OpenAI's API); in FP64, where products
    are exact.
    """
    slot_B, logits_BV = table.slots_S[slots_B], logits_BV.clone()
    is_early_B = slot_B["index"] < slot_B["min_tokens"]
    num_B = slot_B["num_bias"] + np.where(is_early_B, slot_B["num_forbidden"], 0)
    for row in np.flatnonzero(num_B):
        begin = slot_B["bias_begin"][row]
        bias = table.bias[begin : begin + num_B[row]]
        logits_BV[row].index_add_(0, *(_on(logits_BV, bias[name]) for name in ("token", "value")))
    penalised = np.flatnonzero(
        (slot_B["repetition"] != 1) | (slot_B["frequency"] != 0) | (slot_B["presence"] != 0)
    )
    if not len(penalised):
        return logits_BV
    assert table.counts_SV is not None
    assert table.seen_SV is not None
    rows, slots = _on(logits_BV, penalised), _on(logits_BV, slots_B[penalised])
    repetition, frequency, presence = (
        _on(logits_BV, slot_B[name][penalised])[:, None]
        for name in ("repetition", "frequency", "presence")
    )
    x, counts = logits_BV[rows], table.counts_SV[slots]
    x = torch.where(table.seen_SV[slots], torch.where(x > 0, x / repetition, x * repetition), x)
    logits_BV[rows] = (x - frequency.double() * counts - presence.double() * (counts > 0)).float()
    return logits_BV


def allowed(logits_BV: Tensor, masks: RowMasks) -> Tensor:
    """Return the logits with -inf for tokens that the rows' masks do not allow."""
    is_allowed_MV = np.unpackbits(masks.bits_MW.view(np.uint8), axis=1, bitorder="little")
    is_allowed_MV = is_allowed_MV[:, : logits_BV.shape[1]].astype(np.bool_)
    rows = np.flatnonzero(masks.of_R >= 0)
    logits_BV = logits_BV.clone()
    of_rows = _on(logits_BV, is_allowed_MV[masks.of_R[rows]])
    at = _on(logits_BV, rows)
    logits_BV[at] = logits_BV[at].masked_fill(~of_rows, -np.inf)
    return logits_BV


def kept(logits_BV: Tensor, slot_B: np.ndarray) -> Tensor:
    """Return probabilities relative to each row's best token; 0 for tokens removed by top-k, then
    by top-p of the rest, then by min-p.
    """
    temperature, top_k, top_p, min_p = (
        _on(logits_BV, slot_B[name])[:, None] for name in ("temperature", "top_k", "top_p", "min_p")
    )
    p_BV = ((logits_BV - logits_BV.amax(-1, keepdim=True)) * (1 / temperature)).exp()
    sorted_BV, order_BV = logits_BV.sort(-1, descending=True)
    vocabulary = logits_BV.shape[-1]
    top_k = top_k.where(top_k > 0, vocabulary)
    is_within_BV = torch.arange(vocabulary, device=logits_BV.device) < top_k
    ranked_BV = p_BV.gather(-1, order_BV).where(is_within_BV, 0.0).double()
    sums_BV = ranked_BV.cumsum(-1)
    # A token is kept if the more likely ones do not reach top_p of the mass; the first always is.
    is_inside_BV = (sums_BV - ranked_BV < top_p * sums_BV[:, -1:]) | (top_p >= 1)
    last_B1 = (is_within_BV & is_inside_BV).sum(-1, keepdim=True).clamp(min=1) - 1
    return p_BV.where((logits_BV >= sorted_BV.gather(-1, last_B1)) & (p_BV >= min_p), 0.0)


def pick(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Invert the cumulative distribution at `uniform_B`: tokens [B]. A token of probability 0 is
    never picked.
    """
    sums_BV = p_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = (uniform_B * sums_BV[:, -1])[:, None]
    index_B = torch.searchsorted(sums_BV, target_B1, right=True)[:, 0]
    # Rounding may put the target on the total: then pick the last token of positive probability.
    last_B = torch.searchsorted(sums_BV, sums_BV[:, -1:].contiguous())[:, 0]
    return torch.minimum(index_B, last_B)


def _on(like: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
