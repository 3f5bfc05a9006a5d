"""Better expert placements near today's: few replicas move, because each one that does is weights
over a network.

Two kinds of move relieve the heaviest rank of a layer. It trades a replica with another rank; or an
expert slot that holds a spare replica is given to another expert. If that slot is on another rank,
it goes to one of the heaviest rank's experts, whose load is then shared; if it is on the heaviest
rank, it goes to a light expert. A move costs what it adds to the distance from home: an expert that
returns to a rank costs nothing, nor does an expert slot that was rewritten before. Each round
makes, in every layer that is not good enough, the move with the best relief per replica; the tables
on the way make the layer's path. Knows nothing of nodes or time. All layers are planned at once.

Shapes: L layers, E logical experts, R living ranks, S most expert slots of a rank, Q = R * S slots,
U a layer's heaviest rank, Z most spare expert slots of a layer, N rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hadal.core.placement import EMPTY
from hadal.policy.experts.search import (
    Flags,
    Floats,
    Ints,
    Path,
    Singles,
    heaviest_rank,
    held_loads,
    shares_of,
)

# Uneven splits of experts over their replicas: better balance with no replica moved.
#
# The loads that splits can reach form a flow polytope, on which the split with the least sum of
# squares has the least maximum too. Levelling one expert at a time descends that sum, so a few
# sweeps come close to the optimum. Knows nothing of nodes or time. All layers at once.
#
# Shapes: L layers, E logical experts, R ranks, S expert slots of a rank, K most replicated experts
# of a layer, M most replicas.


NOWHERE = 1e30
"""Height of the rank of what pads an expert's slots."""
STILL = 2e-5
"""A sweep that lowers no layer's heaviest rank by this part of the heaviest is the last."""


