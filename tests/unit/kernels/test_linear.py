"""The skinny product against torch, and its promise of equal bits."""

import pytest
import torch
import torch.nn.functional as F

from hadal.kernels import library
from hadal.kernels.ops import linear

pytestmark = pytest.mark.usefixtures("built")
SHAPES = [
    (1, 1, 1),
    (2, 3, 5),
    (7, 100, 33),
    (13, 16, 64),
    (31, 257, 130),
    (6, 2500, 21),
    (64, 1600, 9),
    (65, 48, 301),
    (200, 96, 37),
]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_equals_torch(m: int, k: int, n: int) -> None:
    x, w = torch.randn(m, k), torch.randn(n, k)
    torch.testing.assert_close(
        linear(x, w).double(), F.linear(x.double(), w.double()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_a_row_does_not_depend_on_the_others(m: int, k: int, n: int) -> None:
    x, w = torch.randn(m, k), torch.randn(n, k)
    whole = linear(x, w)
    for count in (1, 2, 5, 8):
        for start in range(0, min(m, 20), count):
            assert torch.equal(linear(x[start : start + count], w), whole[start : start + count])


def test_threads_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(9, 130), torch.randn(77, 130)
    results = []
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        results.append(linear(x, w))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_infinities_and_nans_pass_through() -> None:
    x, w = torch.ones(3, 20), torch.ones(5, 20)
    x[1, 19], x[2, 0] = float("inf"), float("nan")
    y = linear(x, w)
    assert y[0].tolist() == [20.0] * 5
    assert y[1].isinf().all()
    assert y[2].isnan().all()


def test_leading_dimensions_are_kept() -> None:
    x, w = torch.randn(2, 3, 7), torch.randn(5, 7)
    torch.testing.assert_close(linear(x, w), F.linear(x, w))
    assert linear(x[:, 0, :].contiguous()[:0], w).shape == (0, 5)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="do not multiply"):
        linear(torch.randn(2, 3), torch.randn(4, 5))


def test_other_types_take_the_plain_path() -> None:
    x, w = torch.randn(2, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(linear(x, w), F.linear(x, w))
    assert library.isa() in ("avx512", "avx2", "generic")
