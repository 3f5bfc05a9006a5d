"""Decode step of the model over the paged cache, in absorbed form: the twin of the fused step.
Shapes: B requests, V vocabulary, P blocks, L layers, S block tokens, M blocks of a request, D
values of an entry.
"""

from __future__ import annotations

import functools

from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.reference.attention import SeenEntries, mla_decode, select_positions
from hadal.reference.layer import IndexQueries, block
from hadal.reference.params import LayerWeights, ModelWeights
from hadal.reference.products import heads_in, heads_out, linear, rms_norm


def decode_step(
    weights: ModelWeights,
    cache_PLSD: Tensor,
    tokens_B: Tensor,
    positions_B: Tensor,
    block_table_BM: Tensor,
) -> Tensor:
    """Write each token's entries at its position; return the logits [B, V] for the next token."""
    config = weights.config
    hidden_BD = weights.embed.rows(tokens_B)
    for index, layer in enumerate(weights.layers):
        seen = SeenEntries(cache_PLSD, index, block_table_BM, positions_B + 1)
        attend = functools.partial(paged_core_attention, layer, seen, config)
        hidden_BD = block(hidden_BD, layer, config, weights.cos_sin, positions_B, attend)
    return linear(rms_norm(hidden_BD, weights.norm_D, config.rms_norm_eps), weights.head)


def paged_core_attention(
    layer: LayerWeights,
    seen: SeenEntries,
    config: ModelConfig,
    q_nope_BHN: Tensor,
    q_rope_BHR: Tensor,
    entry_BD: Tensor,
    index_queries: IndexQueries | None,
) -> Tensor:
    """Write the rows' entries into the cache; return o [B, H, W] over visible (or selected) ones."""
    write_entries(seen, entry_BD)
    selected_BK = None
    if index_queries is not None:
        assert config.index_topk is not None
        q_BJX, weights_BJ = index_queries
        selected_BK = select_positions(q_BJX, weights_BJ, seen, config.index_topk)
    q_latent_BHC = heads_in(q_nope_BHN, layer.attention.kv_b)
    o_BHC = mla_decode(q_latent_BHC, q_rope_BHR, seen, config.softmax_scale, selected_BK)
    return heads_out(o_BHC, layer.attention.kv_b, config.v_head_dim)


def write_entries(seen: SeenEntries, entry_BD: Tensor) -> None:
    """Write each row's entry into its layer, at the last position that the row sees."""
    block_tokens, position_B = seen.cache_PLSD.shape[2], seen.lengths_B.long() - 1
    block_B = seen.block_table_BM.long().gather(1, (position_B // block_tokens)[:, None])[:, 0]
    seen.cache_PLSD[block_B, seen.layer_index, position_B % block_tokens] = entry_BD
