"""The operations of a step on a CPU, through the kernels of `csrc`: products, norms, gate, experts,
MLA's core attention, and the rows that travel between ranks.

Each has a slow twin of the same name in `hadal.reference`, which runs where the kernels cannot (a
GPU, no compiler). A token's result is bit-equal whatever the other tokens of the batch and the
number of threads; torch's own products do not promise that. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.core.row_bytes import row_bytes
from hadal.kernels import library
from hadal.reference import codec as codec_twin
from hadal.reference import ops as twin
from hadal.reference.ops import Replicas, Route
from hadal.reference.params import Experts, Matrix, MlpWeights

# y = x W^T for few tokens or many. Twin: reference.linear. Shapes: M tokens, K inputs, N outputs.


def linear(x_MK: Tensor, w: Matrix) -> Tensor:
    """Return y [M, N] (or [..., N] for x of more dimensions) for w [N, K]; plain torch where the
    kernels cannot run.

    Raises ValueError if the shapes do not match.
    """
    lib = library.load()
    if lib is None or not library.fits(x_MK) or not library.takes(w):
        return twin.linear(x_MK, w)
    if x_MK.dim() < 1 or x_MK.shape[-1] != w.shape[1]:
        raise ValueError(
            f"x {list(x_MK.shape)} and w {list(w.shape)} do not multiply; [M, K] and [N, K] do."
        )
    n, k = w.shape
    m = x_MK.numel() // k
    y_MN = torch.empty((*x_MK.shape[:-1], n))
    library.check_status(
        lib.hadal_linear(
            library.team(), x_MK.data_ptr(), m, k, library.address(w), n, y_MN.data_ptr()
        )
    )
    return y_MN


# RMS norm over the last dimension. Twin: torch's `F.rms_norm`, which reference.rms_norm spells
# out.


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps), [T, D]. Raises ValueError if the shapes do not
    match.
    """
    lib = library.load()
    if lib is None or not library.fits(x_TD, weight_D):
        return F.rms_norm(x_TD, x_TD.shape[-1:], weight_D, eps)
    library.check_shape("weight_D", weight_D, (x_TD.shape[-1],))
    y_TD = torch.empty_like(x_TD)
    dim = x_TD.shape[-1]
    library.check_status(
        lib.hadal_rms_norm(
            library.team(),
            x_TD.data_ptr(),
            x_TD.numel() // dim,
            dim,
            weight_D.data_ptr(),
            eps,
            y_TD.data_ptr(),
        )
    )
    return y_TD


# A dense network, or the shared expert: SwiGLU over the fast `linear`. Twin: reference.swiglu.


def swiglu(x_TD: Tensor, mlp: MlpWeights) -> Tensor:
    """Return down(silu(gate x) * up x), [T, D]."""
    return linear(F.silu(linear(x_TD, mlp.gate)) * linear(x_TD, mlp.up), mlp.down)


# Products of every head with a matrix of its own, around MLA's absorbed core attention. Twin:
# `hadal.reference.ops`.
#
# A row's result is bit-equal whatever the other rows and the number of threads; torch's batched
# product does not promise that, and a difference in the last bit is enough to round an activation
# otherwise with FP8 dispatch. Shapes: B rows, H heads, N plain key dims, C latent, W value dims.


def heads_in(q_BHN: Tensor, kv_b: Matrix) -> Tensor:
    """W_UK into the query: [B, H, C]. Rows of `kv_b` as in AttentionWeights. The query may be a
    view whose last dimension is dense.

    Raises ValueError if the shapes do not match.
    """
    lib = library.load()
    is_plain = q_BHN.dtype is torch.float32 and q_BHN.device.type == "cpu" and q_BHN.stride(-1) == 1
    if lib is None or not is_plain or not library.takes(kv_b):
        return twin.heads_in(q_BHN, kv_b)
    batch, heads, n = q_BHN.shape
    c, apart = kv_b.shape[1], _rows_apart(kv_b, heads, n)
    y_BHC = torch.empty((batch, heads, c))
    library.check_status(
        lib.hadal_heads_in(
            library.team(),
            q_BHN.data_ptr(),
            q_BHN.stride(0),
            q_BHN.stride(1),
            batch,
            heads,
            n,
            library.address(kv_b),
            0,
            apart,
            c,
            y_BHC.data_ptr(),
        )
    )
    return y_BHC


