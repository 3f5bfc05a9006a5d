"""The staging copy: blocks between a GPU's cache and a pool in the host's memory."""

from __future__ import annotations

import pytest
import torch

from hadal.core.model_config import read_model_config
from hadal.model.cache import KvCache, block_bytes
from hadal.runtime.resolve import model_folder
from tests.needs import skip_unless

pytestmark = [
    pytest.mark.gpu,
    skip_unless(torch.cuda.is_available(), "no CUDA device", "a machine with an NVIDIA GPU"),
]


def test_blocks_go_to_the_pool_and_come_back() -> None:
    """Check order: published bytes are in the pool when `publish` returns, and fetched bytes are in
    the cache before the device's next work.
    """
    config = read_model_config(model_folder(""))
    memory = bytearray(block_bytes(config) * 40)
    pool = torch.frombuffer(memory, dtype=torch.float32).view(40, -1)
    cache = KvCache(config, 40, memory, device="cuda")
    own = cache.cache_PLSD.view(40, -1)
    for value in range(1, 20):
        own.fill_(float(value))
        cache.publish((7, 3, 4, 39))
        assert (pool[[3, 4, 7, 39]] == value).all()
        pool[[5, 6]] = -float(value)
        cache.fetch((6, 5))
        assert float(own[[5, 6]].sum()) == -value * own[5].numel() * 2
    assert not pool[[0, 1, 2, 8, 38]].any()
