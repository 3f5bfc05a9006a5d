"""The multi-token-prediction module: drafts the token after the next from what the model already
computed.

It has a KV cache of its own, of one layer, addressed by the same blocks. Source: DeepSeek-V3 (arXiv
2412.19437), section 2.2, eq. 21-23. Shapes: T packed tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.core.messages import BLOCK_TOKENS
from hadal.core.plans import Chunk
from hadal.kernels.ops import linear
from hadal.model.batch import prefill_batch
from hadal.model.block import OPS, MicroBatch
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.overlap.plan import SEQUENTIAL
from hadal.reference.params import ModelWeights


class MtpModule:
    """The module over one rank's weights and a cache of its own."""

    def __init__(self, weights: ModelWeights, num_blocks: int) -> None:
        """Raises ValueError if the weights were read without the module."""
        if weights.mtp is None:
            raise ValueError(
                "this model was read without its MTP module; read it with with_mtp=True"
            )
        self._weights = weights
        self._module = weights.mtp
        self._cache = KvCache(
            weights.config, num_blocks, num_layers=1, device=weights.norm_D.device
        )

    @torch.inference_mode()
    def draft(self, chunks: Sequence[Chunk], hidden_TD: Tensor) -> Tensor:
        """Return logits [T, V] for token t+2 of every position t of the chunks.

        A chunk's `tokens` are the next ones: tokens[i] is the token at position start+i+1.
        `hidden_TD` are the model's states after the last norm at positions start .. start+len-1,
        packed alike.
        """
        weights, module, eps = self._weights, self._module, self._weights.config.rms_norm_eps
        cache_PLSD, topk = self._cache.cache_PLSD, weights.config.index_topk
        batch = prefill_batch(chunks, (), cache_PLSD, weights.cos_sin, topk)
        dim = hidden_TD.shape[-1:]
        embedded_TD = F.rms_norm(weights.embed.rows(batch.tokens_T), dim, module.enorm_D, eps)
        seen_TD = F.rms_norm(hidden_TD, dim, module.hnorm_D, eps)
        x_TD = linear(torch.cat((embedded_TD, seen_TD), dim=-1), module.eh_proj)
        state = MicroBatch(batch, weights.config, x_TD)
        for op in SEQUENTIAL.ops:
            OPS[op](state, module.layer, 0)
        return linear(F.rms_norm(state.hidden_TD, dim, module.head_norm_D, eps), weights.head)


@torch.inference_mode()
def acceptance(
    model: DeepseekV3, mtp: MtpModule, tokens: Sequence[int], first: int
) -> tuple[int, int]:
    """Return (accepted, drafted): how often the draft of tokens[i], i >= first, is what the model
    itself would choose.

    `first` is at least 2: the first token that can be drafted. Blocks 1, 2, ... of both caches are
    overwritten.
    """
    if not 2 <= first < len(tokens):
        raise ValueError(
            f"first is {first}; it must lie between 2 and the {len(tokens)} tokens of the text"
        )
    block_ids = tuple(range(1, 1 + -(-len(tokens) // BLOCK_TOKENS)))
    text = Chunk("text", tuple(tokens[:-1]), 0, block_ids, None, 0)
    hidden_TD = model.hidden([text])
    chosen_T = model.head(hidden_TD).argmax(-1)  # chosen_T[i] is for position i + 1
    shifted = Chunk("draft", tuple(tokens[1:-1]), 0, block_ids, None, 0)
    drafted_T = mtp.draft([shifted], hidden_TD[:-1]).argmax(
        -1
    )  # drafted_T[i] is for position i + 2
    accepted = drafted_T[first - 2 :] == chosen_T[first - 1 :]
    return int(accepted.sum()), len(accepted)
