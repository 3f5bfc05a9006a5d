"""The lightning indexer against its twin: exact ties, equal selections in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hadal.kernels.attention import select_positions
from hadal.reference import attention as twin
from tests.unit.kernels.shapes import Paged, paged

pytestmark = pytest.mark.usefixtures("built")
LENGTHS = [1, 47, 48, 49, 64, 65, 300, 513, 1100]
NUM_SELECTED = 48
SHAPES = [(1, 8), (2, 17), (4, 32), (7, 25), (64, 128)]
BEFORE = 6
"""Number of an entry's values before its indexer key."""


def whole_numbers(heads: int, width: int) -> tuple[Tensor, Tensor, Paged]:
    """Return queries, weights and keys of small whole numbers: sums are exact, and many are equal."""
    kv = paged(2, BEFORE + width, LENGTHS)
    kv.cache_PLSD = kv.cache_PLSD.sign()
    generator = torch.Generator().manual_seed(heads)
    q_BJX = torch.randint(-1, 2, (len(LENGTHS), heads, width), generator=generator).float()
    weights_BJ = torch.randint(-2, 3, (len(LENGTHS), heads), generator=generator).float()
    return q_BJX, weights_BJ, kv


def run(q_BJX: Tensor, weights_BJ: Tensor, kv: Paged, lengths: list[int], layer: int = 1) -> Tensor:
    return select_positions(q_BJX, weights_BJ, kv.seen(lengths, layer), NUM_SELECTED)


@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_ties_go_to_the_lower_position(heads: int, width: int) -> None:
    q_BJX, weights_BJ, kv = whole_numbers(heads, width)
    expected = twin.select_positions(q_BJX, weights_BJ, kv.seen(LENGTHS), NUM_SELECTED)
    assert torch.equal(run(q_BJX, weights_BJ, kv, LENGTHS), expected)
    nothing = run(q_BJX, 0 * weights_BJ, kv, LENGTHS)
    for row, length in enumerate(LENGTHS):
        if length > NUM_SELECTED:
            assert nothing[row].tolist() == list(range(NUM_SELECTED))


@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_no_better_position_is_left_out(heads: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    kv = paged(2, BEFORE + width, LENGTHS)
    q_BJX = torch.randn(len(LENGTHS), heads, width, generator=generator)
    weights_BJ = torch.randn(len(LENGTHS), heads, generator=generator)
    selected_BK = run(q_BJX, weights_BJ, kv, LENGTHS)
    for row, length in enumerate(LENGTHS):
        if length <= NUM_SELECTED:
            continue
        key_SX = kv.cache_PLSD[kv.table_BM[row].long(), 1, :, BEFORE:].flatten(0, 1)[:length]
        scores_S = twin.index_scores(q_BJX[row, None], weights_BJ[row, None], key_SX)[0]
        chosen = selected_BK[row].long()
        assert bool((chosen.diff() > 0).all())
        others = torch.ones(length, dtype=torch.bool).index_fill(0, chosen, False)
        tolerance = 1e-5 * float(scores_S.abs().max())
        assert float(scores_S[others].max()) <= float(scores_S[chosen].min()) + tolerance


@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_position_0_may_be_left_out(heads: int, width: int) -> None:
    """Leave out position 0 where a row sees one position more than it selects."""
    q_BJX, weights_BJ, kv = whole_numbers(heads, width)
    seen = kv.seen(LENGTHS, first=1)
    expected = twin.select_positions(q_BJX, weights_BJ, seen, NUM_SELECTED)
    kv.cache_PLSD[kv.table_BM[:, 0].long(), :, 0] = float("nan")
    selected_BK = select_positions(q_BJX, weights_BJ, seen, NUM_SELECTED)
    assert torch.equal(selected_BK, expected)
    assert selected_BK[LENGTHS.index(NUM_SELECTED + 1)].tolist() == list(range(1, 49))
    with pytest.raises(ValueError, match="first"):
        select_positions(q_BJX, weights_BJ, kv.seen(LENGTHS, first=2), NUM_SELECTED)


def test_a_row_depends_neither_on_the_others_nor_on_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(3)
    kv = paged(2, BEFORE + 33, LENGTHS)
    q_BJX = torch.randn(len(LENGTHS), 5, 33, generator=generator)
    weights_BJ = torch.randn(len(LENGTHS), 5, generator=generator)
    whole = run(q_BJX, weights_BJ, kv, LENGTHS)
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert torch.equal(run(q_BJX, weights_BJ, kv, LENGTHS), whole)
        for row, length in enumerate(LENGTHS):
            one = slice(row, row + 1)
            alone = Paged(kv.cache_PLSD, kv.table_BM[one])
            assert torch.equal(run(q_BJX[one], weights_BJ[one], alone, [length])[0], whole[row])


def test_scores_that_are_no_numbers_choose_positions_all_the_same() -> None:
    """Use scores that are NaN or inf: the positions are arbitrary, but still the row's own."""
    q_BJX, weights_BJ, kv = whole_numbers(2, 17)
    weights_BJ[-1] = float("nan")
    weights_BJ[-2] = float("inf")
    selected_BK = run(q_BJX, weights_BJ, kv, LENGTHS)
    for row in (-1, -2):
        assert bool((selected_BK[row].diff() > 0).all())
        assert 0 <= int(selected_BK[row, 0]) <= int(selected_BK[row, -1]) < LENGTHS[row]


def test_bad_input_is_refused() -> None:
    kv = paged(2, 8, [65])
    q_BJX, weights_BJ = torch.randn(1, 2, 8), torch.randn(1, 2)
    with pytest.raises(ValueError, match="block"):
        run(q_BJX, weights_BJ, kv, [129])
    with pytest.raises(ValueError, match="negative"):
        run(q_BJX, weights_BJ, kv, [-1])
    with pytest.raises(ValueError, match="layer_index"):
        run(q_BJX, weights_BJ, kv, [65], layer=2)
    with pytest.raises(ValueError, match="weights_BJ"):
        run(q_BJX, weights_BJ[:, :1], kv, [65])
    with pytest.raises(ValueError, match="entries of 8 values; at least 9 are needed"):
        run(torch.randn(1, 2, 9), weights_BJ, kv, [65])
