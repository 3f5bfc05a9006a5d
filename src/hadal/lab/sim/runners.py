"""Runner seam of a whole unit without a model: takes the plans of all ranks, returns results and a
priced time.

lab/perf/step prices the plans themselves: the micro-batches that the leader (scheduler) cut, each
as its slowest rank has it, under the schedule that the leader chose. Op times go back to the leader
as a rank would have measured them, so it chooses schedules, balances, moves and drafts from the
same numbers as live. Tokens are 0 until an output has its requested length; then the stop id is
drawn, and the leader notices one plan late, as live. The drafts (speculative tokens) of one plan
are verified in the next: a draft is accepted by chance, and equally in every run of a request.

Shapes: R ranks, S slots of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, cast

import msgspec
import numpy as np

from hadal.core.arrays import Bools, Ints
from hadal.core.config import DECODE, PREFILL
from hadal.core.drafts import Compared, compared, summed
from hadal.core.plans import NO_LINK_BYTES, Chunk, DecodePlan, OpTime, PrefillPlan, StepDone
from hadal.lab.perf.explain import StepPrice
from hadal.lab.perf.layer import MicroBatchLoad, op_seconds
from hadal.lab.perf.step import MTP_ACCEPT, StepModel
from hadal.lab.sim.slot_drafts import SimulatedDrafts
from hadal.overlap.plan import SCHEDULES
from hadal.overlap.split import num_pairs_of

STOP_ID = 1
"""Stop id of every simulated request, in `Generation.stop_ids`."""
WORD_ID = 0
"""Id of every token that is not the stop id."""
OutputTokens = Callable[[int], int]
"""Number of a request (`Sampling.seed`) -> length of its output, tokens."""


class StepWork(NamedTuple):
    """Figures of one step, for lab/sim/world/seen."""

    tokens: int
    """Prefill: prompt tokens computed. Decode: a token per request and its accepted drafts."""
    positions: int
    """Prefill: (token, position that it attends to) pairs. Decode: cached positions, including the
    first new one, summed over the requests.
    """
    texts: int
    """Prefill: number of chunks. Decode: number of requests."""
    most_tokens: int
    """Prefill: most tokens of a rank. Decode: most requests of a rank."""
    most_positions: int
    """Maximum number of `positions` of a rank."""
    imbalance: float
    """Imbalance of experts, mean of the micro-batches."""
    num_micro_batches: int
    context_tokens: int
    """Tokens read from KV. Prefill: new and earlier ones, per chunk. Decode: as `positions`."""


NO_WORK = StepWork(0, 0, 0, 0, 0, 1.0, 1, 0)


class PrefillRunner:
    """Runner of a prefill unit's steps."""

    def __init__(self, model: StepModel, output_tokens: OutputTokens) -> None:
        self.work = NO_WORK
        """Figures of the last step."""
        self.ranks: tuple[list[int], list[int]] = [0] * model.num_ranks, [0] * model.num_ranks
        """Work of the last step by rank: tokens, and (token, position) pairs."""
        self.price: StepPrice | None = None
        """Price of the last step, for lab/perf/explain."""
        self.slow: dict[int, float] = {}
        """Rank -> slowdown factor of its part of a step."""
        self._num_living = model.num_ranks
        self._model = model
        self._output_tokens = output_tokens
        self._pairs_token = pairs_per_token(model)
        """Result of `pairs_per_token`; used to find a micro-batch's slowest rank."""

    def run(self, plans: Sequence[PrefillPlan]) -> StepDone:
        """Return the step's result. Its `elapsed_s` is the simulated duration of the step."""
        halves = [[plan.chunks for plan in plans]]
        if plans[0].num_micro_batches == 2:
            halves.append([plan.second for plan in plans])
        chunks = list(chain.from_iterable(chain(plan.chunks, plan.second) for plan in plans))
        drawn = [
            (key, chunk, chunk.sampling)
            for key, chunk in enumerate(chunks)
            if chunk.sampling is not None
        ]
        works = [_works_of(half) for half in halves]
        batches = [self._micro_batch(half) for half in works]
        self.ranks = _sums_of(works)
        self.work = _work_of(works, self.ranks, batches)
        schedule, num_rows = SCHEDULES[plans[0].schedule], len(drawn) / self._num_living

        def price_of(batches: Sequence[MicroBatchLoad]) -> StepPrice:
            return self._model.price_works(PREFILL, schedule, batches, num_rows=num_rows)

        self.price = price = price_of(batches)
        part = _slowed(
            price,
            self.slow,
            lambda rank: price_of([self._micro_batch(half, rank) for half in works]),
        )
        ops = _op_times(price_of(_longest(self.work, batches)), part)
        tokens = tuple(
            STOP_ID if chunk.output_index + 1 >= self._output_tokens(sampling.seed) else WORD_ID
            for _, chunk, sampling in drawn
        )
        keys = tuple(key for key, _, _ in drawn)
        return StepDone(
            plans[0].step_id,
            keys,
            tokens,
            {},
            price.seconds * part,
            op_times=ops,
            link_bytes=self._model.link_bytes(PREFILL, self.work.tokens),
        )

    def formed(self, num_living: int) -> None:
        """Let `num_living` ranks take part from now on."""
        self._num_living = max(1, num_living)

    def _micro_batch(self, works: Sequence[_RankWork], rank: int | None = None) -> MicroBatchLoad:
        """Return the micro-batch as its slowest rank has it, or as `rank` has it."""
        slowest = (
            max(works, key=lambda work: work[1] + self._pairs_token * work[0])
            if rank is None
            else works[rank]
        )
        num_tokens = sum(work[0] for work in works)
        mean_tokens = num_tokens / self._num_living
        num_texts = sum(work[3] for work in works)
        imbalance = (
            self._model.expected_imbalance(PREFILL, mean_tokens, num_tokens / num_texts)
            if num_texts
            else 1.0
        )
        return MicroBatchLoad(*slowest[:3], mean_tokens, imbalance)


