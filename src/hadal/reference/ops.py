"""The slow twins of the kernels, in plain torch: each is its formula, with the paper's equation.

The tests compare `hadal.kernels.ops` with them, and they run where the kernels cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.core.rope import RopeScaling
from hadal.core.row_bytes import row_bytes
from hadal.reference import codec
from hadal.reference.params import Experts, Matrix, MlpWeights


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension, in FP32 whatever the input (arXiv 1910.07467, eq. 4)."""
    x32 = x_TD.float()
    mean_square = x32.pow(2).mean(-1, keepdim=True)
    return weight_D * (x32 * torch.rsqrt(mean_square + eps)).to(x_TD.dtype)


# y = x W^T.


def linear(x_MK: Tensor, w: Matrix) -> Tensor:
    """Return y [M, N] (or [..., N] for x of more dimensions)."""
    if w.is_rounding_inputs:
        x_MK = rounded(x_MK)
    return F.linear(x_MK, w.dense(x_MK.dtype))


def rounded(x_MK: Tensor) -> Tensor:
    """What is left of x when each 128 values of a row are E4M3 codes with a common scale."""
    flat_MK = x_MK.reshape(-1, x_MK.shape[-1]).float()
    rows_MB = torch.empty(
        (len(flat_MK), row_bytes(flat_MK.shape[1], "fp8")), dtype=torch.uint8, device=x_MK.device
    )
    out_MK = torch.empty_like(flat_MK)
    codec.encode(flat_MK, None, rows_MB, "fp8")
    codec.decode(rows_MB, out_MK, "fp8")
    return out_MK.view(x_MK.shape).to(x_MK.dtype)


# SwiGLU, the feed-forward network: down(silu(gate x) * up x) (arXiv 2002.05202).


def swiglu(x_TD: Tensor, mlp: MlpWeights) -> Tensor:
    """Apply a dense or shared network to [T, D]."""
    return linear(F.silu(linear(x_TD, mlp.gate)) * linear(x_TD, mlp.up), mlp.down)


# Rotary positions with YaRN's stretched frequencies, on interleaved pairs. Knows nothing of
# attention.
#
# Sources: RoPE arXiv 2104.09864; YaRN arXiv 2309.00071, section 3.2 (NTK-by-parts) and 3.4
# (temperature). Shapes: T tokens, H heads, R rotated dims (R/2 pairs).


def cos_sin_table(config: ModelConfig) -> Tensor:
    """Return [max_position, R]: cos of the R/2 pairs' angles, then sin, in FP32."""
    dim = config.qk_rope_head_dim
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    temperature = 1.0
    if config.rope_scaling is not None:
        frequency = _stretch(frequency, config.rope_scaling, config.rope_theta)
        temperature = config.rope_scaling.temperature
    # FP32 on purpose: the model was trained with angles rounded like this.
    angle = torch.outer(
        torch.arange(config.max_position_embeddings, dtype=torch.float32), frequency
    )
    return torch.cat((angle.cos(), angle.sin()), dim=-1) * temperature


