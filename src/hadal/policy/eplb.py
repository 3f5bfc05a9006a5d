"""EPLB's function, so that its users can switch with one import: `from hadal.policy.eplb import
rebalance_experts`.

Arrays mean what they mean in DeepSeek's EPLB: `weight` [layers, logical experts]; out come, for
every layer, the expert in each of the physical slots (numbered rank by rank), the slots of each
expert padded with -1, and how many there are. Takes numpy arrays, lists, or torch tensors (which it
reads through their own `cpu` and `numpy`, so that torch is not imported here); gives back what it
was given: tensors for tensors, int64 on the CPU, else arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hadal.core.placement import EMPTY
from hadal.policy.expert_balance import Cluster, balance
from hadal.policy.expert_packing import Ints


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
    # Not through the loads' own type: in bfloat16 there is no slot 257.
    int64 = weight.new_zeros(()).long().dtype
    physical, logical, counts = (
        weight.new_tensor(array, dtype=int64, device="cpu") for array in arrays
    )
    return physical, logical, counts


def logical_maps(physical_to_logical_LP: Ints, num_experts: int) -> tuple[Ints, Ints]:
    """Return (slots of every expert [L, E, most replicas], padded with -1; how many [L, E])."""
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


def _filled(slots_LRS: Ints) -> Ints:
    """EPLB knows no empty slot: one that is left (more slots on a rank than experts) repeats the
    rank's first.
    """
    return np.asarray(
        np.where(slots_LRS == EMPTY, slots_LRS[:, :, :1], slots_LRS).reshape(len(slots_LRS), -1)
    )
