"""A DeepSeek-V3 model's weights as frozen values: what `reference`, `kernels` and `model` all take.

All weights are in compute precision (FP32 on CPU; a CUDA model may hold BF16), row-major,
contiguous and as `F.linear` wants them ([out, in]). The loader fuses what is always multiplied
together.

Shapes: D hidden, V vocab, H heads, Q q_lora_rank, C kv_lora_rank, R qk_rope, N qk_nope, W v_head, F
FFN width, E routed experts, I expert width, S shared-expert width (n_shared_experts * I).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hadal.core.model_config import ModelConfig

LATENT_NORM_EPS = 1e-6
"""Epsilon of the two norms inside MLA (q_a and kv_a). The released code fixes it; rms_norm_eps is
for the others.
"""


@dataclass(frozen=True)
class AttentionWeights:
    """MLA (arXiv 2412.19437, eq. 1-11). With q-LoRA, `q_a_norm_Q` and `q_b` are set and `qkv_a`
    starts with W_DQ.
    """

    qkv_a: Tensor
    """[Q+C+R, D] with q-LoRA: W_DQ, W_DKV, W_KR stacked. Without: [H*(N+R)+C+R, D], the queries'
    W_Q first.
    """
    q_a_norm_Q: Tensor | None
    q_b: Tensor | None
    """[H*(N+R), Q], per head the N plain rows, then the R rotated ones."""
    kv_a_norm_C: Tensor
    w_uk_HNC: Tensor
    """W_UK per head: k_nope = w_uk @ c. Absorbed decode multiplies the query by it instead."""
    w_uv_HWC: Tensor
    """W_UV per head: v = w_uv @ c."""
    o: Tensor
    """[D, H*W]"""


@dataclass(frozen=True)
class MlpWeights:
    """SwiGLU: down(silu(gate x) * up x)."""

    gate_up: Tensor
    """[2F, D], gate rows first."""
    down: Tensor
    """[D, F]"""


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts, the shared expert and the gate. Experts are stacked: one kernel sorts tokens
    over them.

    On a rank that holds only some of them, its expert slots stand where E is written below; the
    gate knows all.
    """

    router_ED: Tensor
    router_bias_E: Tensor
    """Correction bias: it chooses, it never weighs."""
    gate_up_E: Tensor
    """[E, 2I, D], gate rows first."""
    down_E: Tensor
    """[E, D, I]"""
    shared: MlpWeights


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: exactly one of `mlp` (dense) and `moe` is set."""

    attn_norm_D: Tensor
    attention: AttentionWeights
    ffn_norm_D: Tensor
    mlp: MlpWeights | None
    moe: MoeWeights | None


@dataclass(frozen=True)
class MtpWeights:
    """The multi-token-prediction module (eq. 21-23): h' = eh_proj [enorm(Emb(t+1)); hnorm(h)], one
    block, head_norm, shared head.
    """

    enorm_D: Tensor
    hnorm_D: Tensor
    eh_proj: Tensor
    """[D, 2D], the embedding's half first."""
    layer: LayerWeights
    head_norm_D: Tensor


@dataclass(frozen=True)
class ModelWeights:
    """A whole model. `cos_sin` is [max_position, R]: cos of the R/2 pairs, then sin, YaRN applied
    (FP32).
    """

    config: ModelConfig
    embed_VD: Tensor
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    head_VD: Tensor
    mtp: MtpWeights | None
    cos_sin: Tensor
