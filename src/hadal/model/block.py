"""One decoder layer as small ops on a micro-batch's state. Ops are independent of the schedule that
orders them.

Each op reads the results of earlier ops from the state and adds its own; `OPS` lists them by their
names in overlap/plan. A dense layer has no gate, no experts and no exchange: its network runs as
`shared`. Without a `comm` all experts are local, and nothing is exchanged. With one, a rank without
tokens still joins every exchange and computes the experts of the rows that it receives.

Shapes: T tokens, D hidden, H heads, K chosen experts, N rows received, M pairs of a received row
and a local expert slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.comm.expert_comm import ExpertComm, Handle, Received
from hadal.comm.group import Interval
from hadal.core.model_config import ModelConfig
from hadal.kernels.experts import experts as routed_experts
from hadal.kernels.experts import gate as choose_experts
from hadal.kernels.products import linear, rms_norm, swiglu
from hadal.model import mla
from hadal.model.batch import DecodeBatch, PrefillBatch
from hadal.overlap import plan
from hadal.reference.params import Experts, LayerWeights


@dataclass(slots=True)
class MicroBatch:
    """Tokens that pass through the layers together, and results of the current layer's ops."""

    batch: PrefillBatch | DecodeBatch | None
    """None if the rank has no tokens in this micro-batch."""
    config: ModelConfig
    hidden_TD: Tensor
    """Residual stream."""
    comm: ExpertComm | None = None
    final_layer: int | None = None
    """Layer in which rows that need no logits stop once their KV is written; None: no row stops."""
    queries: mla.Queries | None = None
    entries_TD: Tensor | None = None
    """New cache entry of each token."""
    x_TD: Tensor | None = None
    """Normed input of the feed-forward part."""
    ids_TK: Tensor | None = None
    weights_TK: Tensor | None = None
    handle: Handle | None = None
    received: Received | None = None
    y_MD: Tensor | None = None
    """Results of this rank's experts, to be sent back to the rows' source ranks."""
    shared_TD: Tensor | None = None
    routed_TD: Tensor | None = None


Op = Callable[[MicroBatch, LayerWeights, int], Interval | None]
"""Op of a layer. A finishing op returns the interval for which its exchange was on the link."""


