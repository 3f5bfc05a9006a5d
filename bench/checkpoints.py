"""Models for measurements: a generated one of middle size, and the shipped one in the FP32 form
that every peer reads.

Both are Hugging Face folders with DeepSeek's own tensor names, stored under .peers/models/. The
weights of the generated one are random, so its output means nothing; its parts, its routing and its
cost per weight are those of a real checkpoint.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"
MODELS = PEERS / "models"
SHIPPED = ROOT / "models" / "hadal-tiny"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"

MID: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "float32",
    "vocab_size": 8192,
    "hidden_size": 640,
    "num_hidden_layers": 10,
    "first_k_dense_replace": 1,
    "intermediate_size": 1792,
    "moe_intermediate_size": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
    # Explicit, because readers assume softmax routing without the bias if these fields are missing.
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "bench_revision": 2,  # Increment if the weights are drawn in another way; readers ignore it.
}
"""Config of the generated model: 0.33 B parameters, 0.08 B active. It has all parts of V3, each smaller."""

# A residual stream dominated by the embedding makes greedy texts differ. With equal standard
# deviations every sequence of a batch soon repeats one token, all choose the same experts, and a
# batch costs as much as one request. A wide head makes the next token's distribution as peaked as a
# trained model's; with a flat one top-p sorts the whole vocabulary.
EMBEDDING_STD, HEAD_STD, WEIGHT_STD = 1.0, 0.25, 0.02


def mid_model(vocab_size: int = MID["vocab_size"]) -> Path:
    """Return the folder of the generated model. The first call makes it, which takes seconds and 1.3 GB, or
    minutes and 1.9 GB with V3's vocabulary size.
    """
    folder = MODELS / ("mid" if vocab_size == MID["vocab_size"] else f"mid-{vocab_size}")
    config = {**MID, "vocab_size": vocab_size}
    if _is_made(folder, config):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(2412_19437)
    tensors = {name: _random(name, shape, generator) for name, shape in tensor_shapes(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder, vocab_size)
    _write_config(folder, config)
    return folder


_ALIKE: dict[str, Any] = {
    **MID,
    "torch_dtype": "bfloat16",
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "mid": MID,
    "mid_mtp": {**MID, "num_nextn_predict_layers": 1},
    "large": {
        **MID,
        "hidden_size": 1024,
        "num_hidden_layers": 20,
        "intermediate_size": 2816,
        "moe_intermediate_size": 384,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
    },
    "moonlight": {
        **_ALIKE,
        "vocab_size": 163840,
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.446,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gigachat": {
        **_ALIKE,
        "vocab_size": 128256,
        "hidden_size": 1536,
        "num_hidden_layers": 26,
        "intermediate_size": 8960,
        "moe_intermediate_size": 1280,
        "num_experts_per_tok": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "v_head_dim": 192,
    },
}
"""Shapes by name: the middle one; the same with an MTP module; one of 1.5 B parameters with parts in the same
proportions; Moonlight-16B-A3B; and GigaChat3-10B-A1.8B as far as its shapes are known (16 and 11 B parameters).
"""
_SCALES = "_scale_inv"
"""Suffix of the name of the tensor that has an FP8 tensor's scales."""
_FP8_FIELDS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_POOL_VALUES = 1 << 26
"""Number of random values in the pool. Every matrix is a piece of the pool, at an offset of its
own: drawing all values would take longer than writing them.
"""


