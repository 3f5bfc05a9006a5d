"""The Runner of one rank: executes step plans on a model, one at a time, and answers each with its tokens.

Knows no requests and no wire. A step that fails is answered with its error; it never ends the thread that runs it.
"""

from __future__ import annotations

import logging
import time

import numpy as np
from torch import Tensor

from hadal.core.plans import Chunk, DecodePlan, FormPlan, PrefillPlan, StepDone, StepPlan
from hadal.model.deepseek import DeepseekV3
from hadal.model.sampler import Drawn, Sampler
from hadal.model.table import RankTable

_log = logging.getLogger(__name__)


class ModelRunner:
    """Implements core.seams.Runner over a model and its cache."""

    def __init__(self, model: DeepseekV3, max_slots: int) -> None:
        """`max_slots`: rows of a decode step, and chunks of a prefill step that draw a token."""
        config = model.config
        self._model = model
        self._max_slots = max_slots
        self._device = model.cache.cache_PLSD.device
        self._is_prepared = False
        self._lost_slots: set[int] = set()
        """Slots whose rows a failed step took with it, until the leader makes them leave or joins them anew."""
        self._table = RankTable(max_slots, config.max_position_embeddings)
        # Two, because a slot number means something else in each kind of plan.
        self._prefill_sampler = Sampler(max_slots, config.vocab_size, self._device)
        self._decode_sampler = Sampler(max_slots, config.vocab_size, self._device)

    def execute(self, plan: StepPlan | FormPlan) -> StepDone:
        """Run one step. After an error the leader gives every request of the step back, else those that failed."""
        assert not isinstance(plan, FormPlan)
        start_s = time.perf_counter()
        try:
            keys, drawn = self._prefill(plan) if isinstance(plan, PrefillPlan) else self._decode(plan)
        except Exception as error:
            _log.exception("step %d failed", plan.step_id)
            elapsed_s = time.perf_counter() - start_s
            return StepDone(plan.step_id, (), (), {}, elapsed_s, f"{type(error).__name__}: {error}")
        for key, reason in drawn.failed.items():
            _log.error("step %d, key %d: %s", plan.step_id, key, reason)
        elapsed_s = time.perf_counter() - start_s
        return StepDone(
            plan.step_id, tuple(keys), tuple(drawn.tokens.tolist()), drawn.draws, elapsed_s, failed=drawn.failed
        )

    def abort(self) -> None:
        """A rank by itself waits for nobody."""

    def close(self) -> None:
        """Nothing is held beyond memory."""

    def _prefill(self, plan: PrefillPlan) -> tuple[list[int], Drawn]:
        wanted = [index for index, chunk in enumerate(plan.chunks) if chunk.sampling is not None]
        if len(wanted) > self._max_slots:
            raise ValueError(f"{len(wanted)} chunks draw a token; this rank was made for {self._max_slots}")
        logits_NV = self._model.prefill(plan.chunks, wanted)
        if not wanted:
            return [], Drawn(np.zeros(0, np.int64))
        for slot, index in enumerate(wanted):
            self._join(slot, plan.chunks[index])
        drawn = self._prefill_sampler.draw(logits_NV, np.arange(len(wanted)))
        for slot in range(len(wanted)):
            self._prefill_sampler.leave(slot)
        draws = {wanted[slot]: draw for slot, draw in drawn.draws.items()}
        return wanted, Drawn(drawn.tokens, draws, {wanted[slot]: reason for slot, reason in drawn.failed.items()})

    def _join(self, slot: int, chunk: Chunk) -> None:
        assert chunk.sampling is not None
        self._prefill_sampler.join(
            slot, chunk.sampling, chunk.output_index, prompt=chunk.prompt, output=chunk.output,
            stop_ids=chunk.stop_ids, min_tokens=chunk.min_tokens,
        )

    def _decode(self, plan: DecodePlan) -> tuple[list[int], Drawn]:
        table = self._table
        joining = {join.slot for join in plan.joins if join.slot < self._max_slots}
        # A plan made before the leader heard of the failure relies on rows that may not be there.
        self._lost_slots -= joining | set(plan.leaves)
        if self._lost_slots:
            self._lost_slots |= joining
            raise RuntimeError("the step before it failed")
        try:
            return self._decode_rows(plan)
        except Exception:
            self._lost_slots = joining | set(table.slots_B.tolist())
            table.clear()
            raise

    def _decode_rows(self, plan: DecodePlan) -> tuple[list[int], Drawn]:
        table, sampler = self._table, self._decode_sampler
        for slot in plan.leaves:
            table.leave(slot)
            sampler.leave(slot)
        for join in plan.joins:
            table.join(join)
            sampler.join(
                join.slot, join.sampling, join.output_index, prompt=join.prompt, output=join.output,
                stop_ids=join.stop_ids, min_tokens=join.min_tokens,
            )
        for slot, index, block_id in plan.grown:
            table.grow(slot, index, block_id)
        if not self._is_prepared:
            self._model.prepare_decode(self._max_slots)
            self._is_prepared = True
        if not len(table):
            return [], Drawn(np.zeros(0, np.int64))
        drawn = sampler.draw(self._decode_logits(), table.slots_B)
        slots: list[int] = table.slots_B.tolist()
        table.advance(drawn.tokens)
        return slots, drawn

    def _decode_logits(self) -> Tensor:
        tokens_B, positions_B, block_table_BM = self._table.batch()
        return self._model.decode(
            tokens_B.to(self._device), positions_B.to(self._device), block_table_BM.to(self._device)
        )
