"""FP8 checkpoints dequantised to full precision: a weight's scales may be in another file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.checkpoints import dequantised

SIDES = (2, 3)


def test_scales_are_found_in_any_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randn(5, 7, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, generator=generator) + 0.5
    norm = torch.rand(7, generator=generator).bfloat16()
    config = {"quantization_config": {"weight_block_size": SIDES}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # a is in the file before its scales, b in the file after them, c in the same file.
    save_file({"a": codes, "b_scale_inv": scales, "norm": norm}, tmp_path / "1.safetensors")
    save_file({"b": codes, "a_scale_inv": scales}, tmp_path / "2.safetensors")
    save_file({"c": codes, "c_scale_inv": scales}, tmp_path / "3.safetensors")
    found = dict(dequantised(tmp_path))
    assert found.keys() == {"a", "b", "c", "norm"}
    assert torch.equal(found["norm"], norm)
    assert found["norm"].dtype == torch.bfloat16
    for name in ("a", "b", "c"):
        for row in range(5):
            for column in range(7):
                scale = scales[row // SIDES[0], column // SIDES[1]]
                assert found[name][row, column] == codes[row, column].float() * scale


def test_nothing_of_the_shipped_model_stays_in_codes() -> None:
    folder = Path(__file__).parents[2] / "models" / "hadal-tiny"
    names = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    found = {name: tensor.dtype for name, tensor in dequantised(folder)}
    assert found.keys() == {name for name in names if not name.endswith("_scale_inv")}
    assert torch.float8_e4m3fn not in found.values()