_RankWork = tuple[int, int, int, int]
"""Work of a rank in a micro-batch: tokens, (token, position) pairs, positions read, chunks."""


def _works_of(rank_to_chunks: Sequence[Sequence[Chunk]]) -> list[_RankWork]:
    return [
        (
            sum(len(c.tokens) for c in chunks),
            sum(num_pairs_of(c.start, len(c.tokens)) for c in chunks),
            sum(c.start + len(c.tokens) for c in chunks),
            len(chunks),
        )
        for chunks in rank_to_chunks
    ]


def _sums_of(halves: Sequence[Sequence[_RankWork]]) -> tuple[list[int], list[int]]:
    """Return the tokens and pairs of both micro-batches, summed by rank."""
    tokens, pairs = (
        [sum(half[rank][of] for half in halves) for rank in range(len(halves[0]))] for of in (0, 1)
    )
    return tokens, pairs


def _work_of(
    halves: Sequence[Sequence[_RankWork]],
    ranks: tuple[list[int], list[int]],
    batches: Sequence[MicroBatchLoad],
) -> StepWork:
    tokens, pairs = ranks
    return StepWork(
        sum(tokens),
        sum(pairs),
        sum(work[3] for half in halves for work in half),
        max(tokens),
        max(pairs),
        sum(batch.expert_imbalance for batch in batches) / len(batches),
        len(batches),
        sum(work[2] for half in halves for work in half),
    )


def pairs_per_token(model: StepModel) -> float:
    """Return how many core-attention pairs take as long as a rank's other work on one token."""

    def own_s(num_tokens: float, num_pairs: float) -> float:
        batch = MicroBatchLoad(num_tokens, num_pairs, num_tokens, 4096.0, 1.0)
        ops = op_seconds(model.kernels(PREFILL, batch, is_overlapped=model.num_ranks > 1), 0.0)
        return ops.attn_in + ops.attn_core + ops.gate + ops.shared

    base_s = own_s(4096.0, 16e6)
    return (own_s(8192.0, 16e6) - base_s) / 4096.0 / ((own_s(4096.0, 32e6) - base_s) / 16e6)


