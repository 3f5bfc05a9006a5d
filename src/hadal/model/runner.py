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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hadal.core.drafts import compared
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.plans import (
    FLIP,
    MASK,
    NO_FOLLOWING,
    NO_LINK_BYTES,
    NO_WAIT,
    Chunk,
    DecodePlan,
    Formed,
    FormPlan,
    PrefillPlan,
    Score,
    StepDone,
    StepPlan,
)
from hadal.model.batch import PrefillBatch, take
from hadal.model.deepseek import DeepseekV3, Rows
from hadal.model.drafts import Drafter, PromptTails
from hadal.model.execute import ComputeProgress, Recorder
from hadal.model.membership import Membership, log_failure
from hadal.model.mtp import MtpModule
from hadal.model.rank_table import RankTable
from hadal.model.sampler import Drawn, Sampler, joined
from hadal.overlap.plan import SCHEDULES, Schedule
from hadal.reference.sampling import RowMasks
from hadal.tokens.grammars import Grammars

_log = logging.getLogger(__name__)
_NONE = np.zeros(0, np.int64)
_NOTHING = Drawn(_NONE, _NONE, _NONE)
_TAILS = 4
"""Prompts for each that may draw in a step, whose last hidden state is kept between chunks."""


@dataclass(frozen=True, slots=True)
class _Fed:
    """Rows of a decode step: of each row of the table its last token, then its drafts that are
    checked, side by side. R rows in all.
    """

    num_B: np.ndarray
    """How many they are of each row of the table."""
    of_R: np.ndarray
    """Row of the table that each is of."""
    tokens_R: np.ndarray
    """The token that each feeds, whose KV the step writes ..."""
    positions_R: np.ndarray
    """... at this position."""


