"""Every model of the family, small and random, with its own config.json: compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import read_model_config
from hadal.core.plans import Chunk
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import load_weights
from hadal.reference.forward import forward, no_latents
from hadal.reference.mtp import mtp
from hadal.reference.params import ModelWeights
from tests.family import CONFIGS, small
from tests.unit.model.checkpoints import dequantise, shake
from tests.unit.model.test_deepseek import TOLERANCE, difference
from tests.unit.model.test_mtp import drafts, make_module

NUM_TOKENS = 100
BLOCKS = (3, 1)
OTHERS = pytest.mark.more("scales of each kind stay in `make test`")
SIDE = 16
"""Rows and columns of a block with one scale."""


def write_checkpoint(folder: Path, name: str, seed: int = 0, **changes: Any) -> Any:
    """Write the small model as its publisher does: transformers' weights, and config.json with the
    published file's fields plus `changes`. Return transformers' model.
    """
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        DeepseekV32Config,
        DeepseekV32ForCausalLM,
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
    )
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = {**small(name), **changes}
    # transformers lacks the code of the other models; with DeepSeek-V3's model_type it is the same.
    kind, (config_class, model_class) = {
        "glm4_moe_lite": ("glm4_moe_lite", (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM)),
        "deepseek_v32": ("deepseek_v32", (DeepseekV32Config, DeepseekV32ForCausalLM)),
    }.get(config["model_type"], ("deepseek_v3", (DeepseekV3Config, DeepseekV3ForCausalLM)))
    theirs = {key: value for key, value in config.items() if key != "quantization_config"}
    theirs |= {"model_type": kind, "num_nextn_predict_layers": 0, "initializer_range": 0.15}
    torch.manual_seed(seed)
    model: Any = model_class(config_class(**theirs))
    shake(model)
    for key, parameter in model.named_parameters():
        if key.endswith("k_norm.bias"):
            parameter.data.normal_(0.0, 0.2)  # Larger biases would make all heads agree.
    model.eval().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return model


def quantise(folder: Path, *, pow2: bool, as_e8m0: bool = False) -> None:
    """Quantise all matrices to block-scaled FP8, but not the gate, embedding, head and the indexer's
    head weights. `pow2`: scales are powers of two (ue8m0). `as_e8m0`: they are stored as E8M0.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in list(tensors.items()):
        is_index_matrix = name.endswith(("indexer.wq_b.weight", "indexer.wk.weight"))
        is_plain = not name.endswith("_proj.weight") or name.endswith("weights_proj.weight")
        if is_plain and not is_index_matrix:
            continue
        rows, columns = tensor.shape
        padded = torch.zeros(-(-rows // SIDE) * SIDE, -(-columns // SIDE) * SIDE)
        padded[:rows, :columns] = tensor
        blocks = padded.view(len(padded) // SIDE, SIDE, -1, SIDE)
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-9) / 448.0
        if pow2:
            scales = torch.exp2(torch.ceil(torch.log2(scales)))
        codes = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
        tensors[name] = codes.to(torch.float8_e4m3fn).contiguous()
        tensors[f"{name}_scale_inv"] = scales.to(torch.float8_e8m0fnu) if as_e8m0 else scales
    save_file(tensors, path)


def tokens_of(weights: ModelWeights) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, weights.config.vocab_size, (NUM_TOKENS,), generator=generator).tolist()


@torch.inference_mode()
def logits_of(weights: ModelWeights, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all tokens' logits [T, V], by the reference and by the engine (prefill, then decode)."""
    reference, _ = forward(weights, torch.tensor(tokens), no_latents(weights))
    model = DeepseekV3(weights, KvCache(weights.config, 6))
    first = NUM_TOKENS - 10
    hidden = model.hidden(
        [Chunk("r", tuple(tokens[:first]), 0, BLOCKS[: -(-first // BLOCK_TOKENS)], None, 0)]
    )
    rows = [model.head(hidden)]
    for position in range(first, NUM_TOKENS):
        rows.append(
            model.decode(
                torch.tensor([tokens[position]]),
                torch.tensor([position]),
                torch.tensor([BLOCKS], dtype=torch.int32),
            ).clone()
        )
    return reference, torch.cat(rows)


@pytest.mark.promise("Logits agree within 1e-4 in FP32 (tests/unit/model/test_family.py).")
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "DeepSeek-V3.1"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_checkpoint(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_weights(tmp_path)
    tokens = tokens_of(weights)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    for ours in logits_of(weights, tokens):
        assert difference(ours, expected) <= TOLERANCE


@pytest.mark.promise("Logits agree within 1e-4 in FP32 (tests/unit/model/test_family.py).")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DeepSeek-V3", {"pow2": False}),
        pytest.param("DeepSeek-V3.1", {"pow2": True}, marks=OTHERS),
        ("DeepSeek-V3.1", {"pow2": True, "as_e8m0": True}),
        pytest.param("DeepSeek-V3.2", {"pow2": True}, marks=OTHERS),
        pytest.param("Kimi-K2", {"pow2": False}, marks=OTHERS),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_fp8_is_its_dequantised_self(name: str, options: dict[str, bool], tmp_path: Path) -> None:
    coded, plain = tmp_path / "coded", tmp_path / "plain"
    theirs = write_checkpoint(coded, name)
    plain.mkdir()
    quantise(coded, **options)
    dequantise(coded, plain)
    assert read_model_config(coded).weight_block_size == (SIDE, SIDE)
    weights, expected = load_weights(coded), load_weights(plain)
    assert torch.equal(
        weights.layers[-1].attention.o.values, expected.layers[-1].attention.o.values
    )
    tokens = tokens_of(weights)
    # transformers computes with the same dequantised weights, so both must match its logits.
    reloaded = type(theirs).from_pretrained(plain, config=theirs.config).eval()
    with torch.inference_mode():
        their_logits = reloaded(torch.tensor([tokens])).logits[0]
    for ours in logits_of(weights, tokens):
        assert difference(ours, their_logits) <= TOLERANCE


@OTHERS
def test_scales_that_are_exponents_in_bytes(tmp_path: Path) -> None:
    """Store ue8m0 scales as U8: transformers reads them as E8M0."""
    write_checkpoint(tmp_path, "DeepSeek-V3.1")
    quantise(tmp_path, pow2=True, as_e8m0=True)
    expected, path = load_weights(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].view(torch.uint8)
    save_file(tensors, path)
    ours = load_weights(tmp_path)
    assert torch.equal(ours.layers[-1].attention.o.values, expected.layers[-1].attention.o.values)


@pytest.mark.parametrize(
    ("name", "is_moe"),
    [
        ("DeepSeek-V3.2", True),
        ("GLM-4.7-Flash", True),
        ("GigaChat3-10B-A1.8B", True),
        ("JoyAI-LLM-Flash", False),
    ],
)
def test_the_mtp_layer_is_as_the_model_has_it(name: str, is_moe: bool, tmp_path: Path) -> None:
    """Write the checkpoint's MTP layer as a copy of one of the model's: dense if not `is_moe`."""
    write_checkpoint(tmp_path, name)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    config = read_model_config(tmp_path)
    last, dim = config.num_hidden_layers, config.hidden_size
    source = f"model.layers.{last - 1 if is_moe else 0}."
    generator = torch.Generator().manual_seed(2)
    for key in [key for key in tensors if key.startswith(source)]:
        tensors[key.replace(source, f"model.layers.{last}.")] = tensors[key].clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.{last}.{norm}.weight"] = 0.5 + torch.rand(dim, generator=generator)
    tensors[f"model.layers.{last}.eh_proj.weight"] = 0.1 * torch.randn(
        dim, 2 * dim, generator=generator
    )
    for copy in ("embed_tokens", "shared_head.head"):  # In files, but never read.
        tensors[f"model.layers.{last}.{copy}.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    weights = load_weights(tmp_path, with_mtp=True)
    assert weights.mtp is not None
    assert (weights.mtp.layer.moe is not None) == is_moe
    tokens = tokens_of(weights)
    _, hidden = forward(weights, torch.tensor(tokens[:-1]), no_latents(weights))
    expected, _ = mtp(weights, hidden, torch.tensor(tokens[1:]))
    for is_fused in (True, False):
        ours, _ = drafts(make_module(weights, is_fused=is_fused), tokens, hidden, 0)
        assert difference(ours, expected) <= TOLERANCE
