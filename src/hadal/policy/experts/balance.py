"""Where every expert's replicas go: from loads to a placement, from scratch or near today's.

Pure: loads in, a plan out; the caller decides when to plan and moves the weights. Equal inputs give
equal plans. Modes: `global` uses any rank for any expert; `hierarchical` keeps each group of
experts on one node, which keeps tokens of group-limited routing there; `hybrid` starts hierarchical
and trades across nodes until every layer's balancedness reaches a target; `fast` is the plain
greedy, global. With `max_moves` a plan stays near today's placement instead.

Shapes: T steps of a window, L layers, E logical experts, R ranks, S most expert slots of a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadal.core.placement import EMPTY, Placement
from hadal.policy.experts.increment import (
    complete,
    descend,
    judged_by,
    mean_of_maxima,
    sample,
    split_loads,
    steadied,
)
from hadal.policy.experts.search import (
    Flags,
    Floats,
    Ints,
    choose,
    choose_counts,
    exchange,
    expand,
    fold,
    heaviest_pair,
    heaviest_rank,
    held_by,
    held_loads,
    improve_counts,
    num_moved,
    pack,
    replicate,
    shares_of,
    standing,
    without_doubles,
)

# Expert placements near today's for ranks of two expert slots, where single moves soon find nothing
# more.
#
# With two expert slots, trades alone reach the fold, the best pairing for the replica counts there
# are. So the counts come first: as the greedy would have them for the new loads, then a replica at
# a time from one expert to another, even where that makes a rank heavier at first. Trades then
# repair the pairing; a layer that ends no better goes back. Knows nothing of nodes or time. All
# layers at once.
#
# Shapes: L layers, E logical experts, R living ranks, S = 2 expert slots of a rank.


WORTHWHILE = 1e-3
"""What a replica that passes on must take from the heaviest pair, as a part of it."""
MOVES_A_PASS = 6
"""What passing a replica on and repairing the pairing is reckoned to move."""


def improve_pairs(
    table_LRS: Ints,
    loads_LE: Floats,
    ceiling_L: Floats,
    capacity_R: Ints,
    *,
    max_moves: int,
    num_passes: int = 8,
) -> Ints:
    """Return a table [L, R, 2] no heavier in any layer, at most `max_moves` replicas away from the
    given one.

    No expert slot of the given table is empty.
    """
    num_layers, num_ranks, _ = table_LRS.shape
    stay = standing(table_LRS, loads_LE, np.zeros(num_layers, np.int64))
    counts, _ = replicate(loads_LE, 2 * num_ranks, num_ranks)
    homes = held_by(table_LRS, loads_LE.shape[1])
    counted = with_counts(table_LRS, loads_LE, counts)
    paths = [
        stay,
        descend(
            counted,
            homes,
            loads_LE,
            ceiling_L,
            capacity_R,
            max_moves=max_moves,
            trades_only=True,
        ),
    ]
    best = choose(paths, max_moves).reshape(table_LRS.shape)
    open_layers = np.arange(num_layers)
    for _ in range(num_passes):
        open_layers = open_layers[
            heaviest_rank(best, loads_LE)[open_layers] > ceiling_L[open_layers]
        ]
        moved = num_moved(table_LRS, best)
        left = max_moves - int(moved.sum())
        if not len(open_layers) or left < MOVES_A_PASS:
            break
        loads = loads_LE[open_layers].astype(np.float32)
        before = _counts(best[open_layers], loads_LE.shape[1])
        after, pairs = before.copy(), heaviest_pair(loads, before)
        heaviest = pairs.copy()
        improve_counts(loads, after, pairs, num_ranks)
        gain = heaviest - pairs
        chosen = np.argsort(-gain, kind="stable")
        chosen = chosen[gain[chosen] > WORTHWHILE * heaviest[chosen]]
        layers = open_layers[chosen]
        if not len(layers):
            break
        trial = best[layers]
        for index, row in enumerate(chosen):
            change = after[row] - before[row]
            _pass_on(
                trial[index], loads_LE[layers[index]], int(change.argmin()), int(change.argmax())
            )
        stay = standing(best[layers], loads_LE[layers], moved[layers])
        path = descend(
            trial,
            homes[layers],
            loads_LE[layers],
            ceiling_L[layers],
            capacity_R,
            max_moves=max_moves,
            trades_only=True,
        )
        new = choose([stay, path], left + int(moved[layers].sum())).reshape(trial.shape)
        better = heaviest_rank(new, loads_LE[layers]) < heaviest_rank(
            best[layers], loads_LE[layers]
        ) * (1 - 1e-6)
        best[layers] = new
        # A layer that was not chosen had too little to gain for the budget left.
        open_layers = layers[better]
    return best


def with_counts(table_LRS: Ints, loads_LE: Floats, counts_LE: Ints) -> Ints:
    """Return the table with as many replicas of every expert, as far as no rank need hold one
    twice.
    """
    table = table_LRS.copy()
    changes = counts_LE - _counts(table, loads_LE.shape[1])
    for layer, change in enumerate(changes):
        while change.max() > 0:
            taker = int(np.argmax(np.where(change > 0, loads_LE[layer], -1.0)))
            giver = int(np.argmin(np.where(change < 0, loads_LE[layer], np.inf)))
            _pass_on(table[layer], loads_LE[layer], giver, taker)
            change[giver] += 1
            change[taker] -= 1
    return table


def _pass_on(table_RS: Ints, loads_E: Floats, giver: int, taker: int) -> None:
    """Give a slot of the expert that loses a replica to the one that gains it, on the rank that is
    then lightest.
    """
    slots = np.argwhere(table_RS == giver)
    others = table_RS[slots[:, 0], 1 - slots[:, 1]]
    can = np.flatnonzero(others != taker)
    if not len(can):
        return
    counts = [np.count_nonzero(table_RS == expert) for expert in others[can]]
    rank, slot = slots[can[int(np.argmin(loads_E[others[can]] / counts))]]
    table_RS[rank, slot] = taker


def _counts(table_LRS: Ints, num_experts: int) -> Ints:
    rows = np.arange(len(table_LRS))[:, None, None] * num_experts
    return np.bincount((table_LRS + rows).ravel(), minlength=len(table_LRS) * num_experts).reshape(
        -1, num_experts
    )


# Place experts on ranks that are all alike to each other: replicas, packing, then exchanges up to
# a ceiling.
#
# Knows nothing of nodes, of today's placement or of time. All layers at once.
#
# Shapes: L layers, E logical experts, R living ranks, S most expert slots of a rank.


def place_flat(loads_LE: Floats, capacity_R: Ints, ceiling_L: Floats, *, num_rounds: int) -> Ints:
    """Return the expert in every expert slot [L, R, S]; `num_rounds` 0 is the plain greedy, the
    quality of EPLB.

    A layer is not improved below its ceiling (the heaviest rank that is good enough). The result is
    never worse than the greedy's. Raises ValueError if there are fewer slots than experts.
    """
    num_experts = loads_LE.shape[1]
    num_ranks = len(capacity_R)
    capacity = np.minimum(capacity_R, num_experts)  # More would only hold an expert twice.
    num_replicas = int(capacity.sum())
    if num_replicas < num_experts:
        raise ValueError(f"{num_replicas} slots are too few for {num_experts} experts.")
    two_each = bool((capacity == 2).all())
    counts, _ = replicate(loads_LE, num_replicas, num_ranks)
    greedy = _packed(loads_LE, counts, capacity, two_each)
    if not num_rounds or int(capacity.max()) < 2:
        return greedy
    if not two_each:
        return exchange(greedy, loads_LE, ceiling_L, num_rounds=num_rounds)
    counts = choose_counts(
        loads_LE, num_replicas, num_ranks, num_rounds=6 if num_replicas - num_experts <= 64 else 1
    )
    table = _packed(loads_LE, counts, capacity, two_each)
    worse = heaviest_rank(table, loads_LE) > heaviest_rank(greedy, loads_LE)
    table[worse] = greedy[worse]
    return table


def _packed(loads_LE: Floats, counts_LE: Ints, capacity_R: Ints, two_each: bool) -> Ints:
    experts, shares = expand(loads_LE, counts_LE)
    table = fold(experts) if two_each else pack(experts, shares, capacity_R)
    return without_doubles(table, loads_LE)


def widened(table_LRS: Ints, num_expert_slots: int) -> Ints:
    """The table with empty expert slots added to every rank until it has `num_expert_slots`."""
    extra = num_expert_slots - table_LRS.shape[2]
    return np.pad(table_LRS, ((0, 0), (0, 0), (0, extra)), constant_values=EMPTY)


# A placement near today's: which search fits the ranks, what nodes allow, and which tables the
# budget buys.
#
# Knows nothing of time. All layers at once.
#
# Shapes: T steps, L layers, E logical experts, R living ranks, S most expert slots of a rank.


def place_near(
    today_LRS: Ints,
    loads_LE: Floats,
    window_TLE: Floats | None,
    ceiling_L: Floats,
    capacity_R: Ints,
    *,
    max_moves: int,
    home_LRE: Flags | None = None,
    may_leave_home: bool = False,
) -> Ints:
    """Return a table [L, R, S] no worse in any layer, at most `max_moves` replicas away from
    today's.

    A layer rests at its ceiling. With a window, its steps' maxima decide. `home_LRE` are the ranks
    on the node of an expert's group: nothing moves elsewhere, unless an expert `may_leave_home`
    where a layer is still above its ceiling. Every expert has a replica today (`complete` sees to
    it).
    """
    held = held_by(today_LRS, loads_LE.shape[1])
    barred = None if home_LRE is None else ~home_LRE
    num_expert_slots = today_LRS.shape[2]
    if (capacity_R == 2).all() and (today_LRS != EMPTY).all() and barred is None:
        found = improve_pairs(today_LRS, loads_LE, ceiling_L, capacity_R, max_moves=max_moves)
        stays = np.zeros(len(found), np.int64)
        paths = [
            standing(today_LRS, loads_LE, stays),
            standing(found, loads_LE, num_moved(today_LRS, found)),
        ]
    else:
        paths = [
            descend(
                today_LRS,
                held,
                loads_LE,
                ceiling_L,
                capacity_R,
                max_moves=max_moves,
                barred_LRE=barred,
            )
        ]
    if window_TLE is not None:
        paths = [judged_by(path, window_TLE, num_expert_slots) for path in paths]
    table = choose(paths, max_moves).reshape(today_LRS.shape)
    if barred is not None and may_leave_home:
        path = descend(table, held, loads_LE, ceiling_L, capacity_R, max_moves=max_moves)
        if window_TLE is not None:
            path = judged_by(path, window_TLE, num_expert_slots)
        table = choose([path], max_moves).reshape(today_LRS.shape)
    if window_TLE is None:
        return table
    left = max_moves - int(num_moved(today_LRS, table).sum())
    return steadied(table, window_TLE, home_LRE=held, max_moves=left, barred_LRE=barred)


# Placements that know nodes: each group of experts on one node, and the fewest trades across nodes
# beyond that.
#
# With group-limited routing a token visits few groups, so groups that stay on a node keep its
# tokens off the network between nodes. How even the groups' loads are limits the balance of such a
# placement; `hybrid` pays for more balance with trades across nodes, only as many as the target
# asks for. Knows nothing of today's placement or of time. All layers at once.
#
# Shapes: L layers, E logical experts, G groups of E/G neighbouring experts, N nodes, R living
# ranks, S most expert slots.


NUM_LIGHT = 6
"""Ranks that the heaviest may trade with. With more, up to 1.5 % less traffic and twice the
time.
"""
MAX_PARTITIONS = 3000
"""Enumerate the ways to deal groups to nodes up to this many (105 for 8 groups on 4 nodes); search
beyond.
"""


def deal_groups(loads_LG: Floats, num_ranks_N: Ints) -> Ints:
    """Return the groups on each node [L, N, most groups], EMPTY-padded; the fullest node is as
    light as can be.

    Exact when the groups divide by the nodes and there are at most MAX_PARTITIONS ways; otherwise
    greedy and trades.
    """
    num_groups, num_nodes = loads_LG.shape[1], len(num_ranks_N)
    if num_groups % num_nodes == 0:
        ways = _partitions(num_groups, num_nodes)
        if ways is not None:
            sums = loads_LG[:, ways].sum(axis=3)  # [L, ways, N]
            # The heaviest part to the node with the most ranks.
            order = np.argsort(-sums, axis=2, kind="stable")
            to_node = np.argsort(-num_ranks_N, kind="stable")
            per_rank = np.take_along_axis(sums, order, axis=2) / num_ranks_N[to_node]
            best = per_rank.max(axis=2).argmin(axis=1)
            rows = np.arange(len(loads_LG))
            dealt = np.empty((len(loads_LG), num_nodes, ways.shape[2]), np.int64)
            dealt[:, to_node] = ways[best[:, None], order[rows, best]]
            return dealt
    capacity = np.full(num_nodes, num_groups // num_nodes, np.int64)
    capacity[np.argsort(-num_ranks_N, kind="stable")[: num_groups % num_nodes]] += 1
    order = np.argsort(-loads_LG, axis=1, kind="stable")
    table = pack(order, np.take_along_axis(loads_LG, order, axis=1), capacity)
    return exchange(table, loads_LG, loads_LG.sum(axis=1) / num_nodes, num_rounds=4 * num_nodes)


def place_hierarchical(
    loads_LE: Floats, num_groups: int, nodes: Sequence[Ints], capacity_R: Ints, *, num_rounds: int
) -> Ints:
    """Return the expert in every expert slot [L, R, S]: groups are dealt to nodes, then each node's
    experts are placed by themselves.

    `nodes` are the living ranks of each node. Raises ValueError if a node has fewer slots than
    experts.
    """
    num_layers, num_experts = loads_LE.shape
    group_size = num_experts // num_groups
    sizes = np.array([len(ranks) for ranks in nodes])
    dealt = deal_groups(loads_LE.reshape(num_layers, num_groups, group_size).sum(axis=2), sizes)
    table = np.full((num_layers, len(capacity_R), int(capacity_R.max())), EMPTY, np.int64)
    experts = dealt[:, :, :, None] * group_size + np.arange(group_size)
    held = np.where(dealt[:, :, :, None] == EMPTY, EMPTY, experts).reshape(
        num_layers, len(nodes), -1
    )
    node_loads = np.where(
        held == EMPTY, 0.0, np.take_along_axis(loads_LE[:, None, :], np.maximum(held, 0), axis=2)
    )
    ceiling = (node_loads.sum(axis=2) / sizes).max(axis=1) * 1.0003
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for node, ranks in enumerate(nodes):
        num_held = int((held[0, node] != EMPTY).sum())
        alike.setdefault((num_held, tuple(capacity_R[ranks].tolist())), []).append(node)
    for (num_held, capacity), members in alike.items():
        if sum(capacity) < num_held:
            raise ValueError(
                f"a node has {sum(capacity)} slots for {num_held} experts; use global placement."
            )
        mine = np.sort(held[:, members], axis=2)[:, :, -num_held:].reshape(-1, num_held)
        loads = np.take_along_axis(loads_LE, mine.reshape(num_layers, -1), axis=1).reshape(
            mine.shape
        )
        limit = np.repeat(ceiling, len(members))
        local = place_flat(loads, np.array(capacity), limit, num_rounds=num_rounds)
        flat = local.reshape(len(mine), -1)
        named = np.where(
            flat == EMPTY, EMPTY, np.take_along_axis(mine, np.maximum(flat, 0), axis=1)
        )
        by_node = named.reshape(num_layers, len(members), len(capacity), -1)
        for index, node in enumerate(members):
            table[:, nodes[node], : by_node.shape[3]] = by_node[:, index]
    return table


def place_hybrid(
    table_LRS: Ints,
    loads_LE: Floats,
    num_groups: int,
    node_R: Ints,
    capacity_R: Ints,
    *,
    target: float,
) -> Ints:
    """Return the hierarchical table [L, R, S] with the moves that bring each layer's mean/max to
    the target.

    A move costs the replicas it adds on nodes that are not their group's; within a node it is free.
    Where single moves do not suffice, any ranks trade.
    """
    ceiling = loads_LE.sum(axis=1) / table_LRS.shape[1] / target
    homes = node_homes(table_LRS, num_groups, loads_LE.shape[1], node_R)
    path = descend(
        table_LRS,
        homes,
        loads_LE,
        ceiling,
        capacity_R,
        max_moves=table_LRS[0].size,
        num_light=NUM_LIGHT,
    )
    last = path.tables_NLQ[-1].astype(np.int64).reshape(table_LRS.shape)
    return exchange(last, loads_LE, ceiling, num_rounds=60)


def node_homes(
    table_LRS: Ints, num_groups: int, num_experts: int, node_R: Ints
) -> NDArray[np.bool_]:
    """Whether a rank is on the node that holds most of an expert's group [L, R, E]."""
    num_nodes = int(node_R.max()) + 1
    held = held_by(table_LRS, num_experts).reshape(*table_LRS.shape[:2], num_groups, -1).sum(axis=3)
    on_node = np.stack([held[:, node_R == node].sum(axis=1) for node in range(num_nodes)], axis=1)
    home_LG = on_node.argmax(axis=1)
    return np.repeat(home_LG[:, None, :] == node_R[:, None], num_experts // num_groups, axis=2)


def _partitions(num_items: int, num_parts: int) -> Ints | None:
    """All ways to cut items into equal parts [ways, parts, size]; None if there are more than
    MAX_PARTITIONS.
    """
    size = num_items // num_parts
    found: list[list[tuple[int, ...]]] = []

    def extend(chosen: list[tuple[int, ...]], left: tuple[int, ...]) -> bool:
        if not left:
            found.append(chosen)
            return len(found) <= MAX_PARTITIONS
        for others in itertools.combinations(left[1:], size - 1):
            part = (left[0], *others)
            if not extend([*chosen, part], tuple(item for item in left if item not in part)):
                return False
        return True

    return np.array(found, np.int64) if extend([], tuple(range(num_items))) else None


MODES = ("global", "hierarchical", "hybrid", "fast")
GOOD_ENOUGH = 0.9997
"""A layer this balanced is left alone: sampling noise of one step is fifty times larger."""
NUM_ROUNDS = {9: 24, 5: 48, 0: 72}
"""Least expert slots of a rank -> rounds of exchange. With few slots, the right partner takes
longer to find.
"""


@dataclass(frozen=True)
class Cluster:
    """The ranks to place on: `expert_slots[r]` of rank r, 0 if it is dead; `nodes[r]` is the node
    it is on.
    """

    expert_slots: tuple[int, ...]
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.expert_slots) != len(self.nodes):
            raise ValueError(
                f"{len(self.expert_slots)} ranks have slots and {len(self.nodes)} have a node."
            )
        if not any(self.expert_slots) or min(self.expert_slots) < 0:
            raise ValueError("slots of ranks are 0 or more, and one rank at least must have some.")

    @classmethod
    def even(cls, num_ranks: int, num_nodes: int, num_expert_slots: int) -> Cluster:
        """Ranks of `num_expert_slots` each, numbered node by node. Raises ValueError if they do not
        divide.
        """
        if num_nodes < 1 or num_ranks < 1 or num_ranks % num_nodes:
            raise ValueError(f"{num_ranks} ranks do not divide evenly by {num_nodes} nodes.")
        return cls(
            (num_expert_slots,) * num_ranks,
            tuple(rank * num_nodes // num_ranks for rank in range(num_ranks)),
        )


@dataclass(frozen=True, eq=False)
class ExpertPlan:
    """A placement, how it shares the loads it was planned for, and what it costs to get there."""

    placement: Placement
    split_LRS: Floats | None
    """Fraction of its expert's tokens that an expert slot takes; None: replicas share evenly."""
    balancedness_L: Floats
    """Mean over the window's steps of (mean / max) rank load, living ranks only; one step if loads
    were summed.
    """
    moved_replicas: int
    """Replicas that their rank did not hold before; 0 if there was no placement before."""
    moved_across_nodes: int = 0
    """Replicas on a node that did not hold their expert before, so that its weights cross between
    nodes.
    """


def balance(
    loads: Floats,
    cluster: Cluster,
    *,
    mode: str = "global",
    num_groups: int = 1,
    target: float = 0.98,
    current: Placement | None = None,
    max_moves: int | None = None,
    weighted: bool = False,
) -> ExpertPlan:
    """Plan a unit's experts for loads [L, E] or for a window of steps [T, L, E].

    `num_groups` are the gate's groups of neighbouring experts (modes with nodes). `target`:
    balancedness that `hybrid` and an incremental plan ask of every layer. `max_moves` with
    `current`: the best placement at most so many replicas away, plus those that no living rank
    holds any more; 0 with `weighted` only splits anew. In mode hierarchical each group then stays
    on the node that holds most of it today, in hybrid where the target allows that. A window's plan
    is chosen by the mean of its steps' maxima. Raises ValueError for sizes that fit nowhere,
    unknown modes, and loads that are negative or not numbers.
    """
    window = _checked(loads, mode, num_groups)
    num_layers, num_experts = window.shape[1:]
    living = np.flatnonzero(np.array(cluster.expert_slots))
    capacity = np.array(cluster.expert_slots, np.int64)[living]
    node_R = np.array(cluster.nodes)[living]
    summed = _normalised(window.sum(axis=0), len(living))
    # A window's steps, in the measure of their sums; None if there is but one.
    steps = sample(window) * _scale(window, len(living)) if len(window) > 1 else None
    if mode in ("hierarchical", "hybrid") and len(np.unique(node_R)) > num_groups:
        raise ValueError(
            f"{num_groups} groups are too few for {len(np.unique(node_R))} nodes to keep each on"
            " one; use mode global."
        )
    sizes = (num_experts, num_layers, len(cluster.expert_slots))
    if (
        current is not None
        and (current.num_experts, current.num_layers, current.num_ranks) != sizes
    ):
        raise ValueError(
            "the current placement has other layers, ranks or experts than the loads and ranks"
            " given."
        )
    if max_moves is not None:
        if current is None or max_moves < 0:
            raise ValueError(
                "max_moves is 0 or more and needs the current placement it counts from."
            )
        today = complete(_today(current, living, capacity), summed, capacity)
        by_node = mode in ("hierarchical", "hybrid")
        table = place_near(
            today,
            summed,
            steps,
            np.full(num_layers, 1.0 / max(target, 1e-6)),
            capacity,
            max_moves=max_moves,
            home_LRE=node_homes(today, num_groups, num_experts, node_R) if by_node else None,
            may_leave_home=mode == "hybrid",
        )
    else:
        table = _from_scratch(summed, steps, node_R, capacity, mode, num_groups, target)
    slots: NDArray[np.int16] = np.full(
        (num_layers, len(cluster.expert_slots), max(cluster.expert_slots)), EMPTY, np.int16
    )
    slots[:, living, : table.shape[2]] = table
    if current is not None:
        slots = settled(slots, current.slot_to_expert_LRS)
    placement = Placement(num_experts, slots)
    split = _split(slots.astype(np.int64), summed, steps) if weighted else None
    moved = moved_replicas(current, placement) if current is not None else 0
    across = moved_replicas(current, placement, cluster.nodes) if current is not None else 0
    return ExpertPlan(
        placement, split, balancedness(placement, window, split, cluster), moved, across
    )


def rank_loads(placement: Placement, loads_LE: Floats, split_LRS: Floats | None = None) -> Floats:
    """Load of every rank [L, R], replicas sharing evenly or by the split."""
    table = placement.slot_to_expert_LRS.astype(np.int64)
    if split_LRS is None:
        return np.asarray(shares_of(table, loads_LE).sum(axis=2))
    return np.asarray(
        (held_loads(table, loads_LE) * np.where(table == EMPTY, 0.0, split_LRS)).sum(axis=2)
    )


def balancedness(
    placement: Placement,
    loads: Floats,
    split_LRS: Floats | None = None,
    cluster: Cluster | None = None,
) -> Floats:
    """Mean load over the living ranks by the window's mean of the heaviest rank's [L]; 1 is
    perfect.

    A step lasts as long as its heaviest rank, so a window's steps count by their own maxima, not by
    that of the sums. Without a cluster, ranks that hold something in any layer are taken to be
    alive.
    """
    window = loads if loads.ndim == 3 else loads[None]
    if cluster is not None:
        living = np.flatnonzero(np.array(cluster.expert_slots))
    else:
        living = np.flatnonzero((placement.slot_to_expert_LRS != EMPTY).any(axis=(0, 2)))
    per_step = np.stack([rank_loads(placement, step, split_LRS)[:, living] for step in window])
    heaviest = per_step.max(axis=2).sum(axis=0)
    mean = per_step.mean(axis=2).sum(axis=0)
    return np.asarray(np.where(heaviest > 0, mean / np.where(heaviest > 0, heaviest, 1.0), 1.0))


def moved_replicas(old: Placement, new: Placement, nodes: tuple[int, ...] | None = None) -> int:
    """Replicas of the new placement whose rank does not hold that expert in the old one: weights
    that must travel.

    With the ranks' nodes: experts new to a node, whose weights must travel between nodes.
    """
    before, after = (
        held_by(each.slot_to_expert_LRS.astype(np.int64), each.num_experts) for each in (old, new)
    )
    if nodes is not None:
        ranks = [np.flatnonzero(np.array(nodes) == node) for node in sorted(set(nodes))]
        before, after = (
            np.stack([held[:, of].any(axis=1) for of in ranks], axis=1) for held in (before, after)
        )
    return int((after & ~before).sum())


def settled(
    slot_to_expert_LRS: NDArray[np.int16], before_LRS: NDArray[np.int16]
) -> NDArray[np.int16]:
    """Return the same experts on the same ranks, each in the slot that it had before if its rank
    held it.
    """
    result = slot_to_expert_LRS.copy()
    num_expert_slots = slot_to_expert_LRS.shape[2]
    width = min(num_expert_slots, before_LRS.shape[2])
    same = (slot_to_expert_LRS[:, :, :width] == before_LRS[:, :, :width]).all(axis=2) & (
        width == num_expert_slots
    )
    for layer, rank in np.argwhere(~same):
        wanted = [int(expert) for expert in slot_to_expert_LRS[layer, rank] if expert != EMPTY]
        row = [EMPTY] * num_expert_slots
        for slot in range(width):
            if before_LRS[layer, rank, slot] in wanted:
                row[slot] = int(before_LRS[layer, rank, slot])
                wanted.remove(row[slot])
        for slot in range(num_expert_slots):
            if row[slot] == EMPTY and wanted:
                row[slot] = wanted.pop(0)
        result[layer, rank] = row
    return result


def _from_scratch(
    summed: Floats,
    steps: Floats | None,
    node_R: Ints,
    capacity: Ints,
    mode: str,
    num_groups: int,
    target: float,
) -> Ints:
    """The table of the living ranks [L, living, S] of a mode."""
    ceiling = np.full(len(summed), 1.0 / GOOD_ENOUGH)
    num_rounds = next(rounds for slots, rounds in NUM_ROUNDS.items() if capacity.min() >= slots)
    barred = None
    if mode in ("global", "fast"):
        table = place_flat(
            summed, capacity, ceiling, num_rounds=num_rounds if mode == "global" else 0
        )
    else:
        nodes = [np.flatnonzero(node_R == node) for node in np.unique(node_R)]
        table = place_hierarchical(summed, num_groups, nodes, capacity, num_rounds=num_rounds)
        barred = ~node_homes(table, num_groups, summed.shape[1], node_R)
        if mode == "hybrid":
            table = place_hybrid(table, summed, num_groups, node_R, capacity, target=target)
    if steps is not None and mode == "global":
        table = _steadier(table, place_flat(summed, capacity, ceiling, num_rounds=0), steps)
    if steps is not None and mode != "fast":
        table = steadied(table, steps, barred_LRE=barred)
    return widened(table, int(capacity.max()))


def _split(slot_to_expert_LRS: Ints, summed: Floats, steps: Floats | None) -> Floats:
    """Return the split of the sums. With a window, each layer has the whole of it, half or none,
    whichever suits the steps' maxima.
    """
    split = split_loads(slot_to_expert_LRS, summed)
    if steps is None:
        return split
    even = shares_of(slot_to_expert_LRS, np.ones_like(summed))
    choices = np.stack([even, (even + split) / 2, split])
    heaviest = np.zeros((len(choices), len(slot_to_expert_LRS)))
    for step in steps:
        heaviest += (choices * held_loads(slot_to_expert_LRS, step)).sum(axis=3).max(axis=2)
    return np.asarray(choices[heaviest.argmin(axis=0), np.arange(len(slot_to_expert_LRS))])


def _steadier(table_LRS: Ints, greedy_LRS: Ints, window: Floats) -> Ints:
    """Return, layer by layer, that one of two placements whose heaviest rank is lighter on the mean
    of the window's steps.
    """
    better = mean_of_maxima(greedy_LRS, window) < mean_of_maxima(table_LRS, window)
    return np.asarray(np.where(better[:, None, None], greedy_LRS, table_LRS))


def _today(current: Placement, living: Ints, capacity: Ints) -> Ints:
    """The living ranks' replicas [L, living, S], at most as many as a rank has expert slots."""
    table = current.slot_to_expert_LRS[:, living].astype(np.int64)
    packed = np.take_along_axis(table, np.argsort(table == EMPTY, axis=2, kind="stable"), axis=2)
    packed = widened(packed, max(int(capacity.max()), packed.shape[2]))[:, :, : int(capacity.max())]
    return np.asarray(np.where(np.arange(packed.shape[2]) < capacity[:, None], packed, EMPTY))


def _checked(loads: Floats, mode: str, num_groups: int) -> Floats:
    window = np.asarray(loads, np.float64)
    window = window[None] if window.ndim == 2 else window
    if window.ndim != 3 or not window.size:
        raise ValueError(
            f"loads are [layers, experts] or [steps, layers, experts], not {np.shape(loads)}."
        )
    if not np.isfinite(window).all() or (window < 0).any():
        raise ValueError("loads must be numbers of tokens, 0 or more.")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; {', '.join(MODES)} are known.")
    if mode in ("hierarchical", "hybrid") and (num_groups < 1 or window.shape[2] % num_groups):
        raise ValueError(
            f"{window.shape[2]} experts do not divide evenly into {num_groups} groups."
        )
    return window


def _scale(window: Floats, num_ranks: int) -> Floats:
    """What makes the mean rank load of a step 1 on average [L, 1]."""
    total = window.sum(axis=(0, 2))[:, None]
    return np.asarray(num_ranks * len(window) / np.where(total > 0, total, 1.0))


def _normalised(loads_LE: Floats, num_ranks: int) -> Floats:
    """Loads whose mean rank load is 1 in every layer; a layer without tokens counts as an even
    one.
    """
    total = loads_LE.sum(axis=1, keepdims=True)
    return np.asarray(
        np.where(total > 0, loads_LE, 1.0)
        * num_ranks
        / np.where(total > 0, total, loads_LE.shape[1])
    )


# EPLB's function, so that its users can switch with one import: `from hadal.policy.experts.balance
# import rebalance_experts`.
#
# Arrays mean what they mean in DeepSeek's EPLB: `weight` is [layers, logical experts]; for every
# layer it returns the expert in each expert slot (numbered rank by rank), the slots of each expert,
# padded with -1, and how many those are. It takes numpy arrays, lists, or torch tensors, which it
# reads through their own `cpu` and `numpy`, so that torch is not imported here. It returns tensors
# for tensors, int64 on the CPU, and arrays for all else.


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """Return (physical_to_logical [L, replicas], logical_to_physical [L, E, most], logical_count
    [L, E]).

    Groups stay on a node where they divide evenly by the nodes, as in EPLB; otherwise the placement
    is global. Raises ValueError if replicas do not divide by the GPUs or GPUs by the nodes.
    """
    is_tensor = hasattr(weight, "detach")
    loads = np.asarray(weight.detach().cpu().double().numpy() if is_tensor else weight, np.float64)
    if num_gpus < 1 or num_replicas % num_gpus:
        raise ValueError(f"{num_replicas} replicas do not divide evenly by {num_gpus} GPUs.")
    cluster = Cluster.even(num_gpus, num_nodes, num_replicas // num_gpus)
    by_node = num_groups % num_nodes == 0
    plan = balance(
        loads,
        cluster,
        mode="hierarchical" if by_node and num_nodes > 1 else "global",
        num_groups=num_groups if by_node else 1,
    )
    filled = _filled(plan.placement.slot_to_expert_LRS.astype(np.int64))
    arrays = (filled, *logical_maps(filled, loads.shape[1]))
    if not is_tensor:
        return arrays
    # Not through the loads' own type: bfloat16 has no 257.
    int64 = weight.new_zeros(()).long().dtype
    physical, logical, counts = (
        weight.new_tensor(array, dtype=int64, device="cpu") for array in arrays
    )
    return physical, logical, counts


def logical_maps(physical_to_logical_LP: Ints, num_experts: int) -> tuple[Ints, Ints]:
    """Return (the slots of every expert [L, E, most replicas], padded with -1; how many [L, E])."""
    num_layers, num_replicas = physical_to_logical_LP.shape
    rows = np.arange(num_layers)[:, None]
    flat = (physical_to_logical_LP + rows * num_experts).ravel()
    counts = np.bincount(flat, minlength=num_layers * num_experts)
    order = np.argsort(flat, kind="stable")
    first = np.cumsum(counts) - counts
    index = np.arange(len(flat)) - np.repeat(first, counts)
    slots = np.full((num_layers * num_experts, int(counts.max(initial=1))), -1, np.int64)
    slots[flat[order], index] = order % num_replicas
    return slots.reshape(num_layers, num_experts, -1), counts.reshape(num_layers, num_experts)


def _filled(slot_to_expert_LRS: Ints) -> Ints:
    """Fill empty expert slots, which EPLB does not know: where a rank has more slots than there are
    experts, those that are left repeat its first.
    """
    return np.asarray(
        np.where(
            slot_to_expert_LRS == EMPTY, slot_to_expert_LRS[:, :, :1], slot_to_expert_LRS
        ).reshape(len(slot_to_expert_LRS), -1)
    )
