"""Speculative decoding with the model's MTP module: the module's KV entries that are still to be
written, and the drafts that the next step verifies.

The module's entry at a position is computed from the token there and the model's hidden state of
the position before (eq. 21 of DeepSeek-V3, arXiv 2412.19437). At a block's first position that
state is zero: so a block depends only on its own and earlier text and can be found by its name.
Prefill writes the entries of the prompt's tokens, and of the first drawn token unless it begins a
block. A decode rank stores the inputs of later entries by slot, and writes these entries before it
drafts and when a block is full. By position, if one of two drafts is accepted:

    step        t d d           the last token, then its drafts
    drawn         x x           the accepted drafts, and one token more
    entries       x x           of these tokens, from the hidden states of the positions before them
    drafts            d d       new ones; their entries are overwritten once the tokens are known

A wrong or missing entry makes drafts worse but changes no output token. Shapes: S slots, N rows, K
drafts, D hidden, M blocks of a row, P = 64 positions of a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hadal.core.arrays import Ints
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.plans import DRAFT, Chunk
from hadal.kernels import library
from hadal.kernels.decode_step import DraftTable
from hadal.model.batch import likeliest, put, take
from hadal.model.execute import Recorder
from hadal.model.mtp import MtpModule


class Drafter:
    """Drafts and inputs of missing MTP entries, for each slot of a decode rank. A slot's position
    is its last token's; the next step writes that token's KV.
    """

    def __init__(self, module: MtpModule, max_slots: int, num_drafts_max: int) -> None:
        self.drafts_SK: Ints = np.zeros((max_slots, num_drafts_max), np.int64)
        self.num_drafts_S: Ints = np.zeros(max_slots, np.int64)
        self.has_drafts = False
        """False: no slot has drafts to verify, so steps skip the look-up. True: some slot may have
        some. A resting slot keeps its drafts.
        """
        self._module = module
        self._num_written_S: Ints = np.zeros(max_slots, np.int64)
        """Number of leading positions of each slot with an entry in the cache."""
        self._tokens_SP: Ints = np.zeros((max_slots, BLOCK_TOKENS), np.int64)
        """Tokens at positions without an entry yet, by position % 64."""
        model = module.model
        hidden_size, device = model.config.hidden_size, model.cache.cache_PLSD.device
        self._hidden_SPD = torch.zeros((max_slots, BLOCK_TOKENS, hidden_size), device=device)
        """Hidden states of the positions before `_tokens_SP`; zeros where a block begins."""
        self._table: DraftTable | None = None
        """View of the arrays above for the C++ kernels; None if they are not built or the device
        is no CPU.
        """
        if device.type == "cpu" and library.load() is not None:
            self._table = DraftTable(
                self.drafts_SK,
                self.num_drafts_S,
                self._num_written_S,
                self._tokens_SP,
                self._hidden_SPD,
            )

    def join(self, slot: int, position: int, token: int) -> None:
        """Add a request to a slot, with KV before its last token at `position`. The rank that
        computed the KV also wrote that token's entry, unless the token begins a new block.
        """
        within = position % BLOCK_TOKENS
        self.num_drafts_S[slot] = 0
        self._num_written_S[slot] = position + (within > 0)
        self._tokens_SP[slot, within] = token
        self._hidden_SPD[slot, within] = 0.0

    def leave(self, slot: int) -> None:
        """Drop the slot's drafts."""
        self.num_drafts_S[slot] = 0

    def checked(self, slots_N: Ints, positions_N: Ints, rooms_N: Ints) -> tuple[Ints, Ints]:
        """Return (drafts_NK, num_N): these slots' drafts, and how many of each the step verifies,
        so that their KV fits into the slot's `rooms_N` positions.
        """
        num_N: Ints = np.minimum(self.num_drafts_S[slots_N], rooms_N - 1 - positions_N)
        return self.drafts_SK[slots_N], np.maximum(num_N, 0, out=num_N)

    def note(
        self, slots_N: Ints, positions_N: Ints, tokens_N: Ints, rows_N: Ints, hidden_RD: Tensor
    ) -> None:
        """Store drawn tokens at these positions, with rows `rows_N` of `hidden_RD`: the model's
        states of the positions before. A slot may occur several times, with successive positions.
        Missing entries of an earlier block must be written before this call.
        """
        if self._table is not None:
            self._table.note(slots_N, positions_N, tokens_N, rows_N, hidden_RD)
            return
        within_N = positions_N % BLOCK_TOKENS
        self._tokens_SP[slots_N, within_N] = tokens_N
        hidden_ND = take(hidden_RD, rows_N).to(self._hidden_SPD.dtype)
        put(self._hidden_SPD, hidden_ND, slots_N, within_N)
        begins = (within_N == 0).nonzero()[0]
        put(self._hidden_SPD, 0.0, slots_N[begins], within_N[begins])

    def write(self, slots_N: Ints, ends_N: Ints, table_NM: Tensor) -> None:
        """Write these slots' missing entries up to `ends_N`, exclusive. `table_NM` must have their
        blocks.
        """
        rows, positions = self._missing(slots_N, ends_N)
        if len(rows):
            tokens, hidden = self._at(slots_N[rows], positions)
            self._module.write_rows(*self._rows(tokens, positions, table_NM, rows), hidden)
        self._num_written_S[slots_N] = np.maximum(self._num_written_S[slots_N], ends_N)

    def draft(
        self,
        num_drafts: int,
        slots_N: Ints,
        positions_N: Ints,
        rooms_N: Ints,
        table_NM: Tensor,
        recorder: Recorder,
    ) -> None:
        """Draft up to `num_drafts` tokens after each slot's last token (at `positions_N`). A slot's
        entries stay below position `rooms_N`: where that space ends, it gets fewer drafts or
        none. All ranks of a unit make the same number of passes, even a rank without rows.
        """
        self.num_drafts_S[slots_N] = 0
        self.has_drafts = num_drafts > 0 or bool(self.num_drafts_S.any())
        if num_drafts and self._table is not None and self._module.has_fused_step:
            recorder.begin(DRAFT)
            step = self._module.fused_step(len(slots_N), len(slots_N))
            step.draft(self._table, num_drafts, slots_N, positions_N, rooms_N, table_NM)
            recorder.end(DRAFT)
        elif num_drafts:
            with recorder.whole(DRAFT) as inner:
                self._passes(num_drafts, slots_N, positions_N, rooms_N, table_NM, inner)

    @torch.inference_mode()
    def _passes(
        self,
        num_drafts: int,
        slots_N: Ints,
        positions_N: Ints,
        rooms_N: Ints,
        table_NM: Tensor,
        recorder: Recorder,
    ) -> None:
        has_room_N = positions_N < rooms_N
        if not has_room_N.all():
            rows = has_room_N.nonzero()[0]
            slots_N, positions_N, rooms_N = slots_N[rows], positions_N[rows], rooms_N[rows]
            table_NM = take(table_NM, rows)
        num_rows = len(slots_N)
        self.num_drafts_S[slots_N] = num_drafts
        before, before_positions = self._missing(slots_N, positions_N)
        if 0 < self._module.max_rows < num_rows + len(before):  # The C++ code has the same limit.
            self.write(slots_N, positions_N, table_NM)
            before = before[:0]
        rows, slots, positions = np.arange(num_rows), slots_N, positions_N
        if len(before):
            rows = np.concatenate((rows, before))
            slots, positions = slots_N[rows], np.concatenate((positions_N, before_positions))
        tokens, hidden = self._at(slots, positions)
        for turn in range(num_drafts):
            logits_NV, states_ND = self._module.draft(
                *self._rows(tokens, positions, table_NM, rows), hidden, num_rows, recorder
            )
            if turn == 0:
                self._num_written_S[slots_N] = positions_N + 1
            # Greedy: drafts drawn with the sampler's own randomness were not accepted more often.
            tokens = likeliest(logits_NV)
            self.drafts_SK[slots_N, turn] = tokens
            if turn + 1 == num_drafts:
                break
            # Further drafts start from the module's own hidden state, as long as positions fit.
            rows, positions, hidden = rows[:num_rows], positions[:num_rows] + 1, states_ND
            has_room_N = positions < rooms_N
            if not has_room_N.all():
                self.num_drafts_S[slots_N[~has_room_N]] = turn + 1
                kept = has_room_N.nonzero()[0]
                rows, positions, tokens = rows[kept], positions[kept], tokens[kept]
                slots_N, rooms_N, num_rows = slots_N[kept], rooms_N[kept], len(kept)
                hidden = take(hidden, kept)
            begins = (positions % BLOCK_TOKENS == 0).nonzero()[0]
            if len(begins):
                put(hidden, 0.0, begins)

    def _missing(self, slots_N: Ints, ends_N: Ints) -> tuple[Ints, Ints]:
        """Return (indices into `slots_N`, positions) of missing entries before `ends_N`."""
        first_N = self._num_written_S[slots_N]
        num_N = np.maximum(ends_N - first_N, 0)
        if not num_N.any():
            return first_N[:0], first_N[:0]
        rows = np.repeat(np.arange(len(slots_N)), num_N)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(num_N) - num_N, num_N)
        return rows, first_N[rows] + within

    def _at(self, slots: Ints, positions: Ints) -> tuple[Ints, Tensor]:
        """Return tokens at these positions, and the hidden states before them."""
        within = positions % BLOCK_TOKENS
        return self._tokens_SP[slots, within], take(self._hidden_SPD, slots, within)

    def _rows(
        self, tokens: Ints, positions: Ints, table_NM: Tensor, rows: Ints
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = self._hidden_SPD.device
        parts = torch.from_numpy(tokens), torch.from_numpy(positions), take(table_NM, rows)
        return parts[0].to(device), parts[1].to(device), parts[2].to(device)


class PromptTails:
    """Hidden state of each prompt's last computed token, which the next chunk's first MTP entry
    needs.
    """

    def __init__(self, num_max: int) -> None:
        """`num_max`: maximum number of stored states; the oldest are dropped. Without its state, an
        entry is computed from zeros, as at the beginning of a block.
        """
        self._hidden: OrderedDict[str, tuple[int, Tensor]] = OrderedDict()
        """Request id -> (number of computed tokens, hidden state of the last one)."""
        self._num_max = num_max

    def before(self, chunk: Chunk) -> Tensor | None:
        """Remove and return the state [D] of the token before the chunk; None if it is unknown or
        the chunk begins a block.
        """
        end, hidden_D = self._hidden.pop(chunk.request_id, (0, None))
        return hidden_D if chunk.start % BLOCK_TOKENS and end == chunk.start else None

    def keep(self, chunk: Chunk, hidden_D: Tensor) -> None:
        """Store the hidden state of the chunk's last token."""
        self._hidden[chunk.request_id] = chunk.start + len(chunk.tokens), hidden_D.clone()
        if len(self._hidden) > self._num_max:
            self._hidden.popitem(last=False)

    def behind(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Remove and return the last states of these chunks, which complete their prompts."""
        return [self._hidden.pop(chunk.request_id)[1] for chunk in chunks]