def heads_out(o_BHC: Tensor, kv_b: Matrix, num_values: int) -> Tensor:
    """W_UV behind the sum: [B, H, W]. Rows of `kv_b` as in AttentionWeights, the last W of a head's
    are W_UV. Raises ValueError if the shapes do not match.
    """
    lib = library.load()
    if lib is None or not library.fits(o_BHC) or not library.takes(kv_b):
        return twin.heads_out(o_BHC, kv_b, num_values)
    batch, heads, c = o_BHC.shape
    apart = _rows_apart(kv_b, heads, num_values)
    library.check_shape("kv_b", kv_b, (heads * apart, c))
    y_BHW = torch.empty((batch, heads, num_values))
    library.check_status(
        lib.hadal_heads_out(
            library.team(),
            o_BHC.data_ptr(),
            batch,
            heads,
            c,
            library.address(kv_b),
            apart - num_values,
            apart,
            num_values,
            y_BHW.data_ptr(),
        )
    )
    return y_BHW


def _rows_apart(kv_b: Matrix, num_heads: int, num_rows: int) -> int:
    """Rows of one head. Raises ValueError if the heads do not share the rows or have fewer."""
    apart = kv_b.shape[0] // num_heads
    if apart * num_heads != kv_b.shape[0] or apart < num_rows:
        raise ValueError(f"kv_b has {kv_b.shape[0]} rows, which {num_heads} heads do not share.")
    return apart


# The MoE gate: which experts a token goes to. Knows no expert's weights. Twin: reference.gate.
#
# T tokens, D hidden, E experts, K chosen.


def gate(
    x_TD: Tensor, router: Matrix, bias_E: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, weights [T, K] FP32) of the experts each token goes to, in no
    promised order.
    """
    lib = library.load()
    if lib is None or not library.fits(x_TD, bias_E) or not library.takes(router):
        return twin.gate(x_TD, router, bias_E, config)
    num_tokens, num_experts, num_chosen = (
        len(x_TD),
        config.n_routed_experts,
        config.num_experts_per_tok,
    )
    logits_TE = linear(x_TD, router)
    library.check_shape("logits_TE", logits_TE, (num_tokens, num_experts))
    library.check_shape("bias_E", bias_E, (num_experts,))
    ids_TK = torch.empty((num_tokens, num_chosen), dtype=torch.int64)
    weights_TK = torch.empty((num_tokens, num_chosen))
    library.check_status(
        lib.hadal_gate(
            library.team(),
            logits_TE.data_ptr(),
            num_tokens,
            num_experts,
            bias_E.data_ptr(),
            num_chosen,
            config.n_group,
            config.topk_group,
            int(config.norm_topk_prob),
            config.routed_scaling_factor,
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
        )
    )
    return ids_TK, weights_TK


# The routed SwiGLU experts of a layer: tokens sorted by expert, one grouped product per
# projection. Knows nothing of gates.
#
# Deterministic: a token's result is bit-equal whatever the batch and the number of threads (its
# experts are added by ascending id). Shapes: T tokens, D hidden, K chosen, E experts, I expert
# width. Twin: `hadal.reference.ops`.


def experts(x_TD: Tensor, held: Experts, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return y [T, D] = sum over k of weights[t, k] * expert(ids[t, k])(x[t]); all experts are of
    one shape.

    Raises ValueError if shapes do not match or an id's expert is not held.
    """
    lib = library.load()
    if lib is None or not library.fits(x_TD, weights_TK) or not library.takes(held):
        return twin.experts(x_TD, held, ids_TK, weights_TK)
    num_tokens, dim = x_TD.shape
    top_k, (width, held_dim) = ids_TK.shape[-1], held.shape
    if width and held_dim != dim:
        raise ValueError(f"tokens have {dim} values, and an expert's gate takes {held_dim}.")
    library.check_shape("ids_TK", ids_TK, (num_tokens, top_k))
    library.check_shape("weights_TK", weights_TK, (num_tokens, top_k))
    ids_TK = library.as_int(ids_TK, torch.int64)
    y_TD = torch.empty((num_tokens, dim))
    library.check_status(
        lib.hadal_experts(
            library.team(),
            x_TD.data_ptr(),
            num_tokens,
            dim,
            library.address(held),
            len(held),
            max(width, 1),
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            top_k,
            y_TD.data_ptr(),
        )
    )
    return y_TD


