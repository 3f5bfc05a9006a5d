"""MLA's core attention in plain torch. Fast twin of the absorbed and sparse forms:
`hadal.kernels.attention`.

Absorbed form, for decode: one query per request against the paged latent cache itself. The query is
already multiplied by W_UK, and the result is multiplied by W_UV later. So all heads share one key
of C+R values, and its first C values as value (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

Sparse form: the lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556, eq. 1-2) selects the
positions that a token attends to. DeepSeek's own code rotates queries and keys by a Hadamard
matrix, which changes no product, and rounds both to FP8; here they are FP32. It also multiplies
scores by J^-1/2 X^-1/2, which does not change their order.

Multi-head form, for prefill: keys and values are expanded from latents (DeepSeek-V3, arXiv
2412.19437, eq. 4-10). Independent of blocks and batches.

Shapes: B requests, H heads, C latent, R rotated, N plain key dims, W value dims, P blocks, L layers,
S block tokens, M blocks of a request, D values of an entry, C+R or more, K selected positions, J
index heads, X index key; of the indexer and of prefill T tokens and S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.reference.params import Matrix
from hadal.reference.products import linear


@dataclass(frozen=True, slots=True)
class SeenEntries:
    """Cache entries of one layer that each request of a batch sees."""

    cache_PLSD: Tensor
    layer_index: int
    block_table_BM: Tensor
    """Block ids of each request."""
    lengths_B: Tensor
    """Number of positions that each request sees, its new token included."""
    first: int = 0
    """First position seen, 0 or 1: an MTP module does not attend to position 0."""


def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    seen: SeenEntries,
    scale: float,
    selected_BK: Tensor | None = None,
) -> Tensor:
    """Return o_latent [B, H, C]. A request that sees more than K positions attends only to
    selected_BK[b].
    """
    num_read, lengths_B = q_latent_BHC.shape[-1] + q_rope_BHR.shape[-1], seen.lengths_B
    blocks_BMSD = seen.cache_PLSD[seen.block_table_BM.long(), seen.layer_index, :, :num_read]
    latents_BSD = blocks_BMSD.flatten(1, 2)
    position_S = torch.arange(latents_BSD.shape[1], device=lengths_B.device)
    unused_BS = (position_S >= lengths_B[:, None]) | (position_S < seen.first)
    if selected_BK is not None:
        others_BS = torch.ones_like(unused_BS).scatter(1, selected_BK.long(), False)
        unused_BS |= others_BS & (lengths_B > selected_BK.shape[1])[:, None]
    # A reused block may hold any values past the length, even NaN, and 0 * NaN is NaN.
    latents_BSD = latents_BSD.masked_fill(unused_BS[..., None], 0.0)
    q_BHD = torch.cat((q_latent_BHC, q_rope_BHR), dim=-1)
    scores_BHS = torch.einsum("bhd,bsd->bhs", q_BHD, latents_BSD) * scale
    p_BHS = scores_BHS.masked_fill(unused_BS[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhs,bsc->bhc", p_BHS, latents_BSD[..., : q_latent_BHC.shape[-1]])


def index_scores(q_TJX: Tensor, weights_TJ: Tensor, key_SX: Tensor) -> Tensor:
    """Return scores [T, S]: the sum over heads of weight * relu(query . key)."""
    dots_TJS = torch.einsum("tjx,sx->tjs", q_TJX, key_SX).relu()
    return torch.einsum("tj,tjs->ts", weights_TJ, dots_TJS)


def best_positions(scores_TS: Tensor, num_selected: int) -> Tensor:
    """Return [T, K] int32, ascending: the K positions with the largest scores, among equal scores
    the lower ones.
    """
    order_TS = scores_TS.sort(dim=-1, descending=True, stable=True).indices
    return order_TS[:, :num_selected].sort(dim=-1).values.int()


def select_positions(
    q_BJX: Tensor, weights_BJ: Tensor, seen: SeenEntries, num_selected: int
) -> Tensor:
    """Return selected [B, K] int32, ascending, from the positions that each request sees. Rows of
    requests that see at most K are undefined. A position's key is the last X values of its entry.
    """
    selected_BK = torch.zeros((len(q_BJX), num_selected), dtype=torch.int32, device=q_BJX.device)
    key_PSX = seen.cache_PLSD[:, seen.layer_index, :, -q_BJX.shape[-1] :]
    for row, length in enumerate(seen.lengths_B.tolist()):
        if length > num_selected:
            key_SX = key_PSX[seen.block_table_BM[row].long()].flatten(0, 1)[seen.first : length]
            scores_1S = index_scores(q_BJX[row : row + 1], weights_BJ[row : row + 1], key_SX)
            selected_BK[row] = seen.first + best_positions(scores_1S, num_selected)[0]
    return selected_BK


def mla_prefill(
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    latents_SD: Tensor,
    kv_b: Matrix,
    scale: float,
    is_left_out_TS: Tensor | None = None,
) -> Tensor:
    """Return o [T, H, W]. The T queries are the last T of the S positions; each sees itself and all
    positions before it, except those in `is_left_out_TS`.
    """
    num_new, num_seen = len(q_nope_THN), len(latents_SD)
    heads, num_keys = q_nope_THN.shape[1:]
    c_SC, k_rope_SR = torch.split(latents_SD, [kv_b.shape[1], q_rope_THR.shape[-1]], dim=-1)
    both_SHK = linear(c_SC, kv_b).view(num_seen, heads, -1)
    k_nope_SHN, v_SHW = both_SHK[..., :num_keys], both_SHK[..., num_keys:]
    scores_HTS = torch.einsum("thn,shn->hts", q_nope_THN, k_nope_SHN)
    scores_HTS = scores_HTS + torch.einsum("thr,sr->hts", q_rope_THR, k_rope_SR)
    position_T = torch.arange(num_seen - num_new, num_seen, device=scores_HTS.device)
    unseen_TS = torch.arange(num_seen, device=scores_HTS.device) > position_T[:, None]
    if is_left_out_TS is not None:
        unseen_TS |= is_left_out_TS
    p_HTS = (scores_HTS * scale).masked_fill(unseen_TS, float("-inf")).softmax(-1)
    return torch.einsum("hts,shw->thw", p_HTS, v_SHW)
