"""Plan every expert's replicas: from loads to a placement, from scratch or near today's.

Pure: loads in, a plan out; the caller decides when to plan and moves the weights. Equal inputs give
equal plans. Modes: `global` uses any rank for any expert; `hierarchical` keeps each group of
experts on one node, which keeps tokens of group-limited routing there; `hybrid` starts hierarchical
and trades across nodes until every layer's balancedness reaches a target; `fast` is the plain
greedy, global. With `max_moves` a plan stays near today's placement instead.

`balance` plans for a unit's cluster; `rebalance_experts` plans by EPLB's arguments, so that EPLB's
users can switch with one import.

Shapes: T steps of a window, L layers, E logical experts, R ranks, S maximum expert slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats, Ints
from hadal.core.placement import EMPTY, Placement
from hadal.policy.experts.flat import place_flat, widened
from hadal.policy.experts.increment import complete
from hadal.policy.experts.near import place_near
from hadal.policy.experts.nodes import node_homes, place_hierarchical, place_hybrid
from hadal.policy.experts.splits import split_loads
from hadal.policy.experts.tables import held_by, held_loads, shares_of
from hadal.policy.experts.windows import mean_of_maxima, sample, steadied

MODES = ("global", "hierarchical", "hybrid", "fast")
GOOD_ENOUGH = 0.9997
"""Balancedness at which a layer is left alone: sampling noise of one step is fifty times larger."""
NUM_ROUNDS = {9: 24, 5: 48, 0: 72}
"""Minimum number of expert slots of a rank -> rounds of exchange. With few slots, a good partner
takes longer to find.
"""


@dataclass(frozen=True)
class Cluster:
    """Ranks to place on: `expert_slots[r]` of rank r, 0 if it is dead; `nodes[r]` is its node."""

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
        """Return a cluster of ranks with `num_expert_slots` each, numbered node by node. Raises
        ValueError if the ranks do not divide by the nodes.
        """
        if num_nodes < 1 or num_ranks < 1 or num_ranks % num_nodes:
            raise ValueError(f"{num_ranks} ranks do not divide evenly by {num_nodes} nodes.")
        return cls(
            (num_expert_slots,) * num_ranks,
            tuple(rank * num_nodes // num_ranks for rank in range(num_ranks)),
        )


@dataclass(frozen=True, eq=False)
class ExpertPlan:
    """Placement, its split of the loads that it was planned for, and the moves to reach it."""

    placement: Placement
    split_LRS: Floats | None
    """Fraction of its expert's tokens that an expert slot takes; None: replicas share evenly."""
    balancedness_L: Floats
    """Mean rank load over the heaviest rank's, both averaged over the window's steps; living ranks
    only. Loads without steps count as one step.
    """
    moved_replicas: int
    """Replicas that their rank did not hold before; 0 if there was no placement before."""
    moved_across_nodes: int = 0
    """Experts new to a node, summed over nodes and layers: weights that cross between nodes."""


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

    `num_groups`: the gate's groups of neighbouring experts (modes with nodes). `target`:
    balancedness that `hybrid` and an incremental plan require of every layer. `max_moves` with
    `current`: the best placement found at most that many replicas away, plus replicas of experts
    that no living rank holds. `max_moves` 0 with `weighted` only changes the split. With
    `max_moves`, mode hierarchical leaves each group on the node with most of it today; so does
    hybrid if the target allows it. A window's plan is chosen by the mean of its steps' maxima.
    Raises ValueError for sizes that fit nowhere, unknown modes, and loads that are negative or not
    numbers.
    """
    window = _checked(loads, mode, num_groups)
    num_layers, num_experts = window.shape[1:]
    living = np.flatnonzero(np.array(cluster.expert_slots))
    capacity = np.array(cluster.expert_slots, np.int64)[living]
    node_R = np.array(cluster.nodes)[living]
    summed = _normalised(window.sum(axis=0), len(living))
    # The window's steps, scaled like their sum; None if there is but one.
    steps = sample(window) * _scale(window, len(living)) if len(window) > 1 else None
    if mode in ("hierarchical", "hybrid") and len(np.unique(node_R)) > num_groups:
        raise ValueError(
            f"{num_groups} expert groups are fewer than {len(np.unique(node_R))} nodes; use mode"
            " global."
        )
    sizes = (num_experts, num_layers, len(cluster.expert_slots))
    if current is not None:
        theirs = current.num_experts, current.num_layers, current.num_ranks
        if theirs != sizes:
            raise ValueError(
                f"the current placement has (experts, layers, ranks) {theirs}; the loads and the"
                f" cluster have {sizes}."
            )
    if max_moves is not None:
        if current is None or max_moves < 0:
            raise ValueError("max_moves must be 0 or more, and needs the current placement.")
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
    """Return the load of every rank [L, R]; replicas share evenly or by the split."""
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
    """Return the mean load of the living ranks over that of the heaviest rank, both averaged over
    the window's steps [L]; 1 is perfect.

    A step lasts as long as its heaviest rank, so the maxima are taken per step, not of the summed
    loads. Without a cluster, ranks that hold an expert in any layer count as alive.
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
    """Return how many replicas of the new placement are on a rank that does not hold that expert in
    the old one: weights to transfer.

    With the ranks' nodes: count experts new to a node, with weights that cross between nodes.
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
    """Return the table with each expert in its former slot, if its rank held it before."""
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
    """Return the table of the living ranks [L, living, S] for a mode."""
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
    """Return the split for the summed loads. With a window, each layer applies all, half or none of
    it, whichever lowers the steps' maxima most.
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
    """Return, for each layer, the placement with the lower load of the heaviest rank, averaged over
    the window's steps.
    """
    better = mean_of_maxima(greedy_LRS, window) < mean_of_maxima(table_LRS, window)
    return np.asarray(np.where(better[:, None, None], greedy_LRS, table_LRS))