def stored_model(name: str, kind: str, folder: Path) -> Path:
    """Write a checkpoint of this shape and return its folder. `kind`: "fp8", "bf16", or "hollow", a BF16 checkpoint
    of sparse files without weights, for tests of sizes only. Writing the largest takes a minute and 32 GB.
    """
    config = {**SHAPES[name], "torch_dtype": "bfloat16", "stored_as": kind}
    if kind == "fp8":
        config["quantization_config"] = _FP8_FIELDS
    if _is_made(folder, config):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(2412_19437)
    pool = torch.randn(_POOL_VALUES, generator=generator)
    codes = (pool * 80.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    halves = pool.bfloat16()
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    names = list(tensor_shapes(config))
    for index, (tensor_name, shape) in enumerate(names):
        shard |= _stored_tensors(tensor_name, shape, kind, codes, halves, generator)
        if index + 1 == len(names) or sum(x.nbytes for x in shard.values()) > 1 << 30:
            file = f"model-{len(set(weight_map.values())):05}.safetensors"
            if kind == "hollow":
                _save_hollow(shard, folder / file)
            else:
                save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    # transformers requires both fields.
    index_text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")
    _write_tokenizer(folder, MID["vocab_size"])
    _write_config(folder, config)
    return folder


def _stored_tensors(
    name: str,
    shape: tuple[int, ...],
    kind: str,
    codes: torch.Tensor,
    halves: torch.Tensor,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    if len(shape) == 1:
        return {name: _random(name, shape, generator)}
    count = shape[0] * shape[1]
    is_fp8 = kind == "fp8" and not any(part in name for part in ("embed", "lm_head", "mlp.gate.w"))
    pool = codes if is_fp8 else halves
    first = int(torch.randint(0, 1 << 20, (), generator=generator))
    if count + first > len(pool):
        repeats = -(-(count + first) // len(pool))
        pool = pool.view(torch.uint8 if is_fp8 else torch.int16).repeat(repeats).view(pool.dtype)
    values = pool[first : first + count].view(shape)
    if is_fp8:
        blocks = -(-shape[0] // 128), -(-shape[1] // 128)
        return {
            name: values.clone(),
            name + _SCALES: torch.full(blocks, WEIGHT_STD / 80.0),
        }
    std = EMBEDDING_STD if "embed" in name else HEAD_STD if "lm_head" in name else WEIGHT_STD
    return {name: values * std}


def _save_hollow(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a sparse safetensors file: the header, and a hole instead of the values."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        dtype = "BF16" if tensor.dtype == torch.bfloat16 else "F32"
        span = [at, at + tensor.nbytes]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def shipped_model_fp32() -> Path | None:
    """Return an FP32 copy of hadal-tiny for engines without block-scaled FP8; None if there is no hadal-tiny yet."""
    if not (SHIPPED / "config.json").exists():
        return None
    fields = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in fields.items() if name != "quantization_config"}
    config.update(torch_dtype="float32", dtype="float32", num_nextn_predict_layers=0)
    folder = MODELS / "hadal-tiny-fp32"
    weights = sorted(SHIPPED.glob("*.safetensors"))
    newest = max(path.stat().st_mtime for path in weights)
    if _is_made(folder, config) and (folder / "model.safetensors").stat().st_mtime > newest:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tensors = {
        name: tensor.float()
        for name, tensor in dequantised(SHIPPED)
        if not name.startswith(
            f"model.layers.{config['num_hidden_layers']}."
        )  # The MTP module: no peer runs it here.
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for extra in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "special_tokens_map.json",
    ):
        if (SHIPPED / extra).exists():
            shutil.copy(SHIPPED / extra, folder / extra)
    _write_config(folder, config)
    return folder


def dequantised(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a checkpoint's names and tensors. A tensor with scales becomes FP32, codes times the scale
    of each block; its scales may be in another file of the folder. Other tensors are as stored.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sides = config["quantization_config"]["weight_block_size"]
    with ExitStack() as stack:
        paths = sorted(folder.glob("*.safetensors"))
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        name_to_file = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name, file in name_to_file.items():
            if name.endswith(_SCALES):
                continue
            tensor = file.get_tensor(name)
            if name + _SCALES in name_to_file:
                scales = name_to_file[name + _SCALES].get_tensor(name + _SCALES).float()
                for axis, side in enumerate(sides):
                    scales = scales.repeat_interleave(side, axis)
                tensor = tensor.float() * scales[: tensor.shape[0], : tensor.shape[1]]
            yield name, tensor


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the released checkpoint's tensor names and shapes for this config, except for an MTP
    module's copies of embedding and head: no reader uses them.
    """
    c = config
    dim, heads = c["hidden_size"], c["num_attention_heads"]
    yield "model.embed_tokens.weight", (c["vocab_size"], dim)
    num_layers = c["num_hidden_layers"]
    for layer in range(num_layers + c["num_nextn_predict_layers"]):
        if layer >= num_layers:
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield f"model.layers.{layer}.{norm}.weight", (dim,)
            yield f"model.layers.{layer}.eh_proj.weight", (dim, 2 * dim)
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        yield f"{prefix}input_layernorm.weight", (dim,)
        rank, queries = c["q_lora_rank"], heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        if rank:
            yield f"{attention}q_a_proj.weight", (rank, dim)
            yield f"{attention}q_a_layernorm.weight", (rank,)
            yield f"{attention}q_b_proj.weight", (queries, rank)
        else:
            yield f"{attention}q_proj.weight", (queries, dim)
        yield (
            f"{attention}kv_a_proj_with_mqa.weight",
            (c["kv_lora_rank"] + c["qk_rope_head_dim"], dim),
        )
        yield f"{attention}kv_a_layernorm.weight", (c["kv_lora_rank"],)
        yield (
            f"{attention}kv_b_proj.weight",
            (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]),
        )
        yield f"{attention}o_proj.weight", (dim, heads * c["v_head_dim"])
        yield f"{prefix}post_attention_layernorm.weight", (dim,)
        if layer < c["first_k_dense_replace"]:
            yield from _mlp_shapes(f"{prefix}mlp.", dim, c["intermediate_size"])
            continue
        yield f"{prefix}mlp.gate.weight", (c["n_routed_experts"], dim)
        yield f"{prefix}mlp.gate.e_score_correction_bias", (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            yield from _mlp_shapes(
                f"{prefix}mlp.experts.{expert}.", dim, c["moe_intermediate_size"]
            )
        shared_width = c["n_shared_experts"] * c["moe_intermediate_size"]
        yield from _mlp_shapes(f"{prefix}mlp.shared_experts.", dim, shared_width)
    yield "model.norm.weight", (dim,)
    yield "lm_head.weight", (c["vocab_size"], dim)


def _mlp_shapes(prefix: str, dim: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (width, dim)
    yield f"{prefix}up_proj.weight", (width, dim)
    yield f"{prefix}down_proj.weight", (dim, width)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(shape)
    stds = {"embed_tokens": EMBEDDING_STD, "lm_head": HEAD_STD, "correction_bias": 0.0}
    std = next((std for part, std in stds.items() if part in name), WEIGHT_STD)
    return torch.randn(shape, generator=generator) * std


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE in DeepSeek's file layout. It is trained on the manual that comes with
    Python, or, if that has too few words, on the installed modules.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    has_enough = vocab_size <= MID["vocab_size"]
    texts = pydoc_data.topics.topics.values() if has_enough else _installed_modules()
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise SystemExit(f"what is installed here makes {tokenizer.get_vocab_size():,} tokens")
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos_id)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(names, ensure_ascii=False, indent=1), encoding="utf-8"
    )


def _installed_modules() -> Iterator[str]:
    for kind in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(kind)).rglob("*.py")):
            yield path.read_text(encoding="utf-8", errors="replace")


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write the config last, so that a folder with a config is complete."""
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _is_made(folder: Path, config: dict[str, Any]) -> bool:
    path = folder / "config.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8")) == json.loads(
        json.dumps(config)
    )
