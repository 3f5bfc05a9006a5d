"""Improve expert placements near today's with few moves, because each moved replica sends
weights over a network.

Two kinds of move relieve the heaviest rank of a layer. It trades a replica with another rank; or a
new replica takes an empty slot, or the slot of a spare replica (one of several of its expert). On
another rank, the new replica is of an expert of the heaviest rank, and shares its load; on the
heaviest rank, it is of a light expert. A rank is a home of an expert if a replica there is free,
such as one that it holds today. A move costs the replicas that it adds away from home: a return
home is free, and so is rewriting a slot with a replica away from home. Each round makes,
in every layer that is not good enough, the move with the most relief per replica; the tables after
each round form the layer's path. Independent of nodes and time. All layers are planned at once.

Shapes: L layers, E logical experts, R living ranks, S maximum expert slots of a rank, Q = R * S
slots, Z maximum spare expert slots of a layer, N rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hadal.core.arrays import Bools, Floats, Ints
from hadal.core.placement import EMPTY
from hadal.policy.experts.paths import Path
from hadal.policy.experts.tables import Singles

NO_MOVE = np.float32(1e9)
FREE = np.float32(0.5)
"""Cost assumed for a move that costs nothing, so that it comes first if it brings any relief."""
WORTHWHILE = np.float32(2e-4)
"""Minimum relief per replica, as a fraction of the heaviest rank's load, for a layer's path to go on."""
LIGHT_RANKS = 12
"""Minimum number of lightest ranks that the heaviest trades with; more if half of all ranks is
more. All ranks if they have at most two expert slots: good partners are rare then, and not among
the lightest.
"""
MAX_ROUNDS = 200
"""Maximum number of moves of one layer's path."""


@dataclass(frozen=True)
class Homes:
    """Ranks where replicas of an expert cost nothing, and ranks where they must never be."""

    home_LRE: Bools
    barred_LRE: Bools | None = None


