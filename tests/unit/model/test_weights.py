"""Loading weights: fusing, precision, FP8, and reading only needed tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hadal.core.errors import CheckpointError
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import load_weights
from hadal.reference.fp8 import quantise
from tests.unit.model.checkpoints import Peer, save_random
from tests.unit.model.test_deepseek import NUM_TOKENS, TOLERANCE, chunk, difference, random_tokens

BLOCK = (128, 128)


def write_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Quantise a checkpoint in place in DeepSeek's format; return the values of its codes."""
    tensors = load_file(folder / "model.safetensors")
    plain = {}
    for name in list(tensors):
        quantised = name.endswith("proj.weight") or name.endswith("proj_with_mqa.weight")
        plain[name] = tensors[name]
        if quantised:
            codes, scale_inv = quantise(tensors[name], BLOCK)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scale_inv
            rows, columns = codes.shape
            scales = scale_inv.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[
                :, :columns
            ]
            plain[name] = codes.float() * scales
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(BLOCK),
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return plain


def test_fp8_equals_its_dequantised_self(tmp_path: Path) -> None:
    """Load matrices with sides near multiples of 128; compare with transformers on dequantised weights."""
    fp8, dequantised = tmp_path / "fp8", tmp_path / "dequantised"
    random = save_random(
        fp8,
        {
            "hidden_size": 200,
            "intermediate_size": 300,
            "moe_intermediate_size": 132,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "q_lora_rank": 256,
            "num_hidden_layers": 2,
            "initializer_range": 0.08,
        },
        seed=3,
    )
    shutil.copytree(fp8, dequantised)
    before = load_weights(fp8)
    save_file(write_fp8(fp8), dequantised / "model.safetensors", metadata={"format": "pt"})
    weights = load_weights(fp8)
    assert (
        weights.layers[0].attention.o.values - before.layers[0].attention.o.values
    ).abs().max() > 1e-4, "nothing was quantised"
    peer = Peer(dequantised, type(random).from_pretrained(dequantised), weights)
    tokens = random_tokens(peer, NUM_TOKENS)
    expected = peer.logits(tokens)
    model = DeepseekV3(weights, KvCache(weights.config, 12))
    assert (
        difference(model.head(model.hidden([chunk(tokens, 0, NUM_TOKENS)])), expected) <= TOLERANCE
    )
    table = torch.tensor([[1, 2, 3]])
    ours = [
        model.decode(torch.tensor([t]), torch.tensor([i]), table)[0].clone()
        for i, t in enumerate(tokens)
    ]
    assert difference(torch.stack(ours), expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(own_folder: Path, dtype: torch.dtype) -> None:
    path = own_folder / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    weights = load_weights(own_folder)
    assert weights.embed.values.dtype == torch.float32
    assert torch.equal(weights.embed.values, tensors["model.embed_tokens.weight"].float())


def test_every_tensor_finds_its_place(plain: Peer) -> None:
    tensors, config = load_file(plain.folder / "model.safetensors"), plain.weights.config
    layer = plain.weights.layers[1]
    prefix = "model.layers.1."
    q_a, kv_a = (
        tensors[f"{prefix}self_attn.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")
    )
    assert torch.equal(layer.attention.q_a.values, q_a)
    assert torch.equal(layer.attention.kv_a.values, kv_a)
    assert torch.equal(layer.attention.kv_b.values, tensors[f"{prefix}self_attn.kv_b_proj.weight"])
    assert layer.moe is not None
    for expert in range(config.n_routed_experts):
        names = (
            f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")
        )
        gate, up, down = (tensors[name] for name in names)
        held = layer.moe.experts[expert]
        assert torch.equal(held.gate.values, gate)
        assert torch.equal(held.up.values, up)
        assert torch.equal(held.down.values, down)


def test_everything_is_contiguous(peer: Peer) -> None:
    for layer in peer.weights.layers:
        for part in (layer, layer.attention, layer.mlp, layer.moe):
            for name, tensor in vars(part).items() if part is not None else ():
                for held in getattr(tensor, "parts", (tensor,)):
                    assert not isinstance(held, torch.Tensor) or held.is_contiguous(), name


def test_other_tensors_are_never_touched(own_folder: Path) -> None:
    """Load with an index that names a missing shard of an unused MTP module."""
    tensors = load_file(own_folder / "model.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors") | {
        "model.layers.3.enorm.weight": "absent.safetensors"
    }
    (own_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load_weights(own_folder)


def test_mtp_that_is_not_there(own_folder: Path) -> None:
    fields = json.loads((own_folder / "config.json").read_text())
    fields["num_nextn_predict_layers"] = 1
    (own_folder / "config.json").write_text(json.dumps(fields))
    assert load_weights(own_folder).mtp is None
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\."):
        load_weights(own_folder, with_mtp=True)


def test_a_layer_the_config_does_not_know(own_folder: Path) -> None:
    fields = json.loads((own_folder / "config.json").read_text())
    fields["num_hidden_layers"] -= 1
    (own_folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="but num_hidden_layers"):
        load_weights(own_folder)
