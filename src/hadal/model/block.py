"""One decoder layer as small ops on a micro-batch's state. An op knows no schedule; schedules put them in order.

    attn_in -> attn_core -> gate -> dispatch -> shared -> experts -> combine

Each op reads what those before it left in the state and leaves its own. A dense layer has no gate and no experts: its
network runs as `shared`. With one rank `dispatch` and `combine` move nothing.

Shapes: T tokens, D hidden, H heads, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hadal.core.model_config import ModelConfig
from hadal.kernels.experts import experts as routed_experts
from hadal.kernels.gate import gate as choose_experts
from hadal.kernels.linear import linear
from hadal.kernels.rms_norm import rms_norm
from hadal.kernels.swiglu import swiglu
from hadal.model import mla
from hadal.model.batch import DecodeBatch, PrefillBatch
from hadal.reference.params import LayerWeights


@dataclass(slots=True)
class MicroBatch:
    """Tokens that go through the layers together, and what the ops of the running layer have left."""

    batch: PrefillBatch | DecodeBatch
    config: ModelConfig
    hidden_TD: Tensor
    """The residual stream."""
    final_only: bool = False
    """Prefill's last layer: only the rows whose logits are wanted go on after their KV is written."""
    q_nope_THN: Tensor | None = None
    q_rope_THR: Tensor | None = None
    latents_TD: Tensor | None = None
    x_TD: Tensor | None = None
    """Normed input of the feed-forward part."""
    ids_TK: Tensor | None = None
    weights_TK: Tensor | None = None
    shared_TD: Tensor | None = None
    routed_TD: Tensor | None = None


Op = Callable[[MicroBatch, LayerWeights, int], None]


def attn_in(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Project queries and latents, write the latents to the cache."""
    batch, config = state.batch, state.config
    cos_sin = batch.cos_sin_TR if isinstance(batch, PrefillBatch) else batch.cos_sin_BR
    x_TD = _norm(state.hidden_TD, layer.attn_norm_D, config)
    if state.final_only:
        assert isinstance(batch, PrefillBatch)
        state.latents_TD = mla.latents(x_TD, layer.attention, config, cos_sin)
        rows = batch.final_rows
        state.hidden_TD = state.hidden_TD[rows]
        state.q_nope_THN, state.q_rope_THR = mla.queries(x_TD[rows], layer.attention, config, cos_sin[rows])
    else:
        state.q_nope_THN, state.q_rope_THR, state.latents_TD = mla.queries_and_latents(
            x_TD, layer.attention, config, cos_sin
        )
    batch.write(layer_index, state.latents_TD)


def attn_core(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Attend and project back into the residual stream."""
    q_nope, q_rope, latents_TD = state.q_nope_THN, state.q_rope_THR, state.latents_TD
    assert q_nope is not None
    assert q_rope is not None
    assert latents_TD is not None
    if isinstance(state.batch, PrefillBatch):
        o = mla.prefill_core(
            q_nope, q_rope, latents_TD, layer.attention, state.config, state.batch, layer_index,
            final_only=state.final_only,
        )
    else:
        o = mla.decode_core(q_nope, q_rope, layer.attention, state.config, state.batch, layer_index)
    state.hidden_TD = state.hidden_TD + linear(o, layer.attention.o)
    state.x_TD = _norm(state.hidden_TD, layer.ffn_norm_D, state.config)
    state.q_nope_THN = state.q_rope_THR = state.latents_TD = None


def gate(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Choose every token's experts."""
    if layer.moe is not None:
        assert state.x_TD is not None
        state.ids_TK, state.weights_TK = choose_experts(
            state.x_TD, layer.moe.router_ED, layer.moe.router_bias_E, state.config
        )


def dispatch(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Send tokens to the ranks of their experts. One rank holds all of them: nothing to send."""


def shared(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """The shared expert, or a dense layer's network."""
    assert state.x_TD is not None
    mlp = layer.mlp if layer.moe is None else layer.moe.shared
    assert mlp is not None
    state.shared_TD = swiglu(state.x_TD, mlp)


def experts(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """The routed experts of this rank."""
    if layer.moe is not None:
        assert state.x_TD is not None
        assert state.ids_TK is not None
        assert state.weights_TK is not None
        state.routed_TD = routed_experts(
            state.x_TD, layer.moe.gate_up_E, layer.moe.down_E, state.ids_TK, state.weights_TK
        )


def combine(state: MicroBatch, layer: LayerWeights, layer_index: int) -> None:
    """Add the experts' results to the residual stream."""
    assert state.shared_TD is not None
    state.hidden_TD = state.hidden_TD + state.shared_TD
    if state.routed_TD is not None:
        state.hidden_TD = state.hidden_TD + state.routed_TD
    state.x_TD = state.ids_TK = state.weights_TK = state.shared_TD = state.routed_TD = None


SEQUENTIAL: tuple[Op, ...] = (attn_in, attn_core, gate, dispatch, shared, experts, combine)


def _norm(x_TD: Tensor, weight_D: Tensor, config: ModelConfig) -> Tensor:
    return rms_norm(x_TD, weight_D, config.rms_norm_eps)
