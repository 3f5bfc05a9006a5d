"""The paged, absorbed step agrees with the plain loop, which has no pages and expands every key."""

from __future__ import annotations

import pytest
import torch

from hadal.reference.decode import decode_step
from hadal.reference.forward import forward, no_latents
from tests.unit.reference.shapes import make_config, random_weights


@pytest.mark.parametrize("q_lora_rank", [16, None])
def test_equals_the_plain_loop(q_lora_rank: int | None) -> None:
    config = make_config(q_lora_rank=q_lora_rank)
    weights = random_weights(config)
    texts = torch.randint(0, 97, (2, 80), generator=torch.Generator().manual_seed(1))
    expected = [forward(weights, text, no_latents(weights))[0] for text in texts]
    assert expected[0].std() > 0.3
    cache = torch.full((6, 2, 64, config.entry_dim), float("nan"))
    table = torch.tensor([[5, 1], [2, 4]], dtype=torch.int32)
    for step in range(80):
        positions = torch.tensor([step, step // 2])
        ours = decode_step(weights, cache, texts[[0, 1], positions], positions, table)
        theirs = torch.stack(
            [logits[p] for logits, p in zip(expected, positions.tolist(), strict=True)]
        )
        assert (ours - theirs).abs().max() <= 1e-4
