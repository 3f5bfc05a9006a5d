"""A config.json is checked field by field: one line that names the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hadal.core.errors import CheckpointError
from hadal.core.model_config import RopeScaling, parse_model_config

ROOT = Path(__file__).resolve().parents[3]
V3: dict[str, Any] = json.loads((ROOT / "configs" / "deepseek_v3" / "config.json").read_text())
YARN = V3["rope_scaling"]
FP8 = V3["quantization_config"]


def test_what_a_file_says_in_another_form() -> None:
    config = parse_model_config(V3, "f")
    assert config.eos_token_ids == (1,)
    assert config.weight_block_size == (128, 128)
    assert config.rope_scaling == RopeScaling(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert type(config.rope_theta) is float
    ends = parse_model_config({**V3, "eos_token_id": [3, 4]}, "f")
    assert ends.eos_token_ids == (3, 4)


def test_what_a_file_does_not_say() -> None:
    optional = {"rope_theta", "rope_scaling", "quantization_config", "eos_token_id", "q_lora_rank"}
    fields = {name: value for name, value in V3.items() if name not in optional}
    config = parse_model_config(fields, "f")
    assert (config.rope_scaling, config.weight_block_size, config.q_lora_rank) == (None,) * 3
    assert (config.eos_token_ids, config.rope_theta) == ((1,), 10000.0)
    newer = parse_model_config({**fields, "rope_parameters": {**YARN, "rope_theta": 5e4}}, "f")
    assert newer.rope_theta == 5e4
    assert newer.rope_scaling is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; only 'deepseek_v3' is served"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; this architecture needs"),
        ({"attention_bias": 0}, "attention_bias is 0; this architecture needs False"),
        ({"hidden_size": "7168"}, "hidden_size is '7168'; expected `int`, got `str`"),
        ({"hidden_size": 7168.0}, "hidden_size is 7168.0; expected `int`, got `float`"),
        ({"hidden_size": 0}, "hidden_size is 0; expected `int` >= 1"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776; expected `int` <="),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; expected `bool`"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True; expected `float`"),
        ({"rope_theta": None}, "rope_theta is None; expected `float`"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0; expected `int` >= 1"),
        ({"eos_token_id": []}, "eos_token_id is []; expected `array` of length >= 1"),
        ({"eos_token_id": [1, -1]}, "eos_token_id[1] is -1; expected `int` >= 0"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; expected `int | array`"),
        ({"rope_scaling": 3}, "rope_scaling is 3; expected `object | null`"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling.type is 'linear'; only"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "rope_scaling.factor is 0; expected `float` >="),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: object missing required field"),
        ({"quantization_config": 3}, "quantization_config is 3; expected `object`"),
        (
            {"quantization_config": {**FP8, "quant_method": "awq"}},
            "quantization_config.quant_method is 'awq'; known are 'fp8'",
        ),
        (
            {"quantization_config": {**FP8, "weight_block_size": [128]}},
            "quantization_config.weight_block_size is [128]; expected `array` of length 2",
        ),
        (
            {"quantization_config": {**FP8, "weight_block_size": [128, 0]}},
            "quantization_config.weight_block_size[1] is 0; expected `int` >= 1",
        ),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; rotation needs pairs"),
        ({"n_group": 7}, "n_group 7 does not divide n_routed_experts 256"),
        ({"topk_group": 9}, "topk_group 9 exceeds n_group 8"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok 200 exceeds the 128 experts"),
    ],
)
def test_a_field_that_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_model_config({**V3, **changes}, "f")
    assert str(error.value).startswith(f"f: {words}")


def test_a_field_that_is_missing_is_named() -> None:
    fields = {name: value for name, value in V3.items() if name != "kv_lora_rank"}
    with pytest.raises(CheckpointError, match="f: object missing required field `kv_lora_rank`"):
        parse_model_config(fields, "f")
