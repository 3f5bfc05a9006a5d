"""The fused draft step against its twin: equal bits in any call; position 0 is never read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.kernels.decode_step import DraftStep, draft_available
from hadal.reference.mtp import draft_step
from hadal.reference.params import Matrix, ModelWeights
from tests.stored import KINDS
from tests.unit.kernels.shapes import odd_config, paged, random_weights
from tests.unit.kernels.test_decode_step import CHANGES

pytestmark = pytest.mark.usefixtures("built")
POSITIONS = [1, 62, 63, 64, 65, 66, 130, 300, 400, 0, 64, 131]
"""Positions of the rows, each of another sequence; the last three only write their entry. If an
indexer selects 66 or 300 positions, one row sees one position more: position 0 is left out.
"""
NUM_FULL = 9
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@dataclasses.dataclass
class Call:
    """A cache full of random entries, and rows of one call over it."""

    cache_PLSD: Tensor
    tokens_T: Tensor
    positions_T: Tensor
    table_TM: Tensor
    hidden_TD: Tensor

    def rows(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = self.tokens_T, self.positions_T, self.table_TM, self.hidden_TD
        tokens_T, positions_T, table_TM, hidden_TD = (part[indices] for part in parts)
        return tokens_T, positions_T, table_TM, hidden_TD

    def bits(self) -> Tensor:
        return self.cache_PLSD.view(torch.int32).clone()


def make_call(config: ModelConfig, positions: list[int]) -> Call:
    """Make a call; rows at a block's first position have zeros as hidden states."""
    num_layers = config.num_hidden_layers + 1
    kv = paged(num_layers, config.entry_dim, [position + 1 for position in positions])
    generator = torch.Generator().manual_seed(1)
    shape = (len(positions),)
    hidden_TD = torch.randn(*shape, config.hidden_size, generator=generator)
    hidden_TD[[position % 64 == 0 for position in positions]] = 0.0
    tokens_T = torch.randint(0, config.vocab_size, shape, generator=generator)
    return Call(kv.cache_PLSD, tokens_T, torch.tensor(positions), kv.table_BM, hidden_TD)


def make(changes: dict[str, Any], kind: str = "fp32") -> tuple[ModelWeights, Call]:
    weights = random_weights(odd_config(**changes), kind=kind, with_mtp=True)
    return weights, make_call(weights.config, POSITIONS)


EVERY = list(range(len(POSITIONS)))


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("changes", CHANGES)
def test_equals_the_twin(changes: dict[str, Any], kind: str) -> None:
    weights, call = make(changes, kind)
    expected_cache = call.cache_PLSD.clone()
    expected, hidden = draft_step(weights, expected_cache, *call.rows(EVERY), NUM_FULL)
    step = DraftStep(weights, call.cache_PLSD, 12, num_threads=2, max_full=NUM_FULL)
    torch.testing.assert_close(step(*call.rows(EVERY), NUM_FULL), expected, **TOLERANCE)
    torch.testing.assert_close(step.hidden(NUM_FULL), hidden, **TOLERANCE)
    torch.testing.assert_close(call.cache_PLSD, expected_cache, **TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [CHANGES[0], CHANGES[1], *CHANGES[-3:]])
def test_a_row_does_not_depend_on_the_others_nor_on_threads(
    changes: dict[str, Any], kind: str
) -> None:
    weights, call = make(changes, kind)
    first = DraftStep(weights, call.cache_PLSD, 12, 1)
    whole, hidden = first(*call.rows(EVERY), NUM_FULL), first.hidden(NUM_FULL)
    written = call.bits()
    for num_threads in (1, 2, 3, 5):
        step = DraftStep(weights, call.cache_PLSD, 12, num_threads)
        for row in range(NUM_FULL):
            for rows, num_full in [
                ([row], 1),
                ([max(0, row - 2), row], 2),
                ([row, 10, 11, 9], 1),
                ([(row + 1) % NUM_FULL, row, *range(NUM_FULL, 12)], 2),
            ]:
                logits = step(*call.rows(rows), num_full)
                at = rows.index(row)
                assert torch.equal(logits[at], whole[row])
                assert torch.equal(step.hidden(num_full)[at], hidden[row])
    assert torch.equal(call.bits(), written)


@pytest.mark.parametrize("changes", [CHANGES[0], CHANGES[1], CHANGES[-2]])
def test_entries_alone_are_those_of_rows_that_draft(changes: dict[str, Any]) -> None:
    weights, call = make(changes)
    blank = call.cache_PLSD.clone()
    drafting = list(range(NUM_FULL))
    DraftStep(weights, call.cache_PLSD, 12, 2)(*call.rows(drafting), NUM_FULL)
    for num_threads in (1, 2):
        cache = blank.clone()
        step = DraftStep(weights, cache, 12, num_threads)
        assert step(*call.rows(drafting), 0).shape == (0, weights.config.vocab_size)
        assert torch.equal(cache.view(torch.int32), call.bits())
    assert not torch.equal(blank.view(torch.int32), call.bits())
    layers = slice(0, weights.config.num_hidden_layers)
    assert torch.equal(
        blank[:, layers].view(torch.int32), call.cache_PLSD[:, layers].view(torch.int32)
    )


