"""Test the check of weights by file headers: it covers the tensors that the loader reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.core.model_config import read_model_config
from hadal.model.checkpoint import Checkpoint
from hadal.model.load import Conversion, _TensorFinder
from hadal.reference.params import Matrix
from hadal.runtime.resolve import model_folder, plan
from hadal.runtime.weight_check import Wanted, check_weights, model_tensors, mtp_tensors
from tests.family import CONFIGS


class Noting(Checkpoint):
    """Tensors without values; each request is recorded."""

    def __init__(self) -> None:
        self.asked: set[Wanted] = set()

    def vector(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.asked.add(Wanted(name, shape, is_matrix=False))
        return torch.empty(shape, device="meta")

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        self.asked.add(Wanted(name, shape))
        return Matrix(torch.empty(shape, device="meta"))


@pytest.mark.parametrize(
    "name", ["Moonlight-16B-A3B", "DeepSeek-V3.2", "JoyAI-LLM-Flash", "GLM-4.7-Flash"]
)
def test_the_tensors_are_those_that_the_loader_reads(name: str, tmp_path: Path) -> None:
    fields = {**CONFIGS[name], "num_hidden_layers": 4}
    fields.pop("mlp_layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_model_config(tmp_path)
    noting = Noting()
    held = Conversion(device="meta")
    loader = _TensorFinder(noting, config, None, held, lambda done, of: None, with_mtp_experts=True)
    loader.model(with_mtp=True)
    assert noting.asked == {*model_tensors(config), *mtp_tensors(config)}


def without_mtp(folder: Path, tensors: str) -> Path:
    """Copy the shipped model without these tensors of the MTP module in its index."""
    shutil.copytree(model_folder(""), folder)
    path = folder / "model.safetensors.index.json"
    index: dict[str, Any] = json.loads(path.read_text())
    kept = {
        name: file
        for name, file in index["weight_map"].items()
        if not name.startswith(f"model.layers.5.{tensors}")
    }
    path.write_text(json.dumps({**index, "weight_map": kept}))
    return folder


@pytest.mark.parametrize("tensors", ["", "enorm", "mlp.experts.9."])
def test_drafts_need_all_tensors_of_the_module(tensors: str, tmp_path: Path) -> None:
    folder = without_mtp(tmp_path / "model", tensors)
    why = check_weights(folder, read_model_config(folder))
    assert f"tensor model.layers.5.{tensors}" in why
    assert why.endswith("is missing; config.json says that the model has it")
    deployment = Deployment(model=str(folder))
    decode = msgspec.structs.replace(deployment.decode, drafts="auto")
    planned = plan(msgspec.structs.replace(deployment, decode=decode))
    assert planned.deployment.decode.drafts == 0
    assert any("no drafts are made" in each and why in each for each in planned.memory.warnings)
    decode = msgspec.structs.replace(deployment.decode, drafts=1)
    with pytest.raises(ConfigError, match="Set 0 or 'auto', or take a checkpoint that has it"):
        plan(msgspec.structs.replace(deployment, decode=decode))


def test_the_model_that_ships_has_all() -> None:
    folder = model_folder("")
    assert check_weights(folder, read_model_config(folder)) == ""
