"""Decode steps of one rank: draw a token for every slot that does not rest, and verify and draft
speculative tokens. Independent of requests and of the wire. A rank with peers also runs steps
without rows, because all ranks of a unit step together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hadal.core.drafts import compared
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.plans import DecodePlan
from hadal.model.batch import take
from hadal.model.deepseek import DeepseekV3, Rows
from hadal.model.drafts import Drafter
from hadal.model.execute import Recorder
from hadal.model.membership import log_failure
from hadal.model.mtp import MtpModule
from hadal.model.rank_table import RankTable
from hadal.model.sampler import NO_ROWS, NOTHING_DRAWN, Drawn, Sampler, joined
from hadal.overlap.plan import schedule_named


@dataclass(frozen=True, slots=True)
class _Fed:
    """Rows that a decode step feeds, R in all: for each row of the table its last token, then its
    drafts to verify.
    """

    num_B: np.ndarray
    """Fed rows per row of the table."""
    of_R: np.ndarray
    """Row of the table to which each fed row belongs."""
    tokens_R: np.ndarray
    """Token that each row feeds; the step writes its KV."""
    positions_R: np.ndarray
    """Position of each fed token."""


class DecodeSteps:
    """Executor of decode plans on a model and its cache."""

    def __init__(
        self,
        model: DeepseekV3,
        max_slots: int,
        module: MtpModule | None,
        num_drafts_max: int,
        new_sampler: Callable[[], Sampler],
        *,
        has_peers: bool,
    ) -> None:
        """`num_drafts_max`: most drafts of a slot in a step; 0 without the MTP module."""
        self._model = model
        self._max_slots = max_slots
        self._module = module
        self._num_drafts_max = num_drafts_max
        self._has_peers = has_peers
        self._device = model.cache.cache_PLSD.device
        self._is_prepared = False
        self._lost_slots: set[int] = set()
        """Slots that a failed step left without rows, until the leader sends a leave or join."""
        self._table = RankTable(max_slots, model.config.max_position_embeddings)
        self._drafter = None if module is None else Drafter(module, max_slots, num_drafts_max)
        self._new_sampler = new_sampler
        self._sampler = new_sampler()

    def restart(self) -> None:
        """Forget all rows, including lost ones: the leader sends all joins again."""
        self._clear_table()
        self._lost_slots.clear()
        self._sampler = self._new_sampler()

    def run(self, plan: DecodePlan, recorder: Recorder) -> tuple[list[int], Drawn]:
        """Run one step. Return the slot of each drawn token, and the tokens. Raises RuntimeError if
        the plan relies on rows that an earlier step lost.
        """
        table = self._table
        joining = {join.slot for join in plan.joins if join.slot < self._max_slots}
        # A plan made before the leader received the failure may rely on lost rows.
        self._lost_slots -= joining | set(plan.leaves)
        if self._lost_slots:
            self._lost_slots |= joining
            raise RuntimeError("the previous step failed")
        try:
            return self._rows(plan, recorder)
        except Exception:
            self._lost_slots = joining | set(table.occupied)
            self._clear_table()
            raise

    def _rows(self, plan: DecodePlan, recorder: Recorder) -> tuple[list[int], Drawn]:
        self._change_table(plan)
        table = self._table
        if not self._is_prepared:
            self._model.prepare_decode(self._max_slots * (1 + self._num_drafts_max))
            if self._module is not None:
                # Per slot: up to `num_drafts_max` accepted drafts, then the row that drafts.
                max_rows = self._max_slots * (1 + self._num_drafts_max)
                self._module.prepare(max(max_rows, BLOCK_TOKENS), self._max_slots)
            self._is_prepared = True
        if not len(table) and not self._has_peers:
            return [], NOTHING_DRAWN
        passes = []
        for _ in range(plan.num_passes):
            if not len(table) and not self._has_peers:
                break
            slots_N, drawn = self._pass(plan, recorder)
            passes.append((slots_N, drawn))
            if table.note_ends(slots_N, drawn.tokens):
                table.rest(plan.resting)
        slots = [slot for slots_N, _ in passes for slot in slots_N.tolist()]
        return slots, joined([drawn for _, drawn in passes])

    def _pass(self, plan: DecodePlan, recorder: Recorder) -> tuple[np.ndarray, Drawn]:
        """Draw one token per slot and one more per correct draft; then draft for the next pass.
        Return each token's slot, and the tokens.
        """
        fed, sampler = self._fed(), self._sampler
        rows = self._table.slots_B, fed.num_B, fed.tokens_R
        sampler.begin(*rows)
        logits_RV, hidden_RD = self._logits(plan, fed, recorder)
        slots_N, drawn = NO_ROWS, NOTHING_DRAWN
        if len(self._table):
            masks = sampler.masks(*rows, recorder)
            recorder.begin("draw")
            drawn = sampler.draw(logits_RV, *rows, masks)
            slots_N = self._go_on(plan, fed, drawn, hidden_RD)
            recorder.end("draw")
        if len(fed.of_R) > len(fed.num_B):
            drawn = replace(drawn, drafts=compared(fed.num_B - 1, drawn.num_B - 1))
        self._draft(plan, recorder)
        return slots_N, drawn

    def _write_entries(self, rows: np.ndarray) -> None:
        """Write the missing MTP entries of these rows up to their last tokens, as far as their
        blocks have space.
        """
        assert self._drafter is not None
        table = self._table
        ends_B = np.minimum(table.positions_B + 1, table.rooms_B)
        table_NM = take(table.table_BM(int(table.positions_B.max())), rows)
        self._drafter.write(table.slots_B[rows], ends_B[rows], table_NM)

    def _clear_table(self) -> None:
        """Write the missing MTP entries, then clear the table: a later join assumes that they are
        written. Unwritten entries make drafts worse, but change no token.
        """
        table = self._table
        table.rest(())
        if self._drafter is not None:
            try:
                if len(table):
                    self._write_entries(np.arange(len(table)))
            except Exception as error:
                log_failure("entries of the MTP module were not written", error)
            for slot in table.occupied:
                self._drafter.leave(slot)
        table.clear()

    def _fed(self) -> _Fed:
        """Return the rows to feed: for each slot its last token, then its drafts that fit."""
        table, drafter = self._table, self._drafter
        positions_B = table.positions_B
        if drafter is not None and drafter.has_drafts:
            drafted_BK, num_B = drafter.checked(table.slots_B, positions_B, table.rooms_B)
            if num_B.any():
                tokens_BK = np.concatenate((table.tokens_B[:, None], drafted_BK), axis=1)
                is_fed_BK = np.arange(tokens_BK.shape[1]) <= num_B[:, None]
                of_R, within_R = is_fed_BK.nonzero()
                positions_R = positions_B[of_R] + within_R
                return _Fed(num_B + 1, of_R, tokens_BK[is_fed_BK], positions_R)
        num_rows = len(table)
        all_rows, num_B = np.arange(num_rows), np.ones(num_rows, np.int64)
        return _Fed(num_B, all_rows, table.tokens_B, positions_B)

    def _go_on(
        self, plan: DecodePlan, fed: _Fed, drawn: Drawn, hidden_RD: Tensor | None
    ) -> np.ndarray:
        """Advance the table by the drawn tokens, and publish blocks for other ranks or the caches.
        Return the tokens' slots.
        """
        table, drafter = self._table, self._drafter
        slots_N: np.ndarray = table.slots_B[fed.of_R[drawn.rows]]
        num_full_B = table.positions_B // BLOCK_TOKENS
        is_filling_B = (table.positions_B + drawn.num_B) // BLOCK_TOKENS > num_full_B
        if drafter is not None:
            assert hidden_RD is not None
            if is_filling_B.any():
                # The drafter stores one block's tokens: write their entries before the next block.
                self._write_entries(is_filling_B.nonzero()[0])
            positions_N = fed.positions_R[drawn.rows] + 1
            drafter.note(slots_N, positions_N, drawn.tokens, drawn.rows, hidden_RD)
        table.advance(drawn.tokens[drawn.num_B.cumsum() - 1], drawn.num_B)
        slots_B, positions_B = table.slots_B, table.positions_B
        if not plan.publishes and not is_filling_B.any():
            return slots_N
        is_moving_B = np.isin(slots_B, plan.publishes)
        rows = np.flatnonzero(is_moving_B | is_filling_B)
        if drafter is not None:
            # A slot that changes ranks also needs its last token's entry, if that block moves.
            ends_B = positions_B - positions_B % BLOCK_TOKENS
            ends_B[is_moving_B] = positions_B[is_moving_B] + (
                positions_B[is_moving_B] % BLOCK_TOKENS > 0
            )
            ends_B = np.minimum(ends_B, table.rooms_B)
            table_NM = take(table.table_BM(int(positions_B.max())), rows)
            drafter.write(slots_B[rows], ends_B[rows], table_NM)
        blocks = {block_id for slot in plan.publishes for block_id in table.written_blocks(slot)}
        if plan.publishes_full:
            blocks |= table.full_blocks(np.flatnonzero(is_filling_B), num_full_B)
        if blocks:
            self._model.cache.publish(sorted(blocks))
        return slots_N

    def _draft(self, plan: DecodePlan, recorder: Recorder) -> None:
        drafter, table = self._drafter, self._table
        if drafter is None or not (plan.num_drafts or drafter.has_drafts):
            return
        slots_B, positions_B = table.slots_B, table.positions_B
        last_position = int(positions_B.max(initial=0)) + plan.num_drafts
        drafter.draft(
            plan.num_drafts,
            slots_B,
            positions_B,
            table.rooms_B,
            table.table_BM(last_position),
            recorder,
        )

    def _change_table(self, plan: DecodePlan) -> None:
        table, sampler = self._table, self._sampler
        for slot in plan.leaves:
            table.leave(slot)
            sampler.leave(slot)
            if self._drafter is not None:
                self._drafter.leave(slot)
        for join in plan.joins:
            table.join(join)
            if join.is_pulled:
                self._model.cache.fetch(join.block_ids[: -(-join.num_tokens // BLOCK_TOKENS)])
            sampler.join(
                join.slot,
                join.sampling,
                join.output_index,
                prompt=join.prompt,
                output=join.output,
                stop_ids=join.stop_ids,
                min_tokens=join.min_tokens,
            )
            if self._drafter is not None:
                self._drafter.join(join.slot, join.num_tokens, join.last_token)
        for slot, index, block_id in plan.grown:
            table.grow(slot, index, block_id)
        table.rest(plan.resting)

    def _placed(self, tensor: Tensor) -> Tensor:
        """Move a tensor to the model's device. On a CPU run no torch op: each releases the GIL."""
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _logits(
        self, plan: DecodePlan, fed: _Fed, recorder: Recorder
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [R, V] of the fed rows and, with an MTP module, their hidden states [R, D]."""
        table_BM = self._table.table_BM(int(fed.positions_R.max(initial=0)))
        is_plain = len(fed.of_R) == len(self._table)
        table_RM = self._placed(table_BM if is_plain else take(table_BM, fed.of_R))
        tokens_R = self._placed(torch.from_numpy(fed.tokens_R))
        positions_R = self._placed(torch.from_numpy(fed.positions_R))
        has_drafts = self._drafter is not None
        if plan.num_micro_batches == 1 and self._model.has_fused_step:
            recorder.begin("step")
            logits_RV = self._model.decode(tokens_R, positions_R, table_RM)
            recorder.end("step")
            return logits_RV, self._model.decoded_hidden(len(fed.of_R)) if has_drafts else None
        parts = [np.arange(len(fed.of_R))]
        if plan.num_micro_batches == 2:
            # A slot's drafts must be in the micro-batch of its last token.
            second_B = np.zeros(len(self._table), np.bool_)
            second_B[self._table.split(plan.second)[1]] = True
            parts = [np.flatnonzero(~second_B[fed.of_R]), np.flatnonzero(second_B[fed.of_R])]
        split: list[Rows] = []
        for part in parts:
            index = torch.from_numpy(part).to(self._device)
            split.append((tokens_R[index], positions_R[index], table_RM[index]))
        outputs = self._model.decode_rows(split, schedule_named(plan.schedule), recorder)
        logits_RV, hidden_RD = (torch.cat([output[i] for output in outputs]) for i in (0, 1))
        if len(parts) > 1:
            back = torch.from_numpy(np.argsort(np.concatenate(parts))).to(self._device)
            logits_RV, hidden_RD = logits_RV[back], hidden_RD[back]
        return logits_RV, hidden_RD
