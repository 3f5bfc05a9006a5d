"""The shared expert's network against its slow twin."""

import torch

from hadal.kernels.products import swiglu
from hadal.reference import products as slow
from tests.stored import stored_mlp


def test_equals_its_twin() -> None:
    generator = torch.Generator().manual_seed(5)
    for num_tokens, dim, width in ((1, 100, 36), (7, 64, 200), (130, 33, 17)):
        weights = stored_mlp(
            torch.randn(width, dim, generator=generator) / dim**0.5,
            torch.randn(width, dim, generator=generator) / dim**0.5,
            torch.randn(dim, width, generator=generator) / width**0.5,
        )
        x_TD = torch.randn(num_tokens, dim, generator=generator)
        torch.testing.assert_close(
            swiglu(x_TD, weights), slow.swiglu(x_TD, weights), atol=1e-5, rtol=1e-5
        )
