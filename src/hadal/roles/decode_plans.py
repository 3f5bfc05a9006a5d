"""The decode unit's plans as they leave the leader: a step's changes by the unit's slots in, one
plan a rank out.

Decides nothing and changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from hadal.core.balance import KV, REQUESTS, balance_of
from hadal.core.plans import DecodePlan, Join
from hadal.roles.decode_table import DecodeTable, Ints
from hadal.roles.ending import has_penalty
from hadal.roles.schedule import Choice


def make_plans(
    step_id: int,
    num_ranks: int,
    per_rank: int,
    leaves: Sequence[int],
    joins: Sequence[tuple[int, Join]],
    grown: Sequence[tuple[int, int, int]],
    publishes: Sequence[int],
    choice: Choice,
    second: tuple[tuple[int, ...], ...] | None,
    fills: Mapping[int, Sequence[int]],
    *,
    is_traced: bool,
) -> tuple[DecodePlan, ...]:
    """The step's plans, one for each rank, with the ranks' own slots; `second` and `fills` are by
    rank already.
    """
    rank_leaves: defaultdict[int, list[int]] = defaultdict(list)
    rank_joins: defaultdict[int, list[Join]] = defaultdict(list)
    rank_grown: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    rank_publishes: defaultdict[int, list[int]] = defaultdict(list)
    for slot in leaves:
        rank_leaves[slot // per_rank].append(slot % per_rank)
    for slot, join in joins:
        rank_joins[slot // per_rank].append(join)
    joining = {
        slot for slot, _ in joins
    }  # With the grown block already: they go on at the rank that they never left.
    for slot, position, block_id in grown:
        if slot not in joining:
            rank_grown[slot // per_rank].append((slot % per_rank, position, block_id))
    for slot in publishes:
        rank_publishes[slot // per_rank].append(slot % per_rank)
    # Most ranks of a large unit have no news, and one plan says it for all of them.
    same = DecodePlan(step_id, (), (), (), choice.schedule, (), choice.num_micro_batches, is_traced)
    plans = [same] * num_ranks
    news = {*rank_leaves, *rank_joins, *rank_grown, *rank_publishes, *fills}
    if second is not None:
        news.update(rank for rank, slots in enumerate(second) if slots)
    for rank in news:
        plans[rank] = DecodePlan(
            step_id,
            tuple(rank_leaves.get(rank, ())),
            tuple(rank_joins.get(rank, ())),
            tuple(rank_grown.get(rank, ())),
            choice.schedule,
            second[rank] if second is not None else (),
            choice.num_micro_batches,
            is_traced,
            tuple(rank_publishes.get(rank, ())),
            fills=tuple(fills.get(rank, ())),
        )
    return tuple(plans)


def join_of(table: DecodeTable, slot: int, per_rank: int) -> Join:
    """How a slot enters its rank's table: from the last token delivered, the first time
    prefill's.
    """
    generation = table.seat(slot).generation
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
        ticket=int(table.ticket[slot]),
        stop_ids=generation.stop_ids,
        min_tokens=generation.min_tokens,
        is_pulled=table.is_as_pulled(slot),
    )


def step_balance(living: Sequence[int], work_R2: Ints) -> dict[str, float]:
    """How even a step's (requests, KV positions) lie on the living ranks; empty for a step without
    work.
    """
    requests, positions = work_R2[np.array(living, np.int64)].T.tolist()
    return balance_of({KV: positions, REQUESTS: requests})
