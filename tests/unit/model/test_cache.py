"""The shape of the KV cache, and the memory that it may use."""

from __future__ import annotations

import pytest
import torch

from hadal.model.cache import KvCache, block_bytes
from tests.unit.model.checkpoints import Peer


def test_shape(plain: Peer) -> None:
    config = plain.weights.config
    cache = KvCache(config, 9)
    found = cache.cache_PLSD.shape
    assert found == (9, config.num_hidden_layers, 64, config.kv_lora_rank + config.qk_rope_head_dim)
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


def test_a_staged_cache_is_published_and_fetched_by_blocks(plain: Peer) -> None:
    config = plain.weights.config
    memory = bytearray(block_bytes(config) * 6)
    pool = torch.frombuffer(memory, dtype=torch.float32).view(6, -1)
    cache = KvCache(config, 6, memory, is_staged=True)
    own = cache.cache_PLSD.view(6, -1)
    own += torch.arange(6.0)[:, None]
    assert not pool.any()
    cache.publish((4, 1, 2))
    assert pool[:, 0].tolist() == [0, 1, 2, 0, 4, 0]
    assert torch.equal(pool[[1, 2, 4]], own[[1, 2, 4]])
    pool.fill_(9.0)
    cache.fetch((5, 2))
    assert own[:, 0].tolist() == [0, 1, 9, 3, 4, 9]
    assert (own[[2, 5]] == 9).all()


def test_where_the_cache_is_the_pool_nothing_is_copied(plain: Peer) -> None:
    memory = bytearray(block_bytes(plain.weights.config) * 3)
    cache = KvCache(plain.weights.config, 3, memory)
    assert cache.cache_PLSD.data_ptr() == torch.frombuffer(memory, dtype=torch.float32).data_ptr()
    cache.cache_PLSD.fill_(1.0)
    cache.publish((1, 2))
    cache.fetch((1, 2))
    assert (cache.cache_PLSD == 1).all()
    alone = KvCache(plain.weights.config, 3)
    alone.publish((1,))
    alone.fetch((1,))


def test_needs_a_block_beside_scratch(plain: Peer) -> None:
    with pytest.raises(ValueError, match="scratch"):
        KvCache(plain.weights.config, 1)
