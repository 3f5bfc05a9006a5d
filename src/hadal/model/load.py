"""Mapping of DeepSeek-V3's tensor names to ModelWeights. The Checkpoint reads the files.

Names and shapes are those of the released model (its README_WEIGHTS and modeling code). Shapes: D
hidden, V vocabulary, H heads, Q q_lora_rank, C kv_lora_rank, R qk_rope, N qk_nope, W v_head, J
index heads, X index_head_dim, F FFN width, E experts, I expert width, L MoE layers, S expert slots
of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hadal.core.model_config import SCALE_BLOCK, ModelConfig, read_model_config
from hadal.core.placement import EMPTY
from hadal.model.checkpoint import Checkpoint
from hadal.reference.params import (
    AttentionWeights,
    Experts,
    IndexerWeights,
    LayerWeights,
    Matrix,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)
from hadal.reference.rope import cos_sin_table

Advance = Callable[[float, float], None]


@dataclass(frozen=True)
class Conversion:
    """Conversion of a stored matrix to its format in memory."""

    dtype: torch.dtype | None = None
    """Data type in memory; None: the stored one, but FP32 for FP8 in blocks without a kernel."""
    device: torch.device | str = "cpu"
    is_rounding_inputs: bool = False

    def __call__(self, stored: Matrix) -> Matrix:
        dtype = self.dtype
        is_fp8 = stored.scales is not None
        if dtype is None and is_fp8 and stored.block != SCALE_BLOCK:
            # No kernel supports this block shape, and the torch twin would convert it in every step.
            dtype = torch.float32
        if dtype is not None:
            # Always copy, so that a converted matrix never shares memory with the mapped file.
            stored = Matrix(stored.dense(dtype).to(self.device, copy=stored.values.dtype == dtype))
        return replace(stored, is_rounding_inputs=is_fp8 and self.is_rounding_inputs)

    @property
    def vector_dtype(self) -> torch.dtype:
        return self.dtype or torch.float32


AS_FP32 = Conversion(torch.float32)
AS_STORED = Conversion()


def load_weights(
    folder: Path,
    *,
    slot_to_expert_LS: NDArray[np.int16] | None = None,
    held: Conversion = AS_FP32,
    with_mtp: bool = False,
    with_mtp_experts: bool = True,
    advance: Advance = lambda done, of: None,
    config: ModelConfig | None = None,
) -> ModelWeights:
    """Read the tensors that this rank needs from `folder`. Raises CheckpointError, and ConfigError
    for config.json. `with_mtp_experts` False: read the MTP module without experts; it then only
    writes its KV. `advance` is called before each MoE layer's experts are read, with the number of
    layers before it and the model's number of layers. `slot_to_expert_LS`: the expert in each slot
    of this rank, by MoE layer (EMPTY: none); only these are read. None: all experts, in order. If
    the array has no row for the MTP module, `with_mtp_experts` decides between all its experts and
    none. `config`: parsed config.json of the folder; None: read it.
    """
    config = read_model_config(folder) if config is None else config
    with Checkpoint(folder, config.weight_block_size, config.scale_names) as checkpoint:
        checkpoint.check_layers(config.num_hidden_layers)
        loader = _TensorFinder(
            checkpoint, config, slot_to_expert_LS, held, advance, with_mtp_experts=with_mtp_experts
        )
        return loader.model(with_mtp)


def read_expert(
    checkpoint: Checkpoint, config: ModelConfig, layer_index: int, expert: int, held: Conversion
) -> MlpWeights:
    """Read a routed expert of a layer (`layer_index` counts all layers)."""
    prefix = f"model.layers.{layer_index}.mlp.experts.{expert}."
    return read_mlp(checkpoint, prefix, config.hidden_size, config.moe_intermediate_size, held)


def read_mlp(
    checkpoint: Checkpoint, prefix: str, dim: int, width: int, held: Conversion
) -> MlpWeights:
    """Read the feed-forward network [F = `width`] with this prefix of its tensor names."""
    return MlpWeights(
        held(checkpoint.matrix(f"{prefix}gate_proj.weight", (width, dim))),
        held(checkpoint.matrix(f"{prefix}up_proj.weight", (width, dim))),
        held(checkpoint.matrix(f"{prefix}down_proj.weight", (dim, width))),
    )


class _TensorFinder:
    """Reader of ModelWeights from a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        slot_to_expert_LS: NDArray[np.int16] | None,
        held: Conversion,
        advance: Advance,
        *,
        with_mtp_experts: bool,
    ) -> None:
        self._with_mtp_experts = with_mtp_experts
        self._advance = advance
        self._checkpoint = checkpoint
        self._config = config
        self._slot_to_expert_LS = slot_to_expert_LS
        self._held = held

    def model(self, with_mtp: bool) -> ModelWeights:
        config = self._config
        with_mtp = with_mtp and config.num_nextn_predict_layers > 0
        return ModelWeights(
            config=config,
            embed=self._matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size),
            layers=tuple(self._layer(index) for index in range(config.num_hidden_layers)),
            norm_D=self._vector("model.norm.weight", config.hidden_size),
            head=self._matrix("lm_head.weight", config.vocab_size, config.hidden_size),
            mtp=self._mtp() if with_mtp else None,
            cos_sin=cos_sin_table(config).to(self._held.device),
        )

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        is_moe = config.is_moe(index)
        return LayerWeights(
            attn_norm_D=self._vector(f"{prefix}input_layernorm.weight", config.hidden_size),
            attention=self._attention(f"{prefix}self_attn."),
            ffn_norm_D=self._vector(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
            mlp=None if is_moe else self._mlp(f"{prefix}mlp.", config.intermediate_size),
            moe=self._moe(index, f"{prefix}mlp.") if is_moe else None,
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        c = self._config
        heads, dim, rank = c.num_attention_heads, c.hidden_size, c.q_lora_rank
        queries, both = heads * c.qk_head_dim, heads * (c.qk_nope_head_dim + c.v_head_dim)
        q_b_name = "q_b_proj" if rank else "q_proj"
        return AttentionWeights(
            q_a=self._matrix(f"{prefix}q_a_proj.weight", rank, dim) if rank else None,
            q_a_norm_Q=self._vector(f"{prefix}q_a_layernorm.weight", rank) if rank else None,
            q_b=self._matrix(f"{prefix}{q_b_name}.weight", queries, rank or dim),
            kv_a=self._matrix(f"{prefix}kv_a_proj_with_mqa.weight", c.latent_dim, dim),
            kv_a_norm_C=self._vector(f"{prefix}kv_a_layernorm.weight", c.kv_lora_rank),
            # The absorbed form also multiplies by the transpose; its inputs must not be rounded.
            kv_b=replace(
                self._matrix(f"{prefix}kv_b_proj.weight", both, c.kv_lora_rank),
                is_rounding_inputs=False,
            ),
            o=self._matrix(f"{prefix}o_proj.weight", dim, heads * c.v_head_dim),
            indexer=self._indexer(f"{prefix}indexer."),
        )

    def _indexer(self, prefix: str) -> IndexerWeights | None:
        c = self._config
        heads, width, rank = c.index_n_heads, c.index_head_dim, c.q_lora_rank
        if heads is None or width is None or rank is None:
            return None
        return IndexerWeights(
            q_b=self._matrix(f"{prefix}wq_b.weight", heads * width, rank),
            k=self._matrix(f"{prefix}wk.weight", width, c.hidden_size),
            k_norm_X=self._vector(f"{prefix}k_norm.weight", width),
            k_norm_bias_X=self._vector(f"{prefix}k_norm.bias", width),
            head_weights=self._matrix(f"{prefix}weights_proj.weight", heads, c.hidden_size),
        )

    def _mlp(self, prefix: str, width: int) -> MlpWeights:
        return read_mlp(self._checkpoint, prefix, self._config.hidden_size, width, self._held)

    def _moe(self, index: int, prefix: str) -> MoeWeights:
        c = self._config
        slots: Sequence[int] = range(c.n_routed_experts)
        moe_layer = index - c.first_k_dense_replace
        if self._slot_to_expert_LS is not None and moe_layer < len(self._slot_to_expert_LS):
            slots = self._slot_to_expert_LS[moe_layer].tolist()
        elif index >= c.num_hidden_layers and not self._with_mtp_experts:
            slots = ()
        self._advance(index, c.num_hidden_layers)
        held = tuple(
            None if expert == EMPTY else read_expert(self._checkpoint, c, index, expert, self._held)
            for expert in slots
        )
        gate = self._checkpoint.vector(f"{prefix}gate.weight", (c.n_routed_experts, c.hidden_size))
        bias_E = self._checkpoint.vector(
            f"{prefix}gate.e_score_correction_bias", (c.n_routed_experts,)
        )
        shared_width = c.n_shared_experts * c.moe_intermediate_size
        return MoeWeights(
            router=Matrix(gate.to(self._held.device)),
            router_bias_E=bias_E.to(self._held.device),
            experts=Experts(held),
            shared=self._mlp(f"{prefix}shared_experts.", shared_width),
        )

    def _mtp(self) -> MtpWeights:
        """Read the first MTP module, which follows the last layer. Its embedding and head are
        copies of the model's, and are not read.
        """
        index, dim = self._config.num_hidden_layers, self._config.hidden_size
        prefix = f"model.layers.{index}."
        return MtpWeights(
            enorm_D=self._vector(f"{prefix}enorm.weight", dim),
            hnorm_D=self._vector(f"{prefix}hnorm.weight", dim),
            eh_proj=self._matrix(f"{prefix}eh_proj.weight", dim, 2 * dim),
            layer=self._layer(index),
            head_norm_D=self._vector(f"{prefix}shared_head.norm.weight", dim),
        )

    def _matrix(self, name: str, rows: int, columns: int) -> Matrix:
        return self._held(self._checkpoint.matrix(name, (rows, columns)))

    def _vector(self, name: str, size: int) -> Tensor:
        vector = self._checkpoint.vector(name, (size,))
        return vector.to(self._held.vector_dtype).to(self._held.device)
