"""Place experts by node: each group of experts on one node, and the fewest trades across nodes
beyond that.

With group-limited routing a token visits few groups, so groups that stay on a node keep its tokens
off the network between nodes. The evenness of the groups' loads limits the balance of such a
placement. `place_hybrid` buys more balance with trades across nodes, only as many as the target
requires. Independent of today's placement and of time. All layers at once.

Shapes: L layers, E logical experts, G groups of E/G neighbouring experts, N nodes, R living ranks,
S maximum expert slots of a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats, Ints
from hadal.core.placement import EMPTY
from hadal.policy.experts.exchange import exchange
from hadal.policy.experts.flat import place_flat
from hadal.policy.experts.greedy import pack
from hadal.policy.experts.increment import Homes, descend
from hadal.policy.experts.tables import held_by

NUM_LIGHT = 6
"""Lightest ranks that the heaviest may trade with. More: at best 1.5 % less traffic, 2x the time."""
MAX_PARTITIONS = 3000
"""Try all ways to deal groups to nodes if there are at most this many (8 groups, 4 nodes: 105)."""


def deal_groups(loads_LG: Floats, num_ranks_N: Ints) -> Ints:
    """Return the groups on each node [L, N, most groups], EMPTY-padded, so that the highest
    load per rank of a node is as low as possible.

    Exact when the groups divide by the nodes and there are at most MAX_PARTITIONS ways; otherwise
    greedy with trades.
    """
    num_groups, num_nodes = loads_LG.shape[1], len(num_ranks_N)
    if num_groups % num_nodes == 0:
        ways = _partitions(num_groups, num_nodes)
        if ways is not None:
            sums = loads_LG[:, ways].sum(axis=3)  # [L, ways, N]
            # The heaviest part goes to the node with the most ranks.
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
    experts are placed separately.

    `nodes`: living ranks of each node. Raises ValueError if a node has fewer slots than experts.
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
    """Return the hierarchical table [L, R, S] after the moves that bring each layer's mean/max to
    the target.

    A move costs the replicas that it adds outside their group's node; within a node it is free.
    Where single moves do not suffice, any ranks trade.
    """
    ceiling = loads_LE.sum(axis=1) / table_LRS.shape[1] / target
    homes = node_homes(table_LRS, num_groups, loads_LE.shape[1], node_R)
    path = descend(
        table_LRS,
        Homes(homes),
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
    """Return [L, R, E], True where a rank is on the node that holds most of an expert's group."""
    num_nodes = int(node_R.max()) + 1
    held = held_by(table_LRS, num_experts).reshape(*table_LRS.shape[:2], num_groups, -1).sum(axis=3)
    on_node = np.stack([held[:, node_R == node].sum(axis=1) for node in range(num_nodes)], axis=1)
    home_LG = on_node.argmax(axis=1)
    return np.repeat(home_LG[:, None, :] == node_R[:, None], num_experts // num_groups, axis=2)


def _partitions(num_items: int, num_parts: int) -> Ints | None:
    """Return all ways to cut items into equal parts [ways, parts, size]; None if there are more
    than MAX_PARTITIONS.
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
