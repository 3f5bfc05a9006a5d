"""Plans of a decode step, one per rank, made of the changes to the unit's slots. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from hadal.core.arrays import Ints
from hadal.core.balance import KV, REQUESTS, balance_of
from hadal.core.plans import DecodePlan, Join, OpTime
from hadal.roles.decode.table import DecodeTable
from hadal.roles.unit.tokens import has_penalty


@dataclass(frozen=True, slots=True)
class StepNews:
    """Slots of the unit that a step changes. `second`: each rank's own slots of micro-batch 2."""

    leaves: Sequence[int] = ()
    joins: Sequence[tuple[int, Join]] = ()
    grown: Sequence[tuple[int, int, int]] = ()
    """(slot, position in its block list, block id)"""
    publishes: Sequence[int] = ()
    resting: Sequence[int] = ()
    second: tuple[tuple[int, ...], ...] | None = None


def make_plans(
    same: DecodePlan, num_ranks: int, per_rank: int, news: StepNews
) -> tuple[DecodePlan, ...]:
    """Return the step's plans, one per rank, with the rank's own slot numbers. `same`: plan
    of a rank without changes.
    """
    rank_leaves = _by_rank(news.leaves, per_rank)
    rank_publishes = _by_rank(news.publishes, per_rank)
    rank_resting = _by_rank(news.resting, per_rank)
    rank_joins: defaultdict[int, list[Join]] = defaultdict(list)
    rank_grown: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for slot, join in news.joins:
        rank_joins[slot // per_rank].append(join)
    # A join lists all blocks of its slot, the grown one included.
    joining = {slot for slot, _ in news.joins}
    for slot, position, block_id in news.grown:
        if slot not in joining:
            rank_grown[slot // per_rank].append((slot % per_rank, position, block_id))
    # Most ranks of a large unit have no news and share one plan.
    plans = [same] * num_ranks
    ranks = {*rank_leaves, *rank_joins, *rank_grown, *rank_publishes, *rank_resting}
    if news.second is not None:
        ranks.update(rank for rank, slots in enumerate(news.second) if slots)
    for rank in ranks:
        plans[rank] = msgspec.structs.replace(
            same,
            leaves=tuple(rank_leaves.get(rank, ())),
            joins=tuple(rank_joins.get(rank, ())),
            grown=tuple(rank_grown.get(rank, ())),
            second=news.second[rank] if news.second is not None else (),
            publishes=tuple(rank_publishes.get(rank, ())),
            resting=tuple(rank_resting.get(rank, ())),
        )
    return tuple(plans)


def _by_rank(slots: Sequence[int], per_rank: int) -> dict[int, list[int]]:
    """Return rank -> its own slot numbers, from slots of the unit."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for slot in slots:
        found[slot // per_rank].append(slot % per_rank)
    return found


def join_of(table: DecodeTable, slot: int, per_rank: int) -> Join:
    """Return the slot's entry in its rank's table. The request continues from its last
    delivered token; prefill drew the first token.
    """
    generation = table.occupant(slot).generation
    prompt, output = (
        generation.prompt if has_penalty(generation.sampling) else (),
        table.outputs.get(slot, ()),
    )
    return Join(
        slot % per_rank,
        table.blocks_of(slot),
        int(table.length[slot]),
        int(table.last_token[slot]),
        int(table.output_index[slot]),
        generation.sampling,
        prompt=prompt,
        output=tuple(output),
        attempt_id=int(table.attempt_id[slot]),
        stop_ids=generation.stop_ids,
        min_tokens=generation.min_tokens,
        is_pulled=table.is_as_pulled(slot),
    )


def of_one_pass(op_times: Sequence[OpTime], num_passes: int) -> tuple[OpTime, ...]:
    """Return the operation times of one pass, given those of a step of `num_passes`."""
    if num_passes == 1:
        return tuple(op_times)
    return tuple(
        OpTime(each.op, max(1, each.count // num_passes), each.seconds / num_passes)
        for each in op_times
    )


def step_balance(living: Sequence[int], work_R2: Ints) -> dict[str, float]:
    """Return how evenly a step's requests and KV positions lie on the living ranks; empty without work."""
    requests, positions = work_R2[np.array(living, np.int64)].T.tolist()
    return balance_of({KV: positions, REQUESTS: requests})
