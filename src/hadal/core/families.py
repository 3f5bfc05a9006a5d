"""Models that are served, and models and formats that are easily mistaken for one of them.

A refusal names what the folder contains and what to use instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hadal.core import model_keys
from hadal.core.documents import is_file, shown
from hadal.core.errors import CheckpointError


@dataclass(frozen=True)
class FamilyMember:
    """One architecture, found by its `model_type`."""

    name: str
    architecture: str
    """Class name in `architectures`."""


FAMILY = {
    # Also V3-0324, R1, R1-0528, V3.1 and Terminus, Moonlight-16B-A3B and GigaChat3.
    "deepseek_v3": FamilyMember("DeepSeek-V3", "DeepseekV3ForCausalLM"),
    # Also V3.2-Exp and Speciale.
    "deepseek_v32": FamilyMember("DeepSeek-V3.2", "DeepseekV32ForCausalLM"),
    "kimi_k2": FamilyMember("Kimi-K2", "DeepseekV3ForCausalLM"),
    "joyai_llm_flash": FamilyMember("JoyAI-LLM-Flash", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": FamilyMember("GLM-4.7-Flash", "Glm4MoeLiteForCausalLM"),
}
"""`model_type` -> model that is served."""

_OTHERS: dict[str, tuple[str, str, str]] = {
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepSeek-V2", "its gate differs (softmax)"),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        "DeepSeek-V4",
        "its architecture differs (compressed attention, hyper-connections, FP4 experts)",
    ),
    "deepseek_v41": ("DeepseekV41ForCausalLM", "DeepSeek-V4.1", "its architecture differs"),
    "kimi_k25": (
        "KimiK25ForConditionalGeneration",
        "Kimi-K2.5 or K2.6",
        "it is a vision model around Kimi-K2, and its experts are INT4",
    ),
    "kimi_k3": (
        "KimiK3ForConditionalGeneration",
        "Kimi-K3",
        "its architecture differs (linear attention)",
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "Kimi-Linear",
        "its architecture differs (linear attention)",
    ),
    "kimi_vl": ("KimiVLForConditionalGeneration", "Kimi-VL", "it is a vision model"),
    "glm4_moe": ("Glm4MoeForCausalLM", "GLM-4.5 to 4.7", "its attention is not MLA"),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM",
        "GLM-5",
        "its indexer differs (it rotates interleaved pairs, and layers may share a selection)",
    ),
}
"""`model_type` of models mistaken for one of the family -> (class, name, why not served)."""

SERVED = ", ".join(member.name for member in FAMILY.values())
_INSTEAD = f"Take one of these: {SERVED}; or serve it with vLLM, SGLang or llama.cpp."
OWN_WEIGHTS = "Take the repository that it was made from: the maker's own safetensors, BF16 or FP8"
"""Advice for a folder with converted weights."""

_HUB_ID = re.compile(
    r"(?:(?:https?://)?(?:huggingface\.co|hf\.co|modelscope\.cn/models)/|hf://|hf:)?"
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?"
)


def member_of(fields: Mapping[str, Any], source: str) -> FamilyMember:
    """Return the model that config.json names by `model_type` and `architectures`. Raises
    CheckpointError that names a model that is not served, and what to take instead.
    """
    kind, classes = fields.get("model_type"), fields.get("architectures")
    for model_type, (architecture, name, why) in _OTHERS.items():
        if kind == model_type or classes == [architecture]:
            raise CheckpointError(
                f"{source}: this is {name}, which is not served: {why}. {_INSTEAD}"
            )
    member = FAMILY.get(kind) if isinstance(kind, str) else None
    if member is None:
        known = ", ".join(map(repr, FAMILY))
        raise CheckpointError(
            f"{source}: model_type is {shown(kind)}; use one of {known}. {_INSTEAD}"
        )
    if classes is not None and classes != [member.architecture]:
        raise CheckpointError(
            f"{source}: architectures is {shown(classes)}; with model_type {kind!r} it must be"
            f" [{member.architecture!r}]."
        )
    return member


def as_v32(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields, with V3.2's own model_type if they describe V3.2 under V3's name.

    Such files exist for loaders that support only V3; index_topk identifies them. Served as V3,
    they would give wrong tokens beyond index_topk positions. If a file is not V3.2 after all, the
    indexer's tensors are found to be missing.
    """
    names = {name: FAMILY[name].architecture for name in ("deepseek_v3", "deepseek_v32")}
    is_v3 = fields.get("model_type") == "deepseek_v3"
    is_read = model_keys.CONFIG["deepseek_v3"]["index_topk"].use is model_keys.Use.USED
    if not (is_v3 and is_read and fields.get("index_topk") is not None) or fields.get(
        "architectures"
    ) not in (
        None,
        *([name] for name in names.values()),
    ):
        return fields
    named = {"model_type": "deepseek_v32", "architectures": [names["deepseek_v32"]]}
    return {**fields, **named}


def why_no_folder(asked: str, path: Path) -> str | None:
    """Return why a --model that is not a folder cannot be read, and what to use instead; None: the
    path merely does not exist.
    """
    if asked.lower().endswith(".gguf"):
        return f"{asked}: a GGUF file, which cannot be read. {OWN_WEIGHTS}."
    if is_file(path):
        return f"{path}: a file. Give the Hugging Face folder that config.json is in."
    found = _HUB_ID.fullmatch(asked)
    # A path inside an existing folder is a typing mistake, not a name on the Hub.
    if found is None or (path.parent.is_dir() and asked == found[1]):
        return None
    name = found[1]
    return (
        f"{asked}: a name on the Hugging Face Hub; nothing is downloaded here. Run `hf download"
        f" {name} --local-dir {name.rpartition('/')[2]}` and give that folder."
    )


def check_format(folder: Path, fields: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError if the folder's weights are in an unsupported format: GGUF, pickles, or
    a conversion marked by a file beside config.json. `fields`: contents of config.json, or None.
    """
    beside = {
        "hf_quant_config.json": "NVIDIA's ModelOpt, such as NVFP4",
        "quantize_config.json": "AutoGPTQ",
        "quant_config.json": "AutoAWQ",
    }
    is_plain = fields is not None and fields.get("quantization_config") is None
    for name, maker in beside.items():
        if is_plain and is_file(folder / name):
            raise CheckpointError(
                f"{folder / name}: the weights are quantised by {maker}, which is not read."
                f" {OWN_WEIGHTS}."
            )
    if any(folder.glob("*.safetensors")):
        return
    for pattern, what in (
        ("*.gguf", "a GGUF file"),
        ("*.bin", "PyTorch's pickles"),
        ("*.pth", "PyTorch's pickles"),
    ):
        if (found := next(iter(sorted(folder.glob(pattern))), None)) is not None:
            raise CheckpointError(
                f"{found}: the folder's weights are {what}; only safetensors are read."
                f" {OWN_WEIGHTS}."
            )
