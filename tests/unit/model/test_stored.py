"""Weights in their stored format: logits are within TOLERANCE of the dequantised model's, for any
division into chunks (rounded inputs: near it). A batch changes no bit. The memory is pages of the
checkpoint's files.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hadal.core.plans import Chunk
from hadal.kernels import library
from hadal.kernels.weights import takes
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import AS_STORED, Conversion, load_weights
from hadal.reference.forward import forward, no_latents
from hadal.reference.fp8 import num_scales
from hadal.reference.params import FP8, Matrix, ModelWeights
from hadal.runtime.resolve import model_folder
from tests.stored import KINDS, stored
from tests.unit.kernels.shapes import odd_config, random_weights

NUM_TOKENS = 150
BLOCKS = (1, 2, 3)
CUTS = (1, 37, 64, 149)
TOLERANCE = 1e-4
# Some matrices are wide enough for tile units, where the CPU has them, and some are not.
CHANGES = {"hidden_size": 640, "moe_intermediate_size": 520, "v_head_dim": 24}


@cache
def held(kind: str) -> ModelWeights:
    return random_weights(odd_config(**CHANGES), seed=3, kind=kind)


def dequantised(weights: ModelWeights) -> ModelWeights:
    """Return the same model with every matrix in FP32."""

    def dense(value: object) -> object:
        if isinstance(value, Matrix):
            return Matrix(value.dense())
        if isinstance(value, tuple):
            return tuple(dense(part) for part in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            if "config" in fields or any(
                not isinstance(x, (int, float, str)) for x in fields.values()
            ):
                kept = {name: x if name == "config" else dense(x) for name, x in fields.items()}
                return type(value)(**kept)
        return value

    found = dense(weights)
    assert isinstance(found, ModelWeights)
    return found


def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(8)
    return torch.randint(0, 301, (NUM_TOKENS,), generator=generator).tolist()


def logits_after(weights: ModelWeights, cut: int) -> Tensor:
    """Return the last token's logits; the text is prefilled in two chunks."""
    model, text = DeepseekV3(weights, KvCache(weights.config, 4)), tokens()
    model.prefill([Chunk("a", tuple(text[:cut]), 0, BLOCKS, None, 0)])
    return model.prefill([Chunk("a", tuple(text[cut:]), cut, BLOCKS, None, 0)])[0]


