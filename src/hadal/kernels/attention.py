"""MLA's core attention on a CPU, in absorbed form over the paged latent cache, and the selection of
positions for its sparse form. Independent of projections.

All heads share each latent row, so one load serves a group of heads. Only a sequence's length
decides how it is cut into ranges of positions, so results are bit-equal for any batch and number of
threads. Each op has a slow twin of the same name in `hadal.reference.attention`, which runs where
the kernels cannot (a GPU, no compiler). Shapes: B requests, H heads, C latent, R rotated, P blocks,
L layers, S = 64 block tokens, M blocks of a request, D values of an entry, C + R or more, K
selected positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.kernels import library
from hadal.reference import attention as twin
from hadal.reference.attention import SeenEntries

BLOCK_TOKENS = 64  # must equal kBlock in cpu/attention.h


def available(cache_PLSD: Tensor) -> bool:
    """Return True if the kernels can read this cache; otherwise the twin runs."""
    return (
        library.load() is not None
        and library.fits(cache_PLSD)
        and cache_PLSD.shape[2] == BLOCK_TOKENS
    )


def mla_decode(
    q_latent_BHC: Tensor,
    q_rope_BHR: Tensor,
    seen: SeenEntries,
    scale: float,
    selected_BK: Tensor | None = None,
) -> Tensor:
    """Return o_latent [B, H, C]. A request with more than K visible positions attends only to
    selected_BK[b], which is ascending. Raises ValueError if shapes do not match, a length is
    negative, a table names a block out of range, a selected position is not visible, or `first` is
    neither 0 nor 1.
    """
    _check_first(seen.first)
    lib = library.load()
    if lib is None or not library.fits(q_latent_BHC, q_rope_BHR) or not available(seen.cache_PLSD):
        return twin.mla_decode(q_latent_BHC, q_rope_BHR, seen, scale, selected_BK)
    batch, heads, c = q_latent_BHC.shape
    r = q_rope_BHR.shape[-1]
    library.check_shape("q_rope_BHR", q_rope_BHR, (batch, heads, r))
    arguments, _kept = _cache_arguments(batch, c + r, seen)
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
            *arguments,
            *selected,
            seen.first,
            scale,
            o_BHC.data_ptr(),
        )
    )
    return o_BHC


def select_positions(
    q_BJX: Tensor, weights_BJ: Tensor, seen: SeenEntries, num_selected: int
) -> Tensor:
    """Return selected [B, K] int32, ascending: the K visible positions of a request with the best
    scores. The rows of requests with at most K visible positions are undefined. A position's key is
    the last X values of its entry (DeepSeek-V3.2's lightning indexer; J index heads, X index key).

    Raises ValueError as `mla_decode` does.
    """
    _check_first(seen.first)
    lib = library.load()
    if lib is None or not library.fits(q_BJX, weights_BJ) or not available(seen.cache_PLSD):
        return twin.select_positions(q_BJX, weights_BJ, seen, num_selected)
    batch, heads, width = q_BJX.shape
    library.check_shape("weights_BJ", weights_BJ, (batch, heads))
    arguments, _kept = _cache_arguments(batch, width, seen)
    selected_BK = torch.zeros((batch, num_selected), dtype=torch.int32)
    library.check_status(
        lib.hadal_select_positions(
            library.team(),
            q_BJX.data_ptr(),
            weights_BJ.data_ptr(),
            batch,
            heads,
            width,
            *arguments,
            num_selected,
            seen.first,
            selected_BK.data_ptr(),
        )
    )
    return selected_BK


def _check_first(first: int) -> None:
    if first not in (0, 1):
        raise ValueError(f"first is {first}; attention begins at position 0 or 1.")


def _cache_arguments(
    batch: int, width: int, seen: SeenEntries
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor]]:
    """Return (arguments for C++, tensors that must stay alive during the call). `width`: values
    read per entry. Raises ValueError if shapes do not match.
    """
    cache_PLSD, block_table_BM, layer_index = seen.cache_PLSD, seen.block_table_BM, seen.layer_index
    num_blocks, num_layers, _, entry = cache_PLSD.shape
    if entry < width:
        raise ValueError(f"cache_PLSD has entries of {entry} values; at least {width} are needed.")
    library.check_shape("block_table_BM", block_table_BM, (batch, block_table_BM.shape[-1]))
    library.check_shape("lengths_B", seen.lengths_B, (batch,))
    if not 0 <= layer_index < num_layers:
        raise ValueError(f"layer_index is {layer_index}; the cache has {num_layers} layers.")
    table_BM = library.as_int(block_table_BM, torch.int32)
    lengths_B = library.as_int(seen.lengths_B, torch.int64)
    arguments = (
        cache_PLSD.data_ptr(),
        entry,
        num_blocks,
        num_layers,
        layer_index,
        table_BM.data_ptr(),
        table_BM.shape[1],
        lengths_B.data_ptr(),
    )
    return arguments, (table_BM, lengths_B)
