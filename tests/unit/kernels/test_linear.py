"""The skinny product against torch, and its promise of equal bits."""

import pytest
import torch
import torch.nn.functional as F

from hadal.kernels import library
from hadal.kernels.products import linear
from hadal.reference import products as twin
from hadal.reference.params import FP8, Matrix
from tests.stored import KINDS, stored

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
    (3, 512, 128),
    (70, 1024, 260),
    (300, 640, 90),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_equals_its_twin(m: int, k: int, n: int, kind: str) -> None:
    x, w = torch.randn(m, k), stored(torch.randn(n, k), kind)
    exact = (twin.rounded(x) if w.is_rounding_inputs else x).double() @ w.dense().double().T
    torch.testing.assert_close(linear(x, w).double(), exact, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(twin.linear(x, w).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.promise(
    "Within one instruction set, a row's result depends on the row alone, not on "
    "batch, tile, thread or width."
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_a_row_does_not_depend_on_the_others(m: int, k: int, n: int, kind: str) -> None:
    x, w = torch.randn(m, k), stored(torch.randn(n, k), kind)
    whole = linear(x, w)
    for count in (1, 2, 5, 8):
        for start in range(0, min(m, 20), count):
            assert torch.equal(linear(x[start : start + count], w), whole[start : start + count])


@pytest.mark.parametrize("columns", [96, 640])
def test_every_code_and_every_half_float_is_widened_right(columns: int) -> None:
    """Widen every code with subnormals and both zeros, but no NaN codes: a quantiser saturates."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    codes = torch.where(codes.float().isnan(), torch.zeros(()), codes.float()).to(FP8)
    scales = torch.tensor([[0.37] * -(-columns // 128)] * 2)
    by_code = Matrix(codes[:, None].expand(256, columns).contiguous(), scales)
    halves = torch.arange(0, 65536, 127).to(torch.int16).view(torch.bfloat16)
    halves = halves[halves.isfinite() & (halves.abs() < 1e30) & (halves.abs() > 1e-30)]
    by_half = Matrix(halves[:, None].expand(len(halves), columns).contiguous())
    one_hot = torch.eye(columns)[[0, 1, 31, 32, 63, 64, columns - 1]]
    for w in (by_code, by_half):
        assert torch.equal(linear(one_hot, w), w.dense().T[: len(one_hot)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [130, 520])
def test_threads_do_not_change_the_bits(
    kind: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.randn(9, columns), stored(torch.randn(77, columns), kind)
    results = []
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        results.append(linear(x, w))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_infinities_and_nans_pass_through() -> None:
    x, w = torch.ones(3, 20), stored(torch.ones(5, 20))
    x[1, 19], x[2, 0] = float("inf"), float("nan")
    y = linear(x, w)
    assert y[0].tolist() == [20.0] * 5
    assert y[1].isinf().all()
    assert y[2].isnan().all()


def test_leading_dimensions_are_kept() -> None:
    x, w = torch.randn(2, 3, 7), stored(torch.randn(5, 7))
    torch.testing.assert_close(linear(x, w), F.linear(x, w.values))
    assert linear(x[:, 0, :].contiguous()[:0], w).shape == (0, 5)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        linear(torch.randn(2, 3), stored(torch.randn(4, 5)))


def test_other_types_take_the_plain_path() -> None:
    x, w = torch.randn(2, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(linear(x, Matrix(w)), F.linear(x, w))
    assert library.isa() in ("amx", "avx512", "avx2", "generic")
