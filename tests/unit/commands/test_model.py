"""`hadal model`: a folder's contents, in rows for people and in JSON, and one line for a mistake."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hadal.cli import app
from hadal.core.model_config import read_model_config
from hadal.runtime.resolve import model_folder
from hadal.runtime.weight_check import model_tensors
from tests.family import CONFIGS, ROOT
from tests.waiting import DEADLINE_S


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["model", *arguments], env={"HADAL_MODEL": ""})


def write(folder: Path, config: dict[str, Any], dtype: str = "") -> Path:
    """Write config.json and, with a `dtype`, a sparse file of weights: a header, then only a hole.
    Return the folder.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not dtype:
        return folder
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for wanted in model_tensors(read_model_config(folder)):
        begin, end = end, end + math.prod(wanted.shape) * 2
        header[wanted.name] = {"dtype": dtype, "shape": wanted.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(folder / "model.safetensors", 8 + len(text) + end)
    return folder


def found(*arguments: str) -> dict[str, Any]:
    """Return the printed JSON. The exit code must be 1 if it says why the folder is not served,
    else 0.
    """
    result = run(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    values: dict[str, Any] = json.loads(result.stdout)
    assert bool(values["why_not_served"]) == bool(result.exit_code)
    return values


@pytest.mark.promise(
    "show which model the folder holds, how much memory it takes (so far only for one "
    "host), and which deployment would serve it"
)
def test_the_model_that_ships() -> None:
    result = run()
    assert result.exit_code == 0
    assert "DeepSeek-V3 (deepseek_v3, DeepseekV3ForCausalLM)" in result.stdout
    assert "21.1 million, 2.8 million of them active per token" in result.stdout
    assert "F8_E4M3" in result.stdout
    assert "laptop          serves it with" in result.stdout


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("DeepSeek-V3", 671, 37),
        ("DeepSeek-V3.2", 672, 38),
        ("Kimi-K2", 1026, 32),
        ("Moonlight-16B-A3B", 16, 3),
        ("JoyAI-LLM-Flash", 49, 3),
        ("GLM-4.7-Flash", 30, 4),
        ("GigaChat3-10B-A1.8B", 11, 2),
    ],
)
def test_parameters_are_those_that_the_makers_give(
    name: str, billions: int, active: int, tmp_path: Path
) -> None:
    """Compare with the models' names and cards. Active parameters may differ by up to 1 billion, as
    makers count them differently.
    """
    values = found(str(write(tmp_path, CONFIGS[name])))
    assert round(values["num_parameters"] / 1e9) == billions
    assert abs(values["num_parameters_active"] / 1e9 - active) < 1
    assert values["architecture"] == CONFIGS[name]["architectures"][0]


def test_an_indexer_is_told_and_its_key_is_part_of_the_kv(tmp_path: Path) -> None:
    folder = str(write(tmp_path, CONFIGS["DeepSeek-V3.2"]))
    assert found(folder)["kv_bytes_per_token"] == 61 * (576 + 128) * 4
    text = run(folder).stdout
    assert "DeepSeek-V3.2 (deepseek_v32, DeepseekV32ForCausalLM)" in text
    assert "indexer         64 heads of width 128: a token attends to 2048 positions" in text
    assert "indexer " not in run(str(ROOT / "configs" / "deepseek_v3")).stdout


@pytest.mark.promise(
    "show which model the folder holds, how much memory it takes (so far only for one "
    "host), and which deployment would serve it"
)
@pytest.mark.needs("compiler")
def test_what_fits(tmp_path: Path) -> None:
    """Fit Moonlight in its stored format: 32 GB of BF16 weights, which both units of a host share."""
    folder = write(tmp_path, CONFIGS["Moonlight-16B-A3B"], "BF16")
    small = found(str(folder), "--memory-gb", "20")
    laptop = next(fit for fit in small["deployments"] if fit["deployment"] == "laptop")
    assert "are needed" in laptop["reason"]
    large = found(str(folder), "--memory-gb", "40")
    stored = large["stored_bytes"]["BF16"]
    assert stored == pytest.approx(31.92e9, rel=1e-3)
    assert large["kv_bytes_per_token"] == 27 * 576 * 4
    assert large["kv_tokens_as_stored"] == (40_000_000_000 - stored) // (27 * 576 * 4)
    laptop = next(fit for fit in large["deployments"] if fit["deployment"] == "laptop")
    assert not laptop["reason"]
    free_bytes = 40e9 - 2 * large["num_parameters"]
    tokens = laptop["kv_tokens"]["prefill"] + laptop["kv_tokens"]["decode"]
    assert tokens == pytest.approx(free_bytes / 4 / (27 * 576 * 4), rel=0.07)
    text = run(str(folder), "--memory-gb", "20").stdout
    assert "as stored       the weights alone take 31.9 GB" in text
    assert "31.9 GB in 1 file: 31.9 GB BF16\n" in text