def attn_in(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Project queries and cache entries, and write the entries to the cache."""
    batch, config = state.batch, state.config
    if batch is None:
        return
    cos_sin = batch.cos_sin_TR if isinstance(batch, PrefillBatch) else batch.cos_sin_BR
    x_TD = _norm(state.hidden_TD, layer.attn_norm_D, config)
    if layer_index == state.final_layer:
        assert isinstance(batch, PrefillBatch)
        state.entries_TD = mla.entries(x_TD, layer.attention, config, cos_sin)
        rows = batch.final_rows
        state.hidden_TD = state.hidden_TD[rows]
        x_TD, cos_sin = x_TD[rows], cos_sin[rows]
    else:
        state.entries_TD = mla.entries(x_TD, layer.attention, config, cos_sin)
    if len(x_TD):
        state.queries = mla.queries(
            x_TD, layer.attention, config, cos_sin, is_selecting=batch.is_selecting
        )
    batch.write(layer_index, state.entries_TD)


def attn_core(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Attend, add the result to the residual stream, and norm the feed-forward part's input."""
    if not len(state.hidden_TD):
        return
    queries, entries_TD = state.queries, state.entries_TD
    assert queries is not None
    assert entries_TD is not None
    if isinstance(state.batch, PrefillBatch):
        o = mla.prefill_core_attention(
            queries,
            entries_TD,
            layer.attention,
            state.config,
            state.batch,
            layer_index,
            final_only=layer_index == state.final_layer,
        )
    else:
        assert state.batch is not None
        o = mla.decode_core_attention(
            queries, layer.attention, state.config, state.batch, layer_index
        )
    state.hidden_TD = state.hidden_TD + linear(o, layer.attention.o)
    state.x_TD = _norm(state.hidden_TD, layer.ffn_norm_D, state.config)
    state.queries = state.entries_TD = None


def gate(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Choose every token's experts."""
    if layer.moe is not None and len(state.hidden_TD):
        assert state.x_TD is not None
        state.ids_TK, state.weights_TK = choose_experts(
            state.x_TD, layer.moe.router, layer.moe.router_bias_E, state.config
        )


def dispatch_start(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Send tokens to the ranks of their experts."""
    if layer.moe is None or state.comm is None:
        return
    if not len(state.hidden_TD):
        state.x_TD = state.hidden_TD
        none_TK = (0, state.config.num_experts_per_tok)
        state.ids_TK = torch.empty(none_TK, dtype=torch.int64, device=state.hidden_TD.device)
        state.weights_TK = torch.empty(none_TK, device=state.hidden_TD.device)
    assert state.x_TD is not None
    assert state.ids_TK is not None
    moe_layer = layer_index - state.config.first_k_dense_replace
    state.handle = state.comm.dispatch(state.x_TD.float(), state.ids_TK, moe_layer)


def dispatch_finish(state: MicroBatch, layer: LayerWeights, layer_index: int) -> Interval | None:
    """Receive the rows that other ranks sent. Return when the exchange was on the link."""
    if state.handle is None:
        return None
    state.received = state.handle.finish_dispatch()
    return state.handle.dispatch_interval


def shared(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Compute the shared expert, or a dense layer's network."""
    if not len(state.hidden_TD):
        return
    assert state.x_TD is not None
    mlp = layer.mlp if layer.moe is None else layer.moe.shared
    assert mlp is not None
    state.shared_TD = swiglu(state.x_TD, mlp)


def experts(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Compute this rank's routed experts: without a `comm` on the rank's own tokens, weighted; with
    a `comm` on the received rows, unweighted, because the source rank applies the weights.
    """
    moe = layer.moe
    if moe is None:
        return
    if state.comm is not None:
        assert state.received is not None
        state.y_MD = _received_experts(state.received, moe.experts, state.hidden_TD.dtype)
        state.received = None
    elif len(state.hidden_TD):
        assert state.x_TD is not None
        assert state.ids_TK is not None
        assert state.weights_TK is not None
        state.routed_TD = routed_experts(state.x_TD, moe.experts, state.ids_TK, state.weights_TK)


def _received_experts(rows: Received, held: Experts, dtype: torch.dtype) -> Tensor:
    """Return each pair's expert output, [M, D] in FP32; computed in `dtype`."""
    x_MD = rows.x_ND.index_select(0, rows.row_M)
    if not len(x_MD):
        return x_MD
    ones_M1 = torch.ones((len(x_MD), 1), device=x_MD.device)
    return routed_experts(x_MD.to(dtype), held, rows.expert_slot_M[:, None], ones_M1).float()


def combine_start(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Send the experts' results back to the source ranks."""
    if state.handle is not None:
        assert state.y_MD is not None
        state.handle.start_combine(state.y_MD)


def combine_finish(state: MicroBatch, layer: LayerWeights, layer_index: int) -> Interval | None:
    """Add the experts' results to the residual stream. Return when the exchange was on the link."""
    interval = None
    if state.handle is not None:
        assert state.weights_TK is not None
        state.routed_TD = state.handle.finish_combine(state.weights_TK).to(state.hidden_TD.dtype)
        interval = state.handle.combine_interval
    if len(state.hidden_TD):
        assert state.shared_TD is not None
        state.hidden_TD = state.hidden_TD + state.shared_TD
        if state.routed_TD is not None:
            state.hidden_TD = state.hidden_TD + state.routed_TD
    state.x_TD = state.ids_TK = state.weights_TK = state.shared_TD = state.routed_TD = (
        state.y_MD
    ) = None
    state.handle = None
    return interval


OPS: dict[str, Op] = {
    plan.ATTN_IN: attn_in,
    plan.ATTN_CORE: attn_core,
    plan.GATE: gate,
    plan.DISPATCH_START: dispatch_start,
    plan.DISPATCH_FINISH: dispatch_finish,
    plan.SHARED: shared,
    plan.EXPERTS: experts,
    plan.COMBINE_START: combine_start,
    plan.COMBINE_FINISH: combine_finish,
}


def _norm(x_TD: Tensor, weight_D: Tensor, config: ModelConfig) -> Tensor:
    return rms_norm(x_TD, weight_D, config.rms_norm_eps)
