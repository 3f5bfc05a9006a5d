"""DeepSeek-V3.2's sparse attention in the engine. While a token sees no more than it attends to, it
equals dense attention to the bit; beyond, the reference, for any chunk, form and batch.

test_family compares its logits with transformers'.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig
from hadal.core.plans import Chunk
from hadal.kernels import library
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.reference.forward import forward, no_latents
from hadal.reference.params import ModelWeights
from tests.needs import leave_out
from tests.stored import KINDS
from tests.unit.kernels.shapes import odd_config, random_weights

TOPK = 66
NUM_TOKENS = 150
INDEXER = {"index_n_heads": 9, "index_head_dim": 11, "index_topk": TOPK}
# Multiples of a vector: torch's silu gives other bits to values after a batch's last whole vector.
WIDTHS = {"intermediate_size": 64, "moe_intermediate_size": 32}
BLOCKS = ((7, 3, 5), (2, 1, 6))
TOLERANCE = 1e-4
CUTS = (1, 30, 64, TOPK - 1, TOPK, TOPK + 1, 100, 128, NUM_TOKENS - 1)


@cache
def sparse(kind: str = "fp32") -> ModelWeights:
    return random_weights(odd_config(**INDEXER, **WIDTHS), seed=4, kind=kind)


def without_indexer(weights: ModelWeights) -> ModelWeights:
    none = {name: None for name in INDEXER}
    config: ModelConfig = replace(weights.config, model_type="deepseek_v3", **none)
    layers = (
        replace(layer, attention=replace(layer.attention, indexer=None)) for layer in weights.layers
    )
    return replace(weights, config=config, layers=tuple(layers))


def make_model(weights: ModelWeights, *, is_fused: bool = True) -> DeepseekV3:
    model = DeepseekV3(weights, KvCache(weights.config, 8))
    model.cache.cache_PLSD.fill_(float("nan"))
    model._has_fused_step &= is_fused
    return model


def text(seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 301, (NUM_TOKENS,), generator=generator).tolist()


def chunk(tokens: list[int], start: int, end: int, blocks: tuple[int, ...] = BLOCKS[0]) -> Chunk:
    num_blocks = -(-end // BLOCK_TOKENS)
    return Chunk("r", tuple(tokens[start:end]), start, blocks[:num_blocks], None, 0)


@cache
def expected(seed: int = 0) -> Tensor:
    """Return the reference's logits of every token."""
    return forward(sparse(), torch.tensor(text(seed)), no_latents(sparse()))[0]


def decoded(
    model: DeepseekV3, tokens: list[int], first: int, end: int = NUM_TOKENS, batch: int = 1
) -> Tensor:
    """Return logits [end - first, V] of tokens decoded one by one, in a batch of equal rows."""
    table = torch.tensor([BLOCKS[0]] * batch, dtype=torch.int32)
    rows = []
    for position in range(first, end):
        step = torch.tensor([tokens[position]] * batch), torch.tensor([position] * batch)
        rows.append(model.decode(*step, table)[-1].clone())
    return torch.stack(rows)


@pytest.mark.promise(
    "For a token with at most 2,048 visible positions the dense code runs and no position is "
    "scored: the result is that of dense attention, bit for bit."
)
@pytest.mark.usefixtures("prefill_form")
@pytest.mark.parametrize("is_fused", [True, False])
def test_dense_to_the_bit_while_all_positions_are_attended_to(is_fused: bool) -> None:
    found = []
    for weights in (sparse(), without_indexer(sparse())):
        model, tokens = make_model(weights, is_fused=is_fused), text()
        rows = [model.head(model.hidden([chunk(tokens, 0, 20)]))]
        rows.append(model.head(model.hidden([chunk(tokens, 20, 50)])))
        rows.append(decoded(model, tokens, 50, TOPK))
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1])
    one_more = [
        make_model(weights).prefill([chunk(text(), 0, TOPK + 1)])[0]
        for weights in (sparse(), without_indexer(sparse()))
    ]
    assert not torch.allclose(*one_more), "the next token leaves one out"


@pytest.mark.usefixtures("prefill_form")
def test_cut_anywhere() -> None:
    tokens = text()
    for cut in CUTS:
        model = make_model(sparse())
        first = model.prefill([chunk(tokens, 0, cut)])[0]
        assert (first - expected()[cut - 1]).abs().max() <= TOLERANCE, cut
        hidden_TD = model.hidden([chunk(tokens, cut, NUM_TOKENS)])
        assert (model.head(hidden_TD) - expected()[cut:]).abs().max() <= TOLERANCE, cut


@pytest.mark.usefixtures("prefill_form")
def test_prompts_on_both_sides_of_the_border_in_one_step() -> None:
    model = make_model(sparse())
    model.prefill([chunk(text(), 0, 60), chunk(text(1), 0, 100, BLOCKS[1])])
    parts = [chunk(text(), 60, 75), chunk(text(1), 100, 149, BLOCKS[1])]
    logits = model.prefill(parts, wanted=[0, 1])
    for row, (seed, position) in enumerate(((0, 74), (1, 148))):
        assert (logits[row] - expected(seed)[position]).abs().max() <= TOLERANCE
    only = make_model(sparse()).prefill([chunk(text(), 0, 40), chunk(text(1), 0, 140, BLOCKS[1])])
    assert (only[1] - expected(1)[139]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("is_fused", [True, False])
def test_token_by_token(is_fused: bool) -> None:
    model = make_model(sparse(), is_fused=is_fused)
    assert (decoded(model, text(), 0) - expected()).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_batch_changes_no_bit(kind: str, is_fused: bool) -> None:
    if library.load() is None:
        leave_out("no kernels: torch's products promise it not", "apt-get install g++")
    found = []
    for batch in (1, 5):
        model = make_model(sparse(kind), is_fused=is_fused)
        model.prefill([chunk(text(), 0, TOPK - 2)])
        found.append(decoded(model, text(), TOPK - 2, TOPK + 20, batch))
    assert torch.equal(found[0], found[1])


def test_many_tokens_of_a_large_models_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend in multi-head form: tokens beyond `index_topk` are computed in groups, here of seven."""
    monkeypatch.setattr("hadal.model.mla.ABSORBED_TOKENS", 7)
    monkeypatch.setattr("hadal.model.mla.absorbs_prefill", lambda config, cache_PLSD: False)
    model = make_model(sparse())
    hidden_TD = model.hidden([chunk(text(), 0, NUM_TOKENS)])
    assert (model.head(hidden_TD) - expected()).abs().max() <= TOLERANCE
