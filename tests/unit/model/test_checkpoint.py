"""Every way a checkpoint can be damaged is an error that names the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hadal.core.errors import CheckpointError
from hadal.model.load import load_weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
KV_B = "model.layers.1.self_attn.kv_b_proj.weight"
EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"


def shard(folder: Path) -> Path:
    """Cut the single file into two shards and an index; return the second."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / SINGLE).unlink()
    return folder / "model-00002-of-00002.safetensors"


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def complaint(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_weights(folder)
    return str(error.value)


def test_shards_equal_the_single_file(own_folder: Path) -> None:
    whole = load_weights(own_folder)
    shard(own_folder)
    parts = load_weights(own_folder)
    assert torch.equal(whole.head.values, parts.head.values)
    assert whole.layers[2].moe is not None
    assert parts.layers[2].moe is not None
    for one, other in zip(
        whole.layers[2].moe.experts.slots, parts.layers[2].moe.experts.slots, strict=True
    ):
        assert one is not None
        assert other is not None
        assert torch.equal(one.up.values, other.up.values)


def test_no_weights(own_folder: Path) -> None:
    (own_folder / SINGLE).unlink()
    assert "no weights" in complaint(own_folder)


def test_missing_shard(own_folder: Path) -> None:
    missing = shard(own_folder)
    missing.unlink()
    message = complaint(own_folder)
    assert str(missing) in message
    assert "missing" in message


def test_index_names_an_absent_tensor(own_folder: Path) -> None:
    second = shard(own_folder)
    index = json.loads((own_folder / INDEX).read_text())
    index["weight_map"][EXPERT] = second.name
    (own_folder / INDEX).write_text(json.dumps(index))
    for file in own_folder.glob("model-*.safetensors"):
        tensors = load_file(file)
        tensors.pop(EXPERT, None)
        save_file(tensors, file)
    message = complaint(own_folder)
    assert EXPERT in message
    assert second.name in message


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../x"}}', "\xff{"]
)
def test_broken_index(own_folder: Path, text: str) -> None:
    shard(own_folder)
    (own_folder / INDEX).write_bytes(text.encode("latin-1"))
    assert INDEX in complaint(own_folder)


@pytest.mark.parametrize("keep", [0, 4, 1000, -1000])
def test_truncated_file(own_folder: Path, keep: int) -> None:
    path = own_folder / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in complaint(own_folder)


def test_corrupt_header(own_folder: Path) -> None:
    path = own_folder / SINGLE
    content = bytearray(path.read_bytes())
    content[8:40] = b"\x00" * 32
    path.write_bytes(content)
    message = complaint(own_folder)
    assert str(path) in message
    assert "damaged" in message


@pytest.mark.parametrize(
    "name", [KV_B, EXPERT, "lm_head.weight", "model.layers.1.mlp.gate.e_score_correction_bias"]
)
def test_missing_tensor(own_folder: Path, name: str) -> None:
    change(own_folder, lambda tensors: tensors.pop(name))
    message = complaint(own_folder)
    assert name in message
    assert "missing" in message


@pytest.mark.parametrize("name", [KV_B, EXPERT, "model.norm.weight"])
def test_wrong_shape(own_folder: Path, name: str) -> None:
    change(own_folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    message = complaint(own_folder)
    assert str(own_folder / SINGLE) in message
    assert name in message
    assert "shape" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e5m2])
def test_wrong_dtype(own_folder: Path, dtype: torch.dtype) -> None:
    change(own_folder, lambda tensors: tensors.update({KV_B: tensors[KV_B].to(dtype)}))
    message = complaint(own_folder)
    assert KV_B in message
    assert str(dtype).removeprefix("torch.") in message


def test_fp8_without_quantization_config(own_folder: Path) -> None:
    change(
        own_folder, lambda tensors: tensors.update({KV_B: tensors[KV_B].to(torch.float8_e4m3fn)})
    )
    message = complaint(own_folder)
    assert KV_B in message
    assert "quantization_config" in message


def make_fp8(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(fields))

    def quantised(tensors: dict[str, torch.Tensor]) -> None:
        rows, columns = tensors[KV_B].shape
        tensors[KV_B] = tensors[KV_B].to(torch.float8_e4m3fn)
        tensors[f"{KV_B}_scale_inv"] = torch.ones(-(-rows // 16), -(-columns // 16))
        edit(tensors)

    change(folder, quantised)


def test_missing_scales(own_folder: Path) -> None:
    make_fp8(own_folder, lambda tensors: tensors.pop(f"{KV_B}_scale_inv"))
    assert f"{KV_B}_scale_inv" in complaint(own_folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(own_folder: Path, value: float) -> None:
    make_fp8(own_folder, lambda tensors: tensors[f"{KV_B}_scale_inv"][0, 0].fill_(value))
    message = complaint(own_folder)
    assert f"{KV_B}_scale_inv" in message
    assert "finite" in message


def test_scales_of_the_wrong_shape(own_folder: Path) -> None:
    make_fp8(own_folder, lambda tensors: tensors.update({f"{KV_B}_scale_inv": torch.ones(2, 1)}))
    assert f"{KV_B}_scale_inv" in complaint(own_folder)


def test_scales_of_the_wrong_dtype(own_folder: Path) -> None:
    make_fp8(
        own_folder,
        lambda tensors: tensors.update({f"{KV_B}_scale_inv": torch.ones(8, 2, dtype=torch.int32)}),
    )
    assert f"{KV_B}_scale_inv" in complaint(own_folder)


def test_fp8_vector(own_folder: Path) -> None:
    name = "model.norm.weight"
    make_fp8(
        own_folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)})
    )
    assert name in complaint(own_folder)