def _longest(work: StepWork, batches: Sequence[MicroBatchLoad]) -> list[MicroBatchLoad]:
    """Return the micro-batches for a unit's op times, with the most tokens and pairs of any rank: a
    unit reports each op's time on the rank where it takes longest (roles/ranks/steps).
    """
    num = len(batches)
    return [
        MicroBatchLoad(
            work.most_tokens / num,
            work.most_positions / num,
            batch.context_tokens,
            batch.mean_tokens,
            batch.expert_imbalance,
        )
        for batch in batches
    ]


class DecodeRunner:
    """Runner of a decode unit's steps. The tables of its ranks are arrays by slot.

    A draft is accepted with probability `mtp_accept` if all drafts before it were
    (lab/sim/slot_drafts). A plan makes at most `num_drafts_max`. Raises ValueError if `mtp_accept`
    is no probability.
    """

    def __init__(
        self,
        model: StepModel,
        num_slots: int,
        output_tokens: OutputTokens,
        *,
        num_drafts_max: int = 0,
        mtp_accept: float = MTP_ACCEPT,
    ) -> None:
        self.work = NO_WORK
        """Figures of the last step; if it had several passes, of the last pass."""
        self.price: StepPrice | None = None
        """Price of the last step's last pass, for lab/perf/explain."""
        self.slow: dict[int, float] = {}
        """Rank -> slowdown factor of its part of a step."""
        self._num_living = model.num_ranks
        self._model = model
        self._num_slots = num_slots
        self._output_tokens = output_tokens
        size = model.num_ranks * num_slots
        self._drafts = SimulatedDrafts(size, num_drafts_max, mtp_accept)
        self.is_taken: Bools = np.zeros(size, np.bool_)
        self._left: Ints = np.zeros(size, np.int64)
        """Output tokens left, including the stop id, by slot."""
        self._length: Ints = np.zeros(size, np.int64)
        """Positions in the KV cache, by slot."""
        self._is_computed: Bools = np.zeros(size, np.bool_)
        """True for slots that the step computes: taken, and not resting."""
        self._is_second: Bools = np.zeros(size, np.bool_)
        self._second: tuple[tuple[int, ...], ...] = ()

    def run(self, plans: Sequence[DecodePlan]) -> StepDone:
        """Return the step's result. Its `elapsed_s` is the simulated duration of the step."""
        for rank, plan in enumerate(plans):
            if plan.leaves or plan.joins:
                self._change(rank * self._num_slots, plan)
        if self._drafts.num_max:
            self._grow(plans)
        np.copyto(self._is_computed, self.is_taken)
        for rank, plan in enumerate(plans):
            if plan.resting:
                self._is_computed[rank * self._num_slots + np.array(plan.resting)] = False
        return _joined([self._pass(plans) for _ in range(plans[0].num_passes)])

    def _pass(self, plans: Sequence[DecodePlan]) -> StepDone:
        """Return the result of one pass: one token per computed slot, and its accepted drafts."""
        slots, num_drafts = np.flatnonzero(self._is_computed), plans[0].num_drafts
        assert num_drafts <= self._drafts.num_max, "a plan drafts more tokens than announced"
        num_checked = (
            self._drafts.num_checked(slots, self._length) if self._drafts.has_any else None
        )
        self._length[slots] += 1
        is_in = self._halves(plans)
        num_tokens = None  # One token per slot: counting slots is faster than adding an array.
        if num_checked is not None:
            num_tokens = self._is_computed.astype(np.int64)
            num_tokens[slots] += num_checked
        batches = [self._micro_batch(half, num_tokens) for half in is_in]
        num_requests = slots.size / self._num_living
        num_rows = num_requests
        if num_tokens is not None:
            num_rows = float(num_tokens.sum()) / self._num_living

        def price_of(batches: Sequence[MicroBatchLoad]) -> StepPrice:
            return self._model.price_works(
                DECODE,
                SCHEDULES[plans[0].schedule],
                batches,
                num_rows=num_rows,
                mtp_tokens=num_drafts,
                num_draft_rows=num_requests,
            )

        self.price = price = price_of(batches)
        # Step and ops are scaled alike; otherwise the ops would add up to more than their step.
        part = _slowed(
            price,
            self.slow,
            lambda rank: price_of([self._micro_batch(half, num_tokens, rank) for half in is_in]),
        )
        self._note(slots, batches)
        drawn, tokens = self._draw(slots, num_checked)
        drafts: Compared = ()
        if num_checked is not None:
            num_right = np.bincount(drawn, minlength=self.is_taken.size)[slots] - 1
            drafts = compared(num_checked, num_right)
        if drawn.size > slots.size:
            self.work = self.work._replace(tokens=drawn.size)
        self._drafts.note(slots, num_drafts, self.is_taken)
        # Arrays, although live ranks send tuples: readers need only lengths and elements.
        keys, values = cast("tuple[int, ...]", drawn), cast("tuple[int, ...]", tokens)
        num_computed = slots.size if num_tokens is None else int(num_tokens.sum())
        return StepDone(
            plans[0].step_id,
            keys,
            values,
            {},
            price.seconds * part,
            op_times=_op_times(price, part),
            link_bytes=self._model.link_bytes(DECODE, num_computed, num_drafts),
            drafts=drafts,
        )

    def formed(self, num_living: int) -> None:
        """Let `num_living` ranks take part from now on, with empty tables."""
        self._num_living = max(1, num_living)
        self.is_taken[:] = False
        self._drafts.clear()

    @property
    def requests_R(self) -> Ints:
        """Requests by rank."""
        requests_R: Ints = np.count_nonzero(self.is_taken.reshape(-1, self._num_slots), axis=1)
        return requests_R

    def _draw(self, slots: Ints, num_checked: Ints | None) -> tuple[Ints, Ints]:
        """Draw the step's tokens. Return (slot of each token, tokens): first one token per slot,
        then the tokens of accepted drafts, by draft index.
        """
        self._left[slots] -= 1
        left = self._left[slots]
        tokens = np.where(left <= 0, STOP_ID, WORD_ID)
        if num_checked is None:
            return slots, tokens
        keys, values = [slots], [tokens]
        rows = np.arange(slots.size)
        for place in range(1, 1 + int(num_checked.max(initial=0))):
            rows = rows[num_checked[rows] >= place]
            rows = rows[self._drafts.is_right(slots[rows], left[rows] - place + 1)]
            keys.append(slots[rows])
            values.append(np.where(left[rows] == place, STOP_ID, WORD_ID))
            self._length[keys[-1]] += 1
            self._left[keys[-1]] -= 1
        return np.concatenate(keys), np.concatenate(values)

    def _note(self, slots: Ints, batches: Sequence[MicroBatchLoad]) -> None:
        lengths, ranks = self._length[slots], slots // self._num_slots
        requests_R = np.bincount(ranks, minlength=self._model.num_ranks)
        positions_R = np.bincount(ranks, lengths, minlength=self._model.num_ranks)
        self.work = StepWork(
            slots.size,
            int(lengths.sum()),
            slots.size,
            int(requests_R.max()),
            int(positions_R.max()),
            sum(batch.expert_imbalance for batch in batches) / len(batches),
            len(batches),
            int(lengths.sum()),
        )

    def _change(self, first: int, plan: DecodePlan) -> None:
        for slot in plan.leaves:
            self.is_taken[first + slot] = False
        for join in plan.joins:
            slot = first + join.slot
            self.is_taken[slot] = True
            self._drafts.join(slot, len(join.block_ids), join.sampling.seed)
            self._length[slot] = join.num_tokens
            self._left[slot] = self._output_tokens(join.sampling.seed) - join.output_index

    def _grow(self, plans: Sequence[DecodePlan]) -> None:
        for rank, plan in enumerate(plans):
            for slot, _, _ in plan.grown:
                self._drafts.grow(rank * self._num_slots + slot)

    def _halves(self, plans: Sequence[DecodePlan]) -> list[Bools]:
        """Return the mask of computed slots of each micro-batch."""
        if plans[0].num_micro_batches == 1:
            return [self._is_computed]
        second = tuple(plan.second for plan in plans)
        if second != self._second:
            self._second = second
            self._is_second[:] = False
            for rank, slots in enumerate(second):
                self._is_second[rank * self._num_slots + np.array(slots, np.int64)] = True
        return [self._is_computed & ~self._is_second, self._is_computed & self._is_second]

    def _micro_batch(
        self, is_in: Bools, num_tokens: Ints | None, rank: int | None = None
    ) -> MicroBatchLoad:
        """Return the micro-batch as its slowest rank has it, or as `rank` has it. `num_tokens`:
        tokens of each slot, including drafts; None: one per slot.
        """
        shape = (-1, self._num_slots)
        lengths = self._length * is_in
        positions_R = pairs_R = lengths.reshape(shape).sum(axis=1)
        if num_tokens is None:
            tokens_R = np.count_nonzero(is_in.reshape(shape), axis=1)
        else:
            tokens_R = (num_tokens * is_in).reshape(shape).sum(axis=1)
            pairs_R = (lengths * num_tokens).reshape(shape).sum(axis=1)
        slowest = int(pairs_R.argmax()) if rank is None else rank
        mean_tokens = float(tokens_R.sum()) / self._num_living
        return MicroBatchLoad(
            float(tokens_R[slowest]),
            float(pairs_R[slowest]),
            float(positions_R[slowest]),
            mean_tokens,
            self._model.expected_imbalance(DECODE, mean_tokens) if mean_tokens else 1.0,
        )


