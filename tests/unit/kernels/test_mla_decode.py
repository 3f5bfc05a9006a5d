"""Paged absorbed attention against its twin: block borders, blocks out of order, splits, equal
bits.
"""

import pytest
import torch
from torch import Tensor

from hadal.kernels.ops import mla_decode
from hadal.reference import ops as twin
from tests.unit.kernels.shapes import Paged, paged

pytestmark = pytest.mark.usefixtures("built")
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 300, 1100]
DIMS = [(3, 40, 6), (1, 16, 2), (8, 128, 32), (7, 65, 10), (16, 33, 4)]


def queries(batch: int, heads: int, c: int, r: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, c), torch.randn(batch, heads, r)


def run(q: tuple[Tensor, Tensor], kv: Paged, lengths: list[int], layer: int = 1) -> Tensor:
    return mla_decode(*q, kv.cache_PLSD, layer, kv.table_BM, torch.tensor(lengths), 0.2)


@pytest.mark.parametrize(("heads", "c", "r"), DIMS)
def test_equals_the_twin(heads: int, c: int, r: int) -> None:
    kv, q = paged(2, c + r, LENGTHS), queries(len(LENGTHS), heads, c, r)
    expected = twin.mla_decode(*q, kv.cache_PLSD, 1, kv.table_BM, torch.tensor(LENGTHS), 0.2)
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
    expected = twin.mla_decode(*q, kv.cache_PLSD, 1, kv.table_BM, torch.tensor([200, 64]), 0.2)
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
