"""Whole decode step, from token ids to logits, and drafts of the MTP module, each as one C++ call
without the GIL or allocations.

Depends on a model's weights and a rank's cache, not on requests. Weights are used in place. Several
rows of a batch may be consecutive positions of one sequence, because every row's entry is cached
before any row attends. Shapes: B rows, T rows (some only write their entry), V vocabulary, D
hidden, P blocks, L layers, S = 64 block tokens, M blocks of a row. Twins: `hadal.reference.decode`
and `hadal.reference.mtp`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.kernels import library
from hadal.kernels.attention import BLOCK_TOKENS
from hadal.kernels.weights import address, takes
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
    "max_rows",
    "max_batch",
    "max_position",
    "num_blocks",
    "cache_layers",
    "first_layer",
    "first_position",
)
_FLOATS = ("eps", "latent_eps", "index_eps", "routed_scale", "softmax_scale")


class _StepShape(ctypes.Structure):
    """Same layout as StepShape in cpu/step.h."""

    _fields_ = [(name, ctypes.c_int32) for name in _INTS] + [
        (name, ctypes.c_float) for name in _FLOATS
    ]


def available(weights: ModelWeights) -> bool:
    """Return True if the kernels are built and can read all of the model's weights."""
    return _takes(weights, weights.layers, (weights.norm_D,), ())


def draft_available(weights: ModelWeights) -> bool:
    """Return True if the model's MTP module was loaded and the kernels can read all its weights."""
    module = weights.mtp
    return module is not None and _takes(
        weights,
        (module.layer,),
        (module.enorm_D, module.hnorm_D, module.head_norm_D),
        (module.eh_proj,),
    )


def _takes(
    weights: ModelWeights,
    layers: Sequence[LayerWeights],
    vectors: Sequence[Tensor],
    matrices: Sequence[Matrix],
) -> bool:
    of_layers = [x for layer in layers for x in _vectors(layer) if x is not None]
    return (
        library.load() is not None
        and library.fits(weights.cos_sin, *vectors, *of_layers)
        and takes(
            weights.embed, weights.head, *matrices, *(x for y in layers for x in _matrices(y))
        )
    )


class DecodeStep:
    """Decode step of one model over one cache, for up to `max_batch` rows. One call at a time."""

    def __init__(
        self,
        weights: ModelWeights,
        cache_PLSD: Tensor,
        max_batch: int,
        num_threads: int | None = None,
    ) -> None:
        """Raise ValueError if `available` is false for these weights, if `max_batch` is below 1, or
        if the cache or a weight does not match the config.
        """
        if not available(weights):
            raise ValueError(
                "the step needs built kernels and weights on the CPU; ask available()."
            )
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}; it must be positive.")
        _check_cache(weights, cache_PLSD, len(weights.layers))
        _check_weights(weights)
        library.check_shape("norm_D", weights.norm_D, (weights.config.hidden_size,))
        for index, layer in enumerate(weights.layers):
            _check_layer(layer, f"layer {index}", weights.config)
        self.max_batch = max_batch
        shape = _shape(weights, cache_PLSD, len(weights.layers), max_batch, max_batch)
        module = None, None, None
        self._step = _Step(
            weights, cache_PLSD, shape, weights.norm_D, module, weights.layers, num_threads
        )

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, block_table_BM: Tensor) -> Tensor:
        """Write each token's entries at its position, and return the logits [B, V] for the next token.

        The result is a view of a buffer that the next call overwrites. Raises ValueError if a
        shape, token, position or block is out of range; nothing has been written then.
        """
        batch = len(tokens_B)
        if not 0 <= batch <= self.max_batch:
            raise ValueError(f"{batch} rows; this step was made for at most {self.max_batch}.")
        _check_rows("B", tokens_B, positions_B, block_table_BM)
        return self._step.run(tokens_B, positions_B, block_table_BM, None, batch)

    def hidden(self, batch: int) -> Tensor:
        """Return the last call's hidden states [B, D] after the last norm (input of the head and an
        MTP module), as a view of a buffer that the next call overwrites.
        """
        return self._step.normed_BD[:batch]


