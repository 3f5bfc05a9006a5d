"""The table of config keys: defaults equal transformers'; other keys are refused or listed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hadal.core import model_keys
from hadal.core.errors import CheckpointError, ConfigError
from hadal.core.model_config import (
    check_accepted,
    parse_model_config,
    read_model_config,
    unknown_keys,
)
from hadal.core.model_keys import Use
from tests.family import CONFIGS

V3 = CONFIGS["DeepSeek-V3"]
YARN = V3["rope_scaling"]
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
}
BLOCKS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "block",
                "block_structure": [128, 128],
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
}


def write(folder: Path, fields: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.slow("transformers is imported")
def test_defaults_are_those_of_transformers_classes() -> None:
    import transformers

    for family, name in (
        (model_keys.V3, "DeepseekV3Config"),
        (model_keys.V32, "DeepseekV32Config"),
        (model_keys.GLM, "Glm4MoeLiteConfig"),
    ):
        config_class = getattr(transformers, name)
        theirs = {each.name: each.default for each in dataclasses.fields(config_class)}
        theirs |= {"rope_theta": config_class.default_theta}
        theirs |= {"num_nextn_predict_layers": theirs.get("num_mtp_layers", 0)}
        for key, row in model_keys.CONFIG[family].items():
            if row.use is Use.USED and key in theirs:
                assert row.default == theirs[key], f"{family}.{key}"
        # A key that the class declares and the table lacks would be ignored without notice.
        base = {each.name for each in dataclasses.fields(transformers.PreTrainedConfig)}
        assert not theirs.keys() - base - model_keys.CONFIG[family].keys()


@pytest.mark.slow("transformers is imported")
def test_every_key_of_transformers_generation_config_is_in_the_table() -> None:
    from transformers import GenerationConfig

    known = {key for key in vars(GenerationConfig()) if not key.startswith("_")}
    assert not known - model_keys.GENERATION.keys()


def test_every_row_names_its_source() -> None:
    tables = [*model_keys.CONFIG.values(), model_keys.ROPE, model_keys.FP8, model_keys.GENERATION]
    for table in tables:
        for key, row in table.items():
            assert row.source, key
            assert (row.use is Use.FIXED) == bool(row.allowed), key
            assert (row.use in (Use.ALIAS, Use.SAME)) == bool(row.of), key


@pytest.mark.promise(
    "Keys that Hadal does not know are refused inside rope_parameters, rope_scaling and"
    " quantization_config"
)
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rope_scaling": {**YARN, "mrope_section": [1]}}, "rope_scaling.mrope_section"),
        ({"rope_parameters": {"rope_theta": 1e4, "x": 1}}, "rope_parameters.x"),
        (
            {"quantization_config": {**V3["quantization_config"], "zero_point": True}},
            "quantization_config.zero_point",
        ),
    ],
)
def test_an_unknown_key_of_an_object_is_refused_or_accepted(
    changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(CheckpointError, match=f"--accept-config {name}") as error:
        parse_model_config({**V3, **changes}, "f")
    assert str(error.value).startswith(f"f: {name} is ")
    check_accepted((name,))
    parse_model_config({**V3, **changes}, "f", (name,))


def test_a_key_that_is_read_cannot_be_accepted() -> None:
    for name in ("scoring_func", "rope_scaling.factor", "quantization_config.weight_block_size"):
        with pytest.raises(ConfigError, match=rf"{name} is a key that Hadal knows and reads"):
            check_accepted((name,))


@pytest.mark.promise("unknown keys at the top are listed by `hadal model` and at the start")
def test_unknown_keys_at_the_top_are_listed(tmp_path: Path) -> None:
    write(tmp_path, {**V3, "my_note": 1, "router_dtype": "float64"}, {"my_switch": True})
    read_model_config(tmp_path)
    names = ("my_note", "router_dtype", "generation_config.my_switch")
    assert unknown_keys(tmp_path) == names
    assert unknown_keys(tmp_path, names[:1]) == names[1:]


@pytest.mark.promise(
    "Keys of generation_config.json that change a draw or the end, and are not served, are refused by"
    " name"
)
@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("repetition_penalty", 1.05, "a draw"),
        ("min_p", 0.05, "a draw"),
        ("typical_p", 0.9, "a draw"),
        ("no_repeat_ngram_size", 3, "a draw"),
        ("suppress_tokens", [5], "a draw"),
        ("num_beams", 4, "a draw"),
        ("max_new_tokens", 100, "the end of a text"),
        ("min_new_tokens", 3, "the end of a text"),
        ("stop_strings", ["x"], "the end of a text"),
        ("forced_eos_token_id", 2, "the end of a text"),
    ],
)
def test_generation_keys_that_are_not_served(
    key: str, value: Any, word: str, tmp_path: Path
) -> None:
    write(tmp_path, V3, {"temperature": 0.6, key: value})
    name = f"generation_config.{key}"
    with pytest.raises(
        CheckpointError, match=rf"{key} is .*changes {word} .*--accept-config {name}"
    ):
        read_model_config(tmp_path)
    read_model_config(tmp_path, (name,))


def test_generation_keys_that_change_nothing(tmp_path: Path) -> None:
    write(
        tmp_path,
        V3,
        {
            "_from_model_config": True,
            "repetition_penalty": 1.0,
            "min_p": None,
            "num_beams": 1,
            "min_new_tokens": 0,
            "use_cache": True,
            "max_length": 131072,
        },
    )
    read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_local_experts": 128}, "num_local_experts is 128, and n_routed_experts says 256"),
        (
            {"head_dim": 128},
            "head_dim is 128, and qk_rope_head_dim says 64: both must state the same value",
        ),
        ({"mlp_layer_types": ["sparse"] * 61}, "mlp_layer_types is ["),
        ({"sliding_window": 4096}, "sliding_window is 4096; this architecture needs nothing"),
        ({"layer_types": ["sliding_attention"] * 61}, "layer_types is ["),
        (
            {"quantization": {"bits": 4}},
            "quantization is {'bits': 4}; this architecture needs nothing",
        ),
        ({"quantization_config": INT4}, "quantization_config.format is 'pack-quantized'"),
    ],
)
def test_two_statements_and_what_is_not_served(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_model_config({**V3, **changes}, "f")
    assert str(error.value).startswith(f"f: {words}")


def test_one_value_under_another_name() -> None:
    fields = {key: value for key, value in V3.items() if key != "n_routed_experts"}
    assert parse_model_config({**fields, "num_local_experts": 512}, "f").n_routed_experts == 512
    assert parse_model_config({**V3, "hidden_act": "swish"}, "f") == parse_model_config(V3, "f")
    v32 = {k: v for k, v in CONFIGS["DeepSeek-V3.2"].items() if k != "first_k_dense_replace"}
    kinds = ["dense"] * 5 + ["sparse"] * 56
    assert parse_model_config({**v32, "mlp_layer_types": kinds}, "f").first_k_dense_replace == 5


@pytest.mark.promise("compressed-tensors' float-quantized with strategy block is read as FP8, too")
def test_blocks_of_compressed_tensors_are_fp8() -> None:
    config = parse_model_config({**V3, "quantization_config": BLOCKS}, "f")
    assert (config.weight_block_size, config.scale_names) == ((128, 128), ("weight_scale",))
    weights = BLOCKS["config_groups"]["group_0"]["weights"]  # type: ignore[index]
    for changes, key in (
        ({"strategy": "channel"}, "strategy"),
        ({"num_bits": 4}, "num_bits"),
        ({"type": "int"}, "type"),
    ):
        groups = {"group_0": {"targets": ["Linear"], "weights": {**weights, **changes}}}
        other = {**BLOCKS, "config_groups": groups}
        with pytest.raises(CheckpointError, match=rf"config_groups\.group_0\.weights\.{key} is"):
            parse_model_config({**V3, "quantization_config": other}, "f")


def test_every_variant_of_fp8_that_transformers_writes() -> None:
    written = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": [128, 128],
        "dequantize": True,
        "modules_to_not_convert": None,
        "modules_to_convert": ["model.embed_tokens"],
        "scale_fmt": "float",
        "expert_dtype": "fp8",
    }
    config = parse_model_config({**V3, "quantization_config": written}, "f")
    assert config.weight_block_size == (128, 128)
    short = {"quant_method": "fp8"}
    assert parse_model_config({**V3, "quantization_config": short}, "f") == config
    with pytest.raises(CheckpointError, match=r"quantization_config\.expert_dtype is 'fp4'"):
        parse_model_config({**V3, "quantization_config": {**written, "expert_dtype": "fp4"}}, "f")
