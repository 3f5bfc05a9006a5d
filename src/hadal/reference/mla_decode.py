"""MLA's core in absorbed form, for decode: one query per request against the paged latent cache
itself.

W_UK is already in the query and W_UV comes after, so all heads share one key and value of C+R
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2). Shapes: B requests, H heads, C latent, R rotated, P
blocks, L layers, S block tokens, M blocks of a request, D = C+R.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    cache_PLSD: Tensor,
    layer_index: int,
    block_table_BM: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> Tensor:
    """Return o_latent [B, H, C]. Request b sees the first lengths_B[b] positions of its blocks, the
    new token's too.
    """
    latents_BSD = cache_PLSD[block_table_BM.long(), layer_index].flatten(1, 2)
    unused_BS = torch.arange(latents_BSD.shape[1], device=lengths_B.device) >= lengths_B[:, None]
    # A reused block may hold anything past the length, NaN too, and 0 * NaN is NaN.
    latents_BSD = latents_BSD.masked_fill(unused_BS[..., None], 0.0)
    q_BHD = torch.cat((q_latent_BHC, q_rope_BHR), dim=-1)
    scores_BHS = torch.einsum("bhd,bsd->bhs", q_BHD, latents_BSD) * scale
    p_BHS = scores_BHS.masked_fill(unused_BS[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhs,bsc->bhc", p_BHS, latents_BSD[..., : q_latent_BHC.shape[-1]])
