"""The oracle `generate`: its cache changes nothing, and it ends at a stop id or its limit."""

from __future__ import annotations

import pytest
import torch

from hadal.reference.forward import forward, generate, no_latents
from hadal.reference.params import ModelWeights
from tests.unit.reference.shapes import make_config, random_weights


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    return random_weights(make_config())


def test_kept_latents_change_nothing(weights: ModelWeights) -> None:
    tokens = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0))
    whole, _ = forward(weights, tokens, no_latents(weights))
    latents = no_latents(weights)
    parts = [forward(weights, part, latents)[0] for part in tokens.split([7, 1, 1, 20, 11])]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)


@pytest.mark.promise("Greedy output equals a plain single-request loop over the reference model")
def test_greedy_by_recomputing_everything(weights: ModelWeights) -> None:
    text = [5, 17, 80]
    for token in generate(weights, text.copy(), 25):
        logits, _ = forward(weights, torch.tensor(text), no_latents(weights))
        assert token == int(logits[-1].argmax())
        text.append(token)
    assert len(text) == 28
    assert len(set(text)) > 8


def test_a_stop_id_is_the_last_token(weights: ModelWeights) -> None:
    free = generate(weights, [3, 1], 30)
    stop = free[7]
    assert generate(weights, [3, 1], 30, (stop,)) == free[: free.index(stop) + 1]
    assert generate(weights, [3, 1], 0) == []
