"""Make random DeepSeek-V3 checkpoints with transformers. Its import takes 4 s: do it in makers only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.checkpoints import dequantised
from hadal.model.load import load_weights
from hadal.reference.params import ModelWeights

_BASE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "num_mtp_layers": 0,
    "initializer_range": 0.15,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_q_lora": {"q_lora_rank": None, "num_attention_heads": 5, "num_key_value_heads": 5},
    "yarn": {"rope_parameters": _YARN, "qk_rope_head_dim": 16},
    "yarn_odd": {
        "hidden_size": 100,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 12,
        "v_head_dim": 28,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "moe_intermediate_size": 36,
        "intermediate_size": 130,
        "n_shared_experts": 2,
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "factor": 8.0},
    },
    "one_group": {
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
    },
    "all_moe": {
        "first_k_dense_replace": 0,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
    },
    "all_dense": {"first_k_dense_replace": 3, "v_head_dim": 48, "q_lora_rank": None},
    "deep": {
        "num_hidden_layers": 5,
        "first_k_dense_replace": 3,
        "v_head_dim": 8,
        "kv_lora_rank": 48,
        "hidden_size": 72,
    },
}


@dataclass(frozen=True, repr=False)
class Peer:
    """A random model in both implementations: transformers' and ours."""

    folder: Path
    theirs: Any
    weights: ModelWeights

    @property
    def vocab_size(self) -> int:
        return self.weights.config.vocab_size

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return transformers' logits [T, V]."""
        logits: torch.Tensor = self.theirs(torch.tensor([tokens])).logits[0]
        return logits


def make_peer(name: str, folder: Path, **changes: Any) -> Peer:
    """Write the named random model to `folder` with transformers, read it with our loader."""
    theirs = save_random(folder, {**CONFIGS[name], **changes}, seed=sum(name.encode()))
    return Peer(folder, theirs, load_weights(folder))


def save_random(folder: Path, changes: dict[str, Any], seed: int) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**_BASE, **changes})).eval()
    shake(model)
    model.save_pretrained(folder)
    return model


def shake(model: Any) -> None:
    """Draw norms and biases: norms of 1 and a bias of 0 would hide mistakes."""
    for key, parameter in model.named_parameters():
        if "norm" in key:
            parameter.data.uniform_(0.5, 1.5)
    for key, buffer in model.named_buffers():
        if "e_score_correction_bias" in key:
            buffer.normal_(0.0, 0.2)


def dequantise(folder: Path, into: Path) -> None:
    """Write the same checkpoint with plain weights, by the definition: code times scale."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    save_file(dict(dequantised(folder)), into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(config))
