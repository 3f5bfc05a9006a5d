"""A whole decode step outside Python: from token ids to logits in one call that holds no GIL and
allocates nothing.

Knows a model's weights and a rank's cache; knows nothing of requests. Weights are used where they
lie, none is copied. Rows of a batch may be several consecutive positions of one sequence: every
row's latent is cached before any row attends. Shapes: B rows, V vocabulary, D hidden, P blocks, L
layers, S = 64 block tokens, M blocks of a row. Twin: `hadal.reference.model`.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from hadal.kernels import library
from hadal.kernels.ops import BLOCK_TOKENS
from hadal.reference.params import LATENT_NORM_EPS, LayerWeights, ModelWeights

_INTS = (
    "vocab",
    "D",
    "num_layers",
    "Q",
    "H",
    "N",
    "R",
    "C",
    "W",
    "F",
    "S",
    "E",
    "I",
    "K",
    "num_groups",
    "topk_group",
    "is_normed",
    "max_batch",
    "max_position",
    "num_blocks",
    "cache_layers",
)
_TensorShape = tuple[int, ...] | None
_FLOATS = ("eps", "latent_eps", "routed_scale", "softmax_scale")


class _Shape(ctypes.Structure):
    """cpu/step.h, StepShape."""

    _fields_ = [(name, ctypes.c_int32) for name in _INTS] + [
        (name, ctypes.c_float) for name in _FLOATS
    ]


def available(weights: ModelWeights) -> bool:
    """Whether the fused step can run this model here: kernels built, all weights FP32 on the CPU
    and contiguous.
    """
    return library.load() is not None and library.fits(
        weights.embed_VD,
        weights.norm_D,
        weights.head_VD,
        weights.cos_sin,
        *(tensor for layer in weights.layers for tensor in _tensors(layer) if tensor is not None),
    )


class DecodeStep:
    """The step of one model over one cache, for up to `max_batch` rows. One call at a time."""

    def __init__(
        self,
        weights: ModelWeights,
        cache_PLSD: Tensor,
        max_batch: int,
        num_threads: int | None = None,
    ) -> None:
        """Raises ValueError if the step is not `available` for these weights or the cache is not
        theirs.
        """
        if not available(weights):
            raise ValueError(
                "the step needs built kernels and contiguous FP32 weights on the CPU; ask"
                " available()."
            )
        config = weights.config
        num_blocks, cache_layers = cache_PLSD.shape[:2]
        library.check_shape(
            "cache_PLSD", cache_PLSD, (num_blocks, cache_layers, BLOCK_TOKENS, config.latent_dim)
        )
        if not library.fits(cache_PLSD) or cache_layers < len(weights.layers):
            raise ValueError(
                f"the cache must be contiguous FP32 on the CPU with {len(weights.layers)} layers or"
                " more."
            )
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}; it must be positive.")
        _check_weights(weights)
        lib = library.load()
        assert lib is not None
        self.max_batch = max_batch
        self._kept = (weights, cache_PLSD)  # C holds their addresses.
        self._team = library.team(num_threads)
        self._shape = _shape(weights, cache_PLSD, max_batch)
        self._logits_BV = torch.empty((max_batch, config.vocab_size))
        self._normed_BD = torch.empty((max_batch, config.hidden_size))
        whole = (weights.embed_VD, weights.norm_D, weights.head_VD, weights.cos_sin, cache_PLSD)
        layers = [_pointer(tensor) for layer in weights.layers for tensor in _tensors(layer)]
        handle = lib.hadal_step_new(
            self._team,
            ctypes.addressof(self._shape),
            (ctypes.c_void_p * len(whole))(*map(_pointer, whole)),
            (ctypes.c_void_p * len(layers))(*layers),
        )
        if not handle:
            raise MemoryError("the step's working memory could not be allocated.")
        self._handle = handle
        self._run = lib.hadal_step_run
        weakref.finalize(self, lib.hadal_step_free, handle)

    @torch.inference_mode()
    def __call__(self, tokens_B: Tensor, positions_B: Tensor, block_table_BM: Tensor) -> Tensor:
        """Write each token's latents at its position, return the logits [B, V] for the next.

        The result is a view of a buffer that the next call overwrites. Raises ValueError if a
        shape, token, position or block is out of range; nothing has been written then.
        """
        batch = len(tokens_B)
        if not 0 <= batch <= self.max_batch:
            raise ValueError(f"{batch} rows; this step was made for at most {self.max_batch}.")
        library.check_shape("tokens_B", tokens_B, (batch,))
        library.check_shape("positions_B", positions_B, (batch,))
        library.check_shape("block_table_BM", block_table_BM, (batch, block_table_BM.shape[-1]))
        logits_BV = self._logits_BV[:batch]
        if batch == 0:
            return logits_BV
        tokens_B, positions_B = (
            library.as_int(tokens_B, torch.int64),
            library.as_int(positions_B, torch.int64),
        )
        table_BM = library.as_int(block_table_BM, torch.int32)
        library.check_status(
            self._run(
                self._handle,
                self._team,
                ctypes.addressof(self._shape),
                batch,
                tokens_B.data_ptr(),
                positions_B.data_ptr(),
                table_BM.data_ptr(),
                table_BM.shape[1],
                self._normed_BD.data_ptr(),
                logits_BV.data_ptr(),
            )
        )
        return logits_BV

    def hidden(self, batch: int) -> Tensor:
        """The last call's hidden states [B, D] after the last norm: what the head took and an MTP
        module wants. A view, too.
        """
        return self._normed_BD[:batch]


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _tensors(layer: LayerWeights) -> tuple[Tensor | None, ...]:
    """A layer's weights in the order of cpu/step.h, LayerPointers."""
    a, moe = layer.attention, layer.moe
    mlp = layer.mlp if moe is None else moe.shared
    assert mlp is not None, "a layer has a dense network or experts"
    routed = (
        (None,) * 4
        if moe is None
        else (moe.router_ED, moe.router_bias_E, moe.gate_up_E, moe.down_E)
    )
    return (
        layer.attn_norm_D,
        a.qkv_a,
        a.q_a_norm_Q,
        a.q_b,
        a.kv_a_norm_C,
        a.w_uk_HNC,
        a.w_uv_HWC,
        a.o,
        layer.ffn_norm_D,
        mlp.gate_up,
        mlp.down,
        *routed,
    )