def decoded(weights: ModelWeights, num_decoded: int, batch: int = 1) -> Tensor:
    """Return the last token's logits; `num_decoded` are decoded singly, in a batch of equals."""
    model, text = DeepseekV3(weights, KvCache(weights.config, 4)), tokens()
    first = NUM_TOKENS - num_decoded
    model.prefill([Chunk("a", tuple(text[:first]), 0, BLOCKS, None, 0)])
    table, found = torch.tensor([BLOCKS] * batch), torch.empty(0)
    for position in range(first, NUM_TOKENS):
        rows = torch.tensor([text[position]] * batch), torch.tensor([position] * batch)
        found = model.decode(*rows, table)
    return found[-1].clone()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_logits_are_those_of_the_dequantised_model(kind: str) -> None:
    weights = held(kind)
    plain = dequantised(weights)
    expected, _ = forward(plain, torch.tensor(tokens()), no_latents(plain))
    for cut in CUTS:
        for found in (logits_after(weights, cut), logits_after(plain, cut)):
            assert (found - expected[-1]).abs().max() <= TOLERANCE
    for found in (decoded(weights, 3), decoded(weights, 20), decoded(plain, 20)):
        assert (found - expected[-1]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_changes_no_bit(kind: str) -> None:
    assert torch.equal(decoded(held(kind), 3, batch=1), decoded(held(kind), 3, batch=21))


def test_rounded_inputs_are_near_their_twin_and_not_far_from_the_others() -> None:
    """Compare with the reference, which rounds the same values. A last bit may move a value to the
    next code: FP8 has three bits after the leading one, so it is off by 2^-4 of its size at most. A
    sum is off by less, as its terms' errors are independent.
    """
    weights = held(KINDS[-1])
    expected, _ = forward(weights, torch.tensor(tokens()), no_latents(weights))
    plain, _ = forward(
        dequantised(weights), torch.tensor(tokens()), no_latents(dequantised(weights))
    )
    spread = plain[-1].std()
    for found in (logits_after(weights, 37), decoded(weights, 20)):
        assert (found - expected[-1]).abs().mean() < 0.05 * spread
        assert 1e-4 * spread < (found - plain[-1]).abs().mean() < 0.15 * spread


def test_matrices_are_pages_of_the_files() -> None:
    folder = model_folder("")
    weights = load_weights(folder, held=AS_STORED)
    spans = [
        (int(begin, 16), int(end, 16))
        for begin, end, path in re.findall(
            r"^(\w+)-(\w+) .*?(/\S+)$", Path("/proc/self/maps").read_text(), re.M
        )
        if Path(path).parent == folder and path.endswith(".safetensors")
    ]
    moe = weights.layers[1].moe
    assert moe is not None
    for matrix in (moe.experts[7].up, weights.layers[0].attention.o, weights.head):
        for part in matrix.parts:
            assert any(begin <= part.data_ptr() < end for begin, end in spans)
    assert moe.experts[7].up.values.dtype is FP8
    assert weights.norm_D.dtype is moe.router.values.dtype is torch.float32
    assert library.load() is None or DeepseekV3(weights, KvCache(weights.config, 2)).has_fused_step


def test_pages_are_in_memory_once_for_all_processes(tmp_path: Path) -> None:
    """Touch all pages in three processes and add up their shares. Only this test maps the files."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder(""), folder)
    weights = load_weights(folder, held=AS_STORED)
    touched = sum(int(part.view(torch.uint8).sum(dtype=torch.int64)) for part in parts(weights))
    assert touched
    num_bytes = sum(part.nbytes for part in parts(weights))
    children = [os.pipe() for _ in range(2)]
    pids = []
    for read_end, write_end in children:
        pid = os.fork()
        if pid == 0:
            found = sum(
                int(part.view(torch.uint8).sum(dtype=torch.int64)) for part in parts(weights)
            )
            os.write(write_end, b"y" if found == touched else b"n")
            os.read(read_end, 0)
            os.kill(os.getpid(), 19)  # SIGSTOP: the child stays until its memory was measured.
            os._exit(0)
        pids.append(pid)
    try:
        assert [os.read(read_end, 1) for read_end, _ in children] == [b"y", b"y"]
        pss = sum(mapped_pss(pid, folder) for pid in (os.getpid(), *pids))
    finally:
        for pid, pair in zip(pids, children, strict=True):
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(pair[0])
            os.close(pair[1])
    print(
        f"{num_bytes / 1e6:.1f} MB of weights, proportional set size of three processes {pss / 1e6:.1f} MB"
    )
    assert 0.9 * num_bytes < pss < 1.2 * num_bytes, "copied, or not shared"


def parts(weights: ModelWeights) -> list[Tensor]:
    moes = [layer.moe for layer in weights.layers if layer.moe is not None]
    experts = [mlp for moe in moes for mlp in moe.experts.slots if mlp is not None]
    return [part for mlp in experts for part in mlp.parts]


def mapped_pss(pid: int, folder: Path) -> int:
    """Return the proportional set size of a process's mappings of the folder's files."""
    total, is_ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"^\w+-\w+ ", line):
            is_ours = str(folder) in line
        elif is_ours and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_whole(kind: str) -> None:
    matrix = stored(torch.randn(300, 200, generator=torch.Generator().manual_seed(2)), kind)
    ids = torch.tensor([299, 0, 127, 128, 128])
    assert torch.equal(matrix.rows(ids), matrix.dense()[ids])


def test_blocks_that_no_kernel_takes_are_converted() -> None:
    codes = torch.ones(8, 96).to(FP8)
    for block in ((128, 64), (64, 128), (4, 128), (128, 256)):
        scales = torch.full(num_scales((8, 96), block), 0.5)
        odd = Matrix(codes, scales, block)
        assert not takes(odd)
        assert torch.equal(Conversion()(odd).values, torch.full((8, 96), 0.5))
    kept = Matrix(codes, torch.full((1, 1), 0.5))
    assert Conversion()(kept).values is codes
    assert Conversion(is_rounding_inputs=True)(kept).is_rounding_inputs
    assert not Conversion(is_rounding_inputs=True)(Matrix(torch.ones(8, 96))).is_rounding_inputs
