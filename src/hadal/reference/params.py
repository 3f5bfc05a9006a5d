"""A DeepSeek-V3 model's weights as frozen values: what `reference`, `kernels` and `model` all take.

Matrices are as the checkpoint stores them (on a CPU, mapped from its files) or converted to the
compute precision; norms, the gate and its bias are FP32. All are row-major, contiguous and as
`F.linear` wants them ([out, in]).

Shapes: D hidden, V vocab, H heads, Q q_lora_rank, C kv_lora_rank, R qk_rope, N qk_nope, W v_head, J
index heads, X index_head_dim, F FFN width, E routed experts, I expert width, S shared-expert width
(n_shared_experts * I).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.core.model_config import SCALE_BLOCK, ModelConfig
from hadal.reference.fp8 import dequantise

LATENT_NORM_EPS = 1e-6
"""Epsilon of the two norms inside MLA (q_a and kv_a). The released code fixes it; rms_norm_eps is
for the others.
"""
INDEX_NORM_EPS = 1e-6
"""Epsilon of the indexer's LayerNorm; the released code fixes it, too."""
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight [N, K]: plain values, or E4M3 codes with a scale per block. Its value is code *
    scale, rounded to FP32.
    """

    values: Tensor
    scales: Tensor | None = None
    """[blocks of rows, blocks of columns], FP32; of E4M3 alone."""
    block: tuple[int, int] = SCALE_BLOCK
    """Rows and columns that share a scale."""
    is_rounding_inputs: bool = False
    """What it multiplies is rounded to E4M3, too, with a scale per 128 values: DeepSeek-V3's own
    recipe (arXiv 2412.19437, 3.3.2).
    """

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that makes the matrix, for whoever copies it."""
        return (self.values,) if self.scales is None else (self.values, self.scales)

    def empty_like(self) -> Matrix:
        """Room for another matrix of this shape and kind, in memory of its own."""
        scales = None if self.scales is None else torch.empty_like(self.scales)
        return Matrix(torch.empty_like(self.values), scales, self.block, self.is_rounding_inputs)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix's values [N, K] in this type; its very tensor where that is what it is."""
        if self.scales is None:
            return self.values.to(dtype)
        out = torch.empty(self.shape, dtype=torch.float32, device=self.values.device)
        dequantise(self.values[None], self.scales[None], self.block, out[None])
        return out.to(dtype)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows [T, K] of the ids, FP32 where they are codes or on a CPU, else as they are stored."""
        found_TK = self.values[ids_T]
        if self.scales is not None:
            block = 1, self.block[1]
            return Matrix(found_TK, self.scales[ids_T // self.block[0]], block).dense()
        return found_TK.float() if found_TK.device.type == "cpu" else found_TK


@dataclass(frozen=True)
class IndexerWeights:
    """The lightning indexer (arXiv 2512.02556, eq. 1): a position's score for a token is the sum over
    index heads of weight * relu(query . key).
    """

    q_b: Matrix
    """[J*X, Q], of the query latent. Of a head's X values the first R are rotated."""
    k: Matrix
    """[X, D]: one key for all heads, normed, its first R values rotated."""
    k_norm_X: Tensor
    k_norm_bias_X: Tensor
    head_weights: Matrix
    """[J, D]"""


@dataclass(frozen=True)
class AttentionWeights:
    """MLA (arXiv 2412.19437, eq. 1-11). Without q-LoRA there is no `q_a`, and `q_b` is W_Q."""

    q_a: Matrix | None
    """W_DQ, [Q, D]."""
    q_a_norm_Q: Tensor | None
    q_b: Matrix
    """[H*(N+R), Q], or [H*(N+R), D] without q-LoRA: per head the N plain rows, then the R rotated
    ones.
    """
    kv_a: Matrix
    """[C+R, D]: W_DKV, then W_KR."""
    kv_a_norm_C: Tensor
    kv_b: Matrix
    """[H*(N+W), C]: per head N rows of W_UK (k_nope = W_UK c) and W rows of W_UV (v = W_UV c).
    Absorbed decode multiplies the query by W_UK instead.
    """
    o: Matrix
    """[D, H*W]"""
    indexer: IndexerWeights | None = None
    """None: a token attends to all positions."""


@dataclass(frozen=True, eq=False)
class MlpWeights:
    """SwiGLU: down(silu(gate x) * up x)."""

    gate: Matrix
    """[F, D]"""
    up: Matrix
    """[F, D]"""
    down: Matrix
    """[D, F]"""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that makes the network, for whoever copies it."""
        return (*self.gate.parts, *self.up.parts, *self.down.parts)

    def empty_like(self) -> MlpWeights:
        """Room for another network of this shape and kind, in memory of its own."""
        return MlpWeights(self.gate.empty_like(), self.up.empty_like(), self.down.empty_like())


@dataclass(frozen=True, eq=False)
class Experts:
    """Routed experts of a layer, by expert id; on a rank that holds only some of them, by expert
    slot, None where one is empty.
    """

    slots: tuple[MlpWeights | None, ...]

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def shape(self) -> tuple[int, int]:
        """(I, D) of the experts that are held; (0, 0) where none is."""
        return next((mlp.gate.shape for mlp in self.slots if mlp is not None), (0, 0))

    def __getitem__(self, index: int) -> MlpWeights:
        """Raises IndexError if there is no such expert, or its slot is empty."""
        found = self.slots[index] if index >= 0 else None
        if found is None:
            raise IndexError(f"expert slot {index} of {len(self.slots)} is empty.")
        return found


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts, the shared expert and the gate, which knows all experts, held here or not."""

    router: Matrix
    """[E, D], FP32: a rounded score sends a token elsewhere."""
    router_bias_E: Tensor
    """Correction bias: it chooses, it never weighs."""
    experts: Experts
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
    eh_proj: Matrix
    """[D, 2D], the embedding's half first."""
    layer: LayerWeights
    head_norm_D: Tensor


@dataclass(frozen=True)
class ModelWeights:
    """A whole model. `cos_sin` is [max_position, R]: cos of the R/2 pairs, then sin, YaRN applied
    (FP32).
    """

    config: ModelConfig
    embed: Matrix
    """[V, D]"""
    layers: tuple[LayerWeights, ...]
    norm_D: Tensor
    head: Matrix
    """[V, D]"""
    mtp: MtpWeights | None
    cos_sin: Tensor
