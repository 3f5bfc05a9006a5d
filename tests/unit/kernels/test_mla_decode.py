"""Paged absorbed attention against its twin: block borders, disorder, splits, equal bits."""

import pytest
import torch
from torch import Tensor

from hadal.kernels.attention import mla_decode
from hadal.reference import attention as twin
from tests.unit.kernels.shapes import Paged, paged

pytestmark = pytest.mark.usefixtures("built")
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 300, 1100]
DIMS = [(3, 40, 6), (1, 16, 2), (8, 128, 32), (7, 65, 10), (16, 33, 4)]


def queries(batch: int, heads: int, c: int, r: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, c), torch.randn(batch, heads, r)


def run(q: tuple[Tensor, Tensor], kv: Paged, lengths: list[int], layer: int = 1) -> Tensor:
    return mla_decode(*q, kv.seen(lengths, layer), 0.2)


@pytest.mark.parametrize(("heads", "c", "r"), DIMS)
def test_equals_the_twin(heads: int, c: int, r: int) -> None:
    kv, q = paged(2, c + r, LENGTHS), queries(len(LENGTHS), heads, c, r)
    expected = twin.mla_decode(*q, kv.seen(LENGTHS), 0.2)
    torch.testing.assert_close(run(q, kv, LENGTHS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "c", "r"), DIMS)
def test_a_row_does_not_depend_on_the_others(heads: int, c: int, r: int) -> None:
    kv, q = paged(2, c + r, LENGTHS), queries(len(LENGTHS), heads, c, r)
    whole = run(q, kv, LENGTHS)
    for i, length in enumerate(LENGTHS):
        alone = Paged(kv.cache_PLSD, kv.table_BM[i : i + 1])
        assert torch.equal(run((q[0][i : i + 1], q[1][i : i + 1]), alone, [length])[0], whole[i])


def test_threads_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, q = paged(2, 46, LENGTHS), queries(len(LENGTHS), 9, 40, 6)
    results = []
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        results.append(run(q, kv, LENGTHS))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_sharp_scores_and_length_zero() -> None:
    kv, q = paged(2, 46, [200, 64]), queries(2, 3, 40, 6)
    q = (q[0] * 300, q[1])
    o = run(q, kv, [200, 0])
    expected = twin.mla_decode(*q, kv.seen([200, 64]), 0.2)
    torch.testing.assert_close(o[0], expected[0], rtol=1e-4, atol=1e-4)
    assert not o[1].any()


def test_bad_input_is_refused() -> None:
    kv, q = paged(2, 46, [65]), queries(1, 3, 40, 6)
    with pytest.raises(ValueError, match="block"):
        run(q, kv, [129])
    with pytest.raises(ValueError, match="negative"):
        run(q, kv, [-1])
    with pytest.raises(ValueError, match="block"):
        run(q, Paged(kv.cache_PLSD, kv.table_BM + 100), [65])
    with pytest.raises(ValueError, match="layer_index"):
        run(q, kv, [65], layer=2)
    with pytest.raises(ValueError, match="q_rope_BHR"):
        run((q[0], q[1][:, :2]), kv, [65])


SELECTED = [64, 300]
"""Numbers of selected positions: one block, and two ranges."""


def selections(num_selected: int, seed: int = 0) -> Tensor:
    """Return [B, K] int32: ascending positions of each row that sees more than K; else zeros."""
    generator = torch.Generator().manual_seed(seed)
    selected_BK = torch.zeros(len(LENGTHS), num_selected, dtype=torch.int32)
    for row, length in enumerate(LENGTHS):
        if length > num_selected:
            shuffled = torch.randperm(length, generator=generator)
            selected_BK[row] = shuffled[:num_selected].sort().values
    return selected_BK


def run_selected(
    q: tuple[Tensor, Tensor], kv: Paged, lengths: list[int], selected_BK: Tensor
) -> Tensor:
    seen = kv.seen(lengths)
    return mla_decode(*q, seen, 0.2, selected_BK)