# MLA's core attention in absorbed form over the paged latent cache. Knows nothing of projections.
#
# All heads share each latent row, so one load of it serves a group of heads. A sequence is cut into
# ranges of positions by its length alone: bit-equal whatever the batch and the number of threads.
# Shapes: B requests, H heads, C latent, R rotated, P blocks, L layers, S = 64 block tokens, M
# blocks of a request, D values of an entry, C + R or more, K selected positions. Twin:
# `hadal.reference.ops`.


BLOCK_TOKENS = 64  # compiled in: cpu/attention.h, kBlock


def available(cache_PLSD: Tensor) -> bool:
    """Whether the fast path takes this cache; the twin does otherwise."""
    return (
        library.load() is not None
        and library.fits(cache_PLSD)
        and cache_PLSD.shape[2] == BLOCK_TOKENS
    )


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
    """Return o_latent [B, H, C]. Request b sees the first lengths_B[b] positions of its blocks, its
    new token included; where these are more than K, it attends to selected_BK[b] of them, which
    ascend. With `first` 1 position 0 is not seen: an MTP module has no entry there.

    Raises ValueError if shapes do not match, a length is negative, a table names a block that is
    not there, a selected position is not seen, or `first` is neither 0 nor 1.
    """
    _check_first(first)
    lib = library.load()
    if lib is None or not library.fits(q_latent_BHC, q_rope_BHR) or not available(cache_PLSD):
        return twin.mla_decode(
            q_latent_BHC,
            q_rope_BHR,
            cache_PLSD,
            layer_index,
            block_table_BM,
            lengths_B,
            scale,
            selected_BK,
            first,
        )
    batch, heads, c = q_latent_BHC.shape
    r = q_rope_BHR.shape[-1]
    library.check_shape("q_rope_BHR", q_rope_BHR, (batch, heads, r))
    seen, _kept = _seen(batch, c + r, cache_PLSD, layer_index, block_table_BM, lengths_B)
    o_BHC = torch.empty((batch, heads, c))
    if batch == 0:
        return o_BHC
    selected: tuple[int | None, int] = None, 0
    if selected_BK is not None:
        num_selected = selected_BK.shape[-1]
        library.check_shape("selected_BK", selected_BK, (batch, num_selected))
        selected_BK = library.as_int(selected_BK, torch.int32)
        selected = selected_BK.data_ptr(), num_selected
    library.check_status(
        lib.hadal_mla_decode(
            library.team(),
            q_latent_BHC.data_ptr(),
            q_rope_BHR.data_ptr(),
            batch,
            heads,
            c,
            r,
            *seen,
            *selected,
            first,
            scale,
            o_BHC.data_ptr(),
        )
    )
    return o_BHC


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
    """Return selected [B, K] int32, ascending: the K positions that score best for a row, of the
    first lengths_B[b] of its blocks, but none before `first`. Rows of K or fewer say nothing. A
    position's key is the last X values of its entry (DeepSeek-V3.2's lightning indexer; J index
    heads, X index key).

    Raises ValueError as `mla_decode`.
    """
    _check_first(first)
    lib = library.load()
    if lib is None or not library.fits(q_BJX, weights_BJ) or not available(cache_PLSD):
        return twin.select_positions(
            q_BJX,
            weights_BJ,
            cache_PLSD,
            layer_index,
            block_table_BM,
            lengths_B,
            num_selected,
            first,
        )
    batch, heads, width = q_BJX.shape
    library.check_shape("weights_BJ", weights_BJ, (batch, heads))
    seen, _kept = _seen(batch, width, cache_PLSD, layer_index, block_table_BM, lengths_B)
    selected_BK = torch.zeros((batch, num_selected), dtype=torch.int32)
    library.check_status(
        lib.hadal_select_positions(
            library.team(),
            q_BJX.data_ptr(),
            weights_BJ.data_ptr(),
            batch,
            heads,
            width,
            *seen,
            num_selected,
            first,
            selected_BK.data_ptr(),
        )
    )
    return selected_BK


