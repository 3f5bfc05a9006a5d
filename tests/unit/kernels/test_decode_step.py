"""The fused step against its twin on awkward models; equal bits; bad input writes nothing."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.kernels.decode_step import DecodeStep, available
from hadal.reference.decode import decode_step
from hadal.reference.params import Matrix, ModelWeights
from tests.stored import KINDS
from tests.unit.kernels.shapes import odd_config, paged, random_weights

pytestmark = pytest.mark.usefixtures("built")
POSITIONS = [0, 62, 63, 64, 65, 130, 400]
YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    {
        "hidden_size": 192,
        "num_attention_heads": 6,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    {"n_shared_experts": 2, "topk_group": 4, "rope_scaling": YARN, "first_k_dense_replace": 2},
    {"first_k_dense_replace": 0, "hidden_size": 1601, "num_hidden_layers": 1},
    {"hidden_size": 640, "kv_lora_rank": 512, "moe_intermediate_size": 512, "v_head_dim": 200},
    # Two rows of POSITIONS see more than they attend to; 300 positions are two ranges.
    {"index_n_heads": 3, "index_head_dim": 11, "index_topk": 66},
    {"index_n_heads": 5, "index_head_dim": 6, "index_topk": 300, "kv_lora_rank": 64},
]


def inputs(config: ModelConfig, positions: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (cache, tokens, positions, table); the rows' earlier positions hold random entries."""
    kv = paged(config.num_hidden_layers, config.entry_dim, [position + 1 for position in positions])
    tokens = torch.randint(
        0, config.vocab_size, (len(positions),), generator=torch.Generator().manual_seed(1)
    )
    return kv.cache_PLSD, tokens, torch.tensor(positions), kv.table_BM


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("changes", CHANGES)
def test_equals_the_twin(changes: dict[str, Any], kind: str) -> None:
    weights = random_weights(odd_config(**changes), kind=kind)
    cache, *rows = inputs(weights.config, POSITIONS)
    expected_cache = cache.clone()
    expected = decode_step(weights, expected_cache, *rows)
    step = DecodeStep(weights, cache, max_batch=8, num_threads=2)
    torch.testing.assert_close(step(*rows), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, expected_cache, rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(
        step.hidden(len(POSITIONS)) @ weights.head.dense().T, expected, rtol=1e-4, atol=1e-4
    )


def small() -> ModelWeights:
    return random_weights(odd_config())


@pytest.mark.promise(
    "Within one instruction set, a row's result depends on the row alone, not on "
    "batch, tile, thread or width."
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [CHANGES[0], *CHANGES[-3:]])
def test_a_row_does_not_depend_on_the_others_nor_on_threads(
    changes: dict[str, Any], kind: str
) -> None:
    weights = random_weights(odd_config(**changes), kind=kind)
    cache, tokens, positions, table = inputs(weights.config, POSITIONS)
    whole = DecodeStep(weights, cache, 7, 1)(tokens, positions, table)
    whole_cache = cache.clone()
    for num_threads in (1, 2, 3, 5):
        step = DecodeStep(weights, cache, 3, num_threads)
        for i in range(len(tokens)):
            row = slice(max(0, i - 2), i + 1)
            assert torch.equal(step(tokens[row], positions[row], table[row])[-1], whole[i])
    assert torch.equal(cache.view(torch.int32), whole_cache.view(torch.int32))


def test_rows_of_one_sequence_give_what_steps_one_by_one_give() -> None:
    weights = small()
    cache, _, _, table = inputs(weights.config, [70])
    other_cache = cache.clone()
    tokens, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([62, 63, 64, 65])
    together = DecodeStep(weights, cache, 4, 2)(tokens, positions, table.expand(4, -1))
    step = DecodeStep(weights, other_cache, 1, 1)
    for i in range(4):
        assert torch.equal(step(tokens[i : i + 1], positions[i : i + 1], table)[0], together[i])


def test_int32_rows_and_an_empty_batch() -> None:
    weights = small()
    cache, tokens, positions, table = inputs(weights.config, [3, 70])
    step = DecodeStep(weights, cache, 2, 2)
    first = step(tokens, positions, table).clone()
    assert torch.equal(step(tokens.int(), positions.int(), table.long()), first)
    assert step(tokens[:0], positions[:0], table[:0]).shape == (0, weights.config.vocab_size)


def test_bad_input_is_refused_and_nothing_written() -> None:
    weights = small()
    cache, tokens, positions, table = inputs(weights.config, [3, 70])
    step = DecodeStep(weights, cache, 2, 2)
    before = cache.clone()
    for bad, message in [
        ((tokens + 301, positions, table), "vocabulary"),
        ((tokens, positions - 100, table), "position"),
        ((tokens, positions + 2048, table), "position"),
        ((tokens, positions + 64, table), "block"),
        ((tokens, positions, table + 100), "block"),
        ((tokens, positions[:1], table), "positions_B"),
        ((tokens.repeat(2), positions.repeat(2), table.repeat(2, 1)), "at most 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            step(*bad)
    assert torch.equal(cache.view(torch.int32), before.view(torch.int32))


def test_weights_it_cannot_run_are_refused() -> None:
    weights = small()
    cache, *_ = inputs(weights.config, [3])
    assert available(weights)
    half = dataclasses.replace(weights, embed=Matrix(weights.embed.values.half()))
    assert not available(half)
    with pytest.raises(ValueError, match="available"):
        DecodeStep(half, cache, 1)
    with pytest.raises(ValueError, match="head"):
        DecodeStep(dataclasses.replace(weights, head=Matrix(weights.head.values[:10])), cache, 1)
    with pytest.raises(ValueError, match="cache_PLSD"):
        DecodeStep(weights, cache[..., :-1].contiguous(), 1)