@pytest.mark.parametrize("changes", [CHANGES[0], CHANGES[-2]])
def test_rows_of_one_sequence_give_what_steps_one_by_one_give(changes: dict[str, Any]) -> None:
    weights = random_weights(odd_config(**changes), with_mtp=True)
    call = make_call(weights.config, [70])
    positions = [62, 63, 64, 65, 66, 67, 68]
    generator = torch.Generator().manual_seed(4)
    hidden_TD = torch.randn(7, weights.config.hidden_size, generator=generator)
    hidden_TD[2] = 0.0
    rows = torch.arange(7), torch.tensor(positions), call.table_TM.expand(7, -1), hidden_TD
    other = call.cache_PLSD.clone()
    together = DraftStep(weights, call.cache_PLSD, 7, 2)(*rows, 7)
    step = DraftStep(weights, other, 1, 1)
    for i in range(7):
        assert torch.equal(step(*(part[i : i + 1] for part in rows), 1)[0], together[i])
    # Entries of earlier positions may be in the same call, even after the rows that need them.
    other.fill_(float("nan"))
    start = torch.arange(1, 62)
    before = (
        start,
        start,
        call.table_TM.expand(61, -1),
        torch.randn(61, weights.config.hidden_size, generator=generator),
    )
    step = DraftStep(weights, other, 68, 2)
    at_once = step(*(torch.cat(pair) for pair in zip(rows, before, strict=True)), 7).clone()
    step(*before, 0)
    assert torch.equal(step(*rows, 7), at_once)
    assert bool(at_once.isfinite().all())


@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("changes", [CHANGES[0], *CHANGES[-2:]])
def test_position_0_is_not_attended_to(changes: dict[str, Any], garbage: float) -> None:
    weights, call = make(changes)
    rows = call.rows(list(range(NUM_FULL)))
    for num_threads in (1, 2):
        step = DraftStep(weights, call.cache_PLSD, 12, num_threads)
        expected = step(*rows, NUM_FULL).clone()
        kept = call.cache_PLSD.clone()
        for row in range(NUM_FULL):
            call.cache_PLSD[int(call.table_TM[row, 0]), :, 0] = garbage
        assert torch.equal(step(*rows, NUM_FULL), expected)
        call.cache_PLSD.copy_(kept)


def test_a_further_draft_takes_the_hidden_states_of_the_last() -> None:
    """Draft further from hidden states in the step's own buffer, which the new hidden states overwrite."""
    weights, call = make(CHANGES[0])
    rows = call.rows(EVERY)
    step = DraftStep(weights, call.cache_PLSD, 12, 2)
    tokens = step(*rows, NUM_FULL).argmax(-1)
    further = tokens[:2], torch.tensor([2, 60]), call.table_TM[:2]
    copied = step.hidden(2).clone()
    drafted = step(*further, step.hidden(2), 2).clone()
    assert torch.equal(step(*further, copied, 2), drafted)


def test_bad_input_is_refused_and_nothing_written() -> None:
    weights = random_weights(odd_config(), with_mtp=True)
    call = make_call(weights.config, [3, 70, 0])
    tokens, positions, table, hidden = call.rows([0, 1, 2])
    step = DraftStep(weights, call.cache_PLSD, 3, 2, max_full=2)
    before = call.bits()
    assert step(tokens[:0], positions[:0], table[:0], hidden[:0], 0).shape == (0, 301)
    for bad, num_full, message in [
        ((tokens + 301, positions, table, hidden), 2, "vocabulary"),
        ((tokens, positions - 100, table, hidden), 2, "position"),
        ((tokens, positions + 2048, table, hidden), 2, "position"),
        ((tokens, positions + 64, table, hidden), 2, "block"),
        ((tokens, positions, table + 100, hidden), 2, "block"),
        ((tokens, positions - torch.tensor([3, 0, 0]), table, hidden), 1, "draft at a position"),
        ((tokens, positions[:1], table, hidden), 2, "positions_T"),
        ((tokens, positions, table[:2], hidden), 2, "block_table_TM"),
        ((tokens, positions, table, hidden[:2]), 2, "hidden_TD"),
        ((tokens, positions, table, hidden[:, :-1]), 2, "hidden_TD"),
        ((tokens, positions, table, hidden), 3, "at most 3 of which 2"),
        ((tokens, positions, table, hidden), -1, "at most 3 of which 2"),
        ((tokens[:1], positions[:1], table[:1], hidden[:1]), 2, "1 rows of which 2"),
        (tuple(part.repeat(2, *[1] * (part.dim() - 1)) for part in call.rows([0, 1])), 2, "4 rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            step(*bad, num_full)
    assert torch.equal(call.bits(), before)


def test_weights_it_cannot_run_are_refused() -> None:
    weights = random_weights(odd_config(), with_mtp=True)
    cache = make_call(weights.config, [3]).cache_PLSD
    module = weights.mtp
    assert module is not None
    assert draft_available(weights)
    without = dataclasses.replace(weights, mtp=None)
    half = dataclasses.replace(
        weights, mtp=dataclasses.replace(module, eh_proj=Matrix(module.eh_proj.values.half()))
    )
    for bad in (without, half):
        assert not draft_available(bad)
        with pytest.raises(ValueError, match="draft_available"):
            DraftStep(bad, cache, 1)
    cut = Matrix(module.eh_proj.values[:, :10].contiguous())
    with pytest.raises(ValueError, match="eh_proj"):
        DraftStep(
            dataclasses.replace(weights, mtp=dataclasses.replace(module, eh_proj=cut)), cache, 1
        )
    with pytest.raises(ValueError, match="4 layers or more"):
        DraftStep(weights, cache[:, :-1].contiguous(), 1)
    for max_rows, max_full in ((0, None), (2, 0), (2, 3)):
        with pytest.raises(ValueError, match="max_full"):
            DraftStep(weights, cache, max_rows, max_full=max_full)