def _check_first(first: int) -> None:
    if first not in (0, 1):
        raise ValueError(f"first is {first}; attention begins at position 0 or 1.")


def _seen(
    batch: int,
    width: int,
    cache_PLSD: Tensor,
    layer_index: int,
    block_table_BM: Tensor,
    lengths_B: Tensor,
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor]]:
    """What C is told of a cache whose entries have `width` values or more, and of what each row
    sees; and tensors to keep until it has returned. Raises ValueError.
    """
    num_blocks, num_layers, _, entry = cache_PLSD.shape
    if entry < width:
        raise ValueError(f"cache_PLSD has entries of {entry} values; {width} are read.")
    library.check_shape("block_table_BM", block_table_BM, (batch, block_table_BM.shape[-1]))
    library.check_shape("lengths_B", lengths_B, (batch,))
    if not 0 <= layer_index < num_layers:
        raise ValueError(f"layer_index is {layer_index}; the cache has {num_layers} layers.")
    table_BM = library.as_int(block_table_BM, torch.int32)
    lengths_B = library.as_int(lengths_B, torch.int64)
    told = (
        cache_PLSD.data_ptr(),
        entry,
        num_blocks,
        num_layers,
        layer_index,
        table_BM.data_ptr(),
        table_BM.shape[1],
        lengths_B.data_ptr(),
    )
    return told, (table_BM, lengths_B)


# Which rank and expert slot every (token, expert) pair goes to, grouped by rank. Twin:
# `hadal.reference.ops`.
#
# Shapes: T tokens, K chosen, E experts, M most replicas, P = T * K pairs, N rows.


def route(ids_TK: Tensor, replicas: Replicas, shift: int) -> Route:
    """See the twin. Raises ValueError if an id is out of range or its expert has no replica."""
    lib = library.load()
    tensors = (ids_TK, replicas.expert_slots_EM, replicas.counts_E)
    if lib is None or any(x.device.type != "cpu" for x in tensors):
        return twin.route(ids_TK, replicas, shift)
    num_tokens, top_k = ids_TK.shape
    num_experts, most = replicas.expert_slots_EM.shape
    num_ranks, num_pairs = replicas.num_ranks, num_tokens * top_k
    library.check_shape("counts_E", replicas.counts_E, (num_experts,))
    ids_TK = library.as_int(ids_TK, torch.int64)
    expert_slots_EM, counts_E = (
        library.as_int(x, torch.int32) for x in (replicas.expert_slots_EM, replicas.counts_E)
    )
    # One allocation: scratch, pairs and rows of every rank, then five lists of a pair each.
    out = torch.empty(num_pairs * 6 + num_ranks * 6, dtype=torch.int32)
    sizes = [num_pairs + 4 * num_ranks, 2 * num_ranks, *([num_pairs] * 5)]
    scratch, counts, *lists = torch.split_with_sizes(out, sizes)
    pairs_address = counts.data_ptr()
    shape = (ctypes.c_int32 * 7)(
        num_tokens, top_k, num_experts, most, replicas.num_expert_slots, num_ranks, shift
    )
    library.check_status(
        lib.hadal_route(
            ctypes.addressof(shape),
            ids_TK.data_ptr(),
            expert_slots_EM.data_ptr(),
            counts_E.data_ptr(),
            scratch.data_ptr(),
            pairs_address,
            pairs_address + 4 * num_ranks,
            *(x.data_ptr() for x in lists),
        )
    )
    token_P, row_P, expert_slot_P, token_N, at_P = lists
    num_both = counts.tolist()
    num_pairs_R, num_rows_R = num_both[:num_ranks], num_both[num_ranks:]
    return Route(
        num_pairs_R,
        num_rows_R,
        token_P,
        row_P,
        expert_slot_P,
        token_N[: sum(num_rows_R)],
        at_P.view(num_tokens, top_k),
        scratch[:num_pairs].view(num_tokens, top_k),
    )


# Rows as they travel between ranks: encode with gather, decode, and the weighted sum of what came
# back.
#
# Bit-equal to its twin `hadal.reference.codec`, which runs where the kernels cannot (a GPU, no
# compiler) and knows the formats. Rows are views of a message, so nothing is copied on the way.
#
# Shapes: T tokens, D hidden, N rows, B bytes of a row, P rows that came back, K of a token.