def _shape(weights: ModelWeights, cache_PLSD: Tensor, max_batch: int) -> _Shape:
    c = weights.config
    return _Shape(
        vocab=c.vocab_size,
        D=c.hidden_size,
        num_layers=len(weights.layers),
        Q=c.q_lora_rank or 0,
        H=c.num_attention_heads,
        N=c.qk_nope_head_dim,
        R=c.qk_rope_head_dim,
        C=c.kv_lora_rank,
        W=c.v_head_dim,
        F=c.intermediate_size,
        S=c.n_shared_experts * c.moe_intermediate_size,
        E=c.n_routed_experts,
        I=c.moe_intermediate_size,
        K=c.num_experts_per_tok,
        num_groups=c.n_group,
        topk_group=c.topk_group,
        is_normed=c.norm_topk_prob,
        max_batch=max_batch,
        max_position=weights.cos_sin.shape[0],
        num_blocks=cache_PLSD.shape[0],
        cache_layers=cache_PLSD.shape[1],
        eps=c.rms_norm_eps,
        latent_eps=LATENT_NORM_EPS,
        routed_scale=c.routed_scaling_factor,
        softmax_scale=c.softmax_scale,
    )


def _check_weights(weights: ModelWeights) -> None:
    """C trusts the config's dimensions, so every tensor must have them."""
    c = weights.config
    dim, heads, latent = c.hidden_size, c.num_attention_heads, c.latent_dim
    queries = heads * c.qk_head_dim
    shared, width = c.n_shared_experts * c.moe_intermediate_size, c.moe_intermediate_size
    attention: list[_TensorShape] = [
        (dim,),
        ((c.q_lora_rank or queries) + latent, dim),
        (c.q_lora_rank,) if c.q_lora_rank else None,
        (queries, c.q_lora_rank) if c.q_lora_rank else None,
        (c.kv_lora_rank,),
        (heads, c.qk_nope_head_dim, c.kv_lora_rank),
        (heads, c.v_head_dim, c.kv_lora_rank),
        (dim, heads * c.v_head_dim),
        (dim,),
    ]
    dense: list[_TensorShape] = [
        (2 * c.intermediate_size, dim),
        (dim, c.intermediate_size),
        None,
        None,
        None,
        None,
    ]
    sparse: list[_TensorShape] = [
        (2 * shared, dim),
        (dim, shared),
        (c.n_routed_experts, dim),
        (c.n_routed_experts,),
        (c.n_routed_experts, 2 * width, dim),
        (c.n_routed_experts, dim, width),
    ]
    for index, layer in enumerate(weights.layers):
        shapes = attention + (dense if layer.moe is None else sparse)
        for tensor, shape in zip(_tensors(layer), shapes, strict=True):
            if (None if tensor is None else tuple(tensor.shape)) != shape:
                raise ValueError(f"a weight of layer {index} is not of the config's shape {shape}.")
    library.check_shape("embed_VD", weights.embed_VD, (c.vocab_size, dim))
    library.check_shape("head_VD", weights.head_VD, (c.vocab_size, dim))
    library.check_shape("norm_D", weights.norm_D, (dim,))
    library.check_shape("cos_sin", weights.cos_sin, (weights.cos_sin.shape[0], c.qk_rope_head_dim))
