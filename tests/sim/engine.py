"""An engine without a model: KV cells keep what was written, and tokens depend on every cell.

A cell hashes its token and position; the next token hashes all cells read through the block list,
the output index, the seed and the penalties' history. A block freed too early, a stale copy, a wrong
position or a lost history gives a wrong token. Expected tokens need no blocks and no steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hadal.core.config import PREFILL, Deployment
from hadal.core.drafts import Compared, compared, summed
from hadal.core.messages.base import BLOCK_TOKENS, SCRATCH_BLOCK
from hadal.core.messages.generation import Generation
from hadal.core.messages.units import KvLease
from hadal.core.plans import DecodePlan, Draw, Join, PrefillPlan, Sampling, StepDone
from hadal.roles.unit.tokens import has_penalty

VOCAB = 48
MAX_POSITIONS = 1 << 14
Cells = NDArray[np.uint64]

_MIX = np.uint64(0x9E3779B97F4A7C15)


def mix(values: Cells) -> Cells:
    """Return a cheap 64-bit hash of each element (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_WEIGHTS = mix(np.arange(1, MAX_POSITIONS + 1, dtype=np.uint64)) | np.uint64(1)


_WEIGHT_OF: list[int] = _WEIGHTS.tolist()
_BITS = (1 << 64) - 1


def cells_of(tokens: Sequence[int], start: int) -> Cells:
    """Return the KV cells of `tokens` at positions start, start+1, ..."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return mix((np.asarray(tokens, dtype=np.uint64) + np.uint64(1)) * _MIX + positions)


@lru_cache(maxsize=1 << 18)
def cell_of(token: int, position: int) -> int:
    """Return the KV cell of one token. Decode steps and expected outputs go token by token."""
    return int(cells_of([token], position)[0])


def state_of(cells: Cells) -> int:
    """Return the state of `cells` (positions 0 .. n-1), on which the next token depends."""
    return int((cells * _WEIGHTS[: len(cells)]).sum(dtype=np.uint64))


def draw_token(
    state: int,
    num_cells: int,
    index: int,
    sampling: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int],
    min_tokens: int,
) -> int:
    """Return the token after cells of this state at output index `index`."""
    seen: tuple[object, ...] = ()
    if has_penalty(sampling):
        seen = (tuple(prompt), tuple(output))
    token = hash((state, num_cells, index, sampling.seed, seen)) % VOCAB
    while token in stop_ids and index < min_tokens:
        token = (token + 1) % VOCAB
    return token


def expected_output(generation: Generation) -> list[int]:
    """Return the output of a request, computed without blocks, steps or other requests."""
    prompt, output = generation.prompt, list(generation.output)
    state = state_of(np.concatenate([cells_of(prompt, 0), cells_of(output, len(prompt))]))
    while len(output) < generation.max_tokens:
        index = len(output)
        position = len(prompt) + index
        token = draw_token(
            state,
            position,
            index,
            generation.sampling,
            prompt,
            output,
            generation.stop_ids,
            generation.min_tokens,
        )
        output.append(token)
        if token in generation.stop_ids and index >= generation.min_tokens:
            break
        state = (state + cell_of(token, position) * _WEIGHT_OF[position]) & _BITS
    return output


class Pool:
    """A unit's KV memory, as other units see it.

    Writes and reads apply the unit's weights to cells, so a cell of other weights gives wrong
    tokens.
    """

    def __init__(self, num_blocks: int, weights: int = 0) -> None:
        self.cells: Cells = np.zeros((num_blocks, BLOCK_TOKENS), np.uint64)
        self.versions = [0] * num_blocks
        self.weights = weights

    def freed(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.versions[block] += 1

    def read(self, block_ids: Sequence[int], num_tokens: int) -> Cells:
        flat: Cells = self.cells[list(block_ids)].reshape(-1)
        assert num_tokens <= len(flat), (
            f"{num_tokens} positions are read from {len(block_ids)} blocks"
        )
        return flat[:num_tokens] ^ np.uint64(self.weights)

    def write(self, block_ids: Sequence[int], start: int, cells: Cells | list[int]) -> None:
        for offset, cell in enumerate(cells):
            position = start + offset
            at = block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            self.cells[at] = cell ^ self.weights


def pull(source: Pool | None, lease: KvLease, target: Pool, into: Sequence[int]) -> str | None:
    """Copy leased cells, then check that the lease still holds. Return the error, or None."""
    if source is None:
        return "the pool is gone"
    assert len(into) == len(lease.block_ids), "as many blocks as are leased"
    cells = source.read(lease.block_ids, lease.num_tokens)
    # Raw cells are copied: a copy does not convert between weights.
    target.write(into, 0, cells ^ np.uint64(source.weights ^ target.weights))
    now = tuple(source.versions[block] for block in lease.block_ids)
    return None if now == lease.versions else "the blocks were freed meanwhile"


class PrefillEngine:
    """Executes prefill plans on a pool."""

    def __init__(self, pool: Pool, chunk_tokens: int) -> None:
        self._pool = pool
        self._chunk_tokens = chunk_tokens

    def _verify(self, plan: PrefillPlan) -> None:
        """Check that a step has at most `chunk_tokens` tokens, and that chunks do not overlap."""
        chunks = plan.chunks + plan.second
        assert sum(len(chunk.tokens) for chunk in chunks) <= self._chunk_tokens
        written = [
            (chunk.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS)
            for chunk in chunks
            for position in range(chunk.start, chunk.start + len(chunk.tokens))
        ]
        assert len(set(written)) == len(written), "two chunks of a step write the same place"
        assert all(block != SCRATCH_BLOCK for block, _ in written), "the scratch block is nobody's"
        assert all(chunk.tokens for chunk in chunks), "a chunk without tokens"

    def execute(self, plan: PrefillPlan, elapsed_s: float, error: str | None) -> StepDone:
        self._verify(plan)
        if error is not None:
            return StepDone(plan.step_id, (), (), {}, elapsed_s, error)
        keys, tokens, draws = [], [], {}
        for key, chunk in enumerate(plan.chunks + plan.second):
            self._pool.write(chunk.block_ids, chunk.start, cells_of(chunk.tokens, chunk.start))
            if chunk.sampling is None:
                continue
            cells = self._pool.read(chunk.block_ids, chunk.start + len(chunk.tokens))
            keys.append(key)
            tokens.append(
                draw_token(
                    state_of(cells),
                    len(cells),
                    chunk.output_index,
                    chunk.sampling,
                    chunk.prompt,
                    chunk.output,
                    chunk.stop_ids,
                    chunk.min_tokens,
                )
            )
            if chunk.sampling.num_logprobs >= 0:
                draws[len(tokens) - 1] = Draw(-float(tokens[-1]), ())
        return StepDone(plan.step_id, tuple(keys), tuple(tokens), draws, elapsed_s)


@dataclass
class _Row:
    join: Join
    block_ids: list[int]
    length: int
    last_token: int
    output: list[int]
    index: int
    drafts: list[int] = field(default_factory=list)
    """Tokens that the last plan drafted behind `last_token`."""
    has_ended: bool = False
    """True after a stop id was drawn: the row is computed no more."""


class DecodeEngine:
    """Executes decode plans on a pool, with the table that plans change.

    All checked cells are written first, as a model does. A share `accept` of the drafts is right,
    and later tokens overwrite the cells of wrong drafts.
    """

    def __init__(
        self,
        pool: Pool,
        num_slots: int,
        accept: float = 0.7,
        pass_s: float | None = None,
        row_share: float = 0.0,
    ) -> None:
        """`pass_s`: reported seconds of a pass; None: those given to `execute`. `row_share`: extra
        time of a pass per row, as a share of the pass.
        """
        self.num_tried = self.num_right = 0
        """Drafts that were compared with drawn tokens, and drafts that were equal to them."""
        self.num_rested = 0
        """Slots that steps did not compute, summed over steps."""
        self._pool = pool
        self._num_slots = num_slots
        self._accept = accept
        self._pass_s = pass_s
        self._row_share = row_share
        self._rows: dict[int, _Row] = {}
        self._lost_slots: set[int] = set()
        """Slots lost by a failed step. Plans made before the leader receives the failure still use them."""
        self._num_failures = 0

    def empty(self) -> None:
        """Empty the table, because the unit forms anew."""
        self._rows.clear()
        self._lost_slots.clear()
        self._num_failures = 0

    def execute(self, plan: DecodePlan, pass_s: float, error: str | None) -> StepDone:
        elapsed_s = plan.num_passes * (pass_s if self._pass_s is None else self._pass_s)
        joining = {join.slot for join in plan.joins}
        was_lost = self._lost_slots.intersection(plan.leaves)
        self._lost_slots -= joining.union(plan.leaves)
        if self._lost_slots:
            error = error or "the step before it failed"
        gone = {slot for slot in plan.leaves if self._rows.pop(slot, None) is None}
        strangers = sorted(gone - was_lost)
        if len(plan.leaves) == self._num_slots and self._num_failures:
            # After a failed step the leader empties every slot, once.
            self._num_failures -= 1
        else:
            # The leader's table may only differ in slots that a failed step lost.
            assert not strangers, f"slots {strangers} leave and are not there"
        if error is not None:
            self._num_failures += 1
            self._lost_slots |= joining.union(self._rows)
            self._rows.clear()
            return StepDone(plan.step_id, (), (), {}, elapsed_s, error)
        for join in plan.joins:
            assert join.slot not in self._rows, f"slot {join.slot} is joined twice"
            self._rows[join.slot] = _Row(
                join,
                list(join.block_ids),
                join.num_tokens,
                join.last_token,
                list(join.output),
                join.output_index,
            )
        for slot, position, block in plan.grown:
            assert position == len(self._rows[slot].block_ids), (
                f"slot {slot} grows at the wrong place"
            )
            self._rows[slot].block_ids.append(block)
        self._verify()
        # Keys in a rank's order: the first token of each row, then the tokens that drafts bring.
        resting = set(plan.resting)
        assert resting <= self._rows.keys(), f"slots {sorted(resting)} rest and are not there"
        assert resting.isdisjoint((*plan.second, *plan.publishes)), "a slot rests and is computed"
        self.num_rested += len(resting)
        made: dict[int, list[int]] = {slot: [] for slot in sorted(self._rows.keys() - resting)}
        drafts: Compared = ()
        took_s, pass_s = 0.0, elapsed_s / plan.num_passes
        for _ in range(plan.num_passes):
            checked, right = [], []
            for slot, tokens in made.items():
                row = self._rows[slot]
                if row.has_ended:
                    continue
                drawn, num_checked = self._advance(row)
                tokens += drawn
                checked.append(num_checked)
                right.append(len(drawn) - 1)
                row.has_ended = any(token in row.join.stop_ids for token in drawn)
                row.drafts = self._drafted(row, plan.num_drafts)
            took_s += pass_s * (1.0 + self._row_share * len(checked)) * bool(checked)
            drafts = summed((drafts, compared(np.array(checked), np.array(right))))
        most = max(map(len, made.values()), default=0)
        keys = [slot for turn in range(most) for slot in made if turn < len(made[slot])]
        values = [
            made[slot][turn] for turn in range(most) for slot in made if turn < len(made[slot])
        ]
        draws = {
            row: Draw(-float(token), ())
            for row, (slot, token) in enumerate(zip(keys, values, strict=True))
            if self._rows[slot].join.sampling.num_logprobs >= 0
        }
        self.num_tried += sum(tried for tried, _ in drafts)
        self.num_right += sum(right for _, right in drafts)
        return StepDone(plan.step_id, tuple(keys), tuple(values), draws, took_s, drafts=drafts)

    def _verify(self) -> None:
        """Check that all rows have slots of the rank, and that no two rows share a block."""
        assert all(0 <= slot < self._num_slots for slot in self._rows), (
            f"slots {sorted(self._rows)}"
        )
        held = [block for row in self._rows.values() for block in row.block_ids]
        assert len(set(held)) == len(held), "two requests of a rank have a block in common"
        assert SCRATCH_BLOCK not in held, "the scratch block is nobody's"

    def _advance(self, row: _Row) -> tuple[list[int], int]:
        """Return the tokens of a pass (one, and one per right draft) and how many were checked."""
        room = len(row.block_ids) * BLOCK_TOKENS
        if row.length >= room:
            # The request ended in the plan before. A rank now writes to its scratch block, and the
            # token must not be used: a client's check fails if it is.
            row.length += 1
            return [VOCAB - 1], 0
        checked = row.drafts[: max(0, room - 1 - row.length)]
        for ahead, token in enumerate((row.last_token, *checked)):
            at = row.length + ahead
            self._pool.write(row.block_ids, at, [cell_of(token, at)])
        made = [self._draw(row)]
        for draft in checked:
            if draft != made[-1]:
                break
            made.append(self._draw(row))
        return made, len(checked)

    def _draw(self, row: _Row) -> int:
        row.length += 1
        state = state_of(self._pool.read(row.block_ids, row.length))
        token = self._token(row, state, row.length, row.index, row.output)
        row.last_token = token
        row.index += 1
        row.output.append(token)
        return token

    def _token(self, row: _Row, state: int, num_cells: int, index: int, output: list[int]) -> int:
        join = row.join
        return draw_token(
            state,
            num_cells,
            index,
            join.sampling,
            join.prompt,
            output,
            join.stop_ids,
            join.min_tokens,
        )

    def _drafted(self, row: _Row, num_drafts: int) -> list[int]:
        if not num_drafts or row.length >= len(row.block_ids) * BLOCK_TOKENS:
            return []
        state = state_of(self._pool.read(row.block_ids, row.length))
        token, position, output = row.last_token, row.length, [*row.output]
        for index in range(row.index, row.index + num_drafts):
            state = (state + cell_of(token, position) * _WEIGHT_OF[position]) & _BITS
            position += 1
            token = self._token(row, state, position, index, output)
            if hash((row.join.sampling.seed, index, 1)) % 1000 >= 1000 * self._accept:
                token = (token + 1) % VOCAB
            output.append(token)
        return output[-num_drafts:]


def engine_for(
    role: str,
    pool: Pool,
    config: Deployment,
    draft_accept: float = 0.7,
    pass_s: float | None = None,
    row_share: float = 0.0,
) -> PrefillEngine | DecodeEngine:
    """Return the engine of a rank."""
    if role == PREFILL:
        return PrefillEngine(pool, config.chunk_tokens)
    return DecodeEngine(pool, config.decode.max_requests, draft_accept, pass_s, row_share)
