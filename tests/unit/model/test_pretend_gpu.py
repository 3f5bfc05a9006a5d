"""The model's ops on the pretend GPU: sparse attention, moving experts, FP8 codes. Also the device
itself, which raises where CUDA does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from hadal.core.handshake import key_of
from hadal.core.plans import Source
from hadal.core.row_bytes import row_bytes
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.reference import codec, fp8
from hadal.reference.exchange import all_to_all
from hadal.reference.params import Matrix, MlpWeights
from hadal.runtime.transfer.experts import ExpertClient, ExpertServer
from tests.pretend import DEVICE, on_gpu, pretend_gpu
from tests.unit.model.test_sparse import BLOCKS, NUM_TOKENS, chunk, make_model, sparse, text

TOLERANCE = 1e-4


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    with pretend_gpu():
        yield DEVICE


def logits_of(model: DeepseekV3) -> Tensor:
    """Return logits [N, V] on the CPU: two chunks, the second with context, then single tokens."""
    tokens, device = text(), model.cache.cache_PLSD.device
    first = model.prefill([chunk(tokens, 0, 100)])
    second = model.prefill([chunk(tokens, 100, 140)])
    table = torch.tensor([BLOCKS[0]], dtype=torch.int32, device=device)
    rows = [
        model.decode(
            torch.tensor(tokens[at : at + 1], device=device),
            torch.tensor([at], device=device),
            table,
        )
        for at in range(140, NUM_TOKENS)
    ]
    return torch.cat([first, second, *rows]).cpu()


@pytest.mark.parametrize("kind", ["fp32", "fp8"])
def test_sparse_attention_gives_the_cpus_logits(kind: str) -> None:
    """Compare with the same ops on the CPU, without fused kernels."""
    expected = logits_of(make_model(sparse(kind), is_fused=False))
    with pretend_gpu():
        weights = on_gpu(sparse(kind))
        cache = KvCache(weights.config, 8, device=DEVICE)
        cache.cache_PLSD.fill_(float("nan"))
        found = logits_of(DeepseekV3(weights, cache))
    assert float((found - expected).abs().max()) <= TOLERANCE


def test_codes_of_both_devices_are_the_same(gpu: torch.device) -> None:
    weight = torch.randn(200, 150)
    for values in (weight, weight.to(gpu)):
        codes, scales = fp8.quantise(values, (128, 128))
        assert codes.device == scales.device == values.device
        out = torch.empty_like(values)
        fp8.dequantise(codes, scales, (128, 128), out)
        assert torch.allclose(out.cpu(), weight, rtol=0.07, atol=0.01)


@pytest.mark.parametrize("row_format", ["fp32", "bf16", "fp8", "fp8_pow2"])
def test_rows_decode_on_any_device(gpu: torch.device, row_format: str) -> None:
    x = torch.randn(5, 200)
    decoded = []
    for device in ("cpu", gpu):
        rows = torch.empty((5, row_bytes(200, row_format)), dtype=torch.uint8, device=device)
        out = torch.empty((5, 200), device=device)
        codec.encode(x.to(device), None, rows, row_format)
        codec.decode(rows, out, row_format)
        decoded.append(out.cpu())
    assert torch.equal(*decoded)


def test_what_dispatch_means_is_said_on_any_device(gpu: torch.device) -> None:
    x, ids, weights = torch.randn(3, 8), torch.tensor([[0, 1], [1, 2], [2, 0]]), torch.rand(3, 2)

    def experts(expert: int, x_ND: Tensor) -> Tensor:
        return x_ND * (expert + 1)

    found = [
        all_to_all({0: x.to(d)}, {0: ids.to(d)}, {0: weights.to(d)}, experts)[0].cpu()
        for d in ("cpu", gpu)
    ]
    assert torch.equal(*found)


def test_experts_move_between_gpus(gpu: torch.device) -> None:
    held = MlpWeights(*(Matrix(torch.randn(s, device=gpu)) for s in ((6, 8), (6, 8), (8, 6))))
    key = key_of(b"a run", "experts")
    server = ExpertServer("127.0.0.1", key, lambda layer, expert: held)
    try:
        got = held.empty_like()
        assert ExpertClient(key).fetch(0, Source(7, "127.0.0.1", server.port), got)
        assert all(part.is_cuda for part in got.parts)
        assert all(map(torch.equal, got.parts, held.parts))
    finally:
        assert server.close(5)


MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda cpu, gpu: cpu + gpu,
    "product": lambda cpu, gpu: torch.matmul(gpu, cpu),
    "cat": lambda cpu, gpu: torch.cat([cpu, gpu]),
    "lookup": lambda cpu, gpu: cpu.index_select(0, gpu.int().flatten()),
    "index": lambda cpu, gpu: cpu[gpu.long()],
    "assignment": lambda cpu, gpu: gpu.__setitem__(torch.tensor([0]), cpu[:1]),
    "in place": lambda cpu, gpu: cpu[0, 0].add_(gpu[0, 0]),
    "a number of the GPU": lambda cpu, gpu: cpu + gpu[0, 0],
    "out": lambda cpu, gpu: torch.add(gpu, gpu, out=cpu),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_do_not_meet(gpu: torch.device, name: str) -> None:
    with pytest.raises(RuntimeError, match=r"same device"):
        MIXED[name](torch.ones(2, 2), torch.ones(2, 2, device=gpu))


def test_a_tensor_of_the_gpu_is_no_array(gpu: torch.device) -> None:
    tensor = torch.ones(2, device=gpu)
    for convert in (Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="numpy"):
            convert(tensor)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:1")


def test_copies_and_numbers_go_between_devices(gpu: torch.device) -> None:
    host, tensor = torch.arange(4.0), torch.zeros(4, device=gpu)
    tensor.copy_(host)
    tensor[1:3] = host[:2]
    tensor += torch.tensor(1.0)
    assert tensor[torch.tensor([0, 3])].tolist() == [1.0, 4.0]
    there = host.to(gpu)
    there.zero_()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0], "a copy, even where the CPU holds both"
    assert tensor.cpu().numpy().tolist() == [1.0, 1.0, 2.0, 4.0]
