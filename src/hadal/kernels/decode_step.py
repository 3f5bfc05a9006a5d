"""A whole decode step outside Python: from token ids to logits in one call that holds no GIL and
allocates nothing.

Knows a model's weights and a rank's cache; knows nothing of requests. Weights are used where they
lie, none is copied. Rows of a batch may be several consecutive positions of one sequence: every
row's entry is cached before any row attends. Shapes: B rows, V vocabulary, D hidden, P blocks, L
layers, S = 64 block tokens, M blocks of a row. Twin: `hadal.reference.model`.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from hadal.kernels import library
from hadal.kernels.ops import BLOCK_TOKENS
from hadal.reference.params import (
    INDEX_NORM_EPS,
    LATENT_NORM_EPS,
    Experts,
    LayerWeights,
    Matrix,
    MlpWeights,
    ModelWeights,
)

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
    "J",
    "X",
    "index_topk",
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
_FLOATS = ("eps", "latent_eps", "index_eps", "routed_scale", "softmax_scale")


class _Shape(ctypes.Structure):
    """cpu/step.h, StepShape."""

    _fields_ = [(name, ctypes.c_int32) for name in _INTS] + [
        (name, ctypes.c_float) for name in _FLOATS
    ]


def available(weights: ModelWeights) -> bool:
    """Whether the fused step can run this model here: kernels are built and take all weights."""
    vectors = [x for layer in weights.layers for x in _vectors(layer) if x is not None]
    matrices = [x for layer in weights.layers for x in _matrices(layer)]
    return (
        library.load() is not None
        and library.fits(weights.norm_D, weights.cos_sin, *vectors)
        and library.takes(weights.embed, weights.head, *matrices)
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
                "the step needs built kernels and weights on the CPU; ask available()."
            )
        config = weights.config
        num_blocks, cache_layers = cache_PLSD.shape[:2]
        library.check_shape(
            "cache_PLSD", cache_PLSD, (num_blocks, cache_layers, BLOCK_TOKENS, config.entry_dim)
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
        whole = (
            weights.norm_D.data_ptr(),
            weights.cos_sin.data_ptr(),
            library.address(weights.embed),
            library.address(weights.head),
            cache_PLSD.data_ptr(),
        )
        layers = [
            pointer
            for layer in weights.layers
            for pointer in (
                *(None if x is None else x.data_ptr() for x in _vectors(layer)),
                *(None if x is None else library.address(x) for x in _matrices(layer)),
            )
        ]
        handle = lib.hadal_step_new(
            self._team,
            ctypes.addressof(self._shape),
            (ctypes.c_void_p * len(whole))(*whole),
            (ctypes.c_void_p * len(layers))(*layers),
        )
        if not handle:
            raise MemoryError("the step's working memory could not be allocated.")
        self._handle = handle
        self._run = lib.hadal_step_run
        weakref.finalize(self, lib.hadal_step_free, handle)

    @torch.inference_mode()
    def __call__(self, tokens_B: Tensor, positions_B: Tensor, block_table_BM: Tensor) -> Tensor:
        """Write each token's entries at its position, return the logits [B, V] for the next.

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


# A layer's weights in the order of cpu/step.h, LayerPointers.


def _vectors(layer: LayerWeights) -> tuple[Tensor | None, ...]:
    """Norms and the gate, all FP32."""
    a, moe = layer.attention, layer.moe
    gate = (None, None) if moe is None else (moe.router.values, moe.router_bias_E)
    keys = (None, None) if (x := a.indexer) is None else (x.k_norm_X, x.k_norm_bias_X)
    return (layer.attn_norm_D, a.q_a_norm_Q, a.kv_a_norm_C, *keys, layer.ffn_norm_D, *gate)


def _matrices(layer: LayerWeights) -> tuple[Matrix | MlpWeights | Experts | None, ...]:
    a, moe = layer.attention, layer.moe
    mlp = layer.mlp if moe is None else moe.shared
    assert mlp is not None, "a layer has a dense network or experts"
    index = (None, None, None) if (x := a.indexer) is None else (x.q_b, x.k, x.head_weights)
    return (a.q_a, a.q_b, a.kv_a, a.kv_b, a.o, *index, mlp, None if moe is None else moe.experts)


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
        J=c.index_n_heads or 0,
        X=c.index_head_dim or 0,
        index_topk=c.index_topk or 0,
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
        index_eps=INDEX_NORM_EPS,
        routed_scale=c.routed_scaling_factor,
        softmax_scale=c.softmax_scale,
    )


def _check_weights(weights: ModelWeights) -> None:
    """C trusts the config's dimensions, so every tensor must have them."""
    c = weights.config
    dim, heads, rank = c.hidden_size, c.num_attention_heads, c.q_lora_rank
    queries = heads * c.qk_head_dim
    library.check_shape("embed", weights.embed, (c.vocab_size, dim))
    library.check_shape("head", weights.head, (c.vocab_size, dim))
    library.check_shape("norm_D", weights.norm_D, (dim,))
    library.check_shape("cos_sin", weights.cos_sin, (weights.cos_sin.shape[0], c.qk_rope_head_dim))
    for index, layer in enumerate(weights.layers):
        a, moe = layer.attention, layer.moe
        wanted: list[tuple[Tensor | Matrix | None, tuple[int, ...] | None]] = [
            (layer.attn_norm_D, (dim,)),
            (layer.ffn_norm_D, (dim,)),
            (a.q_a, (rank, dim) if rank else None),
            (a.q_a_norm_Q, (rank,) if rank else None),
            (a.q_b, (queries, rank or dim)),
            (a.kv_a, (c.latent_dim, dim)),
            (a.kv_a_norm_C, (c.kv_lora_rank,)),
            (a.kv_b, (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)),
            (a.o, (dim, heads * c.v_head_dim)),
        ]
        if (c.index_n_heads is None) != (a.indexer is None):
            raise ValueError(f"layer {index} and the config do not agree on an indexer.")
        if a.indexer is not None:
            index_heads, width = c.index_n_heads or 0, c.index_head_dim or 0
            wanted += [
                (a.indexer.q_b, (index_heads * width, rank or 0)),
                (a.indexer.k, (width, dim)),
                (a.indexer.k_norm_X, (width,)),
                (a.indexer.k_norm_bias_X, (width,)),
                (a.indexer.head_weights, (index_heads, dim)),
            ]
        if moe is None:
            assert layer.mlp is not None
            wanted += _mlp_shapes(layer.mlp, c.intermediate_size, dim)
        else:
            width = c.moe_intermediate_size
            wanted += _mlp_shapes(moe.shared, c.n_shared_experts * width, dim)
            wanted += [
                (moe.router, (c.n_routed_experts, dim)),
                (moe.router_bias_E, (c.n_routed_experts,)),
            ]
            if len(moe.experts) != c.n_routed_experts:
                raise ValueError(f"layer {index} has {len(moe.experts)} experts.")
            for expert in range(len(moe.experts)):
                wanted += _mlp_shapes(moe.experts[expert], width, dim)
        for weight, shape in wanted:
            if (None if weight is None else tuple(weight.shape)) != shape:
                raise ValueError(f"a weight of layer {index} is not of the config's shape {shape}.")


def _mlp_shapes(
    mlp: MlpWeights, width: int, dim: int
) -> list[tuple[Tensor | Matrix | None, tuple[int, ...] | None]]:
    return [(mlp.gate, (width, dim)), (mlp.up, (width, dim)), (mlp.down, (dim, width))]
