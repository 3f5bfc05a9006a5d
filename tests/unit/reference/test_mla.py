"""The two forms of attention agree: absorbed over the paged cache equals multi-head over expanded
keys and values.
"""

from __future__ import annotations

import pytest
import torch

from hadal.reference.attention import SeenEntries, mla_decode, mla_prefill
from hadal.reference.params import Matrix
from hadal.reference.products import heads_in, heads_out

HEADS, N, R, C, W, LAYERS, BLOCK = 3, 6, 4, 12, 5, 2, 64
SCALE = 0.3


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def kv_b_of(w_uk_HNC: torch.Tensor, w_uv_HWC: torch.Tensor) -> Matrix:
    return Matrix(torch.cat((w_uk_HNC, w_uv_HWC), dim=1).flatten(0, 1))


def test_multi_head_form_by_hand(generator: torch.Generator) -> None:
    q_nope, q_rope = (
        torch.randn(4, HEADS, N, generator=generator),
        torch.randn(4, HEADS, R, generator=generator),
    )
    latents = torch.randn(7, C + R, generator=generator)
    w_uk, w_uv = (
        torch.randn(HEADS, N, C, generator=generator),
        torch.randn(HEADS, W, C, generator=generator),
    )
    out = mla_prefill(q_nope, q_rope, latents, kv_b_of(w_uk, w_uv), SCALE)
    for token in range(4):
        seen = latents[: 3 + token + 1]
        for head in range(HEADS):
            keys = torch.cat((seen[:, :C] @ w_uk[head].T, seen[:, C:]), dim=-1)
            p = (keys @ torch.cat((q_nope[token, head], q_rope[token, head])) * SCALE).softmax(0)
            assert torch.allclose(out[token, head], p @ (seen[:, :C] @ w_uv[head].T), atol=1e-5)


def test_absorbed_equals_multi_head(generator: torch.Generator) -> None:
    lengths, layer = [1, 64, 65, 130], 1
    table = torch.tensor([[3, 0, 0], [5, 0, 0], [1, 7, 0], [2, 6, 4]])
    # Entries beyond every length may have any value.
    cache = torch.full((8, LAYERS, BLOCK, C + R), float("nan"))
    w_uk, w_uv = (
        torch.randn(HEADS, N, C, generator=generator),
        torch.randn(HEADS, W, C, generator=generator),
    )
    q_nope, q_rope = (
        torch.randn(4, HEADS, N, generator=generator),
        torch.randn(4, HEADS, R, generator=generator),
    )
    expected, kv_b = [], kv_b_of(w_uk, w_uv)
    for row, length in enumerate(lengths):
        latents = torch.randn(length, C + R, generator=generator)
        for position in range(length):
            cache[table[row, position // BLOCK], layer, position % BLOCK] = latents[position]
        expected.append(
            mla_prefill(q_nope[row : row + 1], q_rope[row : row + 1], latents, kv_b, SCALE)[0]
        )
    q_latent = heads_in(q_nope, kv_b)
    seen = SeenEntries(cache, layer, table, torch.tensor(lengths))
    o_latent = mla_decode(q_latent, q_rope, seen, SCALE)
    assert torch.allclose(heads_out(o_latent, kv_b, W), torch.stack(expected), atol=1e-4)
