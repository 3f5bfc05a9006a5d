"""A tiny model to train, without a compiler and with one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from train import experts
from train.model import Config

TINY = Config(
    vocab_size=2560,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=32,
    moe_intermediate_size=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)


@contextmanager
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train with plain ops on one thread, and restore torch's settings afterwards. So tests wait
    for no compiler and no starved threads, which would also add numbers in another order.
    """
    monkeypatch.setenv("HADAL_PLAIN", "1")
    experts.kernels.cache_clear()
    precision, num_threads = torch.backends.mkldnn.matmul.fp32_precision, torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
    torch.backends.mkldnn.matmul.fp32_precision = precision
    experts.kernels.cache_clear()
