"""The Runner of one rank: executes step plans on a model, one at a time, and answers each with its
tokens.

Knows no requests and no wire. A step that fails is answered with its error; it never ends the
thread that runs it. In a unit of many ranks every plan is executed by all of them together, also by
those without work; a failure on one ends the generation, and until a FormPlan has formed the next,
every step fails at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from hadal.core.messages import BLOCK_TOKENS, SCRATCH_BLOCK
from hadal.core.plans import (
    FLIP,
    Chunk,
    DecodePlan,
    Formed,
    FormPlan,
    Join,
    PrefillPlan,
    StepDone,
    StepPlan,
)
from hadal.model.deepseek import DeepseekV3
from hadal.model.execute import ComputeProgress, Recorder
from hadal.model.experts import Membership, log_failure
from hadal.model.sampler import Drawn, Sampler
from hadal.overlap.plan import SCHEDULES, Schedule

# A decode rank's mirror of its leader's table: one row per occupied slot, packed, in arrays made
# once.
#
# The leader sends differences; from then on the rank advances every row by itself. Rows are packed
# so that a step reads prefixes of the arrays; the order of rows means nothing. Shapes: B rows, M
# blocks of a request.


class RankTable:
    """Which slot decodes what, where, with which blocks."""

    def __init__(self, max_slots: int, max_positions: int) -> None:
        max_blocks = -(-max_positions // BLOCK_TOKENS)
        self._max_positions = max_positions
        self._row_of_slot: dict[int, int] = {}
        self._slots = np.zeros(max_slots, np.int64)
        self._tokens = np.zeros(max_slots, np.int64)
        self._positions = np.zeros(max_slots, np.int64)
        # What was never set is the scratch block: a step past the last block harms nobody.
        self._blocks = np.full((max_slots, max_blocks), SCRATCH_BLOCK, np.int32)

    def __len__(self) -> int:
        return len(self._row_of_slot)

    def leave(self, slot: int) -> None:
        """Remove a slot; one that is not there was cleared after a failed step."""
        row = self._row_of_slot.pop(slot, None)
        if row is None:
            return
        last = len(self)  # The last row moves into the gap.
        if row != last:
            for array in (self._slots, self._tokens, self._positions, self._blocks):
                array[row] = array[last]
            self._row_of_slot[int(self._slots[row])] = row

    def join(self, join: Join) -> None:
        """Add a slot, in place of what it held. Raises ValueError for one that does not fit the
        table.
        """
        if not 0 <= join.slot < len(self._slots):
            raise ValueError(f"slot {join.slot} is outside the table of {len(self._slots)}")
        if join.num_tokens >= self._max_positions or len(join.block_ids) > self._blocks.shape[1]:
            raise ValueError(
                f"slot {join.slot}: {join.num_tokens} tokens exceed the model's"
                f" {self._max_positions} positions"
            )
        self.leave(join.slot)
        row = self._row_of_slot[join.slot] = len(self)
        self._slots[row] = join.slot
        self._tokens[row] = join.last_token
        self._positions[row] = join.num_tokens
        self._blocks[row] = SCRATCH_BLOCK
        self._blocks[row, : len(join.block_ids)] = join.block_ids

    def grow(self, slot: int, index: int, block_id: int) -> None:
        """Give a slot another block."""
        row = self._row_of_slot.get(slot)
        if row is not None:
            self._blocks[row, index] = block_id

    def written_blocks(self, slot: int) -> list[int]:
        """The blocks that hold the positions so far; none for a slot that is not there."""
        row = self._row_of_slot.get(slot)
        if row is None:
            return []
        num_blocks = -(-int(self._positions[row]) // BLOCK_TOKENS)
        return [int(block_id) for block_id in self._blocks[row, :num_blocks]]

    def clear(self) -> None:
        self._row_of_slot.clear()

    @property
    def slots_B(self) -> np.ndarray:
        return self._slots[: len(self)]

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens_B, positions_B int64, block_table_BM int32) as views, M as wide as the longest
        row needs.
        """
        num_rows = len(self)
        num_blocks = int(self._positions[:num_rows].max(initial=0)) // BLOCK_TOKENS + 1
        return (
            torch.from_numpy(self._tokens[:num_rows]),
            torch.from_numpy(self._positions[:num_rows]),
            torch.from_numpy(self._blocks[:num_rows, :num_blocks]),
        )

    def split(self, second: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the two micro-batches; `second` are slots. Raises ValueError for one that is not
        occupied.
        """
        absent = sorted(slot for slot in second if slot not in self._row_of_slot)
        if absent:
            raise ValueError(f"slots {absent} of the second micro-batch are not occupied")
        is_second = np.zeros(len(self), np.bool_)
        is_second[[self._row_of_slot[slot] for slot in second]] = True
        return np.flatnonzero(~is_second), np.flatnonzero(is_second)

    def advance(self, tokens_B: np.ndarray) -> None:
        """Every row got its token; it is what the next step feeds."""
        num_rows = len(self)
        self._tokens[:num_rows] = tokens_B
        positions = self._positions[:num_rows]
        # A row that finished at the context's end may be stepped once more before its leave
        # arrives.
        np.minimum(positions + 1, self._max_positions - 1, out=positions)


_log = logging.getLogger(__name__)
_NOTHING = Drawn(np.zeros(0, np.int64))


class ModelRunner:
    """Implements core.seams.Runner over a model and its cache."""

    def __init__(
        self, model: DeepseekV3, max_slots: int, membership: Membership | None = None
    ) -> None:
        """`max_slots`: rows of a decode step, and chunks of a prefill step that draw a token.

        `membership`: of a rank among many; its comm is the model's.
        """
        config = model.config
        self._model = model
        self._max_slots = max_slots
        self._membership = membership
        self._device = model.cache.cache_PLSD.device
        self._is_prepared = False
        self._lost_slots: set[int] = set()
        """Slots whose rows a failed step took with it, until the leader makes them leave or joins
        them anew.
        """
        self._table = RankTable(max_slots, config.max_position_embeddings)
        # Two, because a slot number means something else in each kind of plan.
        self._prefill_sampler = Sampler(max_slots, config.vocab_size, self._device)
        self._decode_sampler = Sampler(max_slots, config.vocab_size, self._device)
        self._progress = ComputeProgress()
        self._is_stepping = False

    def execute(self, plan: StepPlan | FormPlan) -> StepDone | Formed:
        """Run one step. After an error the leader gives every request of the step back, else those
        that failed.
        """
        if isinstance(plan, FormPlan):
            return self._form(plan)
        start_s = time.perf_counter()
        recorder = Recorder(
            self._progress,
            rank=0 if self._membership is None else self._membership.rank,
            is_traced=plan.is_traced,
        )
        self._is_stepping = True
        try:
            if self._membership is not None:
                self._membership.check()
            self._flip(plan, recorder)
            run = (
                self._prefill(plan, recorder)
                if isinstance(plan, PrefillPlan)
                else self._decode(plan, recorder)
            )
            keys, drawn = run
        except torch.AcceleratorError:
            # The device's context is gone with all it held, and only another process gets a new
            # one.
            raise
        except Exception as error:
            log_failure(f"step {plan.step_id} failed", error)
            if self._membership is not None:
                self._membership.note_lost(error)
            elapsed_s = time.perf_counter() - start_s
            return StepDone(plan.step_id, (), (), {}, elapsed_s, f"{type(error).__name__}: {error}")
        finally:
            self._is_stepping = self._progress.is_waiting = False
        for reason in drawn.failed.values():
            _log.error("a request of step %d cannot go on: %s", plan.step_id, reason)
        elapsed_s = time.perf_counter() - start_s
        return StepDone(
            plan.step_id,
            tuple(keys),
            tuple(drawn.tokens.tolist()),
            drawn.draws,
            elapsed_s,
            failed=drawn.failed,
            op_times=recorder.op_times(),
            events=tuple(recorder.events),
            expert_slot_counts=self._expert_slot_counts(plan),
        )

    def abort(self) -> None:
        """A rank by itself waits for nobody."""
        if self._membership is not None:
            self._membership.abort()

    def close(self) -> None:
        if self._membership is not None:
            self._membership.close()

    @property
    def num_ops(self) -> int:
        """Ops begun since the process started. This and the next two: from any thread."""
        return self._progress.num_ops

    @property
    def is_computing(self) -> bool:
        """A step runs and does not wait for a peer: `num_ops` must move."""
        return self._is_stepping and not self._progress.is_waiting

    @property
    def lost(self) -> tuple[int, ...]:
        """Peers held responsible for the last failure, or whose connection broke."""
        return () if self._membership is None else self._membership.lost

    def _form(self, plan: FormPlan) -> Formed:
        assert self._membership is not None, "a rank by itself has no peers to form with"
        self._table.clear()
        self._lost_slots.clear()
        vocab_size = self._model.config.vocab_size
        self._prefill_sampler = Sampler(self._max_slots, vocab_size, self._device)
        self._decode_sampler = Sampler(self._max_slots, vocab_size, self._device)
        return self._membership.form(plan, self._model)

    def _flip(self, plan: StepPlan, recorder: Recorder) -> None:
        for flip in plan.flips:
            if self._membership is None:
                raise ValueError(
                    f"layer {flip.layer} flips, but a rank by itself holds every expert"
                )
            recorder.begin(FLIP)
            self._membership.flip(flip, self._model)
            recorder.end(FLIP)

    def _expert_slot_counts(self, plan: StepPlan) -> bytes:
        comm = self._model.comm
        return comm.take_counts().numpy().tobytes() if plan.is_counted and comm is not None else b""

    def _prefill(self, plan: PrefillPlan, recorder: Recorder) -> tuple[list[int], Drawn]:
        parts = (plan.chunks, plan.second)[: plan.num_micro_batches]
        wanted = [
            [index for index, chunk in enumerate(part) if chunk.sampling is not None]
            for part in parts
        ]
        if sum(map(len, wanted)) > self._max_slots:
            raise ValueError(
                f"{sum(map(len, wanted))} chunks draw a token; this rank was made for"
                f" {self._max_slots}"
            )
        cache, chunks = self._model.cache, [*plan.chunks, *plan.second]
        cache.fetch(plan.fetches)
        logits = self._model.prefill_split(parts, wanted, _schedule(plan), recorder)
        keys = [index for index, chunk in enumerate(chunks) if chunk.sampling is not None]
        # What this step wrote, before anybody hears that it is done: from then on it is pulled,
        # found and stored.
        written = sorted({block_id for chunk in chunks for block_id in _written_blocks(chunk)})
        if not keys:
            cache.publish(written)
            return [], _NOTHING
        recorder.begin("draw")
        for slot, key in enumerate(keys):
            self._join(slot, chunks[key])
        drawn = self._prefill_sampler.draw(torch.cat(logits), np.arange(len(keys)))
        cache.publish(written)
        for slot in range(len(keys)):
            self._prefill_sampler.leave(slot)
        recorder.end("draw")
        failed = {keys[slot]: reason for slot, reason in drawn.failed.items()}
        return keys, Drawn(drawn.tokens, drawn.draws, failed)

    def _join(self, slot: int, chunk: Chunk) -> None:
        assert chunk.sampling is not None
        self._prefill_sampler.join(
            slot,
            chunk.sampling,
            chunk.output_index,
            prompt=chunk.prompt,
            output=chunk.output,
            stop_ids=chunk.stop_ids,
            min_tokens=chunk.min_tokens,
        )

    def _decode(self, plan: DecodePlan, recorder: Recorder) -> tuple[list[int], Drawn]:
        table = self._table
        joining = {join.slot for join in plan.joins if join.slot < self._max_slots}
        # A plan made before the leader heard of the failure relies on rows that may not be there.
        self._lost_slots -= joining | set(plan.leaves)
        if self._lost_slots:
            self._lost_slots |= joining
            raise RuntimeError("the step before it failed")
        try:
            return self._decode_rows(plan, recorder)
        except Exception:
            self._lost_slots = joining | set(table.slots_B.tolist())
            table.clear()
            raise

    def _decode_rows(self, plan: DecodePlan, recorder: Recorder) -> tuple[list[int], Drawn]:
        self._change_table(plan)
        table = self._table
        if not self._is_prepared:
            self._model.prepare_decode(self._max_slots)
            self._is_prepared = True
        if not len(table) and self._membership is None:
            return [], _NOTHING
        logits_BV, rows_B = self._decode_logits(plan, recorder)
        if not len(rows_B):
            return [], _NOTHING
        recorder.begin("draw")
        slots_B = table.slots_B[rows_B]
        drawn = self._decode_sampler.draw(logits_BV, slots_B)
        tokens_B = np.empty_like(drawn.tokens)
        tokens_B[rows_B] = drawn.tokens
        table.advance(tokens_B)
        if plan.publishes or plan.fills:
            moving = [
                block_id for slot in plan.publishes for block_id in table.written_blocks(slot)
            ]
            self._model.cache.publish(sorted({*moving, *plan.fills}))
        recorder.end("draw")
        return slots_B.tolist(), drawn

    def _change_table(self, plan: DecodePlan) -> None:
        table, sampler = self._table, self._decode_sampler
        for slot in plan.leaves:
            table.leave(slot)
            sampler.leave(slot)
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
        for slot, index, block_id in plan.grown:
            table.grow(slot, index, block_id)

    def _decode_logits(self, plan: DecodePlan, recorder: Recorder) -> tuple[Tensor, np.ndarray]:
        """Logits of all rows, micro-batch by micro-batch, and which row of the table each is of."""
        batch = tuple(tensor.to(self._device) for tensor in self._table.batch())
        all_rows = np.arange(len(self._table))
        if plan.num_micro_batches == 1 and self._model.has_fused_step:
            recorder.begin("step")
            logits_BV = self._model.decode(*batch)
            recorder.end("step")
            return logits_BV, all_rows
        parts = (all_rows,) if plan.num_micro_batches == 1 else self._table.split(plan.second)
        tokens_B, positions_B, block_table_BM = batch
        split = []
        for rows_B in parts:
            index = torch.from_numpy(rows_B).to(self._device)
            split.append((tokens_B[index], positions_B[index], block_table_BM[index]))
        logits = self._model.decode_split(split, _schedule(plan), recorder)
        return torch.cat(logits), np.concatenate(parts)


def _written_blocks(chunk: Chunk) -> tuple[int, ...]:
    """Those that its tokens lie in."""
    return chunk.block_ids[chunk.start // BLOCK_TOKENS :]


def _schedule(plan: StepPlan) -> Schedule:
    if plan.schedule not in SCHEDULES:
        raise ValueError(
            f"schedule {plan.schedule!r} is not known; these are: {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[plan.schedule]
