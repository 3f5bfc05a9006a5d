"""Weights of a DeepSeek-V3 model as frozen values, shared by `reference`, `kernels` and `model`.

Matrices are in the checkpoint's format (on a CPU, mapped from its files) or converted to the
compute precision; norms, the gate and its bias are FP32. All are contiguous, in `F.linear`'s layout
([out, in]).

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
"""Epsilon of MLA's norms after q_a and kv_a, fixed by the released code; not rms_norm_eps."""
INDEX_NORM_EPS = 1e-6
"""Epsilon of the indexer's LayerNorm, fixed by the released code."""
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weight [N, K]: plain values, or E4M3 codes with a scale per block (value = code * scale,
    rounded to FP32).
    """

    values: Tensor
    scales: Tensor | None = None
    """[row blocks, column blocks], FP32, of E4M3 codes; None for plain values."""
    block: tuple[int, int] = SCALE_BLOCK
    """Numbers of rows and columns that share a scale."""
    is_rounding_inputs: bool = False
    """True if inputs are rounded to E4M3 as well, with a scale per 128 values: DeepSeek-V3's own
    recipe (arXiv 2412.19437, 3.3.2).
    """

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors of the matrix, for copying."""
        return (self.values,) if self.scales is None else (self.values, self.scales)

    def empty_like(self) -> Matrix:
        """Return an uninitialised matrix of this shape and kind, in its own memory."""
        scales = None if self.scales is None else torch.empty_like(self.scales)
        return Matrix(torch.empty_like(self.values), scales, self.block, self.is_rounding_inputs)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [N, K] in this type; the stored tensor itself if it has the type."""
        if self.scales is None:
            return self.values.to(dtype)
        out = torch.empty(self.shape, dtype=torch.float32, device=self.values.device)
        dequantise(self.values[None], self.scales[None], self.block, out[None])
        return out.to(dtype)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Return rows [T, K], in FP32 if stored as codes or on a CPU, else in the stored type."""
        found_TK = self.values[ids_T]
        if self.scales is not None:
            block = 1, self.block[1]
            return Matrix(found_TK, self.scales[ids_T // self.block[0]], block).dense()
        return found_TK.float() if found_TK.device.type == "cpu" else found_TK


@dataclass(frozen=True)
class IndexerWeights:
    """Lightning indexer (arXiv 2512.02556, eq. 1): a position's score for a token is the sum over
    index heads of weight * relu(query . key).
    """

    q_b: Matrix
    """[J*X, Q], applied to the query latent. The first R of a head's X values are rotated."""
    k: Matrix
    """[X, D]. All heads share its key, which is normed; the first R values are rotated."""
    k_norm_X: Tensor
    k_norm_bias_X: Tensor
    head_weights: Matrix
    """[J, D]"""


@dataclass(frozen=True)
class AttentionWeights:
    """MLA weights (arXiv 2412.19437, eq. 1-11). Without q-LoRA there is no `q_a`, and `q_b` is W_Q."""

    q_a: Matrix | None
    """W_DQ, [Q, D]."""
    q_a_norm_Q: Tensor | None
    q_b: Matrix
    """[H*(N+R), Q], or [H*(N+R), D] without q-LoRA: per head N plain rows, then R rotated ones."""
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
    """None if tokens attend to all visible positions."""


@dataclass(frozen=True, eq=False)
class MlpWeights:
    """SwiGLU network: down(silu(gate x) * up x)."""

    gate: Matrix
    """[F, D]"""
    up: Matrix
    """[F, D]"""
    down: Matrix
    """[D, F]"""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors of the network, for copying."""
        return (*self.gate.parts, *self.up.parts, *self.down.parts)

    def empty_like(self) -> MlpWeights:
        """Return an uninitialised network of this shape and kind, in its own memory."""
        return MlpWeights(self.gate.empty_like(), self.up.empty_like(), self.down.empty_like())


@dataclass(frozen=True, eq=False)
class Experts:
    """Routed experts of a layer, by expert id; on a rank of a unit by expert slot, None if a slot
    is empty.
    """

    slots: tuple[MlpWeights | None, ...]

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def shape(self) -> tuple[int, int]:
        """(I, D) of the experts in the slots; (0, 0) if all slots are empty."""
        return next((mlp.gate.shape for mlp in self.slots if mlp is not None), (0, 0))

    def __getitem__(self, index: int) -> MlpWeights:
        """Return the expert in a slot. Raises IndexError if the slot is empty or does not exist."""
        found = self.slots[index] if index >= 0 else None
        if found is None:
            raise IndexError(f"expert slot {index} of {len(self.slots)} is empty.")
        return found


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts of this rank, the shared expert, and the gate of all experts."""

    router: Matrix
    """[E, D], FP32: a rounded score would route a token to other experts."""
    router_bias_E: Tensor
    """Correction bias, which affects the choice of experts, never their weights."""
    experts: Experts
    shared: MlpWeights


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer: exactly one of `mlp` (dense) and `moe` is set."""

    attn_norm_D: Tensor
    attention: AttentionWeights
    ffn_norm_D: Tensor
    mlp: MlpWeights | None
    moe: MoeWeights | None


@dataclass(frozen=True)
class MtpWeights:
    """Multi-token-prediction module (eq. 21-23): h' = eh_proj [enorm(Emb(t+1)); hnorm(h)], one
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
    """Weights of a model. `cos_sin`, [max_position, R] in FP32: cos of the R/2 pairs, then sin,
    with YaRN.
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
