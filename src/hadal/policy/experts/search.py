"""Better expert placements by exchanges: pairs of ranks trade replicas until the heaviest rank is
near the mean.

Knows nothing of nodes or time. The replicas' counts stay as they are here. All layers at once.

Shapes: L layers, E logical experts, R living ranks, S most expert slots of a rank, H pairs of
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hadal.core.placement import EMPTY

# How many replicas each expert gets and which rank holds them: the greedy start of every expert
# placement.
#
# Knows nothing of nodes, of today's placement or of time. All layers are planned at once: an
# array's first axis is the layer, and a step of a loop is one numpy call for all of them.
#
# Shapes: L layers, E logical experts, R living ranks, S most expert slots of a rank, P those of all
# ranks together.


Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Ints = NDArray[np.int64]

FULL = 1e30
"""Key of a rank that can take no more; loads are normalised to about 1 before they come here."""


def replicate(loads_LE: Floats, num_replicas: int, num_ranks: int) -> tuple[Ints, Ints]:
    """Return (replicas [L, E], the expert of each extra replica in the order given [L, num_replicas
    - E]).

    Each extra replica goes to the expert whose replicas are heaviest, as in DeepSeek's EPLB; that
    minimises the heaviest replica. No expert gets more replicas than there are ranks.
    """
    num_layers, num_experts = loads_LE.shape
    counts_LE = np.ones((num_layers, num_experts), np.int64)
    num_extra = num_replicas - num_experts
    given = np.empty((num_layers, num_extra), np.int64)
    share = loads_LE.copy()
    rows = np.arange(num_layers)
    for index in range(num_extra):
        best = np.argmax(share, axis=1)
        given[:, index] = best
        count = counts_LE[rows, best] + 1
        counts_LE[rows, best] = count
        share[rows, best] = np.where(count < num_ranks, loads_LE[rows, best] / count, -1.0)
    return counts_LE, given


def expand(loads_LE: Floats, counts_LE: Ints) -> tuple[Ints, Floats]:
    """Return (expert [L, P], load [L, P]) of every replica, heaviest first, those of an expert side
    by side.
    """
    num_layers, num_experts = loads_LE.shape
    share = loads_LE / counts_LE
    order = np.argsort(-share, axis=1, kind="stable")
    flat = (order + np.arange(num_layers)[:, None] * num_experts).ravel()
    experts = np.repeat(flat, counts_LE.ravel()[flat]).reshape(num_layers, -1)
    return experts % num_experts, share.ravel()[experts]


def pack(experts_LP: Ints, shares_LP: Floats, capacity_R: Ints) -> Ints:
    """Return the expert in every expert slot [L, R, S]: the heaviest replica comes first, and each
    goes to the least loaded rank that has a slot left.

    A rank that holds the expert is passed over while another has one left. `capacity_R` sums to P,
    and none of it is 0.
    """
    num_layers, num_replicas = experts_LP.shape
    num_ranks, num_expert_slots = len(capacity_R), int(capacity_R.max())
    table = np.full((num_layers, num_ranks, num_expert_slots), EMPTY, np.int64)
    # The first R meet empty ranks: one each.
    table[:, :, 0] = experts_LP[:, :num_ranks]
    flat = table.reshape(-1)
    key = shares_LP[:, :num_ranks].copy()
    key[:, capacity_R == 1] = FULL
    last = experts_LP[:, :num_ranks].ravel()
    used = np.ones(num_layers * num_ranks, np.int64)
    capacity = np.tile(capacity_R, num_layers)
    base = np.arange(num_layers) * num_ranks
    flat_key = key.reshape(-1)
    again = np.zeros(num_replicas, bool)
    again[1:] = (experts_LP[:, 1:] == experts_LP[:, :-1]).any(axis=0)
    experts_PL, shares_PL = np.ascontiguousarray(experts_LP.T), np.ascontiguousarray(shares_LP.T)
    for index in range(num_ranks, num_replicas):
        expert = experts_PL[index]
        if again[index]:
            # Replicas of an expert come in a row, so a rank that holds this one took it last.
            held = last.reshape(num_layers, num_ranks) == expert[:, None]
            at = np.argmin(key + held * (FULL / 2), axis=1) + base
        else:
            at = key.argmin(axis=1) + base
        count = used[at]
        flat[at * num_expert_slots + count] = expert
        used[at] = count + 1
        last[at] = expert
        flat_key[at] += shares_PL[index]
        flat_key[at[count + 1 == capacity[at]]] = FULL
    return table


def fold(experts_LP: Ints) -> Ints:
    """Return the experts of ranks of two expert slots [L, R, 2]: the heaviest replica with the
    lightest, which is optimal once the replicas are given.
    """
    num_ranks = experts_LP.shape[1] // 2
    return np.stack((experts_LP[:, :num_ranks], experts_LP[:, : num_ranks - 1 : -1]), axis=2)


def without_doubles(table_LRS: Ints, loads_LE: Floats) -> Ints:
    """Where a rank holds an expert twice, swap one replica with another rank's, or give its slot to
    another expert.

    Changes the table in place and returns it. Succeeds whenever no rank has more expert slots than
    there are experts.
    """
    ordered = np.sort(table_LRS, axis=2)
    doubled = ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != EMPTY)).any(axis=2)
    for layer, rank in np.argwhere(doubled):
        table = table_LRS[layer]
        for slot in range(table.shape[1]):
            expert = table[rank, slot]
            if expert != EMPTY and np.count_nonzero(table[rank] == expert) > 1:
                _undouble(table, int(rank), slot, loads_LE[layer])
    return table_LRS


def _undouble(table_RS: Ints, rank: int, slot: int, loads_E: Floats) -> None:
    """Free a slot of an expert that its rank holds twice, by the swap that changes loads least;
    where there is none, by a new replica of the heaviest expert.
    """
    expert = table_RS[rank, slot]
    counts = np.bincount(table_RS[table_RS != EMPTY], minlength=len(loads_E))
    share = loads_E / np.maximum(counts, 1)
    here = np.isin(table_RS, table_RS[rank]) | (table_RS == EMPTY)
    here |= (table_RS == expert).any(axis=1)[:, None]
    if not here.all():
        distance = np.where(here, np.inf, np.abs(share[table_RS] - share[expert]))
        other = np.unravel_index(int(np.argmin(distance)), table_RS.shape)
        table_RS[rank, slot], table_RS[other] = table_RS[other], expert
        return
    share[table_RS[rank][table_RS[rank] != EMPTY]] = -1.0
    if share.max() >= 0:
        table_RS[rank, slot] = int(np.argmax(share))


# Replica counts for ranks of two expert slots, where not the packing but the counts limit the
# balance.
#
# With two expert slots, folding (heaviest replica with the lightest) is optimal for given counts,
# so counts can be judged by one sort. What pays is not what the greedy does: it splits whatever is
# heaviest; better is often to leave middling experts whole and split the *lightest* instead, so
# that every heavy replica gets a tiny partner. Knows nothing of ranks by name. All layers at once.
#
# Shapes: L layers, E logical experts, P replicas (2 per rank), X extra replicas (P - E).


def heaviest_pair(loads_LE: Singles, counts_LE: Ints) -> Singles:
    """Load of the heaviest rank [L] after folding. Single precision: its sort is several times
    faster.
    """
    counts = counts_LE.ravel()
    shares = np.repeat(loads_LE.ravel() / counts.astype(np.float32), counts).reshape(
        len(loads_LE), -1
    )
    shares.sort(axis=1)
    half = shares.shape[1] // 2
    result: Singles = (shares[:, :half] + shares[:, : half - 1 : -1]).max(axis=1)
    return result


def choose_counts(loads_LE: Floats, num_replicas: int, num_ranks: int, *, num_rounds: int) -> Ints:
    """Return replicas [L, E] whose folded heaviest rank is no heavier than the greedy's.

    First the best of "the k heaviest splits of the greedy, the other X - k for the lightest
    experts" for every k; then `num_rounds` rounds that take a replica from one expert and give it
    to another, best exchange first.
    """
    num_layers, num_experts = loads_LE.shape
    counts, given = replicate(loads_LE, num_replicas, num_ranks)
    loads = loads_LE.astype(np.float32)
    best = heaviest_pair(loads, counts)
    lightest = np.argsort(loads_LE, axis=1, kind="stable")
    num_extra = num_replicas - num_experts
    rows = np.arange(num_layers)[:, None]
    for num_light in range(1, min(num_extra, num_experts // 2) + 1):
        trial = np.ones_like(counts)
        np.add.at(trial, (rows, given[:, : num_extra - num_light]), 1)
        np.add.at(trial, (rows, lightest[:, :num_light]), 1)
        worth = heaviest_pair(loads, trial)
        better = (worth < best * (1 - 1e-6)) & (trial.max(axis=1) <= num_ranks)
        counts[better], best[better] = trial[better], worth[better]
    for _ in range(num_rounds):
        if not improve_counts(loads, counts, best, num_ranks):
            break
    return counts


def improve_counts(loads_LE: Singles, counts_LE: Ints, best_L: Singles, num_ranks: int) -> bool:
    """One exchange per layer where one pays, in place: from any split expert to one that the
    heaviest pair needs.
    """
    num_layers = len(loads_LE)
    experts, shares = expand(loads_LE.astype(np.float64), counts_LE)
    half = shares.shape[1] // 2
    rows = np.arange(num_layers)
    worst = np.argmax(shares[:, :half] + shares[:, : half - 1 : -1], axis=1)
    heavy = experts[rows, worst]
    partner = experts[rows, shares.shape[1] - 1 - worst]
    whole = np.where(counts_LE == 1, loads_LE, np.inf)
    lightest = np.argpartition(whole, 1, axis=1)[:, :2]
    takers = np.stack((heavy, partner, lightest[:, 0], lightest[:, 1]), axis=1)
    split = np.where(counts_LE > 1, loads_LE / np.maximum(counts_LE - 1, 1), np.inf)
    givers = np.argsort(split, axis=1, kind="stable")
    num_givers = int((counts_LE > 1).sum(axis=1).max())
    found = best_L.copy()
    chosen = np.full((num_layers, 2), -1)
    for taker_index in range(takers.shape[1]):
        taker = takers[:, taker_index]
        giver = givers[:, :num_givers]
        can = (
            (counts_LE[rows[:, None], giver] > 1)
            & (giver != taker[:, None])
            & (counts_LE[rows, taker] < num_ranks)[:, None]
            & (split[rows[:, None], giver] < found[:, None])
        )
        layer, index = np.nonzero(can)
        if not len(layer):
            continue
        trial = counts_LE[layer]
        each = np.arange(len(layer))
        trial[each, giver[layer, index]] -= 1
        trial[each, taker[layer]] += 1
        worth = np.full(can.shape, np.inf, np.float32)
        worth[layer, index] = heaviest_pair(loads_LE[layer], trial)
        best = worth.argmin(axis=1)
        hit = np.flatnonzero(worth[rows, best] < found * (1 - 1e-6))
        found[hit] = worth[hit, best[hit]]
        chosen[hit, 0], chosen[hit, 1] = giver[hit, best[hit]], taker[hit]
    hit = np.flatnonzero(chosen[:, 0] >= 0)
    counts_LE[hit, chosen[hit, 0]] -= 1
    counts_LE[hit, chosen[hit, 1]] += 1
    best_L[hit] = found[hit]
    return bool(len(hit))


NEVER = np.float32(1e9)


def shares_of(table_LRS: Ints, loads_LE: Floats) -> Floats:
    """Load of the replica in every expert slot [L, R, S] when the replicas of an expert share
    evenly; 0 in empty ones.
    """
    num_layers, num_experts = loads_LE.shape
    flat = table_LRS.reshape(num_layers, -1)
    at = np.where(flat == EMPTY, num_experts, flat) + np.arange(num_layers)[:, None] * (
        num_experts + 1
    )
    counts = np.bincount(at.ravel(), minlength=num_layers * (num_experts + 1)).reshape(
        num_layers, -1
    )
    share = np.zeros((num_layers, num_experts + 1))
    share[:, :num_experts] = loads_LE / np.maximum(counts[:, :num_experts], 1)
    result: Floats = share.ravel()[at].reshape(table_LRS.shape)
    return result


def held_loads(table_LRS: Ints, loads_LE: Floats) -> Floats:
    """Load of the whole expert in every expert slot [L, R, S]. Empty ones have some load or other,
    which the caller must not use.
    """
    flat = np.where(table_LRS == EMPTY, 0, table_LRS).reshape(len(table_LRS), -1)
    return np.asarray(np.take_along_axis(loads_LE, flat, axis=1).reshape(table_LRS.shape))


def heaviest_rank(table_LRS: Ints, loads_LE: Floats) -> Floats:
    """Load of the heaviest rank [L] when the replicas of an expert share evenly."""
    return np.asarray(shares_of(table_LRS, loads_LE).sum(axis=2).max(axis=1))


def exchange(
    table_LRS: Ints,
    loads_LE: Floats,
    ceiling_L: Floats,
    *,
    num_rounds: int,
    only_above: bool = False,
    toll: float = 0.0,
) -> Ints:
    """Return a table [L, R, S] whose heaviest ranks are lighter, never heavier; a layer rests at
    its ceiling.

    In a round every rank meets another one, heavy with light, and they trade the pair of replicas
    that halves their difference best. Who meets whom changes from round to round, so a pair that
    found nothing does not meet again at once. With `only_above`, only ranks above the ceiling
    trade: fewest changes. `toll` is what the load that comes back in a trade counts against a good
    halving: with it, little load travels both ways.
    """
    table = table_LRS.copy()
    half = table.shape[1] // 2
    if half < 1:
        return table
    shares = shares_of(table, loads_LE).astype(np.float32)
    shares[table == EMPTY] = np.nan
    active = np.arange(len(table))
    work_table, work_shares = table, shares
    loads = np.nansum(work_shares, axis=2)
    ceiling = ceiling_L.astype(np.float32)
    for index in range(num_rounds):
        if only_above or index % 4 == 0:
            left = np.flatnonzero(loads.max(axis=1) > ceiling)
            if not len(left):
                break
            if len(left) < len(active):
                table[active], shares[active] = work_table, work_shares
                active = active[left]
                work_table, work_shares, loads, ceiling = (
                    table[active],
                    shares[active],
                    loads[left],
                    ceiling[left],
                )
        order = np.argsort(loads, axis=1, kind="stable")
        low = np.roll(order[:, :half], index * (index + 1) // 2 % half, axis=1)
        high = order[:, ::-1][:, :half]
        _trade(
            work_table,
            work_shares,
            loads,
            high,
            low,
            ceiling if only_above else None,
            np.float32(toll),
        )
    table[active] = work_table
    return table


def _trade(
    table_LRS: Ints,
    shares_LRS: Singles,
    loads_LR: Singles,
    high_LH: Ints,
    low_LH: Ints,
    ceiling_L: Singles | None,
    toll: np.float32,
) -> None:
    """One trade per pair of ranks, in place, where it makes the heavier one lighter than it was."""
    num_layers, num_ranks, num_expert_slots = table_LRS.shape
    num_pairs = high_LH.shape[1]
    base = np.arange(num_layers)[:, None] * num_ranks
    high, low = (high_LH + base).ravel(), (low_LH + base).ravel()
    flat_loads = loads_LR.reshape(-1)
    flat_shares, flat_table = (
        shares_LRS.reshape(-1, num_expert_slots),
        table_LRS.reshape(-1, num_expert_slots),
    )
    if ceiling_L is not None:
        above = flat_loads[high] > np.repeat(ceiling_L, num_pairs)
        high, low = high[above], low[above]
    half_gap = (flat_loads[high] - flat_loads[low]) * np.float32(0.5)
    away = flat_shares[high][:, :, None] - (flat_shares[low] + half_gap[:, None])[:, None, :]
    np.abs(away, out=away)
    if toll:
        away += toll * flat_shares[low][:, None, :]
    away = np.fmin(away, NEVER).reshape(len(high), -1)
    best = away.argmin(axis=1)
    lucky = np.flatnonzero(
        away[np.arange(len(best)), best] < half_gap * np.float32(0.999) - np.float32(1e-7)
    )
    give, take = np.divmod(best[lucky], num_expert_slots)
    high, low = high[lucky], low[lucky]
    gives, takes = flat_table[high, give], flat_table[low, take]
    double = (flat_table[low] == gives[:, None]).any(axis=1) | (
        flat_table[high] == takes[:, None]
    ).any(axis=1)
    keep = ~double
    high, low, give, take, gives, takes = (
        high[keep],
        low[keep],
        give[keep],
        take[keep],
        gives[keep],
        takes[keep],
    )
    delta = flat_shares[high, give] - flat_shares[low, take]
    flat_loads[high] -= delta
    flat_loads[low] += delta
    flat_table[high, give], flat_table[low, take] = takes, gives
    flat_shares[high, give], flat_shares[low, take] = (
        flat_shares[low, take],
        flat_shares[high, give].copy(),
    )


# Paths of placements, ever further from home, and which table of each layer's a budget of moves
# buys best.
#
# Knows nothing of nodes, of time, or of how a path was found.
#
# Shapes: N tables, L layers, E logical experts, R living ranks, S most expert slots of a rank,
# Q = R * S expert slots.


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Path:
    """Tables of every layer, each a move from the one before; the first of all is where the path
    began.
    """

    tables_NLQ: NDArray[np.int16]
    tops_NL: Singles
    """Load of the heaviest rank."""
    distances_NL: Ints
    """Replicas away from home."""


def standing(table_LRS: Ints, loads_LE: Floats, distance_L: Ints) -> Path:
    """A path of no move."""
    tables = table_LRS.reshape(1, len(table_LRS), -1).astype(np.int16)
    return Path(
        tables, heaviest_rank(table_LRS, loads_LE).astype(np.float32)[None], distance_L[None]
    )


def held_by(table_LRS: Ints, num_experts: int) -> Flags:
    """Whether a rank holds an expert [L, R, E]."""
    held = np.zeros((*table_LRS.shape[:2], num_experts + 1), bool)
    layers, ranks = (
        np.arange(len(table_LRS))[:, None, None],
        np.arange(table_LRS.shape[1])[None, :, None],
    )
    held[layers, ranks, table_LRS] = True  # EMPTY is -1, the last.
    return np.asarray(held[:, :, :-1])


def num_moved(old_LRS: Ints, new_LRS: Ints) -> Ints:
    """Replicas that their rank did not hold before [L]."""
    is_new = (new_LRS[:, :, :, None] != old_LRS[:, :, None, :]).all(axis=3) & (new_LRS != EMPTY)
    return np.asarray(is_new.sum(axis=(1, 2)))


def choose(paths: Sequence[Path], max_moves: int) -> Ints:
    """Return tables [L, Q], one of each layer, whose mean/max add up to most within the budget."""
    tops = np.concatenate([path.tops_NL for path in paths])
    distances = np.concatenate([path.distances_NL for path in paths])
    tables = np.concatenate([path.tables_NLQ for path in paths])
    return tables[_within(tops, distances, max_moves), np.arange(tops.shape[1])].astype(np.int64)


def _within(tops_NL: Singles, distances_NL: Ints, max_moves: int) -> Ints:
    """Which of its tables each layer takes [L].

    What a replica must buy is bisected; what that leaves over goes to the worst layers first. The
    first tables are where the layers stand, and no layer ends heavier.
    """
    values = np.where(tops_NL > tops_NL[0], -1.0, 1.0 / np.maximum(tops_NL, 1e-9))
    columns = np.arange(tops_NL.shape[1])
    best = np.zeros(tops_NL.shape[1], np.int64)
    low, high = 0.0, 1.0
    for step in range(24):
        price = 1e-9 if not step else (low + high) / 2
        chosen = (values - price * distances_NL).argmax(axis=0)
        if distances_NL[chosen, columns].sum() <= max_moves:
            best, high = chosen, price
            if not step:
                break
        else:
            low = price
    left = max_moves - int(distances_NL[best, columns].sum())
    for layer in np.argsort(values[best, columns], kind="stable"):
        can = distances_NL[:, layer] <= distances_NL[best[layer], layer] + left
        found = int(np.where(can, values[:, layer], -1.0).argmax())
        if values[found, layer] > values[best[layer], layer]:
            left -= int(distances_NL[found, layer] - distances_NL[best[layer], layer])
            best[layer] = found
    return best
