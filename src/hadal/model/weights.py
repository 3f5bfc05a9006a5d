"""DeepSeek-V3's tensor names, and how they are fused into ModelWeights. Knows no files; the
Checkpoint does.

Names and shapes are those of the released model (its README_WEIGHTS and modeling code). Shapes: D
hidden, V vocabulary, H heads, Q q_lora_rank, C kv_lora_rank, R qk_rope, N qk_nope, W v_head, F FFN
width, E experts, I expert width, L MoE layers, S slots of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hadal.core.model_config import ModelConfig, read_model_config
from hadal.core.placement import EMPTY
from hadal.model.checkpoint import Checkpoint
from hadal.reference.params import (
    AttentionWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)
from hadal.reference.rope import cos_sin_table

Advance = Callable[[float, float], None]


def load_weights(
    folder: Path,
    *,
    slots_LS: NDArray[np.int16] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    with_mtp: bool = False,
    advance: Advance = lambda done, of: None,
) -> ModelWeights:
    """Read the model in `folder`. Only tensors it needs are touched. Raises CheckpointError naming
    file and tensor.

    `advance` is told how many layers are read, of how many.

    `slots_LS`: the expert in each slot of this rank, by MoE layer (EMPTY: none); only these are
    read. None: all experts, in order. An MTP module always has all of its own.
    """
    config = read_model_config(folder)
    with Checkpoint(folder, config.weight_block_size) as checkpoint:
        checkpoint.check_layers(config.num_hidden_layers)
        return _Loader(checkpoint, config, slots_LS, dtype, torch.device(device), advance).model(
            with_mtp
        )


def read_expert(
    checkpoint: Checkpoint, layer_index: int, expert: int, gate_up: Tensor, down: Tensor
) -> None:
    """Fill gate_up [2I, D] and down [D, I] with a routed expert of a layer (index among all
    layers).
    """
    read_mlp(checkpoint, f"model.layers.{layer_index}.mlp.experts.{expert}.", gate_up, down)


def read_mlp(checkpoint: Checkpoint, prefix: str, gate_up: Tensor, down: Tensor) -> None:
    """Fill gate_up [2F, D] and down [D, F] with the network whose tensors' names begin with
    `prefix`.
    """
    width = down.shape[1]
    checkpoint.read(f"{prefix}gate_proj.weight", gate_up[:width])
    checkpoint.read(f"{prefix}up_proj.weight", gate_up[width:])
    checkpoint.read(f"{prefix}down_proj.weight", down)


class _Loader:
    """Reads tensors into newly made, already fused destinations."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        slots_LS: NDArray[np.int16] | None,
        dtype: torch.dtype,
        device: torch.device,
        advance: Advance,
    ) -> None:
        self._advance = advance
        self._checkpoint = checkpoint
        self._config = config
        self._slots_LS = slots_LS
        self._dtype = dtype
        self._device = device

    def model(self, with_mtp: bool) -> ModelWeights:
        config = self._config
        with_mtp = with_mtp and config.num_nextn_predict_layers > 0
        return ModelWeights(
            config=config,
            embed_VD=self._one("model.embed_tokens.weight", config.vocab_size, config.hidden_size),
            layers=tuple(self._layer(index) for index in range(config.num_hidden_layers)),
            norm_D=self._one("model.norm.weight", config.hidden_size),
            head_VD=self._one("lm_head.weight", config.vocab_size, config.hidden_size),
            mtp=self._mtp() if with_mtp else None,
            cos_sin=cos_sin_table(config).to(self._device),
        )

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        is_moe = config.is_moe(index)
        return LayerWeights(
            attn_norm_D=self._one(f"{prefix}input_layernorm.weight", config.hidden_size),
            attention=self._attention(f"{prefix}self_attn."),
            ffn_norm_D=self._one(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
            mlp=None if is_moe else self._mlp(f"{prefix}mlp.", config.intermediate_size),
            moe=self._moe(index, f"{prefix}mlp.") if is_moe else None,
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        c = self._config
        heads, dim, latent = c.num_attention_heads, c.hidden_size, c.kv_lora_rank
        q_rows = heads * c.qk_head_dim if c.q_lora_rank is None else c.q_lora_rank
        q_name = "q_proj" if c.q_lora_rank is None else "q_a_proj"
        qkv_a = self._empty(q_rows + latent + c.qk_rope_head_dim, dim)
        self._checkpoint.read(f"{prefix}{q_name}.weight", qkv_a[:q_rows])
        self._checkpoint.read(f"{prefix}kv_a_proj_with_mqa.weight", qkv_a[q_rows:])
        # Per head N rows of W_UK, then W rows of W_UV.
        kv_b = self._one(
            f"{prefix}kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), latent
        )
        w_uk, w_uv = torch.split(
            kv_b.view(heads, -1, latent), [c.qk_nope_head_dim, c.v_head_dim], dim=1
        )
        has_lora = c.q_lora_rank is not None
        return AttentionWeights(
            qkv_a=qkv_a,
            q_a_norm_Q=self._one(f"{prefix}q_a_layernorm.weight", q_rows) if has_lora else None,
            q_b=self._one(f"{prefix}q_b_proj.weight", heads * c.qk_head_dim, q_rows)
            if has_lora
            else None,
            kv_a_norm_C=self._one(f"{prefix}kv_a_layernorm.weight", latent),
            w_uk_HNC=w_uk.contiguous(),
            w_uv_HWC=w_uv.contiguous(),
            o=self._one(f"{prefix}o_proj.weight", dim, heads * c.v_head_dim),
        )

    def _mlp(self, prefix: str, width: int) -> MlpWeights:
        mlp = MlpWeights(
            self._empty(2 * width, self._config.hidden_size),
            self._empty(self._config.hidden_size, width),
        )
        read_mlp(self._checkpoint, prefix, mlp.gate_up, mlp.down)
        return mlp

    def _moe(self, index: int, prefix: str) -> MoeWeights:
        c = self._config
        slots: Sequence[int] = range(c.n_routed_experts)
        if self._slots_LS is not None and index < c.num_hidden_layers:
            slots = self._slots_LS[index - c.first_k_dense_replace].tolist()
        moe = MoeWeights(
            # The gate stays FP32 whatever the rest is: a rounded score sends a token elsewhere.
            router_ED=self._one(
                f"{prefix}gate.weight", c.n_routed_experts, c.hidden_size, dtype=torch.float32
            ),
            router_bias_E=self._one(
                f"{prefix}gate.e_score_correction_bias", c.n_routed_experts, dtype=torch.float32
            ),
            gate_up_E=self._empty(len(slots), 2 * c.moe_intermediate_size, c.hidden_size),
            down_E=self._empty(len(slots), c.hidden_size, c.moe_intermediate_size),
            shared=self._mlp(
                f"{prefix}shared_experts.", c.n_shared_experts * c.moe_intermediate_size
            ),
        )
        for slot, expert in enumerate(slots):
            self._advance(index + slot / len(slots), c.num_hidden_layers)
            if expert != EMPTY:
                read_expert(self._checkpoint, index, expert, moe.gate_up_E[slot], moe.down_E[slot])
        return moe

    def _mtp(self) -> MtpWeights:
        """The first MTP module; after the last layer. Its embedding and head are copies of the
        model's: not read.
        """
        index, dim = self._config.num_hidden_layers, self._config.hidden_size
        prefix = f"model.layers.{index}."
        return MtpWeights(
            enorm_D=self._one(f"{prefix}enorm.weight", dim),
            hnorm_D=self._one(f"{prefix}hnorm.weight", dim),
            eh_proj=self._one(f"{prefix}eh_proj.weight", dim, 2 * dim),
            layer=self._layer(index),
            head_norm_D=self._one(f"{prefix}shared_head.norm.weight", dim),
        )

    def _one(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._empty(*shape, dtype=dtype)
        self._checkpoint.read(name, tensor)
        return tensor

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
