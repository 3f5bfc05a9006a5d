"""Per-head products against their twins, and the same bits in every batch."""

import pytest
import torch

from hadal.kernels.products import heads_in, heads_out
from hadal.reference import products as twin
from tests.stored import KINDS, stored

pytestmark = pytest.mark.usefixtures("built")
DIMS = [(3, 40, 24), (1, 16, 7), (6, 32, 64), (5, 13, 129), (3, 24, 512)]


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize(("heads", "n", "c"), DIMS)
@pytest.mark.parametrize("batch", [0, 1, 5, 200])
def test_equals_the_twin(batch: int, heads: int, n: int, c: int, kind: str) -> None:
    width = n + 5
    kv_b = stored(torch.randn(heads * (n + width), c), kind)
    q, o = torch.randn(batch, heads, n + 3)[..., :n], torch.randn(batch, heads, c)
    torch.testing.assert_close(heads_in(q, kv_b), twin.heads_in(q, kv_b), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(
        heads_out(o, kv_b, width), twin.heads_out(o, kv_b, width), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("latent", [40, 520])
def test_a_row_does_not_depend_on_the_others(
    kind: str, latent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, o = torch.randn(150, 5, 20), torch.randn(150, 5, latent)
    kv_b = stored(torch.randn(5 * 50, latent), kind)
    whole = heads_in(q, kv_b), heads_out(o, kv_b, 30)
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        for rows in (slice(0, 1), slice(7, 20), slice(90, 150)):
            assert torch.equal(heads_in(q[rows], kv_b), whole[0][rows])
            assert torch.equal(heads_out(o[rows], kv_b, 30), whole[1][rows])


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_b"):
        heads_in(torch.randn(2, 3, 4), stored(torch.randn(17, 6)))
    with pytest.raises(ValueError, match="kv_b"):
        heads_in(torch.randn(2, 3, 4), stored(torch.randn(9, 6)))
    with pytest.raises(ValueError, match="kv_b"):
        heads_out(torch.randn(2, 3, 4), stored(torch.randn(30, 6)), 5)
