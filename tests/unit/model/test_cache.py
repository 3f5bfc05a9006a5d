"""The cache's shape, and where it may lie."""

from __future__ import annotations

import pytest
import torch

from hadal.model.cache import KvCache, block_bytes
from tests.unit.model.checkpoints import Peer


def test_shape(plain: Peer) -> None:
    config = plain.weights.config
    cache = KvCache(config, 9)
    assert cache.cache_PLSD.shape == (9, config.num_hidden_layers, 64, config.kv_lora_rank + config.qk_rope_head_dim)
    assert cache.cache_PLSD.is_contiguous()
    assert not cache.cache_PLSD.any()
    assert cache.cache_PLSD[0].numel() * 4 == block_bytes(config)
    assert KvCache(config, 9, num_layers=1).cache_PLSD.shape[1] == 1


def test_memory_of_the_caller(plain: Peer) -> None:
    config = plain.weights.config
    memory = bytearray(block_bytes(config) * 3)
    cache = KvCache(config, 3, memory)
    cache.cache_PLSD[2, 0, 0, 0] = 1.0
    assert torch.frombuffer(memory, dtype=torch.float32)[2 * block_bytes(config) // 4] == 1.0
    with pytest.raises(ValueError, match="bytes"):
        KvCache(config, 4, memory)


def test_needs_a_block_beside_scratch(plain: Peer) -> None:
    with pytest.raises(ValueError, match="scratch"):
        KvCache(plain.weights.config, 1)
