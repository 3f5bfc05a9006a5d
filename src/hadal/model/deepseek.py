"""DeepSeek-V3: embedding, layers and head, over one rank's weights and KV cache.

Depends on chunks and block tables, not on requests: batches, block allocation and sampling are
decided elsewhere. With a `comm` the experts are spread over the unit's ranks. All ranks then run
the layers together, with the same schedule and number of micro-batches, even without tokens.

Shapes: T tokens, B decode rows, M blocks of a request, V vocabulary, D hidden, N chunks that need
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.group import Interval
from hadal.core.model_config import ModelConfig
from hadal.core.plans import Chunk, Score
from hadal.kernels import decode_step
from hadal.kernels.decode_step import DecodeStep
from hadal.kernels.products import linear
from hadal.model.batch import DecodeBatch, PrefillBatch, decode_batch, prefill_batch
from hadal.model.block import OPS, MicroBatch
from hadal.model.cache import KvCache
from hadal.model.execute import Recorder, execute
from hadal.overlap.plan import SEQUENTIAL, Schedule
from hadal.reference.params import LayerWeights, ModelWeights

Rows = tuple[Tensor, Tensor, Tensor]
"""Rows of a decode micro-batch: tokens_B and positions_B (int64), block_table_BM (int32)."""
_SCORED_AT_ONCE = 32
"""Rows scored at a time: the logits of a whole chunk would take hundreds of MiB."""


class DeepseekV3:
    """Model of one rank. Calls must not overlap, because they write to the cache."""

    def __init__(
        self, weights: ModelWeights, cache: KvCache, comm: ExpertComm | None = None
    ) -> None:
        """`weights`: with a `comm`, only with the experts in this rank's slots (model/experts)."""
        self.weights = weights
        self.cache = cache
        self.comm = comm
        self._fused_step: DecodeStep | None = None
        self._has_fused_step = comm is None and decode_step.available(weights)

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    def prefill(self, chunks: Sequence[Chunk], wanted: Sequence[int] | None = None) -> Tensor:
        """Compute several chunks at once and write their KV. Return logits [N, V] after the last
        token of each wanted chunk. `wanted`: indices of chunks, ascending; None: all. A chunk's
        blocks must contain its context and have space for its tokens.
        """
        final_chunks = range(len(chunks)) if wanted is None else wanted
        return self.prefill_split([chunks], [final_chunks])[0]

    @torch.inference_mode()
    def prefill_split(
        self,
        chunks: Sequence[Sequence[Chunk]],
        wanted: Sequence[Sequence[int]],
        schedule: Schedule = SEQUENTIAL,
        recorder: Recorder | None = None,
        *,
        on_hidden: Callable[[int, PrefillBatch, Tensor], None] | None = None,
    ) -> list[Tensor]:
        """Run `prefill` on one or two micro-batches. If both have chunks of one prompt, the second
        has the later tokens. `on_hidden` is called in order for each micro-batch with tokens, with
        its index, its batch, and hidden states [T, D] of all its tokens after the last norm.
        """
        states = []
        for part, final_chunks in zip(chunks, wanted, strict=True):
            state = self._start(self._prefill_batch(part, final_chunks) if part else None)
            if on_hidden is None:
                # After the last layer's KV, only tokens that need logits are computed.
                state.final_layer = len(self.weights.layers) - 1
            states.append(state)
        recorder = recorder if recorder is not None else Recorder()
        self._through_layers(states, schedule, recorder)
        logits = []
        for index, state in enumerate(states):
            recorder.begin("head")
            hidden_TD = self._norm(state.hidden_TD)
            if on_hidden is not None and isinstance(state.batch, PrefillBatch):
                on_hidden(index, state.batch, hidden_TD)
                hidden_TD = hidden_TD[state.batch.final_rows]
            logits.append(self.head(hidden_TD))
            recorder.end("head", index)
        return logits

    @torch.inference_mode()
    def scores(self, hidden_TD: Tensor, tokens: Sequence[int], num_top: int) -> tuple[Score, ...]:
        """Return each token's log-probability and rank, and the `num_top` likeliest tokens, without
        sampling parameters. `hidden_TD`: after the last norm, of the positions before these tokens.
        """
        scores: list[Score] = []
        for first in range(0, len(tokens), _SCORED_AT_ONCE):
            part = tokens[first : first + _SCORED_AT_ONCE]
            logits_TV = self.head(hidden_TD[first : first + len(part)]).float()
            ids_T1 = torch.tensor(part, device=logits_TV.device)[:, None]
            chosen_T1 = logits_TV.gather(-1, ids_T1)
            ranks_T = 1 + (logits_TV > chosen_T1).sum(-1)
            totals_T1 = logits_TV.double().logsumexp(-1, keepdim=True)
            best_TK, ids_TK = logits_TV.topk(num_top)
            tops = zip(ids_TK.tolist(), (best_TK - totals_T1).tolist(), strict=True)
            scores += [
                Score(logprob, rank, tuple(zip(ids, logprobs, strict=True)))
                for logprob, rank, (ids, logprobs) in zip(
                    (chosen_T1 - totals_T1)[:, 0].tolist(), ranks_T.tolist(), tops, strict=True
                )
            ]
        return tuple(scores)

    @torch.inference_mode()
    def hidden(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run a prefill, but return every token's hidden state [T, D] after the last norm, which is
        the input of the head and the MTP module.
        """
        state = self._start(self._prefill_batch(chunks, ()))
        self._through_layers([state], SEQUENTIAL, Recorder())
        return self._norm(state.hidden_TD)

    @torch.inference_mode()
    def decode(self, tokens_B: Tensor, positions_B: Tensor, block_table_BM: Tensor) -> Tensor:
        """Write each token's KV at its position, and return logits [B, V] for the next token.
        Tokens and positions are int64. The result may be a view that the next call overwrites.
        """
        if self._has_fused_step:
            if self._fused_step is None or self._fused_step.max_batch < len(tokens_B):
                self.prepare_decode(len(tokens_B))
            assert self._fused_step is not None
            return self._fused_step(tokens_B, positions_B, block_table_BM)
        return self.decode_split([(tokens_B, positions_B, block_table_BM)])[0]

    @torch.inference_mode()
    def decode_split(
        self,
        rows: Sequence[Rows],
        schedule: Schedule = SEQUENTIAL,
        recorder: Recorder | None = None,
    ) -> list[Tensor]:
        """Run `decode` on one or two micro-batches, op by op. Return logits [B, V] of each."""
        return [logits_BV for logits_BV, _ in self.decode_rows(rows, schedule, recorder)]

    @torch.inference_mode()
    def decode_rows(
        self,
        rows: Sequence[Rows],
        schedule: Schedule = SEQUENTIAL,
        recorder: Recorder | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Run `decode_split`, but return pairs (logits [B, V], hidden states [B, D] after the last
        norm).
        """
        states = []
        for tokens_B, positions_B, block_table_BM in rows:
            batch = None
            if len(tokens_B):
                batch = decode_batch(
                    tokens_B,
                    positions_B,
                    block_table_BM,
                    self.cache.cache_PLSD,
                    self.weights.cos_sin,
                    self.config.index_topk,
                )
            states.append(self._start(batch))
        recorder = recorder if recorder is not None else Recorder()
        self._through_layers(states, schedule, recorder)
        outputs = []
        for index, state in enumerate(states):
            recorder.begin("head")
            hidden_BD = self._norm(state.hidden_TD)
            outputs.append((self.head(hidden_BD), hidden_BD))
            recorder.end("head", index)
        return outputs

    def decoded_hidden(self, batch: int) -> Tensor:
        """Return hidden states [B, D] after the last norm of the last fused `decode` call, as a
        view that the next call overwrites.
        """
        assert self._fused_step is not None
        return self._fused_step.hidden(batch)

    @property
    def has_fused_step(self) -> bool:
        """True if `decode` is one call into the C++ kernels."""
        return self._has_fused_step

    def prepare_decode(self, max_batch: int) -> None:
        """Allocate the fused step's buffers for up to `max_batch` rows, so that no step has to."""
        if self._has_fused_step:
            self._fused_step = DecodeStep(self.weights, self.cache.cache_PLSD, max_batch)

    def head(self, hidden_TD: Tensor) -> Tensor:
        """Return logits [T, V] of hidden states after the last norm."""
        return linear(hidden_TD, self.weights.head)

    def _prefill_batch(self, chunks: Sequence[Chunk], wanted: Sequence[int]) -> PrefillBatch:
        cache_PLSD, cos_sin = self.cache.cache_PLSD, self.weights.cos_sin
        return prefill_batch(chunks, wanted, cache_PLSD, cos_sin, self.config.index_topk)

    def _start(self, batch: PrefillBatch | DecodeBatch | None) -> MicroBatch:
        if batch is None:
            tokens_T = torch.empty(0, dtype=torch.int64, device=self.weights.norm_D.device)
        else:
            tokens_T = batch.tokens_T if isinstance(batch, PrefillBatch) else batch.tokens_B
        hidden_TD = self.weights.embed.rows(tokens_T)
        return MicroBatch(batch, self.config, hidden_TD, self.comm)

    def _through_layers(
        self, states: Sequence[MicroBatch], schedule: Schedule, recorder: Recorder
    ) -> None:
        run_layers(self.weights.layers, 0, states, schedule, recorder, self.comm)

    def _norm(self, hidden_TD: Tensor) -> Tensor:
        return F.rms_norm(
            hidden_TD, hidden_TD.shape[-1:], self.weights.norm_D, self.config.rms_norm_eps
        )


def run_layers(
    layers: Sequence[LayerWeights],
    first_layer: int,
    states: Sequence[MicroBatch],
    schedule: Schedule,
    recorder: Recorder,
    comm: ExpertComm | None,
) -> None:
    """Run the micro-batches through these layers. The first layer's KV is layer `first_layer` of
    the cache. On an exception, abandon the open exchanges and re-raise.
    """

    def run_op(state: MicroBatch, layer_index: int, op: str) -> Interval | None:
        return OPS[op](state, layers[layer_index - first_layer], layer_index)

    try:
        execute(schedule, len(layers), states, run_op, recorder, first_layer)
    except BaseException:
        if comm is not None:
            comm.abandon()
        raise