def _joined(passes: Sequence[StepDone]) -> StepDone:
    """Return one result for passes that ran one after another."""
    if len(passes) == 1:
        return passes[0]
    times: dict[str, OpTime] = {}
    for each in (op_time for done in passes for op_time in done.op_times):
        known = times.get(each.op, OpTime(each.op, 0, 0.0))
        times[each.op] = OpTime(each.op, known.count + each.count, known.seconds + each.seconds)
    link_bytes = NO_LINK_BYTES
    for done in passes:
        link_bytes = link_bytes.plus(done.link_bytes)
    return msgspec.structs.replace(
        passes[0],
        keys=cast("tuple[int, ...]", np.concatenate([done.keys for done in passes])),
        tokens=cast("tuple[int, ...]", np.concatenate([done.tokens for done in passes])),
        elapsed_s=sum(done.elapsed_s for done in passes),
        drafts=summed(done.drafts for done in passes),
        op_times=tuple(times.values()),
        link_bytes=link_bytes,
    )


def _slowed(
    price: StepPrice, slow: Mapping[int, float], price_of: Callable[[int], StepPrice]
) -> float:
    """Return the time of a step as a multiple of `price`, if all ranks wait for the slow ones.
    `price_of`: rank -> price of the step with that rank's own work.
    """
    return max(
        [1.0, *(factor * price_of(rank).seconds / price.seconds for rank, factor in slow.items())]
    )


def _op_times(price: StepPrice, part: float) -> tuple[OpTime, ...]:
    """Return the op times of a step that takes `part` times its price."""
    times = price.op_times()
    return (
        times
        if part == 1.0
        else tuple(OpTime(time.op, time.count, time.seconds * part) for time in times)
    )
