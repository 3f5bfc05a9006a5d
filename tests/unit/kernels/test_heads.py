"""Per-head products against their twins, and the same bits in every batch."""

import pytest
import torch

from hadal.kernels.ops import heads_in, heads_out
from hadal.reference import ops as twin

pytestmark = pytest.mark.usefixtures("built")
DIMS = [(3, 40, 24), (1, 16, 7), (6, 32, 64), (5, 13, 129)]


@pytest.mark.parametrize(("heads", "n", "c"), DIMS)
@pytest.mark.parametrize("batch", [0, 1, 5, 200])
def test_equals_the_twin(batch: int, heads: int, n: int, c: int) -> None:
    q, w = torch.randn(batch, heads, n + 3)[..., :n], torch.randn(heads, n, c)
    torch.testing.assert_close(heads_in(q, w), twin.heads_in(q, w), rtol=1e-5, atol=1e-4)
    o, w = torch.randn(batch, heads, c), torch.randn(heads, n, c)
    torch.testing.assert_close(heads_out(o, w), twin.heads_out(o, w), rtol=1e-5, atol=1e-4)


def test_a_row_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    q, o = torch.randn(150, 5, 20), torch.randn(150, 5, 40)
    w_in, w_out = torch.randn(5, 20, 40), torch.randn(5, 20, 40)
    whole = heads_in(q, w_in), heads_out(o, w_out)
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        for rows in (slice(0, 1), slice(7, 20), slice(90, 150)):
            assert torch.equal(heads_in(q[rows], w_in), whole[0][rows])
            assert torch.equal(heads_out(o[rows], w_out), whole[1][rows])


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="w_uk_HNC"):
        heads_in(torch.randn(2, 3, 4), torch.randn(3, 5, 6))
    with pytest.raises(ValueError, match="w_uv_HWC"):
        heads_out(torch.randn(2, 3, 4), torch.randn(3, 5, 6))
