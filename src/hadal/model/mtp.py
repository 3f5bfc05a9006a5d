"""Multi-token-prediction (MTP) module, which drafts the token after next from the model's hidden
states.

Its KV is one more layer of the model's cache, after the model's own. Its entry at position q is
computed from token q and the model's hidden state, after the last norm, of position q-1:

    position           0        1        2   ...   63       64       65
    token             t0       t1       t2        t63      t64      t65
    hidden state       0       h0       h1        h62        0      h64     zeros where a block begins
    drafts                     t2       t3        t64      t65      t66

So a block's entries depend only on its own and earlier tokens: a prompt that continues from another
prompt's blocks needs no hidden state of that prompt. Position 0 has an entry, computed from zeros
and its token, because a block has no gaps. The module was trained without it, so no row attends to
it.

Prompt tokens and accepted drafts only write their entry; the last token of a sequence also drafts. For
each further draft, the hidden state after the module's last norm replaces the model's. With a `comm`
the module's experts are spread over the unit like a layer's. Source: DeepSeek-V3 (arXiv 2412.19437),
section 2.2, eq. 21-23. Shapes: T tokens or rows, S spans of a prefill batch, M blocks of a row, D
hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.plans import Chunk
from hadal.kernels.decode_step import DraftStep, draft_available
from hadal.kernels.products import linear, rms_norm
from hadal.model import mla
from hadal.model.batch import DecodeBatch, PrefillBatch, decode_batch
from hadal.model.block import MicroBatch
from hadal.model.deepseek import DeepseekV3, run_layers
from hadal.model.execute import Recorder
from hadal.overlap.plan import SEQUENTIAL
from hadal.reference.params import MtpWeights

FIRST_POSITION = 1
"""First position that is attended to, and at which a row can draft."""
_PIECE = 64
"""Number of rows that `right_drafts` drafts at a time."""


class MtpModule:
    """MTP module of one model, over the model's cache and with its `comm`. Calls must not overlap
    each other or the model's, because they write to the cache.
    """

    def __init__(self, model: DeepseekV3) -> None:
        """Raise ValueError if the weights or the cache lack the module's layer."""
        if model.weights.mtp is None:
            raise ValueError(
                "this model was read without its MTP module; read it with with_mtp=True"
            )
        self.model = model
        self._layer_index = model.config.num_hidden_layers
        if model.cache.cache_PLSD.shape[1] <= self._layer_index:
            raise ValueError(
                f"the cache has {model.cache.cache_PLSD.shape[1]} layers; the MTP module needs one"
                f" more than the model's {self._layer_index}."
            )
        self._fused_step: DraftStep | None = None
        moe = model.weights.mtp.layer.moe
        # Without experts the module only writes entries.
        can_draft = moe is None or len(moe.experts) > 0
        self._has_fused_step = model.comm is None and can_draft and draft_available(model.weights)

    @property
    def _module(self) -> MtpWeights:
        """Current weights of the module; flips may have replaced its experts."""
        assert self.model.weights.mtp is not None
        return self.model.weights.mtp

    @property
    def has_fused_step(self) -> bool:
        """True if `draft` is one call into the C++ kernels."""
        return self._has_fused_step

    @property
    def max_rows(self) -> int:
        """Rows per call that the buffers allow; 0: any number."""
        return self._fused_step.max_rows if self._fused_step is not None else 0

    def prepare(self, max_rows: int, max_full: int | None = None) -> None:
        """Allocate the fused step's buffers, so that no step has to, for up to `max_rows` rows, of
        which up to `max_full` draft (None: all).
        """
        if self._has_fused_step:
            weights, cache_PLSD = self.model.weights, self.model.cache.cache_PLSD
            self._fused_step = DraftStep(weights, cache_PLSD, max_rows, max_full=max_full)

    @torch.inference_mode()
    def write_entries(
        self, batch: PrefillBatch, hidden_TD: Tensor, before: Sequence[Tensor | None]
    ) -> None:
        """Write the entries of a prefill batch's tokens, without any exchange between ranks.
        `hidden_TD`: the model's states of all these tokens after the last norm. `before`: for each
        span the state [D] of the token before it; None: unknown, or unused because the span begins
        a block.
        """
        seen_TD = hidden_TD.roll(1, 0)
        for span, before_D in zip(batch.spans, before, strict=True):
            seen_TD[span.first] = 0.0 if before_D is None else before_D
        self._write(batch, _without_block_starts(seen_TD, batch.lengths_T - 1))

    @torch.inference_mode()
    def write_rows(
        self, tokens_T: Tensor, positions_T: Tensor, block_table_TM: Tensor, hidden_TD: Tensor
    ) -> None:
        """Write each row's entry at its position, without any exchange between ranks; arguments as
        in `draft`. Tokens, positions and table may be on the CPU.
        """
        device = hidden_TD.device
        tokens_T, positions_T = tokens_T.to(device), positions_T.to(device)
        block_table_TM = block_table_TM.to(device)
        piece = self.max_rows or max(1, len(tokens_T))
        for first in range(0, len(tokens_T), piece):
            of = slice(first, first + piece)
            rows = tokens_T[of], positions_T[of], block_table_TM[of]
            if self._has_fused_step:
                self.fused_step(len(rows[0]), 0)(*rows, hidden_TD[of], 0)
            else:
                self._write(self._batch(*rows), hidden_TD[of])

    @torch.inference_mode()
    def draft(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        block_table_TM: Tensor,
        hidden_TD: Tensor,
        num_full: int,
        recorder: Recorder | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Write each row's entry at its position, and draft with the first `num_full` rows. Return
        (logits [num_full, V] for the token after theirs, hidden [num_full, D] after the module's
        last norm, the input of a further draft). `hidden_TD`: the state of the position before each
        row's, zeros at a block's first position. With a `comm` all ranks make this call together,
        even without rows. The results may be views that the next call overwrites. Raises
        ValueError, before any write, if a row should draft at position 0 or `num_full` is not
        between 0 and the number of rows.
        """
        num_rows = len(tokens_T)
        if not 0 <= num_full <= num_rows:
            raise ValueError(f"num_full is {num_full}; it must be 0 to num_rows, {num_rows}.")
        if self._has_fused_step:
            step = self.fused_step(num_rows, num_full)
            logits = step(tokens_T, positions_T, block_table_TM, hidden_TD, num_full)
            return logits, step.hidden(num_full)
        if num_full and int(positions_T[:num_full].min()) < FIRST_POSITION:
            raise ValueError("a row is to draft at position 0, before which there is no token.")
        rows = tokens_T, positions_T, block_table_TM
        full, others = slice(num_full), slice(num_full, None)
        # Write these entries first: drafting rows of the same sequence may attend to them.
        if num_rows > num_full:
            self._write(self._batch(*(part[others] for part in rows)), hidden_TD[others])
        batch = self._batch(*(part[full] for part in rows)) if num_full else None
        return self._through_layer(batch, hidden_TD[full], recorder)

    def _through_layer(
        self, batch: DecodeBatch | None, seen_TD: Tensor, recorder: Recorder | None
    ) -> tuple[Tensor, Tensor]:
        """Return (logits, hidden states) of drafting rows; without rows, only join the exchanges."""
        recorder = recorder if recorder is not None else Recorder()
        weights, config, comm = self.model.weights, self.model.config, self.model.comm
        if batch is None:
            none_T = torch.empty(0, dtype=torch.int64, device=weights.norm_D.device)
            x_TD = weights.embed.rows(none_T)
        else:
            x_TD = self._combined(batch.tokens_B, seen_TD)
        state = MicroBatch(batch, config, x_TD, comm)
        layers = (self._module.layer,)
        run_layers(layers, self._layer_index, [state], SEQUENTIAL, recorder, comm)
        recorder.begin("head")
        hidden_TD = rms_norm(state.hidden_TD, self._module.head_norm_D, config.rms_norm_eps)
        logits_TV = linear(hidden_TD, weights.head)
        recorder.end("head")
        return logits_TV, hidden_TD

    def _write(self, batch: PrefillBatch | DecodeBatch, seen_TD: Tensor) -> None:
        """Write cache entries, like `attn_in` of a block but without queries."""
        config, layer = self.model.config, self._module.layer
        if isinstance(batch, PrefillBatch):
            tokens_T, cos_sin_TR = batch.tokens_T, batch.cos_sin_TR
        else:
            tokens_T, cos_sin_TR = batch.tokens_B, batch.cos_sin_BR
        x_TD = self._combined(tokens_T, seen_TD)
        x_TD = rms_norm(x_TD, layer.attn_norm_D, config.rms_norm_eps)
        entries_TD = mla.entries(x_TD, layer.attention, config, cos_sin_TR)
        batch.write(self._layer_index, entries_TD)

    def _combined(self, tokens_T: Tensor, seen_TD: Tensor) -> Tensor:
        """Return the input of the module's block, [T, D] (eq. 21)."""
        module, eps = self._module, self.model.config.rms_norm_eps
        embedded_TD = rms_norm(self.model.weights.embed.rows(tokens_T), module.enorm_D, eps)
        seen_TD = rms_norm(seen_TD, module.hnorm_D, eps)
        return linear(torch.cat((embedded_TD, seen_TD), dim=-1), module.eh_proj)

    def _batch(self, tokens_B: Tensor, positions_B: Tensor, block_table_BM: Tensor) -> DecodeBatch:
        return decode_batch(
            tokens_B,
            positions_B,
            block_table_BM,
            self.model.cache.cache_PLSD,
            self.model.weights.cos_sin,
            self.model.config.index_topk,
            FIRST_POSITION,
        )

    def fused_step(self, num_rows: int, num_full: int) -> DraftStep:
        """Return the fused step, with buffers for `num_rows` rows, `num_full` of them drafting."""
        step = self._fused_step
        if step is None:
            self.prepare(max(BLOCK_TOKENS, num_rows), max(1, num_full))
        elif step.max_rows < num_rows or step.max_full < num_full:
            self.prepare(max(step.max_rows, num_rows), max(step.max_full, num_full))
        assert self._fused_step is not None
        return self._fused_step


def _without_block_starts(hidden_TD: Tensor, positions_T: Tensor) -> Tensor:
    """Return `hidden_TD` with zeros in rows of positions where a block begins."""
    return hidden_TD.masked_fill((positions_T % BLOCK_TOKENS == 0)[:, None], 0.0)


@torch.inference_mode()
def right_drafts(module: MtpModule, tokens: Sequence[int], first: int) -> Tensor:
    """Return for each token from `first` on whether its draft equals the model's own choice, as
    bool. The drafts are those of a decode rank. Overwrites blocks 1, 2, ... of the cache. Raises
    ValueError unless `first` is between 2, the first token that can be drafted, and the last token.
    """
    if not 2 <= first < len(tokens):
        raise ValueError(
            f"first is {first}; it must be at least 2 and below the text's {len(tokens)} tokens"
        )
    model = module.model
    block_ids = tuple(range(1, 1 + -(-len(tokens) // BLOCK_TOKENS)))
    hidden_TD = model.hidden([Chunk("text", tuple(tokens[:-1]), 0, block_ids, None, 0)])
    chosen_T = model.head(hidden_TD).argmax(-1)  # chosen_T[i] is for position i + 1
    device = hidden_TD.device
    tokens_T = torch.tensor(tokens[1:-1], device=device)
    positions_T = torch.arange(1, len(tokens) - 1, device=device)
    seen_TD = _without_block_starts(hidden_TD[:-1], positions_T)
    table_1M = torch.tensor([block_ids], dtype=torch.int32, device=device)
    drafted = []
    for first_row in range(0, len(tokens_T), _PIECE):
        rows = slice(first_row, first_row + _PIECE)
        table_TM = table_1M.expand(len(tokens_T[rows]), -1)
        logits_TV, _ = module.draft(
            tokens_T[rows], positions_T[rows], table_TM, seen_TD[rows], len(table_TM)
        )
        drafted.append(logits_TV.argmax(-1))
    drafted_T = torch.cat(drafted)  # drafted_T[i] is for position i + 2
    return drafted_T[first - 2 :] == chosen_T[first - 1 :]