@dataclass
class _TableState:
    """Table and values derived from it, for some layers. Empty expert slots hold replicas of a
    dummy expert E without load.
    """

    table_LQ: Ints
    loads_LE1: Singles
    blocked_LRE1: Bools
    """True if an expert must not be added to a rank: the rank has it already, or it is barred."""
    barred_LRE1: Bools | None
    """True if an expert must never be on a rank."""
    home_LRE1: Bools
    """True if an expert is at home on a rank: a replica there costs nothing."""
    stray_LQ: Bools
    """True if the expert in a slot is not at home on its rank."""
    counts_LE1: Ints
    rank_loads_LR: Singles
    closed_Q: Bools
    num_expert_slots: int

    @classmethod
    def of(
        cls,
        table_LQ: Ints,
        loads_LE1: Singles,
        homes: Homes,
        closed_Q: Bools,
        num_expert_slots: int,
    ) -> _TableState:
        num_layers, num_experts = loads_LE1.shape
        rows = np.arange(num_layers)[:, None]
        counts = np.bincount(
            (table_LQ + rows * num_experts).ravel(), minlength=num_layers * num_experts
        )
        counts = counts.reshape(num_layers, num_experts)
        ranks = np.arange(table_LQ.shape[1])[None] // num_expert_slots
        blocked = np.zeros((num_layers, table_LQ.shape[1] // num_expert_slots, num_experts), bool)
        home = np.ones_like(blocked)
        home[:, :, :-1] = homes.home_LRE
        barred = None
        if homes.barred_LRE is not None:
            barred = np.zeros_like(blocked)
            barred[:, :, :-1] = homes.barred_LRE
            blocked |= barred
        blocked[rows, ranks, table_LQ] = True
        blocked[:, :, -1] = False
        share = loads_LE1 / np.maximum(counts, 1)
        loads = (
            np.take_along_axis(share, table_LQ, axis=1)
            .reshape(num_layers, -1, num_expert_slots)
            .sum(axis=2)
        )
        stray = ~home[rows, ranks, table_LQ]
        return cls(
            table_LQ.copy(),
            loads_LE1,
            blocked,
            barred,
            home,
            stray,
            counts,
            loads,
            closed_Q,
            num_expert_slots,
        )

    def only(self, layers: Ints) -> _TableState:
        return _TableState(
            self.table_LQ[layers],
            self.loads_LE1[layers],
            self.blocked_LRE1[layers],
            None if self.barred_LRE1 is None else self.barred_LRE1[layers],
            self.home_LRE1[layers],
            self.stray_LQ[layers],
            self.counts_LE1[layers],
            self.rank_loads_LR[layers],
            self.closed_Q,
            self.num_expert_slots,
        )

    def write(self, layers: Ints, slots: Ints, experts: Ints) -> None:
        """Write experts [M] to expert slots [M] of layers [M], each layer at most once."""
        ranks, old = slots // self.num_expert_slots, self.table_LQ[layers, slots]
        self.table_LQ[layers, slots] = experts
        self.stray_LQ[layers, slots] = ~self.home_LRE1[layers, ranks, experts]
        self.blocked_LRE1[layers, ranks, old] = (
            False if self.barred_LRE1 is None else self.barred_LRE1[layers, ranks, old]
        )
        self.blocked_LRE1[layers, ranks, experts] = True
        self.blocked_LRE1[layers, ranks, -1] = False
        self.counts_LE1[layers, old] -= 1
        self.counts_LE1[layers, experts] += 1

    def weigh(self) -> None:
        share = self.loads_LE1 / np.maximum(self.counts_LE1, 1)
        loads = np.take_along_axis(share, self.table_LQ, axis=1)
        self.rank_loads_LR = loads.reshape(len(loads), -1, self.num_expert_slots).sum(axis=2)


@dataclass
class _Moves:
    """Best move of each layer: the expert slots to write (-1: none) and the experts to write there
    [L, 2], cost and worth [L].
    """

    slots_L2: Ints
    experts_L2: Ints
    costs_L: Ints
    worths_L: Singles


def descend(
    table_LRS: Ints,
    homes: Homes,
    loads_LE: Floats,
    ceiling_L: Floats,
    capacity_R: Ints,
    *,
    max_moves: int,
    trades_only: bool = False,
    num_light: int | None = None,
) -> Path:
    """Return the path of every layer from a table to the best that single moves find.

    The distance is the number of replicas on a rank that is no home of their expert. The heaviest
    rank trades with one of the `num_light` lightest.
    """
    num_layers, num_ranks, num_expert_slots = table_LRS.shape
    if num_light is None:
        num_light = num_ranks if num_expert_slots < 3 else max(LIGHT_RANKS, num_ranks // 2)
    num_experts = loads_LE.shape[1]
    table = np.where(table_LRS == EMPTY, num_experts, table_LRS).reshape(num_layers, -1)
    loads = np.zeros((num_layers, num_experts + 1), np.float32)
    loads[:, :num_experts] = loads_LE
    state = _TableState.of(
        table,
        loads,
        homes,
        _closed(capacity_R, num_expert_slots).ravel(),
        num_expert_slots,
    )
    ceiling = ceiling_L.astype(np.float32)
    distance = state.stray_LQ.sum(axis=1)
    tables, tops, distances = (
        [table.astype(np.int16)],
        [state.rank_loads_LR.max(axis=1)],
        [distance],
    )
    active = np.arange(num_layers)
    for _ in range(MAX_ROUNDS):
        heaviest = state.rank_loads_LR.max(axis=1)
        moves = _best_moves(state, ceiling[active], trades_only, min(num_light, num_ranks))
        able = (moves.worths_L > WORTHWHILE * heaviest) & (heaviest > ceiling[active])
        going = np.flatnonzero(able & (distances[-1][active] + moves.costs_L <= max_moves))
        if not len(going):
            break
        for column in range(2):
            rows = going[moves.slots_L2[going, column] >= 0]
            state.write(rows, moves.slots_L2[rows, column], moves.experts_L2[rows, column])
        if len(going) < len(active):
            active, state = active[going], state.only(going)
        state.weigh()
        tables.append(tables[-1].copy())
        tables[-1][active] = state.table_LQ
        tops.append(tops[-1].copy())
        tops[-1][active] = state.rank_loads_LR.max(axis=1)
        distances.append(distances[-1].copy())
        distances[-1][active] += moves.costs_L[going]
    found = np.stack(tables)
    found[found == num_experts] = EMPTY
    return Path(found, np.stack(tops), np.stack(distances))


@dataclass(frozen=True)
class _Top:
    """Heaviest rank of every layer, with the values that all kinds of moves need."""

    rows_L: Ints
    rank_L: Ints
    load_L: Singles
    slots_LS: Ints
    experts_LS: Ints
    floor_L: Singles
    """Load below which relieving the rank further is worth nothing."""
    share_LE1: Singles
    base_LR: Ints
    """Start of a rank's row of experts in the flat arrays of (layer, rank, expert)."""

    @classmethod
    def of(cls, state: _TableState, ceiling_L: Singles) -> _Top:
        loads, num_expert_slots = state.rank_loads_LR, state.num_expert_slots
        rows, rank = np.arange(len(loads)), loads.argmax(axis=1)
        load = loads[rows, rank]
        slots = rank[:, None] * num_expert_slots + np.arange(num_expert_slots)
        share = state.loads_LE1 / np.maximum(state.counts_LE1, 1)
        base = np.arange(loads.size).reshape(loads.shape) * share.shape[1]
        experts = state.table_LQ[rows[:, None], slots]
        return cls(
            rows,
            rank,
            load,
            slots,
            experts,
            np.minimum(ceiling_L, load),
            share.astype(np.float32),
            base,
        )

    def worth(self, after: Singles, costs: Singles) -> Singles:
        shape = (-1,) + (1,) * (after.ndim - 1)
        np.maximum(after, self.floor_L.reshape(shape), out=after)
        np.subtract(self.load_L.reshape(shape), after, out=after)
        after /= np.maximum(costs, FREE)
        return after


def _best_moves(
    state: _TableState, ceiling_L: Singles, trades_only: bool, num_light: int
) -> _Moves:
    top = _Top.of(state, ceiling_L)
    best = _trades(state, top, num_light)
    if trades_only:
        return best
    spare, rise = _spares(state, top)
    for move in (_shares(state, top, spare, rise), _drops(state, top, spare, rise)):
        better = move.worths_L > best.worths_L
        best.slots_L2[better], best.experts_L2[better] = (
            move.slots_L2[better],
            move.experts_L2[better],
        )
        best.costs_L[better], best.worths_L[better] = move.costs_L[better], move.worths_L[better]
    return best


def _trades(state: _TableState, top: _Top, num_light: int) -> _Moves:
    """Return the heaviest rank's best trade with one of the lightest."""
    loads, num_expert_slots, rows = state.rank_loads_LR, state.num_expert_slots, top.rows_L
    num_ranks = loads.shape[1]
    light = np.argpartition(loads, num_light - 1, axis=1)[:, :num_light]
    table3 = state.table_LQ.reshape(-1, num_expert_slots)
    held = table3.take(light + rows[:, None] * num_ranks, axis=0).reshape(len(rows), -1)
    slots = (light[:, :, None] * num_expert_slots + np.arange(num_expert_slots)).reshape(
        len(rows), -1
    )
    their_share = top.share_LE1[rows[:, None], held]
    base = np.take_along_axis(top.base_LR, light, axis=1)
    cells = base[:, None, :] + top.experts_LS[:, :, None]
    my_row = top.base_LR[rows, top.rank_L][:, None] + held
    forbidden = state.blocked_LRE1.reshape(-1).take(my_row) | state.closed_Q[slots]
    mine = np.where(
        state.closed_Q[top.slots_LS], -NO_MOVE, top.share_LE1[rows[:, None], top.experts_LS]
    )
    delta = mine[:, :, None] - np.where(forbidden, NO_MOVE, their_share)[:, None, :]
    other = (
        loads[rows[:, None], light][:, None, :]
        + state.blocked_LRE1.reshape(-1).take(cells) * NO_MOVE
    )
    after = np.repeat(other.astype(np.float32), num_expert_slots, axis=2)
    after += delta
    np.maximum(after, top.load_L[:, None, None] - delta, out=after)
    home = state.home_LRE1.reshape(-1)
    theirs = (~home.take(my_row)).astype(np.float32) - state.stray_LQ[rows[:, None], slots]
    ours = np.repeat((~home.take(cells)).astype(np.float32), num_expert_slots, axis=2)
    ours -= state.stray_LQ[rows[:, None], top.slots_LS][:, :, None]
    ours += theirs[:, None, :]
    give, take, best = _most(top.worth(after, ours))
    return _Moves(
        np.stack((top.slots_LS[rows, give], slots[rows, take]), axis=1),
        np.stack((held[rows, take], top.experts_LS[rows, give]), axis=1),
        ours[rows, give, take].astype(np.int64),
        best,
    )


def _spares(state: _TableState, top: _Top) -> tuple[Ints, Singles]:
    """Return (expert slots [L, Z] with a spare replica, padded with -1; load of the expert's
    heaviest other rank once that replica is gone).
    """
    table, counts = state.table_LQ, state.counts_LE1
    num_experts = counts.shape[1] - 1
    rows = top.rows_L[:, None]
    is_spare = ((counts[rows, table] > 1) | (table == num_experts)) & ~state.closed_Q
    layers, slots = np.nonzero(is_spare)
    number = is_spare.sum(axis=1)
    most = max(int(number.max()), 1)
    spare = np.full((len(table), most), -1)
    spare[layers, np.arange(len(layers)) - np.repeat(np.cumsum(number) - number, number)] = slots
    held = np.where(spare < 0, num_experts, table[rows, spare])
    loads = state.rank_loads_LR[rows, spare // state.num_expert_slots]
    # By expert, then heaviest rank first.
    order = np.argsort(held * (1.0 + float(loads.max())) - loads, axis=1, kind="stable")
    sorted_held, sorted_loads = held[rows, order], loads[rows, order]
    first = np.ones_like(order, bool)
    first[:, 1:] = sorted_held[:, 1:] != sorted_held[:, :-1]
    start = np.maximum.accumulate(np.where(first, np.arange(most), 0), axis=1)
    # The heaviest other rank is the group's first, or its second for the first itself.
    at = np.where(first, np.minimum(start + 1, most - 1), start)
    other = np.empty_like(loads)
    other[rows, order] = sorted_loads[rows, at]
    extra = state.loads_LE1 / np.maximum(counts - 1, 1) - top.share_LE1
    return spare, np.where(held == num_experts, np.float32(0), other + extra[rows, held])


def _shares(state: _TableState, top: _Top, spare_LZ: Ints, rise_LZ: Singles) -> _Moves:
    """Return the best new replica of an expert of the heaviest rank, in a spare expert slot elsewhere."""
    rows = top.rows_L[:, None]
    slots = np.maximum(spare_LZ, 0)
    ranks = slots // state.num_expert_slots
    ours = top.experts_LS
    new = state.loads_LE1[rows, ours] / (state.counts_LE1[rows, ours] + 1)
    relieved = top.load_L[:, None] - top.share_LE1[rows, ours] + new
    relieved[ours == state.loads_LE1.shape[1] - 1] = NO_MOVE
    left = state.rank_loads_LR[rows, ranks] - top.share_LE1[rows, state.table_LQ[rows, slots]]
    left[spare_LZ < 0] = NO_MOVE
    after = left[:, None, :] + new[:, :, None]
    np.maximum(after, relieved[:, :, None], out=after)
    np.maximum(after, rise_LZ[:, None, :], out=after)
    cells = top.base_LR[rows, ranks][:, None, :] + ours[:, :, None]
    after[state.blocked_LRE1.reshape(-1).take(cells)] = NO_MOVE
    costs = (~state.home_LRE1.reshape(-1).take(cells)).astype(np.float32)
    costs -= state.stray_LQ[rows, slots][:, None, :]
    shared, at, best = _most(top.worth(after.astype(np.float32), costs))
    rows = top.rows_L
    return _Moves(
        np.stack((spare_LZ[rows, at], np.full(len(rows), -1)), axis=1),
        np.stack((ours[rows, shared], np.zeros(len(rows), np.int64)), axis=1),
        costs[rows, shared, at].astype(np.int64),
        best,
    )


def _drops(state: _TableState, top: _Top, spare_LZ: Ints, rise_LZ: Singles) -> _Moves:
    """Return the best spare replica to remove from the heaviest rank, in favour of a new replica of
    the expert that adds the least load there.
    """
    rows = top.rows_L
    instead = np.where(
        state.blocked_LRE1[rows, top.rank_L], NO_MOVE, state.loads_LE1 / (state.counts_LE1 + 1)
    )
    instead[:, -1] = NO_MOVE
    expert = instead.argmin(axis=1)
    slots = np.maximum(spare_LZ, 0)
    shares = top.share_LE1[rows[:, None], state.table_LQ[rows[:, None], slots]]
    after = np.maximum((top.load_L + instead[rows, expert])[:, None] - shares, rise_LZ).astype(
        np.float32
    )
    after[(spare_LZ < 0) | (slots // state.num_expert_slots != top.rank_L[:, None])] = NO_MOVE
    costs = (~state.home_LRE1[rows, top.rank_L, expert])[:, None].astype(np.float32)
    costs = costs - state.stray_LQ[rows[:, None], slots]
    worth = top.worth(after, costs)
    at = worth.argmax(axis=1)
    return _Moves(
        np.stack((spare_LZ[rows, at], np.full(len(rows), -1)), axis=1),
        np.stack((expert, np.zeros(len(rows), np.int64)), axis=1),
        costs[rows, at].astype(np.int64),
        worth[rows, at],
    )


def _most(worth_LSX: Singles) -> tuple[Ints, Ints, Singles]:
    flat = worth_LSX.reshape(len(worth_LSX), -1)
    best = flat.argmax(axis=1)
    mine, other = np.divmod(best, worth_LSX.shape[2])
    return mine, other, flat[np.arange(len(flat)), best]


def _closed(capacity_R: Ints, num_expert_slots: int) -> Bools:
    """Return [R, S], True for expert slots that a rank lacks because it has fewer than others."""
    return np.asarray(np.arange(num_expert_slots) >= capacity_R[:, None])


def complete(table_LRS: Ints, loads_LE: Floats, capacity_R: Ints) -> Ints:
    """Return the table with a replica of every expert: experts without one take empty or spare
    expert slots.

    The heaviest expert is first, and each takes the slot that leaves its rank lightest. Raises
    ValueError if there are too few slots.
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