FORMATS = {"fp32": 0, "fp8": 1, "fp8_pow2": 2, "bf16": 3}
MAX_TOP_K = 64


def encode(x_TD: Tensor, index_N: Tensor | None, rows_NB: Tensor, row_format: str) -> None:
    """Fill rows_NB (uint8, rows may lie apart) with the rows `index_N` (int32) of x_TD, all in
    order if None.

    Raises ValueError if shapes do not match or an index is out of range.
    """
    num_tokens, hidden = x_TD.shape
    num_rows = num_tokens if index_N is None else index_N.shape[0]
    _check_rows(rows_NB, num_rows, row_bytes(hidden, row_format))
    lib = library.load()
    if lib is None or not library.fits(x_TD) or rows_NB.device.type != "cpu":
        codec_twin.encode(x_TD, index_N, rows_NB, row_format)
        return
    index_N = None if index_N is None else library.as_int(index_N, torch.int32)
    library.check_status(
        lib.hadal_encode(
            library.team(),
            x_TD.data_ptr(),
            num_tokens,
            hidden,
            None if index_N is None else index_N.data_ptr(),
            num_rows,
            FORMATS[row_format],
            rows_NB.data_ptr(),
            rows_NB.stride(0),
        )
    )


def decode(rows_NB: Tensor, out_ND: Tensor, row_format: str) -> None:
    """Fill out_ND (FP32) with what `encode` wrote. Raises ValueError if shapes do not match."""
    num_rows, hidden = out_ND.shape
    _check_rows(rows_NB, num_rows, row_bytes(hidden, row_format))
    lib = library.load()
    if lib is None or not library.fits(out_ND) or rows_NB.device.type != "cpu":
        codec_twin.decode(rows_NB, out_ND, row_format)
        return
    library.check_status(
        lib.hadal_decode(
            library.team(),
            rows_NB.data_ptr(),
            rows_NB.stride(0),
            num_rows,
            hidden,
            FORMATS[row_format],
            out_ND.data_ptr(),
        )
    )


def weighted_sum(
    rows_PB: Tensor,
    row_format: str,
    at_TK: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    out_TD: Tensor,
) -> None:
    """out[t] = sum over k of weights[t, k] * row at[t, k], by ascending id, one fused multiply-add
    each.

    `row_format` "fp32" or "bf16"; rows_PB without gaps. Raises ValueError if shapes do not match.
    """
    num_tokens, hidden = out_TD.shape
    num_rows, top_k = rows_PB.shape[0], ids_TK.shape[1]
    if row_format not in ("fp32", "bf16") or top_k > MAX_TOP_K:
        raise ValueError(f"rows of {row_format} with {top_k} of a token cannot be summed.")
    library.check_shape("rows_PB", rows_PB, (num_rows, row_bytes(hidden, row_format)))
    for name, tensor in (("at_TK", at_TK), ("ids_TK", ids_TK), ("weights_TK", weights_TK)):
        library.check_shape(name, tensor, (num_tokens, top_k))
    lib = library.load()
    if lib is None or not library.fits(weights_TK, out_TD) or not rows_PB.is_contiguous():
        codec_twin.weighted_sum(rows_PB, row_format, at_TK, ids_TK, weights_TK, out_TD)
        return
    at_TK, ids_TK = library.as_int(at_TK, torch.int32), library.as_int(ids_TK, torch.int64)
    library.check_status(
        lib.hadal_weighted_sum(
            library.team(),
            rows_PB.data_ptr(),
            num_rows,
            hidden,
            int(row_format == "bf16"),
            at_TK.data_ptr(),
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
            num_tokens,
            top_k,
            out_TD.data_ptr(),
        )
    )


def _check_rows(rows_NB: Tensor, num_rows: int, num_bytes: int) -> None:
    library.check_shape("rows_NB", rows_NB, (num_rows, num_bytes))
    if rows_NB.dtype is not torch.uint8 or (num_rows and rows_NB.stride(1) != 1):
        raise ValueError("rows_NB must be uint8 with a row's bytes side by side.")