def _today(current: Placement, living: Ints, capacity: Ints) -> Ints:
    """Return the living ranks' replicas [L, living, S], at most as many as a rank has expert slots."""
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
        raise ValueError(f"mode {mode!r} is unknown; use one of {', '.join(MODES)}.")
    if mode in ("hierarchical", "hybrid") and (num_groups < 1 or window.shape[2] % num_groups):
        raise ValueError(
            f"{window.shape[2]} experts do not divide evenly into {num_groups} groups."
        )
    return window


def _scale(window: Floats, num_ranks: int) -> Floats:
    """Return the factor that makes the mean rank load of a step 1 on average [L, 1]."""
    total = window.sum(axis=(0, 2))[:, None]
    return np.asarray(num_ranks * len(window) / np.where(total > 0, total, 1.0))


def _normalised(loads_LE: Floats, num_ranks: int) -> Floats:
    """Return loads with a mean rank load of 1 in every layer; a layer without tokens is even."""
    total = loads_LE.sum(axis=1, keepdims=True)
    return np.asarray(
        np.where(total > 0, loads_LE, 1.0)
        * num_ranks
        / np.where(total > 0, total, loads_LE.shape[1])
    )


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """Return (physical_to_logical [L, replicas], logical_to_physical [L, E, most], logical_count
    [L, E]), as DeepSeek's EPLB does.

    `weight` is [L, E]. For every layer: the expert in each expert slot (numbered rank by rank), the
    slots of each expert, padded with -1, and their number. Groups stay on a node if they divide
    evenly by the nodes, as in EPLB; otherwise the placement is global. Tensors are read through
    their own `cpu` and `numpy`, so that torch is not imported here. Returns tensors for tensors,
    int64 on the CPU, and arrays for arrays and lists. Raises ValueError if replicas do not divide
    by the GPUs or GPUs by the nodes.
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
    # The loads' own type will not do: bfloat16 cannot represent 257.
    int64 = weight.new_zeros(()).long().dtype
    physical, logical, counts = (
        weight.new_tensor(array, dtype=int64, device="cpu") for array in arrays
    )
    return physical, logical, counts


def logical_maps(physical_to_logical_LP: Ints, num_experts: int) -> tuple[Ints, Ints]:
    """Return (slots of every expert [L, E, most replicas], padded with -1; their number [L, E])."""
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
    """Fill empty expert slots, which EPLB does not have: where a rank has more slots than there are
    experts, the rest repeat its first expert.
    """
    return np.asarray(
        np.where(
            slot_to_expert_LRS == EMPTY, slot_to_expert_LRS[:, :, :1], slot_to_expert_LRS
        ).reshape(len(slot_to_expert_LRS), -1)
    )
