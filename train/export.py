"""Write and read the published folder: DeepSeek-V3's tensor names and config, with projections and experts in
FP8 with block scales.

`python -m train.export --run <folder> --out models/hadal-tiny` writes it from a checkpoint, file by
file. `load` reads such a folder back into the training model, dequantised.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from train.model import Config, Model
from train.tokenizer import config as tokenizer_config

BLOCK = 128
FP8_MAX = 448.0
NUM_SHARDS = 3
GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.95,
}


def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return (E4M3 weight, FP32 scale per 128x128 block) with w = weight * scale (V3 report
    3.3).
    """
    rows, cols = w.shape
    padded = F.pad(w.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(
        0, (-1, BLOCK)
    )  # [row blocks, 128, column blocks, 128]
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-4) / FP8_MAX
    scaled = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return scaled.flatten(2).flatten(0, 1)[:rows, :cols].contiguous().to(torch.float8_e4m3fn), scale


def dequantise(w: Tensor, scale: Tensor) -> Tensor:
    """Return a quantised weight as FP32."""
    full = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return w.float() * full[: w.shape[0], : w.shape[1]]


def _split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a stacked expert parameter, one per expert, as DeepSeek names them."""
    prefix = name.rsplit(".", 1)[0]
    out = {}
    for expert, w in enumerate(tensor):
        if name.endswith("gate_up_proj"):
            gate, up = w.chunk(2)
            out[f"{prefix}.{expert}.gate_proj.weight"], out[f"{prefix}.{expert}.up_proj.weight"] = (
                gate,
                up,
            )
        else:
            out[f"{prefix}.{expert}.down_proj.weight"] = w
    return out


def tensors(model: Model) -> dict[str, Tensor]:
    """Return DeepSeek's names -> all tensors of the published checkpoint."""
    plain: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        plain.update(_split_experts(name, tensor) if ".experts." in name else {name: tensor})
    # DeepSeek's files repeat the shared embedding and head under the MTP layer.
    mtp = f"model.layers.{model.c.num_hidden_layers}"
    plain[f"{mtp}.embed_tokens.weight"] = plain["model.embed_tokens.weight"]
    plain[f"{mtp}.shared_head.head.weight"] = plain["lm_head.weight"]
    out: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if name.endswith("e_score_correction_bias"):
            out[name] = tensor.float()
        elif "_proj" in name and "eh_proj" not in name:
            out[name], out[name.replace(".weight", ".weight_scale_inv")] = quantise(tensor)
        else:
            out[name] = tensor.to(torch.bfloat16)
    return {name: tensor.clone().contiguous() for name, tensor in out.items()}


def model_config(c: Config) -> dict:
    """Return config.json."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **c.as_dict(),
        "num_key_value_heads": c.num_attention_heads,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "ep_size": 1,
        "pretraining_tp": 1,
        "use_cache": True,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }


def _write_shards(folder: Path, named: dict[str, Tensor]) -> None:
    """Write the tensors in order into shards of about equal bytes, with DeepSeek's kind of
    index.
    """
    total = sum(t.numel() * t.element_size() for t in named.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(NUM_SHARDS)]
    written = 0
    for name, tensor in named.items():
        shards[min(NUM_SHARDS - 1, written * NUM_SHARDS // total)][name] = tensor
        written += tensor.numel() * tensor.element_size()
    weight_map = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=0)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


def export(model: Model, tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder. Each file is written into a folder beside it and then renamed, so that a reader never
    sees an incomplete file.
    """
    aside = out.with_name(f".{out.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _write_shards(aside, tensors(model))
    files = {
        "config.json": model_config(model.c),
        "generation_config.json": GENERATION,
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, value in files.items():
        (aside / name).write_text(
            json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    tokenizer.save(str(aside / "tokenizer.json"))
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(aside.iterdir()):
        file.chmod(0o644)
        os.replace(file, out / file.name)
    aside.rmdir()


def load(folder: Path) -> tuple[Model, Tokenizer]:
    """Return the training model with a published folder's weights as FP32, and its tokenizer."""
    values = json.loads((folder / "config.json").read_text())
    model = Model(Config(**{name: values[name] for name in Config().as_dict()}))
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(path))

    def read(name: str) -> Tensor:
        scale = (
            stored.get(name.replace(".weight", ".weight_scale_inv"))
            if name.endswith(".weight")
            else None
        )
        return stored[name].float() if scale is None else dequantise(stored[name], scale)

    state = {}
    for name, tensor in model.state_dict().items():
        prefix = name.rsplit(".", 1)[0]
        if name.endswith("gate_up_proj"):
            pairs = [
                [read(f"{prefix}.{e}.{p}_proj.weight") for p in ("gate", "up")]
                for e in range(len(tensor))
            ]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif name.endswith("experts.down_proj"):
            state[name] = torch.stack(
                [read(f"{prefix}.{e}.down_proj.weight") for e in range(len(tensor))]
            )
        else:
            state[name] = read(name)
    model.load_state_dict(state)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    """Parse the arguments and export a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("train/runs/hadal-tiny"))
    parser.add_argument("--out", type=Path, default=Path("models/hadal-tiny"))
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.run / "tokenizer.json"))
    model = Model(Config(vocab_size=tokenizer.get_vocab_size()))
    path = args.run / "checkpoint.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True)["model"])
    export(model, tokenizer, args.out)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
