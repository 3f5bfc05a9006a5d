"""Fast parts of training on a CPU, each beside a plain version: routing, grouped experts, packed
attention.

With a compiler, the C++ in kernels.cpp runs through autograd functions; without one, plain torch. Letters in
shapes: T tokens, E experts, D model width, F expert width, K experts per token, H heads; in attention, K and
V are the widths of keys and values, and R is a number of rows.
"""

import functools
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.kernels.build import cache_folder, only_one


@functools.cache
def kernels():
    """Return the compiled module, or None if there is no compiler (or HADAL_PLAIN is set)."""
    if os.environ.get("HADAL_PLAIN"):
        return None
    try:
        from torch.utils.cpp_extension import load

        flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp"]
        folder = cache_folder() / "train"
        folder.mkdir(parents=True, exist_ok=True)
        with only_one(folder / "building"):
            # torch's own lock survives a killed builder, and the next builder would wait for it for
            # ever.
            (folder / "lock").unlink(missing_ok=True)
            return load(
                "hadal_train_kernels",
                [str(Path(__file__).with_name("kernels.cpp"))],
                extra_cflags=flags,
                build_directory=str(folder),
            )
    except (OSError, RuntimeError, ImportError) as error:
        print(f"no compiled kernels, training the plain way: {error}")
        return None


def route(biased_TE: Tensor, num_groups: int, groups_kept: int, k: int) -> Tensor:
    """Return the experts [T, K] of each token, from biased scores (paper 2.1.2, V3 `Gate`)."""
    fast = kernels()
    if fast is not None:
        return fast.route(biased_TE.detach().contiguous(), num_groups, groups_kept, k)
    groups = biased_TE.unflatten(1, (num_groups, -1))
    kept = groups.topk(2, dim=-1)[0].sum(-1).topk(groups_kept, dim=-1)[1]
    mask = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, kept, False)
    return groups.masked_fill(mask[..., None], float("-inf")).flatten(1).topk(k, dim=-1)[1]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, gate_up, down, weights_TK, chosen_TK):
        order, starts = kernels().sort_by_expert(chosen_TK, gate_up.shape[0])
        x_TD, weights_TK = x_TD.contiguous(), weights_TK.contiguous()
        out, kept = kernels().experts_forward(x_TD, gate_up, down, weights_TK, order, starts)
        ctx.save_for_backward(x_TD, gate_up, down, weights_TK, order, starts, kept)
        return out

    @staticmethod
    def backward(ctx, dout):
        dx, dgate_up, ddown, dweights = kernels().experts_backward(
            dout.contiguous(), *ctx.saved_tensors
        )
        return dx, dgate_up, ddown, dweights, None


def grouped_experts(
    x_TD: Tensor, gate_up: Tensor, down: Tensor, weights_TK: Tensor, chosen_TK: Tensor
) -> Tensor:
    """Return sum over K of weight * SwiGLU_expert(x). gate_up is [E, 2F, D], down [E, D, F]."""
    if kernels() is not None:
        return _Experts.apply(x_TD, gate_up, down, weights_TK, chosen_TK)
    out = torch.zeros_like(x_TD)
    for expert in chosen_TK.unique().tolist():
        token, choice = (chosen_TK == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_TD[token], gate_up[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[expert])
        out = out.index_add(0, token, y * weights_TK[token, choice, None])
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bounds, scale):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = kernels().attention_forward(q, k, v, bounds, scale)
        ctx.save_for_backward(q, k, v, out, lse, bounds)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, bounds = ctx.saved_tensors
        dq, dk, dv = kernels().attention_backward(
            dout.contiguous(), q, k, v, out, lse, bounds, ctx.scale
        )
        return dq, dk, dv, None, None


def packed_attention(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, bounds: Tensor, scale: float
) -> Tensor:
    """Return causal attention inside each sequence; `bounds` has the start of each, and the last end."""
    if kernels() is not None:
        return _Attention.apply(q_THK, k_THK, v_THV, bounds, scale)
    outs = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (q_THK, k_THK, v_THV))
        outs.append(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
        )
    return torch.cat(outs)


def attention_one_further(
    q_RHK: Tensor,
    own: tuple[Tensor, Tensor],
    earlier: tuple[Tensor, Tensor],
    rows_R: Tensor,
    bounds: Tensor,
    scale: float,
) -> Tensor:
    """Return attention of one more token after each of the ascending `rows_R`: over its own key and
    value [R, H, *] and over those of all T tokens [T, H, *], from the start of its sequence up to
    its row.

    The new tokens do not see each other: each is the only one after its row.
    """
    (own_k_RHK, own_v_RHV), (k_THK, v_THV) = own, earlier
    own_score_RH = (q_RHK * own_k_RHK).sum(-1)
    at_R = rows_R - bounds[torch.searchsorted(bounds, rows_R, right=True) - 1]
    # Split, not sliced: the gradient of a slice is as large as all tokens.
    sizes, counts = bounds.diff().tolist(), torch.searchsorted(rows_R, bounds).diff().tolist()
    of_rows = [x.split(counts) for x in (q_RHK, own_score_RH, own_v_RHV, at_R)]
    outs = []
    for q, own_score, own_v, at, k, v in zip(
        *of_rows, k_THK.split(sizes), v_THV.split(sizes), strict=True
    ):
        if len(at) == 0:
            continue
        scores = torch.einsum("rhk,lhk->rhl", q, k)
        scores = scores.masked_fill(torch.arange(len(k)) > at[:, None, None], float("-inf"))
        both = (torch.cat([scores, own_score[..., None]], dim=-1) * scale).softmax(-1)
        outs.append(torch.einsum("rhl,lhv->rhv", both[..., :-1], v) + both[..., -1:] * own_v)
    return torch.cat(outs)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        y, inverse = kernels().norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, dweight = kernels().norm_backward(dy.contiguous(), *ctx.saved_tensors)
        return dx, dweight, None


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight."""
    if kernels() is not None and x_TD.ndim == 2:
        return _Norm.apply(x_TD, weight_D, eps)
    return F.rms_norm(x_TD, (x_TD.shape[-1],), weight_D, eps)