@pytest.mark.parametrize("num_selected", SELECTED)
@pytest.mark.parametrize(("heads", "c", "r"), DIMS)
def test_selected_positions_equal_the_twin(heads: int, c: int, r: int, num_selected: int) -> None:
    kv, q = paged(2, c + r + 9, LENGTHS), queries(len(LENGTHS), heads, c, r)
    selected_BK = selections(num_selected)
    seen = kv.seen(LENGTHS)
    expected = twin.mla_decode(*q, seen, 0.2, selected_BK)
    found = run_selected(q, kv, LENGTHS, selected_BK)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_selected", SELECTED)
def test_selected_positions_are_as_if_they_were_all_there_is(num_selected: int) -> None:
    """Compare bits with rows that see all entries of a cache that has only the selected ones."""
    kv, q = paged(2, 40 + 6 + 9, LENGTHS), queries(len(LENGTHS), 7, 40, 6)
    selected_BK = selections(num_selected)
    lengths = [min(length, num_selected) for length in LENGTHS]
    own = paged(2, 46, lengths)
    for row, length in enumerate(LENGTHS):
        entries_SD = kv.cache_PLSD[kv.table_BM[row].long(), 1, :, :46].flatten(0, 1)
        kept = selected_BK[row].long() if length > num_selected else torch.arange(length)
        blocks = own.table_BM[row].long()
        at = torch.arange(len(kept))
        own.cache_PLSD[blocks[at // 64], 1, at % 64] = entries_SD[kept]
    assert torch.equal(run_selected(q, kv, LENGTHS, selected_BK), run(q, own, lengths))


def test_a_row_of_selected_positions_depends_neither_on_the_others_nor_on_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv, q = paged(2, 46 + 9, LENGTHS), queries(len(LENGTHS), 9, 40, 6)
    selected_BK = selections(300)
    whole = run_selected(q, kv, LENGTHS, selected_BK)
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert torch.equal(run_selected(q, kv, LENGTHS, selected_BK), whole)
        for i, length in enumerate(LENGTHS):
            one = slice(i, i + 1)
            alone = Paged(kv.cache_PLSD, kv.table_BM[one])
            row = run_selected((q[0][one], q[1][one]), alone, [length], selected_BK[one])
            assert torch.equal(row[0], whole[i])


def test_positions_that_are_not_seen_are_refused() -> None:
    kv, q = paged(2, 46, LENGTHS), queries(len(LENGTHS), 3, 40, 6)
    for bad in (-1, 1100):
        selected_BK = selections(64)
        selected_BK[-1, -1] = bad
        with pytest.raises(ValueError, match="position"):
            run_selected(q, kv, LENGTHS, selected_BK)
    with pytest.raises(ValueError, match="selected_BK"):
        run_selected(q, kv, LENGTHS, selections(64)[:2])


@pytest.mark.parametrize(("heads", "c", "r"), DIMS)
def test_position_0_may_be_left_out(heads: int, c: int, r: int) -> None:
    lengths = [2, *LENGTHS[1:], 0]
    kv, q = paged(2, c + r, lengths), queries(len(lengths), heads, c, r)
    seen = kv.seen(lengths, first=1)
    expected = twin.mla_decode(*q, seen, 0.2)[:-1]
    kv.cache_PLSD[kv.table_BM[:, 0].long(), :, 0] = float("nan")
    o_BHC = mla_decode(*q, seen, 0.2)
    torch.testing.assert_close(o_BHC[:-1], expected, rtol=1e-5, atol=1e-5)
    assert not o_BHC[-1].any()


def test_a_selected_position_lies_behind_the_first() -> None:
    kv, q = paged(2, 46, LENGTHS), queries(len(LENGTHS), 3, 40, 6)
    seen = kv.seen(LENGTHS)
    selected_BK = selections(64)
    selected_BK[-1, 0] = 0
    mla_decode(*q, seen, 0.2, selected_BK)
    with pytest.raises(ValueError, match="position"):
        mla_decode(*q, kv.seen(LENGTHS, first=1), 0.2, selected_BK)
    for bad in (-1, 2):
        with pytest.raises(ValueError, match="first"):
            mla_decode(*q, kv.seen(LENGTHS, first=bad), 0.2)