def test_unknown_keys_are_listed_or_accepted(tmp_path: Path) -> None:
    config = {**CONFIGS["DeepSeek-V3"], "my_note": 1}
    folder = str(write(tmp_path, config))
    assert "unknown keys    my_note" in run(folder).stdout
    assert found(folder, "--accept-config", "my_note")["unknown_keys"] == []
    write(tmp_path, {**config, "rope_scaling": {**config["rope_scaling"], "finetuned": True}})
    result = run(folder)
    assert result.exit_code == 2
    assert "--accept-config rope_scaling.finetuned" in result.stderr
    assert found(folder, "--accept-config", "rope_scaling.finetuned")["unknown_keys"] == ["my_note"]


def test_a_config_alone_is_enough() -> None:
    text = run(str(ROOT / "configs" / "deepseek_v3")).stdout
    assert "weights         none: the folder has only" in text
    assert "tokenizer       none;" in text
    assert "v3_ep32_ep144" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v4"}, "this is DeepSeek-V4, which is not served"),
        ({"hidden_size": "x"}, "hidden_size is 'x'"),
    ],
)
def test_a_model_that_is_not_served(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    result = run(str(write(tmp_path, {**CONFIGS["DeepSeek-V3"], **change})))
    assert result.exit_code == 2
    assert result.output.startswith(f"hadal model: {tmp_path}/config.json: {words}")
    assert result.output.count("\n") == 1


def test_other_mistakes_are_one_line(tmp_path: Path) -> None:
    result = run(str(tmp_path / "nowhere"))
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "no such folder" in result.output
    damaged = write(tmp_path / "damaged", CONFIGS["DeepSeek-V3"]) / "model.safetensors"
    damaged.write_bytes(b"123")
    result = run(str(damaged.parent))
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert f"{damaged}: damaged or cut off" in result.output
    assert run(str(tmp_path), "--memory-gb", "nan").exit_code == 2


def test_it_loads_no_torch() -> None:
    code = (
        "import sys\nfrom hadal.cli import app\n"
        "try: app(['model'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'zmq', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, timeout=DEADLINE_S
    )


def shard_missing(folder: Path) -> str:
    (folder / "model-00002-of-00003.safetensors").unlink()
    return "model-00002-of-00003.safetensors: this shard is missing"


def shard_cut(folder: Path) -> str:
    path = folder / "model-00003-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    return "model-00003-of-00003.safetensors: damaged or cut off"


def tensor_missing(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.layers.2.self_attn.o_proj.weight"]
    path.write_text(json.dumps(index))
    return "tensor model.layers.2.self_attn.o_proj.weight is missing"


def config_changed(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kv_lora_rank": 65}))
    return "has shape"


def tokenizer_missing(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "tokenizer.json: no"  # Begins both "not found" and "no such file".


def template_damaged(folder: Path) -> str:
    (folder / "chat_template.jinja").write_text("{% do %}")
    return "chat_template.jinja: the chat template does not parse"


def tokenizer_damaged(folder: Path) -> str:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    return "tokenizer_class is 'Qwen2Tokenizer'"


@pytest.mark.parametrize(
    "damage",
    [
        shard_missing,
        shard_cut,
        tensor_missing,
        config_changed,
        tokenizer_missing,
        template_damaged,
        tokenizer_damaged,
    ],
)
def test_what_serving_refuses_is_told_and_the_exit_code_is_not_0(
    damage: Callable[[Path], str], tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder(""), tmp_path / "model")
    words = damage(folder)
    result = run(str(folder))
    assert result.exit_code, result.output
    assert words in result.stderr
    dry = CliRunner().invoke(app, ["serve", "--dry-run", "--model", str(folder)])
    assert (dry.exit_code, words in dry.stderr) == (2, True), dry.output


def test_chats_are_told() -> None:
    values = found()
    assert values["chat"] == {
        "template": "default in tokenizer_config.json",
        "tools": "deepseek-v3.1",
        "thinks": True,
        "context_tokens": 4096,
    }
    assert "calls in the format of deepseek-v3.1" in run().stdout
