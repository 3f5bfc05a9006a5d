"""Experts sent between ranks with weights on a GPU: through the host, while the device computes."""

from __future__ import annotations

import pytest
import torch

from hadal.core.handshake import key_of
from hadal.core.plans import Source
from hadal.reference.params import Matrix, MlpWeights
from hadal.runtime.transfer.experts import ExpertClient, ExpertServer
from tests.needs import skip_unless

pytestmark = [
    pytest.mark.gpu,
    skip_unless(torch.cuda.is_available(), "no CUDA device", "a machine with an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_was_queued_before_is_sent_and_what_arrived_is_there_for_whatever_comes_next(
    dtype: torch.dtype,
) -> None:
    key, busy = key_of(b"a run", "experts"), torch.randn(4096, 4096, device="cuda")
    shapes = (512, 2048), (512, 2048), (2048, 512)
    held = MlpWeights(*(Matrix(torch.zeros(shape, device="cuda").to(dtype)) for shape in shapes))
    server = ExpertServer("127.0.0.1", key, lambda layer, expert: held)
    client = ExpertClient(key)
    try:
        for value in (1.0, 2.0, 4.0):
            key_layer = int(value)  # Checksums are kept per expert, and these weights change.
            got = held.empty_like()
            for _ in range(10):
                busy = busy @ busy / 64.0
            for part in held.parts:
                part.copy_(
                    torch.full(part.shape, value, device="cuda")
                )  # Queued after the products.
            assert client.fetch(key_layer, Source(7, "127.0.0.1", server.port), got)
            assert all(bool((part.float() == value).all()) for part in got.parts)
    finally:
        assert server.close(5)
