"""Checks of config.json, field by field: an error is one line that names file and field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hadal.core.errors import CheckpointError
from hadal.core.families import FAMILY, why_no_folder
from hadal.core.model_config import parse_model_config, read_model_config
from hadal.core.rope import RopeScaling
from tests.family import CONFIGS

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
    optional |= {"n_group", "topk_group", "num_nextn_predict_layers"}
    fields = {name: value for name, value in V3.items() if name not in optional}
    config = parse_model_config(fields, "f")
    assert (config.rope_scaling, config.weight_block_size, config.q_lora_rank) == (None, None, 1536)
    assert (config.n_group, config.topk_group, config.num_nextn_predict_layers) == (8, 4, 1)
    assert (config.eos_token_ids, config.rope_theta) == ((1,), 10000.0)
    newer = parse_model_config({**fields, "rope_parameters": {**YARN, "rope_theta": 5e4}}, "f")
    assert newer.rope_theta == 5e4
    assert newer.rope_scaling is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "llama"},
            "model_type is 'llama'; use one of 'deepseek_v3', 'deepseek_v32',",
        ),
        ({"model_type": ["kimi_k2"]}, "model_type is ['kimi_k2']; use one of"),
        (
            {"architectures": ["DeepseekV3ForSequenceClassification"]},
            "architectures is ['DeepseekV3ForSequenceClassification']; with model_type"
            " 'deepseek_v3' it must be ['DeepseekV3ForCausalLM']",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; this architecture"),
        (
            {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
            "rope_scaling.partial_rotary_factor is 0.5; this architecture needs 1.0",
        ),
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
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; expected `int | array | null`"),
        ({"rope_scaling": 3}, "rope_scaling is 3; an object is needed"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling.type is 'linear'; only"),
        ({"rope_scaling": {**YARN, "factor": 0}}, "rope_scaling.factor is 0; expected `float` >="),
        (
            {"rope_scaling": {"type": "yarn"}},
            "rope_scaling.factor is missing; rope_scaling.rope_type",
        ),
        ({"quantization_config": 3}, "quantization_config is 3; expected `object`"),
        (
            {"quantization_config": {**FP8, "quant_method": "own"}},
            "quantization_config.quant_method is 'own'; plain weights, 'fp8'",
        ),
        (
            {"quantization_config": {**FP8, "scale_fmt": "e5m2"}},
            "quantization_config.scale_fmt is 'e5m2'; this architecture needs 'float' or 'ue8m0'",
        ),
        (
            {"quantization_config": {**FP8, "weight_block_size": [128]}},
            "quantization_config.weight_block_size is [128]; expected `array` of length 2",
        ),
        (
            {"quantization_config": {**FP8, "weight_block_size": [128, 0]}},
            "quantization_config.weight_block_size[1] is 0; expected `int` >= 1",
        ),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; it must be even"),
        ({"n_group": 7}, "n_group 7 does not divide n_routed_experts 256"),
        ({"topk_group": 9}, "topk_group 9 exceeds n_group 8"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok 200 exceeds the 128 experts"),
    ],
)
def test_a_field_that_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_model_config({**V3, **changes}, "f")
    assert str(error.value).startswith(f"f: {words}")


def test_a_family_without_a_class_has_no_defaults() -> None:
    for name in ("Kimi-K2", "JoyAI-LLM-Flash"):
        fields = {key: value for key, value in CONFIGS[name].items() if key != "kv_lora_rank"}
        with pytest.raises(CheckpointError, match=r"f: kv_lora_rank is missing, and .* no default"):
            parse_model_config(fields, "f")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_of_the_family_is_read(name: str) -> None:
    fields = CONFIGS[name]
    config = parse_model_config(fields, "f")
    assert FAMILY[config.model_type].architecture == fields["architectures"][0]
    for field in ("n_routed_experts", "n_shared_experts", "q_lora_rank", "rms_norm_eps"):
        assert getattr(config, field) == fields[field]
    assert config.first_k_dense_replace == fields.get("first_k_dense_replace", 1)
    assert config.weight_block_size == ((128, 128) if "quantization_config" in fields else None)


def test_what_only_one_of_the_family_has() -> None:
    glm = parse_model_config(CONFIGS["GLM-4.7-Flash"], "f")
    assert (glm.qk_nope_head_dim, glm.v_head_dim) == (192, 256)
    assert glm.eos_token_ids == (154820, 154827, 154829)
    assert glm.is_moe(47), "its MTP layer"
    joyai = parse_model_config(CONFIGS["JoyAI-LLM-Flash"], "f")
    assert joyai.is_moe(39)
    assert not joyai.is_moe(40), "its MTP layer"
    kimi = parse_model_config(CONFIGS["Kimi-K2"], "f")
    assert (kimi.n_routed_experts, kimi.n_group) == (384, 1)
    assert parse_model_config({**V3, "eos_token_id": None}, "f").eos_token_ids == ()


@pytest.mark.promise(
    "A V3.2 config.json with V3's model_type is recognised by its index_topk and served as V3.2"
)
@pytest.mark.parametrize(
    "named",
    [
        {},
        {"model_type": "deepseek_v3"},
        {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
        {"model_type": "deepseek_v3", "architectures": None},
    ],
)
def test_v32_under_its_own_name_and_under_that_of_v3(named: dict[str, Any]) -> None:
    config = parse_model_config({**CONFIGS["DeepSeek-V3.2"], **named}, "f")
    assert config.model_type == "deepseek_v32"
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (64, 128, 2048)
    assert (config.latent_dim, config.entry_dim) == (576, 704)
    assert parse_model_config(V3, "f").entry_dim == 576


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index_topk": None}, "index_topk is None; DeepSeek-V3.2 has an indexer"),
        ({"index_n_heads": 0}, "index_n_heads is 0; expected `int` >= 1"),
        ({"index_topk": 1 << 30}, "index_topk is 1073741824; expected `int` <="),
        (
            {"q_lora_rank": None},
            "q_lora_rank is None; the indexer's queries are computed from that",
        ),
        ({"index_head_dim": 32}, "index_head_dim 32 is less than qk_rope_head_dim 64"),
        (
            {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]},
            "index_n_heads is 64; this architecture needs nothing (no indexer",
        ),
        (
            {"model_type": "deepseek_v3", "index_topk": None, "architectures": None},
            "index_n_heads is 64; this architecture needs nothing (no indexer",
        ),
        (
            {"model_type": "deepseek_v3", "architectures": ["DeepseekV3Model"]},
            "architectures is ['DeepseekV3Model']; with model_type 'deepseek_v3' it must be",
        ),
    ],
)
def test_an_indexer_that_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_model_config({**CONFIGS["DeepSeek-V3.2"], **changes}, "f")
    assert str(error.value).startswith(f"f: {words}")


def test_layers_of_glm_are_dense_first_and_then_sparse() -> None:
    glm = CONFIGS["GLM-4.7-Flash"]
    two = {**glm, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45}
    assert parse_model_config(two, "f").first_k_dense_replace == 2
    older = {name: value for name, value in glm.items() if name != "mlp_layer_types"}
    assert parse_model_config(older, "f").first_k_dense_replace == 1
    for kinds in (["sparse"] * 46 + ["dense"], ["dense"] * 46, "dense", ["dense"] + ["moe"] * 46):
        with pytest.raises(
            CheckpointError, match=r"f: mlp_layer_types is .* for each of 47 layers"
        ):
            parse_model_config({**glm, "mlp_layer_types": kinds}, "f")


@pytest.mark.promise(
    "DeepSeek-V4, GLM-5, Kimi-K2.5 and K3, and INT4, AWQ, GPTQ, NVFP4 and MXFP4 weights "
    "are refused with an error that names them."
)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "deepseek_v2"}, "DeepSeek-V2, which is not served: its gate differs"),
        (
            {"model_type": "deepseek_v4"},
            "DeepSeek-V4, which is not served: its architecture differs",
        ),
        ({"model_type": "kimi_k25", "text_config": {}}, "Kimi-K2.5 or K2.6, which is not served"),
        ({"model_type": "kimi_k3"}, "Kimi-K3, which is not served: its architecture differs"),
        (
            {"model_type": "glm4_moe"},
            "GLM-4.5 to 4.7, which is not served: its attention is not MLA",
        ),
        ({"model_type": "glm_moe_dsa"}, "GLM-5, which is not served: its indexer differs"),
        ({"architectures": ["GlmMoeDsaForCausalLM"], "index_topk": 2048}, "GLM-5, which is not"),
    ],
)
def test_what_looks_like_the_family_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_model_config({**V3, **changes}, "f")
    assert str(error.value).startswith(f"f: this is {words}")


@pytest.mark.promise(
    "DeepSeek-V4, GLM-5, Kimi-K2.5 and K3, and INT4, AWQ, GPTQ, NVFP4 and MXFP4 weights "
    "are refused with an error that names them."
)
@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("awq", "AWQ, 4-bit integers"),
        ("gptq", "GPTQ, 4-bit integers"),
        ("modelopt", "such as NVFP4"),
        ("quark", "such as MXFP4"),
    ],
)
def test_another_quantisation_is_refused_by_name(method: str, words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse_model_config({**V3, "quantization_config": {"quant_method": method}}, "f")
    said = str(error.value)
    assert said.startswith(f"f: quantization_config.quant_method is {method!r} (")
    assert words in said
    assert said.endswith("the maker's own safetensors, BF16 or FP8.")


def test_a_quantisation_that_another_file_tells_of(tmp_path: Path) -> None:
    plain = {name: value for name, value in V3.items() if name != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert read_model_config(tmp_path).weight_block_size is None
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"hf_quant_config\.json: .* NVFP4, which is not read"
    ):
        read_model_config(tmp_path)


@pytest.mark.promise(
    "A GGUF file or folder, a name on the Hub, AWQ, GPTQ, bitsandbytes, MLX and other "
    "families are refused with a hint on what to use instead."
)
def test_folders_in_other_formats(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"Q4_K_M\.gguf: .* a GGUF file; .* Take the repo"):
        read_model_config(tmp_path)
    (tmp_path / "model-Q4_K_M.gguf").unlink()
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(V3))
    with pytest.raises(CheckpointError, match=r"PyTorch's pickles; only safetensors are read"):
        read_model_config(tmp_path)
    asked = {"model.gguf": "a GGUF file", "deepseek-ai/DeepSeek-V3": "hf download deepseek-ai/"}
    for name, words in asked.items():
        assert words in (why_no_folder(name, Path.cwd() / name) or "")
    assert why_no_folder("no-such-folder", tmp_path / "no-such-folder") is None


def test_rope_as_transformers_reads_it() -> None:
    """Check two bugs that were reported: ignored keys, and two values of theta in one file."""
    plain = {key: value for key, value in V3.items() if key != "rope_scaling"}
    both = {**plain, "rope_theta": 1e4, "rope_parameters": {**YARN, "rope_theta": 5e4}}
    assert parse_model_config(both, "f").rope_theta == 5e4

    def temperature(**changes: Any) -> float:
        found = {**YARN, **changes}
        found = {key: value for key, value in found.items() if value != "absent"}
        scaling = parse_model_config({**plain, "rope_scaling": found}, "f").rope_scaling
        assert scaling is not None
        return scaling.temperature

    alone = 0.1 * math.log(40.0) + 1.0
    assert temperature(attention_factor=0.5) == 0.5
    assert temperature() == 1.0
    assert temperature(mscale="absent") == pytest.approx(alone)
    assert temperature(mscale=0.7, mscale_all_dim="absent") == pytest.approx(alone)