class ModelRunner:
    """Implements core.seams.Runner over a model and its cache."""

    def __init__(
        self,
        model: DeepseekV3,
        max_slots: int,
        membership: Membership | None = None,
        num_drafts_max: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        """`max_slots`: slots of a decode step, and chunks of a prefill step that draw a token.

        `membership`: of a rank among many; its comm is the model's. `num_drafts_max`: most drafts of
        a slot in a step; if not 0, `model` has its MTP module and the cache a layer for it.
        `grammars`: None refuses requests that have one.
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
        self._grammars = grammars
        # Two, because a slot number means something else in each kind of plan.
        self._prefill_sampler, self._decode_sampler = self._samplers()
        self._num_drafts_max = num_drafts_max
        self._module = MtpModule(model) if num_drafts_max else None
        self._drafter = (
            Drafter(self._module, max_slots, num_drafts_max) if self._module is not None else None
        )
        self._tails = PromptTails(_TAILS * max_slots) if num_drafts_max else None
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
            scores=drawn.scores,
            drafts=drawn.drafts,
            op_times=recorder.op_times(),
            events=tuple(recorder.events),
            expert_slot_counts=self._expert_slot_counts(plan),
            link_bytes=NO_LINK_BYTES
            if self._model.comm is None
            else self._model.comm.take_link_bytes(),
            waited=NO_WAIT if self._membership is None else self._membership.take_waits(),
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
        self._clear_table()
        self._lost_slots.clear()
        self._prefill_sampler, self._decode_sampler = self._samplers()
        return self._membership.form(plan, self._model)

    def _samplers(self) -> tuple[Sampler, Sampler]:
        vocab_size, grammars = self._model.config.vocab_size, self._grammars
        return (
            Sampler(self._max_slots, vocab_size, self._device, grammars),
            Sampler(self._max_slots, vocab_size, self._device, grammars),
        )

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
        keys = [index for index, chunk in enumerate(chunks) if chunk.sampling is not None]
        for slot, key in enumerate(keys):
            self._join(slot, chunks[key])
        slots, ones = np.arange(len(keys)), np.ones(len(keys), np.int64)
        self._prefill_sampler.begin(slots, ones, ones)
        tails = self._tails
        scores: dict[int, tuple[Score, ...]] = {}

        def see(part: int, batch: PrefillBatch, hidden_TD: Tensor) -> None:
            first = part * len(plan.chunks)
            scores.update({first + i: of for i, of in self._scores(parts[part], batch, hidden_TD)})
            if tails is not None:
                self._write_entries_of(parts[part], batch, hidden_TD, tails)

        is_seen = tails is not None or any(chunk.num_scores >= 0 for chunk in chunks)
        logits = self._model.prefill_split(
            parts,
            wanted,
            _schedule(plan),
            recorder,
            on_hidden=see if is_seen else None,
        )
        # What this step wrote, before anybody hears that it is done: from then on it is pulled,
        # found and stored.
        written = sorted({block_id for chunk in chunks for block_id in _written_blocks(chunk)})
        if not keys:
            cache.publish(written)
            return [], replace(_NOTHING, scores=scores)
        masks = self._masks(self._prefill_sampler, slots, ones, ones, recorder)
        recorder.begin("draw")
        drawn = self._prefill_sampler.draw(torch.cat(logits), slots, masks=masks)
        if tails is not None:
            self._write_first_entries([chunks[key] for key in keys], drawn.tokens, tails)
        cache.publish(written)
        for slot in range(len(keys)):
            self._prefill_sampler.leave(slot)
        recorder.end("draw")
        failed = {keys[slot]: reason for slot, reason in drawn.failed.items()}
        return keys, replace(drawn, failed=failed, scores=scores)

    def _scores(
        self, chunks: Sequence[Chunk], batch: PrefillBatch, hidden_TD: Tensor
    ) -> Iterator[tuple[int, tuple[Score, ...]]]:
        """Of the chunks that ask for them, by index."""
        for index, (chunk, span) in enumerate(zip(chunks, batch.spans, strict=True)):
            if chunk.num_scores < 0:
                continue
            tokens = chunk.tokens[1:]
            if chunk.following != NO_FOLLOWING:
                tokens += (chunk.following,)
            rows_TD = hidden_TD[span.first : span.first + len(tokens)]
            num_top = min(chunk.num_scores, self._model.config.vocab_size)
            yield index, self._model.scores(rows_TD, tokens, num_top)

    def _write_entries_of(
        self, chunks: Sequence[Chunk], batch: PrefillBatch, hidden_TD: Tensor, tails: PromptTails
    ) -> None:
        """The MTP module's, of these chunks."""
        assert self._module is not None
        before = [tails.before(chunk) for chunk in chunks]
        self._module.write_entries(batch, hidden_TD, before)
        for chunk, span in zip(chunks, batch.spans, strict=True):
            tails.keep(chunk, hidden_TD[span.first + span.num_tokens - 1])

    def _write_first_entries(
        self, chunks: Sequence[Chunk], tokens: np.ndarray, tails: PromptTails
    ) -> None:
        """Those of the tokens just drawn, where the prompt's last block has room for them: it goes
        to decode as it is.
        """
        ends = np.array([chunk.start + len(chunk.tokens) for chunk in chunks])
        hidden = torch.stack(tails.behind(chunks))
        rows = np.flatnonzero(ends % BLOCK_TOKENS)
        if not len(rows):
            return
        block_ids = [chunks[row].block_ids for row in rows.tolist()]
        table = np.zeros((len(rows), max(map(len, block_ids))), np.int32)
        for blocks, of_row in zip(table, block_ids, strict=True):
            blocks[: len(of_row)] = of_row
        assert self._module is not None
        self._module.write_rows(
            torch.from_numpy(tokens[rows]),
            torch.from_numpy(ends[rows]),
            torch.from_numpy(table),
            hidden[rows],
        )

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
            self._lost_slots = joining | set(table.occupied)
            self._clear_table()
            raise

    def _decode_rows(self, plan: DecodePlan, recorder: Recorder) -> tuple[list[int], Drawn]:
        self._change_table(plan)
        table = self._table
        if not self._is_prepared:
            self._model.prepare_decode(self._max_slots * (1 + self._num_drafts_max))
            if self._module is not None:
                # A row that drafts for each slot, and before it the tokens that were drafts.
                max_rows = self._max_slots * (1 + self._num_drafts_max)
                self._module.prepare(max(max_rows, BLOCK_TOKENS), self._max_slots)
            self._is_prepared = True
        if not len(table) and self._membership is None:
            return [], _NOTHING
        passes = []
        for _ in range(plan.num_passes):
            if not len(table) and self._membership is None:
                break
            slots_N, drawn = self._pass(plan, recorder)
            passes.append((slots_N, drawn))
            if table.note_ends(slots_N, drawn.tokens):
                table.rest(plan.resting)
        slots = [slot for slots_N, _ in passes for slot in slots_N.tolist()]
        return slots, joined([drawn for _, drawn in passes])

    def _pass(self, plan: DecodePlan, recorder: Recorder) -> tuple[np.ndarray, Drawn]:
        """Make a token of each slot, and those that drafts bring, and draft for the next pass. Return the
        tokens' slots, too.
        """
        fed, sampler = self._fed(), self._decode_sampler
        rows = self._table.slots_B, fed.num_B, fed.tokens_R
        sampler.begin(*rows)
        logits_RV, hidden_RD = self._decode_logits(plan, fed, recorder)
        slots_N, drawn = _NONE, _NOTHING
        if len(self._table):
            masks = self._masks(sampler, *rows, recorder)
            recorder.begin("draw")
            drawn = sampler.draw(logits_RV, *rows, masks)
            slots_N = self._go_on(plan, fed, drawn, hidden_RD)
            recorder.end("draw")
        if len(fed.of_R) > len(fed.num_B):
            drawn = replace(drawn, drafts=compared(fed.num_B - 1, drawn.num_B - 1))
        self._draft(plan, recorder)
        return slots_N, drawn

    def _masks(
        self,
        sampler: Sampler,
        slots_B: np.ndarray,
        num_B: np.ndarray,
        fed_R: np.ndarray,
        recorder: Recorder,
    ) -> RowMasks | None:
        """What the rows' grammars allow; most of it was found out while the step computed."""
        if not sampler.has_grammars:
            return None
        recorder.begin(MASK)
        masks = sampler.wait(slots_B, num_B, fed_R)
        recorder.end(MASK)
        return masks

    def _write_entries(self, rows: np.ndarray) -> None:
        """Write all of the module's entries of these rows that can be, those of the last tokens
        included.
        """
        assert self._drafter is not None
        table = self._table
        ends_B = np.minimum(table.positions_B + 1, table.rooms_B)
        table_NM = take(table.table_BM(int(table.positions_B.max())), rows)
        self._drafter.write(table.slots_B[rows], ends_B[rows], table_NM)

    def _clear_table(self) -> None:
        """Nobody knows afterwards which of the module's entries are not written yet. Where they
        cannot be now, drafts will be worse and no token another.
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
        """What this step feeds: of each slot its last token, then its drafts that have room."""
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
        """Go on behind the drawn tokens, and have in the pool what others will read there. Returns
        the tokens' slots.
        """
        table, drafter = self._table, self._drafter
        slots_N: np.ndarray = table.slots_B[fed.of_R[drawn.rows]]
        num_full_B = table.positions_B // BLOCK_TOKENS
        is_filling_B = (table.positions_B + drawn.num_B) // BLOCK_TOKENS > num_full_B
        if drafter is not None:
            assert hidden_RD is not None
            if is_filling_B.any():
                # It keeps tokens of one block: those of this one go before the next one's come.
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
            # Of one that moves, the last token's entry as well, if it lies in a block that moves.
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
        table, sampler = self._table, self._decode_sampler
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
        """Return it on the model's device. On a CPU no torch op is called: each releases the GIL."""
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _decode_logits(
        self, plan: DecodePlan, fed: _Fed, recorder: Recorder
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] of the step's rows, and with drafts their hidden states [R, D]."""
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
            # A slot's drafts go with its last token.
            second_B = np.zeros(len(self._table), np.bool_)
            second_B[self._table.split(plan.second)[1]] = True
            parts = [np.flatnonzero(~second_B[fed.of_R]), np.flatnonzero(second_B[fed.of_R])]
        split: list[Rows] = []
        for part in parts:
            index = torch.from_numpy(part).to(self._device)
            split.append((tokens_R[index], positions_R[index], table_RM[index]))
        outputs = self._model.decode_rows(split, _schedule(plan), recorder)
        logits_RV, hidden_RD = (torch.cat([output[i] for output in outputs]) for i in (0, 1))
        if len(parts) > 1:
            back = torch.from_numpy(np.argsort(np.concatenate(parts))).to(self._device)
            logits_RV, hidden_RD = logits_RV[back], hidden_RD[back]
        return logits_RV, hidden_RD


def _written_blocks(chunk: Chunk) -> tuple[int, ...]:
    """Those that its tokens lie in."""
    return chunk.block_ids[chunk.start // BLOCK_TOKENS :]


def _schedule(plan: StepPlan) -> Schedule:
    if plan.schedule not in SCHEDULES:
        raise ValueError(
            f"schedule {plan.schedule!r} is not known; these are: {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[plan.schedule]