def split_loads(table_LRS: Ints, loads_LE: Floats, *, num_sweeps: int = 12) -> Floats:
    """Return the fraction of its expert's tokens that every expert slot takes [L, R, S]; empty ones
    take 0.

    The fractions of an expert sum to 1. Each sweep gives every replicated expert the split that
    levels its ranks, the other experts staying as they are; the heaviest rank never ends heavier
    than with even splits.
    """
    num_layers, _, num_expert_slots = table_LRS.shape
    num_experts = loads_LE.shape[1]
    amounts = shares_of(table_LRS, loads_LE)
    even = amounts.copy()
    rank_loads = amounts.sum(axis=2)
    groups = _replicated(table_LRS, num_experts)
    flat = np.concatenate((amounts.reshape(num_layers, -1), np.zeros((num_layers, 1))), axis=1)
    rows = np.arange(num_layers)[:, None]
    # What pads an expert's slots is the last of `flat`, on a rank that is not there.
    padded = [(np.where(slots < 0, flat.shape[1] - 1, slots), slots >= 0) for slots in groups]
    ranks = [np.where(real, at // num_expert_slots, rank_loads.shape[1]) for at, real in padded]
    heights = np.concatenate((rank_loads, np.full((num_layers, 1), NOWHERE)), axis=1)
    heaviest = rank_loads.max(axis=1)
    for sweep in range(num_sweeps):
        for (at, real), rank in zip(padded, ranks, strict=True):
            mine = flat[rows, at]
            others = heights[rows, rank] - mine
            wanted = _level(others, mine.sum(axis=1))
            flat[rows, at] = wanted
            heights[rows, rank] = np.where(real, others + wanted, NOWHERE)
        before, heaviest = heaviest, heights[:, :-1].max(axis=1)
        if sweep and (before - heaviest).max() <= STILL * heaviest.max():
            break
    amounts = flat[:, :-1].reshape(table_LRS.shape)
    worse = amounts.sum(axis=2).max(axis=1) > even.sum(axis=2).max(axis=1)
    amounts[worse] = even[worse]
    return _fractions(table_LRS, amounts, loads_LE)


def _replicated(table_LRS: Ints, num_experts: int) -> list[Ints]:
    """Return K arrays [L, M]: the k-th has the ids of the expert slots of every layer's k-th
    replicated expert, padded with -1.
    """
    found: list[list[list[int]]] = []
    for table in table_LRS.reshape(len(table_LRS), -1):
        counts = np.bincount(table[table != EMPTY], minlength=num_experts)
        order = np.argsort(np.where(table == EMPTY, num_experts, table), kind="stable")
        first = np.concatenate(([0], np.cumsum(counts)))
        found.append([order[first[e] : first[e + 1]].tolist() for e in np.flatnonzero(counts > 1)])
    most = max((len(slots) for layer in found for slots in layer), default=0)
    groups = []
    for index in range(max(map(len, found), default=0)):
        group = np.full((len(found), most), -1)
        for layer, experts in enumerate(found):
            if index < len(experts):
                group[layer, : len(experts[index])] = experts[index]
        groups.append(group)
    return groups


def _level(others_LM: Floats, amount_L: Floats) -> Floats:
    """Pour an amount over ranks so that what it reaches stands equally high; a rank at NOWHERE
    takes nothing.
    """
    height = np.sort(others_LM, axis=1)
    # Over the lowest ranks alone, over one more, and so on: the level sinks until a rank stands out
    # of it.
    level = (height.cumsum(axis=1) + amount_L[:, None]) / np.arange(1, others_LM.shape[1] + 1)
    poured = np.maximum(level.min(axis=1, keepdims=True) - others_LM, 0.0)
    total = poured.sum(axis=1)
    result: Floats = poured * (amount_L / np.where(total > 0, total, 1.0))[:, None]
    return result


def _fractions(table_LRS: Ints, amounts_LRS: Floats, loads_LE: Floats) -> Floats:
    """Amounts as parts of their expert's load; even parts for an expert without load."""
    ones = shares_of(table_LRS, np.ones_like(loads_LE))
    load = held_loads(table_LRS, loads_LE)
    result: Floats = np.where(
        (load > 0) & (table_LRS != EMPTY), amounts_LRS / np.where(load > 0, load, 1.0), ones
    )
    return result


NO_MOVE = np.float32(1e9)
FREE = np.float32(0.5)
"""Cost that is reckoned for a move of no replica: such moves come first, if they relieve at all."""
WORTHWHILE = np.float32(2e-4)
"""Relief per replica, as a part of the heaviest rank's load, below which a layer's path ends."""
LIGHT_RANKS = 12
"""The heaviest rank trades with one of so many lightest at least, or of half of all; of all if they
have two expert slots: the right partner is rare then, and not among the lightest.
"""


@dataclass
class _State:
    """A table and what follows from it, for some layers. Empty expert slots hold replicas of an
    expert number E, which weighs nothing.
    """

    table_LQ: Ints
    loads_LE1: Singles
    blocked_LRE1: Flags
    """An expert may not come to a rank: it is there already, or must not be."""
    barred_LRE1: Flags | None
    """An expert must never be on a rank."""
    home_LRE1: Flags
    """An expert is at home on a rank: a replica there costs nothing."""
    stray_LQ: Flags
    """What an expert slot holds is not at home on its rank."""
    counts_LE1: Ints
    rank_loads_LR: Singles
    closed_Q: Flags
    num_expert_slots: int

    @classmethod
    def of(
        cls,
        table_LQ: Ints,
        loads_LE1: Singles,
        home_LRE: Flags,
        closed_Q: Flags,
        barred_LRE: Flags | None,
        num_expert_slots: int,
    ) -> _State:
        num_layers, num_experts = loads_LE1.shape
        rows = np.arange(num_layers)[:, None]
        counts = np.bincount(
            (table_LQ + rows * num_experts).ravel(), minlength=num_layers * num_experts
        )
        counts = counts.reshape(num_layers, num_experts)
        ranks = np.arange(table_LQ.shape[1])[None] // num_expert_slots
        blocked = np.zeros((num_layers, table_LQ.shape[1] // num_expert_slots, num_experts), bool)
        home = np.ones_like(blocked)
        home[:, :, :-1] = home_LRE
        barred = None
        if barred_LRE is not None:
            barred = np.zeros_like(blocked)
            barred[:, :, :-1] = barred_LRE
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

    def only(self, layers: Ints) -> _State:
        return _State(
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
        """Give expert slots [M] of layers [M], each layer once, to experts [M]."""
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
    """The best move of each layer: the expert slots to write (-1: none) and the experts to write
    there [L, 2], cost and worth [L].
    """

    slots_L2: Ints
    experts_L2: Ints
    costs_L: Ints
    worths_L: Singles


def descend(
    table_LRS: Ints,
    home_LRE: Flags,
    loads_LE: Floats,
    ceiling_L: Floats,
    capacity_R: Ints,
    *,
    max_moves: int,
    num_rounds: int = 200,
    trades_only: bool = False,
    barred_LRE: Flags | None = None,
    num_light: int | None = None,
) -> Path:
    """Return the path of every layer from a table to the best that single moves find.

    Distances count the replicas on a rank that is no home of their expert. The heaviest rank trades
    with one of the `num_light` lightest.
    """
    num_layers, num_ranks, num_expert_slots = table_LRS.shape
    if num_light is None:
        num_light = num_ranks if num_expert_slots < 3 else max(LIGHT_RANKS, num_ranks // 2)
    num_experts = loads_LE.shape[1]
    table = np.where(table_LRS == EMPTY, num_experts, table_LRS).reshape(num_layers, -1)
    loads = np.zeros((num_layers, num_experts + 1), np.float32)
    loads[:, :num_experts] = loads_LE
    state = _State.of(
        table,
        loads,
        home_LRE,
        _closed(capacity_R, num_expert_slots).ravel(),
        barred_LRE,
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
    for _ in range(num_rounds):
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
    """The heaviest rank of every layer, and what all kinds of moves ask about it."""

    rows_L: Ints
    rank_L: Ints
    load_L: Singles
    slots_LS: Ints
    experts_LS: Ints
    floor_L: Singles
    """Relief below this is worth nothing."""
    share_LE1: Singles
    base_LR: Ints
    """Where a rank's row of experts begins in the flat arrays of (layer, rank, expert)."""

    @classmethod
    def of(cls, state: _State, ceiling_L: Singles) -> _Top:
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


def _best_moves(state: _State, ceiling_L: Singles, trades_only: bool, num_light: int) -> _Moves:
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


def _trades(state: _State, top: _Top, num_light: int) -> _Moves:
    """The heaviest rank's best trade with one of the lightest."""
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


def _spares(state: _State, top: _Top) -> tuple[Ints, Singles]:
    """Return (expert slots [L, Z] whose replica can be spared, -1 padded; the heaviest of the
    expert's other ranks then).
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
    # The heaviest other rank is the group's first, or for the first itself its second.
    at = np.where(first, np.minimum(start + 1, most - 1), start)
    other = np.empty_like(loads)
    other[rows, order] = sorted_loads[rows, at]
    extra = state.loads_LE1 / np.maximum(counts - 1, 1) - top.share_LE1
    return spare, np.where(held == num_experts, np.float32(0), other + extra[rows, held])


def _shares(state: _State, top: _Top, spare_LZ: Ints, rise_LZ: Singles) -> _Moves:
    """The best new replica of an expert of the heaviest rank, in a spare expert slot elsewhere."""
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


def _drops(state: _State, top: _Top, spare_LZ: Ints, rise_LZ: Singles) -> _Moves:
    """The best spare replica to take from the heaviest rank, for the expert that weighs least
    there.
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


def _closed(capacity_R: Ints, num_expert_slots: int) -> Flags:
    """Which expert slots [R, S] a rank does not have, as others have more."""
    return np.asarray(np.arange(num_expert_slots) >= capacity_R[:, None])


def complete(table_LRS: Ints, loads_LE: Floats, capacity_R: Ints) -> Ints:
    """Return the table with a replica of every expert: those that lost their last one take empty or
    spare expert slots.

    The heaviest comes first, and each takes the slot that leaves its rank lightest. Raises
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


# Expert placements for a window of steps: the heaviest rank of every step counts, not that of the
# sums.
#
# A step lasts as long as its heaviest rank, and that is another rank in another step: experts that
# are busy in the same steps should not share a rank, which the sums do not show. Ranks trade
# replicas while that lowers the mean of the steps' maxima. Knows nothing of time. All layers at
# once.
#
# Shapes: T steps, L layers, E logical experts, R living ranks, S most expert slots of a rank,
# Q = R * S expert slots, H light ranks.


MAX_STEPS = 16
"""A longer window is judged by as many of its steps, evenly chosen."""
NUM_LIGHT = 8
"""Ranks that the heaviest one may trade with: those with the least load in the sums."""


def sample(window_TLE: Floats) -> Floats:
    """Return at most MAX_STEPS of the window's steps."""
    steps = np.linspace(0, len(window_TLE) - 1, min(len(window_TLE), MAX_STEPS)).round().astype(int)
    return np.asarray(window_TLE[steps])


def mean_of_maxima(tables_LRS: Ints, window_TLE: Floats) -> Floats:
    """Load of the heaviest rank of a step, mean of the steps [L]."""
    return np.asarray(np.mean([heaviest_rank(tables_LRS, step) for step in window_TLE], axis=0))


def judged_by(path: Path, window_TLE: Floats, num_expert_slots: int) -> Path:
    """The path with the window's mean of maxima in place of the maximum of the sums."""
    num_tables, num_layers, _ = path.tables_NLQ.shape
    tables = path.tables_NLQ.astype(np.int64).reshape(num_tables * num_layers, -1, num_expert_slots)
    tops = mean_of_maxima(tables, np.tile(window_TLE, (1, num_tables, 1)))
    return replace(path, tops_NL=tops.reshape(num_tables, num_layers).astype(np.float32))


def steadied(
    table_LRS: Ints,
    window_TLE: Floats,
    *,
    home_LRE: Flags | None = None,
    max_moves: int = 0,
    barred_LRE: Flags | None = None,
    num_rounds: int = 16,
) -> Ints:
    """Return a table [L, R, S] whose mean of maxima is no greater in any layer, found by trades.

    With homes, at most `max_moves` replicas more stand where they are not at home. Barred experts
    do not come to a rank. A round makes one trade in every layer: of the rank that stands out most,
    or the next if that found none.
    """
    table = table_LRS.copy()
    num_layers, num_ranks, num_expert_slots = table.shape
    if num_ranks < 2:
        return table
    tried = np.zeros((num_layers, num_ranks), bool)
    active, left = np.arange(num_layers), max_moves
    for _ in range(num_rounds):
        window = window_TLE[:, active]
        shares = np.stack([shares_of(table[active], step) for step in window])
        loads = shares.sum(axis=3)
        top = _standing_out(loads, tried[active])
        slots, gains = _best_trade(table[active], shares, loads, top, barred_LRE, active)
        rows = np.arange(len(active))
        mine, other = slots // num_expert_slots, slots % num_expert_slots
        costs = np.zeros(len(active), np.int64)
        if home_LRE is not None:
            ours, theirs = (table[active, mine[:, i], other[:, i]] for i in (0, 1))
            for column, (old, new) in enumerate(((ours, theirs), (theirs, ours))):
                home = home_LRE[active, mine[:, column]]
                costs += (~home[rows, new]).astype(np.int64) - ~home[rows, old]
        lucky = np.flatnonzero(gains > 1e-5 * loads.max(axis=2).mean(axis=0))
        lucky = lucky[np.argsort(-gains[lucky] / np.maximum(costs[lucky], FREE), kind="stable")]
        if home_LRE is not None:
            lucky = lucky[np.cumsum(np.maximum(costs[lucky], 0)) <= left]
            left -= int(costs[lucky].sum())
        at = active[lucky]
        first, second = (mine[lucky, 0], other[lucky, 0]), (mine[lucky, 1], other[lucky, 1])
        table[at, first[0], first[1]], table[at, second[0], second[1]] = (
            table[at, second[0], second[1]],
            table[at, first[0], first[1]],
        )
        tried[active, top] = True
        tried[at] = False
        active = active[tried[active].sum(axis=1) < min(3, num_ranks)]
        if not len(active):
            break
    return table


def _standing_out(loads_TLR: Floats, tried_LR: Flags) -> Ints:
    """The rank [L] by which the steps' maxima stand highest above the next, of those not tried."""
    two = np.partition(loads_TLR, -2, axis=2)[:, :, -2:]
    above = np.maximum(loads_TLR - two[:, :, :1], 0.0).sum(axis=0)
    return np.asarray(np.where(tried_LR, -1.0, above + 1e-6 * loads_TLR.sum(axis=0)).argmax(axis=1))


def _best_trade(
    table_LRS: Ints,
    shares_TLRS: Floats,
    loads_TLR: Floats,
    top_L: Ints,
    barred_LRE: Flags | None,
    layers_L: Ints,
) -> tuple[Ints, Floats]:
    """Return the best trade of one rank in each layer: (the two expert slots [L, 2], what the mean
    of maxima falls by [L]).
    """
    num_layers, num_ranks, num_expert_slots = table_LRS.shape
    rows = np.arange(num_layers)
    sums = loads_TLR.sum(axis=0)
    sums[rows, top_L] = np.inf
    light = np.argsort(sums, axis=1, kind="stable")[:, : min(NUM_LIGHT, num_ranks - 1)]
    others = loads_TLR.copy()
    others[:, rows, top_L] = -np.inf
    order = np.argsort(others, axis=2)[:, :, -2:]
    highest = np.take_along_axis(others, order, axis=2)
    rest = np.where(light == order[:, :, 1:], highest[:, :, :1], highest[:, :, 1:])  # [T, L, H]
    mine = shares_TLRS[:, rows, top_L]
    theirs = shares_TLRS[:, rows[:, None], light]
    delta = mine[:, :, :, None, None] - theirs[:, :, None]
    after = np.maximum(
        loads_TLR[:, rows, top_L][:, :, None, None, None] - delta, rest[:, :, None, :, None]
    )
    np.maximum(after, loads_TLR[:, rows[:, None], light][:, :, None, :, None] + delta, out=after)
    mean = after.mean(axis=0)  # [L, S, H, S]
    ours, held = table_LRS[rows, top_L], table_LRS[rows[:, None], light]
    mean[(held[:, None] == ours[:, :, None, None]).any(axis=3)] = np.inf
    double = (held[:, :, :, None] == ours[:, None, None, :]).any(axis=3) | (held == EMPTY)
    mean[np.broadcast_to(double[:, None], mean.shape)] = np.inf
    mean[ours == EMPTY] = np.inf
    if barred_LRE is not None:
        barred = barred_LRE[layers_L]
        mean[
            np.broadcast_to(barred[rows, top_L][rows[:, None, None], held][:, None], mean.shape)
        ] = np.inf
        mean[barred[rows[:, None, None], light[:, None, :], ours[:, :, None]]] = np.inf
    flat = mean.reshape(num_layers, -1)
    best = flat.argmin(axis=1)
    slot, at = np.divmod(best, mean.shape[2] * num_expert_slots)
    index, other = np.divmod(at, num_expert_slots)
    slots = np.stack(
        (top_L * num_expert_slots + slot, light[rows, index] * num_expert_slots + other), axis=1
    )
    return slots, np.asarray(loads_TLR.max(axis=2).mean(axis=0) - flat[rows, best])
