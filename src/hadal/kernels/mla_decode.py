"""MLA's core in absorbed form over the paged latent cache. Knows nothing of projections.

All heads share each latent row, so one load of it serves a group of heads. A sequence is cut into
ranges of positions by its length alone: bit-equal whatever the batch and the number of threads.
Shapes: B requests, H heads, C latent, R rotated, P blocks, L layers, S = 64 block tokens, M blocks
of a request, D = C + R. Twin: `hadal.reference.mla_decode`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.kernels import library
from hadal.reference import mla_decode as twin

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
) -> Tensor:
    """Return o_latent [B, H, C]. Request b sees the first lengths_B[b] positions of its blocks, its
    new token included.

    Raises ValueError if shapes do not match, a length is negative, or a table names a block that is
    not there.
    """
    lib = library.load()
    if lib is None or not library.fits(q_latent_BHC, q_rope_BHR) or not available(cache_PLSD):
        return twin.mla_decode(
            q_latent_BHC, q_rope_BHR, cache_PLSD, layer_index, block_table_BM, lengths_B, scale
        )
    batch, heads, c = q_latent_BHC.shape
    r = q_rope_BHR.shape[-1]
    num_blocks, num_layers = cache_PLSD.shape[:2]
    library.check_shape("q_rope_BHR", q_rope_BHR, (batch, heads, r))
    library.check_shape("cache_PLSD", cache_PLSD, (num_blocks, num_layers, BLOCK_TOKENS, c + r))
    library.check_shape("block_table_BM", block_table_BM, (batch, block_table_BM.shape[-1]))
    library.check_shape("lengths_B", lengths_B, (batch,))
    if not 0 <= layer_index < num_layers:
        raise ValueError(f"layer_index is {layer_index}; the cache has {num_layers} layers.")
    table_BM, lengths_B = (
        library.as_int(block_table_BM, torch.int32),
        library.as_int(lengths_B, torch.int64),
    )
    o_BHC = torch.empty((batch, heads, c))
    if batch == 0:
        return o_BHC
    library.check_status(
        lib.hadal_mla_decode(
            library.team(),
            q_latent_BHC.data_ptr(),
            q_rope_BHR.data_ptr(),
            batch,
            heads,
            c,
            r,
            cache_PLSD.data_ptr(),
            num_blocks,
            num_layers,
            layer_index,
            table_BM.data_ptr(),
            table_BM.shape[1],
            lengths_B.data_ptr(),
            scale,
            o_BHC.data_ptr(),
        )
    )
    return o_BHC
