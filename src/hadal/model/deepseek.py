"""DeepSeek-V3: embedding, layers, head, over one rank's weights and one rank's KV cache.

Knows chunks and block tables, not requests: who is in a batch, where its blocks lie and what is drawn from the logits
is decided elsewhere.

Shapes: T tokens, B requests, M blocks of a request, V vocabulary, D hidden, N chunks that want logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.core.plans import Chunk
from hadal.kernels import decode_step
from hadal.kernels.decode_step import DecodeStep
from hadal.kernels.linear import linear
from hadal.model.batch import decode_batch, prefill_batch
from hadal.model.block import SEQUENTIAL, MicroBatch
from hadal.model.cache import KvCache
from hadal.reference.params import ModelWeights


class DeepseekV3:
    """One model. Calls may not overlap: they write to the cache."""

    def __init__(self, weights: ModelWeights, cache: KvCache) -> None:
        self.weights = weights
        self.cache = cache
        self._fused_step: DecodeStep | None = None
        self._has_fused_step = decode_step.available(weights)

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk], wanted: Sequence[int] | None = None) -> Tensor:
        """Compute several chunks at once, write their KV, return logits [N, V] after the last token of each wanted one.

        `wanted`: indices of chunks, ascending; None: all. A chunk's blocks must hold its context and have room.
        """
        final_chunks = range(len(chunks)) if wanted is None else wanted
        batch = prefill_batch(chunks, final_chunks, self.cache.cache_PLSD, self.weights.cos_sin)
        state = MicroBatch(batch, self.config, F.embedding(batch.tokens_T, self.weights.embed_VD))
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            # Behind the last layer's KV only the tokens whose logits are wanted matter.
            state.final_only = index == last
            ops = SEQUENTIAL[:1] if state.final_only and not final_chunks else SEQUENTIAL
            for op in ops:
                op(state, layer, index)
        return self.head(self._norm(state.hidden_TD))

    @torch.inference_mode()
    def hidden(self, chunks: Sequence[Chunk]) -> Tensor:
        """Like prefill, but return what the head and the MTP module take of every token: [T, D] after the last norm."""
        batch = prefill_batch(chunks, (), self.cache.cache_PLSD, self.weights.cos_sin)
        return self._all_layers(MicroBatch(batch, self.config, F.embedding(batch.tokens_T, self.weights.embed_VD)))

    @torch.inference_mode()
    def decode(self, tokens_B: Tensor, positions_B: Tensor, block_table_BM: Tensor) -> Tensor:
        """Write each token's KV at its position, return logits [B, V] for the next. Tokens, positions: int64.

        The result may be a view that the next call overwrites.
        """
        if self._has_fused_step:
            if self._fused_step is None or self._fused_step.max_batch < len(tokens_B):
                self.prepare_decode(len(tokens_B))
            assert self._fused_step is not None
            return self._fused_step(tokens_B, positions_B, block_table_BM)
        batch = decode_batch(tokens_B, positions_B, block_table_BM, self.cache.cache_PLSD, self.weights.cos_sin)
        state = MicroBatch(batch, self.config, F.embedding(tokens_B, self.weights.embed_VD))
        return self.head(self._all_layers(state))

    def prepare_decode(self, max_batch: int) -> None:
        """Make the fused step's buffers now, for batches of up to `max_batch`, so that no step has to."""
        if self._has_fused_step:
            self._fused_step = DecodeStep(self.weights, self.cache.cache_PLSD, max_batch)

    def head(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V] of hidden states after the last norm."""
        return linear(hidden_TD, self.weights.head_VD)

    def _all_layers(self, state: MicroBatch) -> Tensor:
        for index, layer in enumerate(self.weights.layers):
            for op in SEQUENTIAL:
                op(state, layer, index)
        return self._norm(state.hidden_TD)

    def _norm(self, hidden_TD: Tensor) -> Tensor:
        return F.rms_norm(hidden_TD, hidden_TD.shape[-1:], self.weights.norm_D, self.config.rms_norm_eps)
