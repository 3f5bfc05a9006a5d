"""The KV cache of one rank: one tensor of 64-token blocks over all layers. Counts nothing: kv/ does.

A token's entry in a layer is its latent, [normed c_kv ; rotated k_rope] (DeepSeek-V3, arXiv 2412.19437, eq. 1-5). All
layers of a block lie together, so that handing a block over is one copy. Block 0 is scratch: padding is written there.

Shapes: P blocks, L layers, S tokens of a block, D latent.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hadal.core.messages import BLOCK_TOKENS, SCRATCH_BLOCK
from hadal.core.model_config import ModelConfig


def block_bytes(config: ModelConfig, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of one block: 64 tokens of every layer."""
    return config.num_hidden_layers * BLOCK_TOKENS * config.latent_dim * dtype.itemsize


class KvCache:
    """`cache_PLSD`, in own memory or in the caller's (a shared-memory segment that another process reads)."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        buffer: Any = None,
        *,
        num_layers: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`buffer`: writable memory of at least num_blocks * block_bytes, kept alive by the caller; zeroed by nobody.
        `num_layers`: the model's if None; an MTP module's cache has one.

        Raises ValueError if it is too small or if there is no block beside the scratch one.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; block {SCRATCH_BLOCK} is scratch, so at least 2 are needed.")
        shape = (num_blocks, num_layers or config.num_hidden_layers, BLOCK_TOKENS, config.latent_dim)
        self.num_blocks = num_blocks
        if buffer is None:
            self.cache_PLSD = torch.zeros(shape, dtype=dtype, device=device)
            return
        num_bytes = math.prod(shape) * dtype.itemsize
        if memoryview(buffer).nbytes < num_bytes:
            raise ValueError(f"the buffer has {memoryview(buffer).nbytes} bytes; {num_blocks} blocks need {num_bytes}.")
        self.cache_PLSD = torch.frombuffer(buffer, dtype=dtype, count=num_bytes // dtype.itemsize).view(shape)
