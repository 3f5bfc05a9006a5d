"""Better expert placements near today's: few replicas move, because each one that does is weights over a network.

Two kinds of move relieve the heaviest rank of a layer: it trades a replica with another rank (two replicas travel), or
a slot that holds a spare replica of some expert is given to another expert (one travels): elsewhere to one of the
heaviest rank's own, which then shares it, or on the heaviest rank to a light one. Each round makes, in every layer
that is not good enough, the move with the best relief per replica.
Knows nothing of nodes or time. All layers at once.

Shapes: L layers, E logical experts, R living ranks, S most slots of a rank, Q = R * S slots, U a layer's heaviest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadal.policy.expert_packing import EMPTY, Floats, Ints, Singles

NO_MOVE = np.float32(1e9)


@dataclass
class _State:
    """A table and what follows from it, for some layers. Empty slots are replicas of the weightless expert E."""

    table_LQ: Ints
    loads_LE1: Singles
    num_slots: int
    closed_Q: NDArray[np.bool_]
    held_LRE1: NDArray[np.bool_]
    counts_LE1: Ints
    rank_loads_LR: Singles

    @classmethod
    def of(cls, table_LQ: Ints, loads_LE1: Singles, num_slots: int, closed_Q: NDArray[np.bool_]) -> _State:
        num_layers, num_experts = loads_LE1.shape
        rows = np.arange(num_layers)[:, None]
        counts = np.bincount((table_LQ + rows * num_experts).ravel(), minlength=num_layers * num_experts)
        counts = counts.reshape(num_layers, num_experts)
        num_ranks = table_LQ.shape[1] // num_slots
        held = np.zeros((num_layers, num_ranks, num_experts), bool)
        held[rows, np.arange(table_LQ.shape[1])[None] // num_slots, table_LQ] = True
        share = loads_LE1 / np.maximum(counts, 1)
        loads = np.take_along_axis(share, table_LQ, axis=1).reshape(num_layers, num_ranks, num_slots).sum(axis=2)
        return cls(table_LQ, loads_LE1, num_slots, closed_Q, held, counts, loads)


def improve(
    table_LRS: Ints, loads_LE: Floats, ceiling_L: Floats, capacity_R: Ints, *, max_moves: int, num_rounds: int = 200,
    trades_only: bool = False,
) -> Ints:  # fmt: skip
    """Return a table [L, R, S] no heavier in any layer, at most `max_moves` replicas away from the given one.

    A layer rests when its heaviest rank is at its ceiling or no move helps. Every expert must have a replica
    (`complete` sees to it). Empty slots may be filled. `trades_only` leaves every expert as many replicas as it has.
    """
    num_layers, _, num_slots = table_LRS.shape
    num_experts = loads_LE.shape[1]
    table = np.where(table_LRS == EMPTY, num_experts, table_LRS).reshape(num_layers, -1)
    loads = np.zeros((num_layers, num_experts + 1), np.float32)
    loads[:, :num_experts] = loads_LE
    closed = _closed(capacity_R, num_slots).ravel()
    active = np.arange(num_layers)
    budget = max_moves
    for _ in range(num_rounds):
        if budget < 1 or not len(active):
            break
        state = _State.of(table[active], loads[active], num_slots, closed)
        tops = state.rank_loads_LR.max(axis=1)
        slots, experts, costs, gains = _best_moves(state, ceiling_L[active].astype(np.float32), budget, trades_only)
        able = np.flatnonzero((gains > 1e-6 * tops) & (tops > ceiling_L[active]))
        order = able[np.argsort(-gains[able], kind="stable")]
        order = order[np.cumsum(costs[order]) <= budget]
        budget -= int(costs[order].sum())
        active = active[order]
        for column in range(2):
            at = slots[order, column]
            filled = at >= 0
            table[active[filled], at[filled]] = experts[order[filled], column]
    result: Ints = np.where(table == num_experts, EMPTY, table).reshape(table_LRS.shape)
    return result


def _best_moves(state: _State, ceiling_L: Singles, budget: int, trades_only: bool) -> tuple[Ints, Ints, Ints, Singles]:
    """Return (slots to write [L, 2], experts to write there [L, 2], replicas moved [L], relief per replica [L])."""
    num_layers = len(state.table_LQ)
    rows = np.arange(num_layers)
    top = state.rank_loads_LR.argmax(axis=1)
    tops = state.rank_loads_LR[rows, top]
    mine = top[:, None] * state.num_slots + np.arange(state.num_slots)
    floor = np.minimum(ceiling_L, tops)
    slots = np.full((3, num_layers, 2), -1)
    experts = np.full((3, num_layers, 2), 0)
    gains = np.empty((3, num_layers), np.float32)
    give, take, after = _trades(state, top, mine)
    gains[0] = (tops - np.maximum(after, floor)) / 2 if budget >= 2 else 0
    slots[0, :, 0], slots[0, :, 1] = mine[rows, give], take
    experts[0, :, 0], experts[0, :, 1] = state.table_LQ[rows, take], state.table_LQ[rows, mine[rows, give]]
    if trades_only:
        return slots[0], experts[0], np.full(num_layers, 2), gains[0]
    rise, spare = _rise_elsewhere(state)
    shared, at, after = _shares(state, top, mine, rise, spare)
    gains[1] = tops - np.maximum(after, floor)
    slots[1, :, 0], experts[1, :, 0] = at, state.table_LQ[rows, mine[rows, shared]]
    dropped, instead, after = _drops(state, top, mine, rise, spare)
    gains[2] = tops - np.maximum(after, floor)
    slots[2, :, 0], experts[2, :, 0] = mine[rows, dropped], instead
    kind = gains.argmax(axis=0)
    costs = np.where(kind == 0, 2, 1)
    return slots[kind, rows], experts[kind, rows], costs, gains[kind, rows]


def _trades(state: _State, top_L: Ints, mine_LS: Ints) -> tuple[Ints, Ints, Singles]:
    """The heaviest rank's best trade: (its slot index, the other's slot, the heavier of the two after it)."""
    table, loads = state.table_LQ, state.rank_loads_LR
    rows = np.arange(len(table))
    share = state.loads_LE1 / np.maximum(state.counts_LE1, 1)
    slot_share = np.take_along_axis(share, table, axis=1)
    other = np.repeat(loads, state.num_slots, axis=1)
    ours = np.take_along_axis(table, mine_LS, axis=1)
    our_share = np.take_along_axis(slot_share, mine_LS, axis=1)
    delta = our_share[:, :, None] - slot_share[:, None, :]
    after = np.maximum(loads[rows, top_L][:, None, None] - delta, other[:, None, :] + delta)
    # Not where one would hold an expert twice; the weightless expert may be anywhere.
    they_hold = np.repeat(np.take_along_axis(state.held_LRE1, ours[:, None, :], axis=2), state.num_slots, axis=1)
    i_hold = np.take_along_axis(state.held_LRE1[rows, top_L], table, axis=1)
    i_hold[table == state.loads_LE1.shape[1] - 1] = False
    after[they_hold.transpose(0, 2, 1) | i_hold[:, None, :]] = NO_MOVE
    after[state.closed_Q[mine_LS][:, :, None] | state.closed_Q] = NO_MOVE
    return _least(after)


def _rise_elsewhere(state: _State) -> tuple[Singles, NDArray[np.bool_]]:
    """Of every slot: (the heaviest of its expert's other ranks once this replica is gone [L, Q], is it spare)."""
    table, counts = state.table_LQ, state.counts_LE1
    spare = np.take_along_axis(counts, table, axis=1) > 1
    extra = state.loads_LE1 / np.maximum(counts - 1, 1) - state.loads_LE1 / np.maximum(counts, 1)
    loads = np.repeat(state.rank_loads_LR, state.num_slots, axis=1)
    order = np.lexsort((-loads, table), axis=1)
    sorted_table = np.take_along_axis(table, order, axis=1)
    sorted_loads = np.take_along_axis(loads, order, axis=1)
    first = np.ones_like(sorted_table, bool)
    first[:, 1:] = sorted_table[:, 1:] != sorted_table[:, :-1]
    start = np.maximum.accumulate(np.where(first, np.arange(table.shape[1]), 0), axis=1)
    # The heaviest other rank is the group's first, or for the first itself its second.
    at = np.where(first, np.minimum(start + 1, table.shape[1] - 1), start)
    other = np.empty_like(loads)
    np.put_along_axis(other, order, np.take_along_axis(sorted_loads, at, axis=1), axis=1)
    empty = table == state.loads_LE1.shape[1] - 1
    return np.where(empty, 0, other + np.take_along_axis(extra, table, axis=1)), (spare | empty) & ~state.closed_Q


def _shares(
    state: _State, top_L: Ints, mine_LS: Ints, rise_LQ: Singles, spare_LQ: NDArray[np.bool_]
) -> tuple[Ints, Ints, Singles]:
    """The best new replica of an expert of the heaviest rank: (its slot index, the slot for it, heaviest after)."""
    table, loads = state.table_LQ, state.rank_loads_LR
    rows = np.arange(len(table))
    share = state.loads_LE1 / np.maximum(state.counts_LE1, 1)
    ours = np.take_along_axis(table, mine_LS, axis=1)
    new = np.take_along_axis(state.loads_LE1 / (state.counts_LE1 + 1), ours, axis=1)
    relief = np.take_along_axis(share, ours, axis=1) - new
    left = np.repeat(loads, state.num_slots, axis=1) - np.take_along_axis(share, table, axis=1)
    after = np.maximum(left[:, None, :] + new[:, :, None], (loads[rows, top_L][:, None] - relief)[:, :, None])
    np.maximum(after, rise_LQ[:, None, :], out=after)
    they_hold = np.repeat(np.take_along_axis(state.held_LRE1, ours[:, None, :], axis=2), state.num_slots, axis=1)
    after[they_hold.transpose(0, 2, 1) | ~spare_LQ[:, None, :]] = NO_MOVE
    after[ours == state.loads_LE1.shape[1] - 1] = NO_MOVE
    return _least(after)


def _drops(
    state: _State, top_L: Ints, mine_LS: Ints, rise_LQ: Singles, spare_LQ: NDArray[np.bool_]
) -> tuple[Ints, Ints, Singles]:
    """The best spare replica to take from the heaviest rank: (its slot index, the expert instead, heaviest after)."""
    rows = np.arange(len(state.table_LQ))
    share = state.loads_LE1 / np.maximum(state.counts_LE1, 1)
    ours = np.take_along_axis(state.table_LQ, mine_LS, axis=1)
    instead = np.where(state.held_LRE1[rows, top_L], NO_MOVE, state.loads_LE1 / (state.counts_LE1 + 1))
    instead[:, -1] = NO_MOVE
    expert = instead.argmin(axis=1)
    after = (state.rank_loads_LR[rows, top_L] + instead[rows, expert])[:, None]
    after = after - np.take_along_axis(share, ours, axis=1)
    np.maximum(after, np.take_along_axis(rise_LQ, mine_LS, axis=1), out=after)
    after[~np.take_along_axis(spare_LQ, mine_LS, axis=1)] = NO_MOVE
    dropped = after.argmin(axis=1)
    return dropped, expert, after[rows, dropped]


def _least(after_LSQ: Singles) -> tuple[Ints, Ints, Singles]:
    flat = after_LSQ.reshape(len(after_LSQ), -1)
    best = flat.argmin(axis=1)
    mine, other = np.divmod(best, after_LSQ.shape[2])
    return mine, other, flat[np.arange(len(flat)), best]


def _closed(capacity_R: Ints, num_slots: int) -> NDArray[np.bool_]:
    """The slots [R, S] that a rank with fewer slots than others does not have."""
    return np.asarray(np.arange(num_slots) >= capacity_R[:, None])


def complete(table_LRS: Ints, loads_LE: Floats, capacity_R: Ints) -> Ints:
    """Return the table with a replica of every expert: those that lost their last one take empty or spare slots.

    Heaviest first, each in the slot that leaves its rank lightest. Raises ValueError if there are too few slots.
    """
    table = table_LRS.copy()
    num_experts = loads_LE.shape[1]
    for layer, held in enumerate(table):
        present = np.bincount(held[held != EMPTY], minlength=num_experts)
        for expert in sorted(np.flatnonzero(present == 0), key=lambda e: (-loads_LE[layer, e], e)):
            counts = np.bincount(held[held != EMPTY], minlength=num_experts)
            share = np.append(loads_LE[layer] / np.maximum(counts, 1), 0.0)
            loads = share[held].sum(axis=1, keepdims=True)
            free = (held == EMPTY) | (np.append(counts, 2)[held] > 1)
            free &= ~_closed(capacity_R, held.shape[1])
            if not free.any():
                raise ValueError(f"{held.size} slots are too few for {num_experts} experts.")
            after = np.where(free, loads - share[held], np.inf)
            held[np.unravel_index(int(np.argmin(after)), held.shape)] = expert
    return table