def _stretch(frequency: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Slow pairs are interpolated (divided by factor), fast ones kept, a ramp between."""
    dim = 2 * len(frequency)

    def pair_with(rotations: float) -> float:
        """The pair that turns this often within the original context."""
        wavelength = scaling.original_max_position_embeddings / rotations
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequency / scaling.factor * interpolated + frequency * (1 - interpolated)


def rotate_halves(x: Tensor, cos_sin: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate the first R values of x [T, X] or [T, J, X]: here a pair is (x[i], x[R/2 + i]), as the
    indexer has it.
    """
    cos, sin = cos_sin[positions_T].chunk(2, dim=-1)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rotate(x: Tensor, cos_sin: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate the pairs (x0, x1), (x2, x3) ... of x [T, R] or [T, H, R] and leave them
    interleaved.
    """
    cos, sin = cos_sin[positions_T].chunk(2, dim=-1)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return (
        torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        .flatten(-2)
        .to(x.dtype)
    )


# Products of every head with a matrix of its own: what MLA's absorbed form does before and behind
# its core attention.
#
# Shapes: B rows, H heads, N plain key dims, C latent, W value dims.


def heads_in(q_BHN: Tensor, kv_b: Matrix) -> Tensor:
    """W_UK into the query: [B, H, C]. Rows of `kv_b` as in AttentionWeights."""
    w_uk_HNC = _by_head(kv_b, q_BHN)[:, : q_BHN.shape[-1]]
    return torch.matmul(q_BHN.transpose(0, 1), w_uk_HNC).transpose(0, 1).contiguous()


def heads_out(o_BHC: Tensor, kv_b: Matrix, num_values: int) -> Tensor:
    """W_UV behind the sum: [B, H, W]. Rows of `kv_b` as in AttentionWeights, the last W of a head's
    are W_UV.
    """
    w_uv_HWC = _by_head(kv_b, o_BHC)[:, -num_values:]
    return (
        torch.matmul(o_BHC.transpose(0, 1), w_uv_HWC.transpose(1, 2)).transpose(0, 1).contiguous()
    )


def _by_head(kv_b: Matrix, x_BHK: Tensor) -> Tensor:
    """[H, N + W, C]"""
    return kv_b.dense(x_BHK.dtype).view(x_BHK.shape[1], -1, kv_b.shape[1])


# The MoE gate: sigmoid scores, groups, a correction bias that chooses but never weighs. Knows no
# expert's weights.
#
# Source: DeepSeek-V3 (arXiv 2412.19437), eq. 12-16 and section 2.1.2. T tokens, D hidden, E
# experts, G groups, K chosen.


def gate(
    x_TD: Tensor, router: Matrix, bias_E: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, weights [T, K] FP32) of the experts each token goes to, in no
    promised order.
    """
    scores_TE = linear(x_TD.float(), router).sigmoid()
    biased_TE = scores_TE + bias_E
    if config.n_group > 1:
        biased_TGe = biased_TE.view(len(x_TD), config.n_group, -1)
        group_score_TG = biased_TGe.topk(2, dim=-1).values.sum(-1)
        kept = group_score_TG.topk(config.topk_group, dim=-1, sorted=False).indices
        dropped_TG = torch.ones_like(group_score_TG, dtype=torch.bool).scatter_(-1, kept, False)
        # -inf and not 0: a bias may make every kept score negative.
        biased_TE = biased_TGe.masked_fill(dropped_TG[..., None], float("-inf")).flatten(-2)
    ids_TK = biased_TE.topk(config.num_experts_per_tok, dim=-1, sorted=False).indices
    weights_TK = scores_TE.gather(-1, ids_TK)
    if config.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * config.routed_scaling_factor


# The routed experts: every token through its K experts, summed with the gate's weights. One expert
# at a time.
#
# Shapes: T tokens, D hidden, K chosen, E experts, I expert width.


def experts(x_TD: Tensor, held: Experts, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return y [T, D]: y[t] = sum over k of weights[t, k] * expert(ids[t, k])(x[t]). Raises
    IndexError if an id's expert is not held.
    """
    y_TD = torch.zeros_like(x_TD)
    for expert in sorted(set(ids_TK.flatten().tolist())):
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        out = swiglu(x_TD[token], held[expert])
        y_TD.index_add_(0, token, out * weights_TK[token, choice, None].to(out.dtype))
    return y_TD


# MLA's core attention in absorbed form, for decode: one query per request against the paged latent
# cache itself.
#
# W_UK is already in the query and W_UV comes after, so all heads share one key and value of C+R
# (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). Shapes: B requests, H heads, C latent, R rotated,
# P blocks, L layers, S block tokens, M blocks of a request, D values of an entry, C+R or more, K
# selected positions.


def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    cache_PLSD: Tensor,
    layer_index: int,
    block_table_BM: Tensor,
    lengths_B: Tensor,
    scale: float,
    selected_BK: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Return o_latent [B, H, C]. Request b sees the first lengths_B[b] positions of its blocks, the
    new token's too; where these are more than K, it attends to selected_BK[b] of them. Positions
    before `first` it does not see.
    """
    num_read = q_latent_BHC.shape[-1] + q_rope_BHR.shape[-1]
    latents_BSD = cache_PLSD[block_table_BM.long(), layer_index, :, :num_read].flatten(1, 2)
    position_S = torch.arange(latents_BSD.shape[1], device=lengths_B.device)
    unused_BS = (position_S >= lengths_B[:, None]) | (position_S < first)
    if selected_BK is not None:
        others_BS = torch.ones_like(unused_BS).scatter(1, selected_BK.long(), False)
        unused_BS |= others_BS & (lengths_B > selected_BK.shape[1])[:, None]
    # A reused block may hold anything past the length, NaN too, and 0 * NaN is NaN.
    latents_BSD = latents_BSD.masked_fill(unused_BS[..., None], 0.0)
    q_BHD = torch.cat((q_latent_BHC, q_rope_BHR), dim=-1)
    scores_BHS = torch.einsum("bhd,bsd->bhs", q_BHD, latents_BSD) * scale
    p_BHS = scores_BHS.masked_fill(unused_BS[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhs,bsc->bhc", p_BHS, latents_BSD[..., : q_latent_BHC.shape[-1]])


# The lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556, eq. 1-2): which positions a token attends
# to.
#
# DeepSeek's own code rotates queries and keys by a Hadamard matrix, which changes no product, and
# rounds both to FP8; here they are FP32. It also multiplies scores by J^-1/2 X^-1/2, which changes no
# order. Shapes: T tokens, S positions, J index heads, X index key, K positions a token attends to.


def index_scores(q_TJX: Tensor, weights_TJ: Tensor, key_SX: Tensor) -> Tensor:
    """Return [T, S]: the sum over heads of weight * relu(query . key)."""
    dots_TJS = torch.einsum("tjx,sx->tjs", q_TJX, key_SX).relu()
    return torch.einsum("tj,tjs->ts", weights_TJ, dots_TJS)


def best_positions(scores_TS: Tensor, num_selected: int) -> Tensor:
    """Return [T, K] int32, ascending: the K positions of the largest scores; of equal ones the lower
    position.
    """
    order_TS = scores_TS.sort(dim=-1, descending=True, stable=True).indices
    return order_TS[:, :num_selected].sort(dim=-1).values.int()


def select_positions(
    q_BJX: Tensor,
    weights_BJ: Tensor,
    cache_PLSD: Tensor,
    layer_index: int,
    block_table_BM: Tensor,
    lengths_B: Tensor,
    num_selected: int,
    first: int = 0,
) -> Tensor:
    """Return selected [B, K] int32, ascending, of the first lengths_B[b] positions of a request's
    blocks, none before `first` (0 or 1). Rows of K or fewer say nothing. A position's key is the
    last X of its entry.
    """
    selected_BK = torch.zeros((len(q_BJX), num_selected), dtype=torch.int32, device=q_BJX.device)
    key_PSX = cache_PLSD[:, layer_index, :, -q_BJX.shape[-1] :]
    for row, length in enumerate(lengths_B.tolist()):
        if length > num_selected:
            key_SX = key_PSX[block_table_BM[row].long()].flatten(0, 1)[first:length]
            scores_1S = index_scores(q_BJX[row : row + 1], weights_BJ[row : row + 1], key_SX)
            selected_BK[row] = first + best_positions(scores_1S, num_selected)[0]
    return selected_BK


# MLA's core attention in multi-head form, for prefill: keys and values are expanded from latents.
# Knows no blocks, no batch.
#
# Source: DeepSeek-V3 (arXiv 2412.19437), eq. 4-10. T new tokens, S context and new tokens, H heads,
# C latent, R rotated, N plain key dims, W value dims.


def mla_prefill(
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    latents_SD: Tensor,
    kv_b: Matrix,
    scale: float,
    is_left_out_TS: Tensor | None = None,
) -> Tensor:
    """Return o [T, H, W]. The T queries are the last T of the S positions; each sees itself and all
    before it, but for those that are left out.
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


# Which rank and expert slot every (token, expert) pair goes to, grouped by rank, in plain torch.
#
# Knows nothing of bytes and messages. Fast twin: `hadal.kernels.ops`. Shapes: T tokens, K chosen, E
# experts, M most replicas, P = T * K pairs, N rows (distinct tokens of a rank, all ranks).


@dataclass(frozen=True, slots=True)
class Replicas:
    """Where a layer's experts are: expert slot ids of the whole unit (rank * num_expert_slots +
    slot).
    """

    expert_slots_EM: Tensor
    """int32, padded with an expert's first."""
    counts_E: Tensor
    """int32"""
    num_ranks: int
    num_expert_slots: int
    """Expert slots of a rank."""


@dataclass(frozen=True, slots=True)
class Route:
    """Pairs and rows grouped by rank, within a rank by token, then choice. All tensors are int32.

    A rank's rows are its distinct tokens: one copy of each is enough.
    """

    num_pairs_R: list[int]
    num_rows_R: list[int]
    token_P: Tensor
    row_P: Tensor
    """Index among the rows of its rank."""
    expert_slot_P: Tensor
    """Local expert slot on its rank."""
    token_N: Tensor
    at_TK: Tensor
    """Where a pair stands among the P."""
    expert_slot_TK: Tensor
    """The replica's expert slot id in the whole unit."""


def choose_replicas(ids_TK: Tensor, replicas: Replicas, shift: int) -> Tensor:
    """The expert slot id each pair goes to, int64 [T, K]: replica (t + shift) % count of its
    expert.

    Even, and the same whoever computes it. Raises ValueError if an id is out of range or its expert
    has no replica.
    """
    if ids_TK.numel() and not 0 <= int(ids_TK.min()) <= int(ids_TK.max()) < len(replicas.counts_E):
        raise ValueError("an expert id is out of range.")
    counts_TK = replicas.counts_E[ids_TK].long()
    if bool((counts_TK < 1).any()):
        raise ValueError("an expert id has no replica.")
    token_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None]
    return replicas.expert_slots_EM[ids_TK, (token_T1 + shift) % counts_TK].long()


def route(ids_TK: Tensor, replicas: Replicas, shift: int) -> Route:
    """Choose every pair's replica and group the pairs by rank. Raises ValueError as
    `choose_replicas`.
    """
    num_tokens, top_k = ids_TK.shape
    num_ranks, num_expert_slots = replicas.num_ranks, replicas.num_expert_slots
    expert_slot_TK = choose_replicas(ids_TK, replicas, shift)
    rank_TK = expert_slot_TK // num_expert_slots
    order_P = rank_TK.flatten().argsort(stable=True)
    rank_P, token_P = rank_TK.flatten()[order_P], order_P // max(top_k, 1)
    at_P = torch.empty_like(order_P)
    at_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    is_new_P = torch.ones_like(order_P, dtype=torch.bool)
    is_new_P[1:] = (rank_P[1:] != rank_P[:-1]) | (token_P[1:] != token_P[:-1])
    num_rows_R = torch.bincount(rank_P[is_new_P], minlength=num_ranks)
    first_row_R = num_rows_R.cumsum(0) - num_rows_R
    return Route(
        num_pairs_R=torch.bincount(rank_P, minlength=num_ranks).tolist(),
        num_rows_R=num_rows_R.tolist(),
        token_P=token_P.int(),
        row_P=(is_new_P.cumsum(0) - 1 - first_row_R[rank_P]).int(),
        expert_slot_P=(expert_slot_TK.flatten()[order_P] % num_expert_slots).int(),
        token_N=token_P[is_new_P].int(),
        at_TK=at_P.view(num_tokens, top_k).int(),
        expert_slot_TK=expert_slot_TK.int(),
    )


# Dispatch and combine as what they mean: every token through its experts, all ranks' tokens in one
# process.
#
# Knows no bytes, ranks only as owners of tokens. The slow twin of `comm/expert_comm`: the same rows
# reach the same experts and the same sum is made; what the dispatch format does to a row is a
# function the caller passes. Shapes: T tokens of a rank, D hidden, K chosen.


Rows = Callable[[Tensor], Tensor]


def exact(rows_ND: Tensor) -> Tensor:
    """Dispatch in FP32: rows arrive as they left."""
    return rows_ND


def all_to_all(
    x_TD: Mapping[int, Tensor],
    ids_TK: Mapping[int, Tensor],
    weights_TK: Mapping[int, Tensor],
    experts: Callable[[int, Tensor], Tensor],
    there: Rows = exact,
    back: Rows = exact,
) -> dict[int, Tensor]:
    """Return routed [T, D] of every rank: sum over k, by ascending expert id, of weight *
    back(expert(there(x))).

    `experts(e, x_ND)` is expert e's output for some rows, each computed by itself.
    """
    routed = {}
    for rank, x in x_TD.items():
        order_TK = ids_TK[rank].argsort(dim=1, stable=True)
        ids, weights = ids_TK[rank].gather(1, order_TK), weights_TK[rank].gather(1, order_TK)
        total_TD = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for token in range(len(x)):
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                row_1D = back(experts(expert, there(x[token : token + 1])))
                # Rounded to FP32 after every addition, the product not rounded.
                total_TD[token] = (
                    (total_TD[token] + weight.double() * row_1D[0].double()).float().double()
                )
        routed[rank] = total_TD.float()
    return routed