class _DraftTableStruct(ctypes.Structure):
    """Same layout as DraftTable in cpu/draft.h."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("drafts_SK", "num_drafts_S", "num_written_S", "tokens_SP", "hidden_SPD")
    ] + [(name, ctypes.c_int32) for name in "SKD"]


class DraftTable:
    """Arrays of a rank for the MTP module, by slot, on the CPU; integers are int64. C++ reads and
    writes them in place. `hadal.model.drafts.Drafter` documents them.
    """

    def __init__(
        self,
        drafts_SK: np.ndarray,
        num_drafts_S: np.ndarray,
        num_written_S: np.ndarray,
        tokens_SP: np.ndarray,
        hidden_SPD: Tensor,
    ) -> None:
        lib = library.load()
        assert lib is not None, "ask draft_available() first"
        self._kept = drafts_SK, num_drafts_S, num_written_S, tokens_SP, hidden_SPD
        arrays = [array.ctypes.data for array in self._kept[:-1]]
        num_slots, num_drafts_max = drafts_SK.shape
        self._c = _DraftTableStruct(
            *arrays, hidden_SPD.data_ptr(), num_slots, num_drafts_max, hidden_SPD.shape[-1]
        )
        self.address = ctypes.addressof(self._c)
        self._note = lib.hadal_note

    def note(
        self,
        slots_N: np.ndarray,
        positions_N: np.ndarray,
        tokens_N: np.ndarray,
        rows_N: np.ndarray,
        hidden_RD: Tensor,
    ) -> None:
        """Store drawn tokens, and for each the state of the position before, row `rows_N` of
        `hidden_RD` (zeros at a block's start). Raises ValueError for a slot or row out of range.
        """
        num_tokens = len(slots_N)
        library.check_array("slots_N", slots_N, num_tokens, np.int64)
        library.check_array("positions_N", positions_N, num_tokens, np.int64)
        library.check_array("tokens_N", tokens_N, num_tokens, np.int64)
        library.check_array("rows_N", rows_N, num_tokens, np.int64)
        library.check_shape("hidden_RD", hidden_RD, (len(hidden_RD), self._c.D))
        hidden_RD = hidden_RD.to(torch.float32).contiguous()
        library.check_status(
            self._note(
                self.address,
                num_tokens,
                slots_N.ctypes.data,
                positions_N.ctypes.data,
                tokens_N.ctypes.data,
                rows_N.ctypes.data,
                len(hidden_RD),
                hidden_RD.data_ptr(),
            )
        )


class DraftStep:
    """Step of a model's MTP module (DeepSeek-V3, arXiv 2412.19437, eq. 21-23) over the model's
    cache: its entries are in the cache layer after the model's last one. One call at a time.
    """

    def __init__(
        self,
        weights: ModelWeights,
        cache_PLSD: Tensor,
        max_rows: int,
        num_threads: int | None = None,
        max_full: int | None = None,
    ) -> None:
        """`max_rows`: most rows per call; `max_full`: most rows that draft (None: all). Raises
        ValueError if not `draft_available(weights)`, if the cache has no layer for the module, or
        if a number or a weight's shape is wrong.
        """
        module = weights.mtp
        if module is None or not draft_available(weights):
            raise ValueError(
                "the step needs built kernels and an MTP module whose weights are on the CPU; ask"
                " draft_available()."
            )
        max_full = max_rows if max_full is None else max_full
        if not 1 <= max_full <= max_rows:
            raise ValueError(
                f"max_full is {max_full} of {max_rows} rows; it must be at least 1 and at most all"
                " rows."
            )
        config, index = weights.config, len(weights.layers)
        dim = config.hidden_size
        _check_cache(weights, cache_PLSD, index + 1)
        _check_weights(weights)
        for name in ("enorm_D", "hnorm_D", "head_norm_D"):
            library.check_shape(name, getattr(module, name), (dim,))
        library.check_shape("eh_proj", module.eh_proj, (dim, 2 * dim))
        _check_layer(module.layer, "the MTP module", config)
        self.max_rows, self.max_full = max_rows, max_full
        lib = library.load()
        assert lib is not None, "it is available"
        self._draft = lib.hadal_draft
        shape = _shape(weights, cache_PLSD, 1, max_rows, max_full)
        shape.first_layer, shape.first_position = index, 1
        self._step = _Step(
            weights,
            cache_PLSD,
            shape,
            module.head_norm_D,
            (module.enorm_D, module.hnorm_D, module.eh_proj),
            (module.layer,),
            num_threads,
        )

    @torch.inference_mode()
    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        block_table_TM: Tensor,
        hidden_TD: Tensor,
        num_full: int,
    ) -> Tensor:
        """Write the module's entry of each token at its position; return the logits [num_full, V]
        of the first `num_full` rows, each for the token after its own. `hidden_TD`: the normed
        hidden state of the position before each token, zeros at a block's first position; may be
        the result of `hidden`. The result is a view of a buffer that the next call overwrites.
        Raises ValueError if a shape, token, position or block is out of range or a row would draft
        at position 0; nothing has been written then.
        """
        num_rows = len(tokens_T)
        if not (0 <= num_rows <= self.max_rows and 0 <= num_full <= min(num_rows, self.max_full)):
            raise ValueError(
                f"{num_rows} rows of which {num_full} draft; this step was made for at most"
                f" {self.max_rows} of which {self.max_full} draft."
            )
        _check_rows("T", tokens_T, positions_T, block_table_TM)
        dim = self._step.normed_BD.shape[1]
        library.check_shape("hidden_TD", hidden_TD, (num_rows, dim))
        hidden_TD = hidden_TD.to(device="cpu", dtype=torch.float32).contiguous()
        return self._step.run(tokens_T, positions_T, block_table_TM, hidden_TD, num_full)

    def draft(
        self,
        table: DraftTable,
        num_drafts: int,
        slots_N: np.ndarray,
        positions_N: np.ndarray,
        rooms_N: np.ndarray,
        block_table_NM: Tensor,
    ) -> None:
        """Write each slot's missing entries, including that of its last token, at `positions_N`.
        Then draft `num_drafts` tokens greedily, fewer where a slot's `rooms_N` positions are full.
        No slot may be listed twice. Raises ValueError if a value is out of range.
        """
        num_slots = len(slots_N)
        library.check_array("slots_N", slots_N, num_slots, np.int64)
        library.check_array("positions_N", positions_N, num_slots, np.int64)
        library.check_array("rooms_N", rooms_N, num_slots, np.int64)
        width = block_table_NM.shape[-1]
        library.check_shape("block_table_NM", block_table_NM, (num_slots, width))
        table_NM = library.as_int(block_table_NM, torch.int32)
        library.check_status(
            self._draft(
                *self._step.in_c,
                table.address,
                num_drafts,
                num_slots,
                slots_N.ctypes.data,
                positions_N.ctypes.data,
                rooms_N.ctypes.data,
                table_NM.data_ptr(),
                width,
                self._step.normed_BD.data_ptr(),
                self._step.logits_BV.data_ptr(),
            )
        )

    def hidden(self, num_full: int) -> Tensor:
        """Return the last call's hidden states [num_full, D] after the module's last norm (input of
        the head and a further draft), as a view of a buffer that the next call overwrites.
        """
        return self._step.normed_BD[:num_full]


class _Step:
    """Owner of a C++ Step and of the buffers that it fills. The caller has checked every shape."""

    def __init__(
        self,
        weights: ModelWeights,
        cache_PLSD: Tensor,
        shape: _StepShape,
        norm_D: Tensor,
        module: tuple[Tensor | None, Tensor | None, Matrix | None],
        layers: Sequence[LayerWeights],
        num_threads: int | None,
    ) -> None:
        """`norm_D`: the norm before the head. `module`: enorm, hnorm and eh_proj of an MTP module."""
        lib = library.load()
        assert lib is not None
        self._kept = (weights, cache_PLSD)  # C++ has their addresses, so they must stay alive.
        team = library.team(num_threads)
        self._shape = shape
        self.logits_BV = torch.empty((shape.max_batch, shape.vocab))
        self.normed_BD = torch.empty((shape.max_batch, shape.D))
        self._logits = [self.logits_BV[:num_rows] for num_rows in range(shape.max_batch + 1)]
        """Views by number of rows, made early: slicing releases the GIL and so delays a step."""
        whole = (norm_D, weights.cos_sin, weights.embed, weights.head, cache_PLSD, *module)
        parts = [part for layer in layers for part in (*_vectors(layer), *_matrices(layer))]
        handle = lib.hadal_step_new(
            team,
            ctypes.addressof(shape),
            (ctypes.c_void_p * len(whole))(*map(_address, whole)),
            (ctypes.c_void_p * len(parts))(*map(_address, parts)),
        )
        if not handle:
            raise MemoryError("the step's working memory could not be allocated.")
        self.in_c = handle, team, ctypes.addressof(shape)
        """First arguments of every C++ call: addresses of the step, its team and its shape."""
        self._run = lib.hadal_step_run
        weakref.finalize(self, lib.hadal_step_free, handle)

    def run(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        block_table_TM: Tensor,
        hidden_TD: Tensor | None,
        num_full: int,
    ) -> Tensor:
        """Return the logits [num_full, V] of the first rows. Raises ValueError if a value is out of
        range.
        """
        logits_BV = self._logits[num_full]
        if len(tokens_T) == 0:
            return logits_BV
        tokens_T, positions_T = (
            library.as_int(tokens_T, torch.int64),
            library.as_int(positions_T, torch.int64),
        )
        table_TM = library.as_int(block_table_TM, torch.int32)
        library.check_status(
            self._run(
                *self.in_c,
                len(tokens_T),
                num_full,
                tokens_T.data_ptr(),
                positions_T.data_ptr(),
                table_TM.data_ptr(),
                table_TM.shape[1],
                None if hidden_TD is None else hidden_TD.data_ptr(),
                self.normed_BD.data_ptr(),
                logits_BV.data_ptr(),
            )
        )
        return logits_BV


def _address(part: Tensor | Matrix | MlpWeights | Experts | None) -> int | None:
    """Return the address of a part for C++; None for None."""
    if part is None:
        return None
    return part.data_ptr() if isinstance(part, Tensor) else address(part)


def _check_rows(letter: str, tokens: Tensor, positions: Tensor, block_table: Tensor) -> None:
    """Raise ValueError unless each row has a token, a position and a row of blocks."""
    num_rows = len(tokens)
    library.check_shape(f"tokens_{letter}", tokens, (num_rows,))
    library.check_shape(f"positions_{letter}", positions, (num_rows,))
    width = block_table.shape[-1]
    library.check_shape(f"block_table_{letter}M", block_table, (num_rows, width))


def _check_cache(weights: ModelWeights, cache_PLSD: Tensor, num_layers: int) -> None:
    num_blocks, cache_layers = cache_PLSD.shape[:2]
    wanted = (num_blocks, cache_layers, BLOCK_TOKENS, weights.config.entry_dim)
    library.check_shape("cache_PLSD", cache_PLSD, wanted)
    if not library.fits(cache_PLSD) or cache_layers < num_layers:
        raise ValueError(
            f"the cache must be contiguous FP32 on the CPU with {num_layers} layers or more."
        )


# A layer's weights, in the order of LayerPointers in cpu/step.h.
def _vectors(layer: LayerWeights) -> tuple[Tensor | None, ...]:
    """Return the norms and the gate, all in FP32."""
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


def _shape(
    weights: ModelWeights, cache_PLSD: Tensor, num_layers: int, max_rows: int, max_batch: int
) -> _StepShape:
    c = weights.config
    return _StepShape(
        vocab=c.vocab_size,
        D=c.hidden_size,
        num_layers=num_layers,
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
        max_rows=max_rows,
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


# C++ trusts the config's dimensions, so every tensor is checked against them.
def _check_weights(weights: ModelWeights) -> None:
    """Check the weights outside of the layers."""
    c = weights.config
    library.check_shape("embed", weights.embed, (c.vocab_size, c.hidden_size))
    library.check_shape("head", weights.head, (c.vocab_size, c.hidden_size))
    library.check_shape("cos_sin", weights.cos_sin, (weights.cos_sin.shape[0], c.qk_rope_head_dim))


def _check_layer(layer: LayerWeights, name: str, c: ModelConfig) -> None:
    dim, heads, rank = c.hidden_size, c.num_attention_heads, c.q_lora_rank
    queries = heads * c.qk_head_dim
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
        raise ValueError(f"{name} and the config do not agree on an indexer.")
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
            raise ValueError(
                f"{name} has {len(moe.experts)} experts; n_routed_experts is {c.n_routed_experts}."
            )
        for expert in range(len(moe.experts)):
            wanted += _mlp_shapes(moe.experts[expert], width, dim)
    for weight, shape in wanted:
        if (None if weight is None else tuple(weight.shape)) != shape:
            raise ValueError(f"a weight of {name} does not have the config's shape {shape}.")


def _mlp_shapes(
    mlp: MlpWeights, width: int, dim: int
) -> list[tuple[Tensor | Matrix | None, tuple[int, ...] | None]]:
    return [(mlp.gate, (width, dim)), (mlp.up, (width, dim)), (mlp.down, (dim, width))]
