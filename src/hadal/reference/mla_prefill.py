"""MLA's core in multi-head form, for prefill: keys and values are expanded from latents. Knows no
blocks, no batch.

Source: DeepSeek-V3 (arXiv 2412.19437), eq. 4-10. T new tokens, S context and new tokens, H heads, C
latent, R rotated, N plain key dims, W value dims.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mla_prefill(
    q_nope_THN: Tensor,
    q_rope_THR: Tensor,
    latents_SD: Tensor,
    w_uk_HNC: Tensor,
    w_uv_HWC: Tensor,
    scale: float,
) -> Tensor:
    """Return o [T, H, W]. The T queries are the last T of the S positions; each sees itself and all
    before it.
    """
    num_new, num_seen = len(q_nope_THN), len(latents_SD)
    c_SC, k_rope_SR = torch.split(latents_SD, [w_uk_HNC.shape[-1], q_rope_THR.shape[-1]], dim=-1)
    k_nope_SHN = torch.einsum("sc,hnc->shn", c_SC, w_uk_HNC)
    v_SHW = torch.einsum("sc,hwc->shw", c_SC, w_uv_HWC)
    scores_HTS = torch.einsum("thn,shn->hts", q_nope_THN, k_nope_SHN)
    scores_HTS = scores_HTS + torch.einsum("thr,sr->hts", q_rope_THR, k_rope_SR)
    position_T = torch.arange(num_seen - num_new, num_seen, device=scores_HTS.device)
    future_TS = torch.arange(num_seen, device=scores_HTS.device) > position_T[:, None]
    p_HTS = (scores_HTS * scale).masked_fill(future_TS, float("-inf")).softmax(-1)
    return torch.einsum("hts,shw->thw", p_HTS, v_SHW)