# Whole messages of a dispatch written and read in one call each. Knows their layout (comm/layout),
# no links.
#
# Where the kernels cannot run, both answer that they did nothing; the plain path is
# comm/expert_comm, which gives the same bytes. Shapes: T tokens, D hidden, K
# chosen, N received rows, M received pairs, R ranks, S expert slots of a rank.


Arrived = tuple[Tensor, int, int]
"""A message, its rows, its pairs: its size was checked against them."""


def pack(
    x_TD: Tensor,
    route: Route,
    num_expert_slots: int,
    row_format: str,
    is_low_latency: bool,
    layer: int,
    kind: int,
    offset_R: Sequence[int],
    buffer: Tensor,
) -> bool:
    """Write every rank's message at its offset in the buffer (-1: none). False: nothing was
    done.
    """
    lib = library.load()
    num_tokens, top_k = route.at_TK.shape
    if lib is None or not library.fits(x_TD) or buffer.device.type != "cpu" or top_k > MAX_TOP_K:
        return False
    num_ranks = len(offset_R)
    shape = (ctypes.c_int32 * 9)(
        num_tokens,
        top_k,
        x_TD.shape[1],
        num_expert_slots,
        num_ranks,
        FORMATS[row_format],
        is_low_latency,
        layer,
        kind,
    )
    counts = (ctypes.c_int32 * (3 * num_ranks))(
        *route.num_pairs_R, *route.num_rows_R, *list(accumulate(route.num_pairs_R, initial=0))[:-1]
    )
    at = ctypes.addressof(counts)
    offsets = (ctypes.c_int64 * num_ranks)(*offset_R)
    library.check_status(
        lib.hadal_pack(
            library.team(),
            ctypes.addressof(shape),
            x_TD.data_ptr(),
            route.expert_slot_TK.data_ptr(),
            route.at_TK.data_ptr(),
            at,
            at + 4 * num_ranks,
            route.row_P.data_ptr(),
            route.expert_slot_P.data_ptr(),
            ctypes.addressof(offsets),
            at + 8 * num_ranks,
            buffer.data_ptr(),
        )
    )
    return True


def unpack(
    messages: Sequence[Arrived],
    x_TD: Tensor,
    own: tuple[Tensor, Tensor, Tensor],
    counts_S: Tensor,
    row_format: str,
    is_low_latency: bool,
    row_M: Tensor,
    expert_slot_M: Tensor,
    out_ND: Tensor,
) -> bool:
    """Fill row_M, expert_slot_M (int64) and out_ND: the own part (tokens, rows, expert slots;
    int32), then the messages in order.

    Every expert slot's pairs are added to counts_S (int64). False: nothing was done. Raises
    ValueError if a message names a row or expert slot that is not there.
    """
    lib = library.load()
    if (
        lib is None
        or not library.fits(x_TD, out_ND)
        or any(m.device.type != "cpu" for m, _, _ in messages)
    ):
        return False
    num_expert_slots = counts_S.shape[0]
    token_N, row_P, expert_slot_P = own
    first_row, first_pair = token_N.shape[0], row_P.shape[0]
    shape = (ctypes.c_int32 * 7)(
        x_TD.shape[1],
        num_expert_slots,
        FORMATS[row_format],
        is_low_latency,
        len(messages),
        first_row,
        first_pair,
    )
    numbers: list[int] = []
    for message, num_rows, num_pairs in messages:
        numbers += (message.data_ptr(), num_rows, num_pairs, first_row, first_pair)
        first_row, first_pair = first_row + num_rows, first_pair + num_pairs
    library.check_shape("out_ND", out_ND, (first_row, x_TD.shape[1]))
    library.check_shape("row_M", row_M, (first_pair,))
    library.check_shape("expert_slot_M", expert_slot_M, (first_pair,))
    arrived = (ctypes.c_int64 * len(numbers))(*numbers)
    library.check_status(
        lib.hadal_unpack(
            library.team(),
            ctypes.addressof(shape),
            ctypes.addressof(arrived),
            x_TD.data_ptr(),
            token_N.data_ptr(),
            row_P.data_ptr(),
            expert_slot_P.data_ptr(),
            row_M.data_ptr(),
            expert_slot_M.data_ptr(),
            counts_S.data_ptr(),
            out_ND.data_ptr(),
        )
    )
    return True
