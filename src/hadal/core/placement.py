"""Which expert replica sits in which slot of which rank, as one frozen value per unit.

Knows no loads and no tensors: `spread` is the even start, a balancer may make another. Logical experts are replicated
("redundant experts", DeepSeek-V3/R1 inference overview: 256 + 32 replicas); a slot holds one replica or none.

Shapes: L MoE layers, R ranks of the deployment, S slots of a rank, E logical experts, M most replicas of an expert.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

EMPTY = -1
"""In a slot: no replica."""


@dataclass(frozen=True, eq=False)
class Placement:
    """`slot_to_expert_LRS[l, r, s]` is the expert in slot s of rank r in MoE layer l, or EMPTY.

    A dead rank's slots are all empty. Slot ids over the whole unit are r * S + s.
    """

    num_experts: int
    slot_to_expert_LRS: NDArray[np.int16]

    @property
    def num_layers(self) -> int:
        return int(self.slot_to_expert_LRS.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.slot_to_expert_LRS.shape[1])

    @property
    def num_slots(self) -> int:
        return int(self.slot_to_expert_LRS.shape[2])

    def replicas(self, layer: int) -> tuple[Ints, Ints]:
        """Return (slot ids [E, M] in ascending order, padded with an expert's first; how many replicas [E])."""
        slots = self.slot_to_expert_LRS[layer].reshape(-1).astype(np.int64)
        held = np.flatnonzero(slots != EMPTY)
        counts = np.bincount(slots[held], minlength=self.num_experts)
        order = held[np.argsort(slots[held], kind="stable")]
        first = np.concatenate(([0], np.cumsum(counts)[:-1]))
        most = int(counts.max(initial=1))
        column = np.minimum(np.arange(most), np.maximum(counts, 1)[:, None] - 1)
        at = np.minimum(first[:, None] + column, max(len(order) - 1, 0))
        table = order[at] if len(order) else np.full(at.shape, EMPTY)
        return table, counts

    def missing(self) -> list[set[int]]:
        """Experts without a replica, by layer."""
        everyone = set(range(self.num_experts))
        return [everyone - set(np.unique(layer).tolist()) for layer in self.slot_to_expert_LRS]

    def check(self) -> list[str]:
        """Problems; empty when every expert has a replica in every layer and no rank holds one twice."""
        problems = []
        for layer, experts in enumerate(self.missing()):
            if experts:
                problems.append(f"layer {layer}: no replica of experts {sorted(experts)[:8]}")
        for layer, rank_slots in enumerate(self.slot_to_expert_LRS):
            for rank, slots in enumerate(rank_slots):
                held = slots[slots != EMPTY]
                if len(np.unique(held)) != len(held):
                    problems.append(f"layer {layer}: rank {rank} holds an expert twice")
        return problems

    def to_bytes(self) -> bytes:
        return np.ascontiguousarray(self.slot_to_expert_LRS, np.int16).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, num_experts: int, num_ranks: int, num_slots: int) -> Placement:
        """The placement that `to_bytes` wrote. Raises ValueError if the sizes do not fit."""
        return cls(num_experts, np.frombuffer(data, np.int16).reshape(-1, num_ranks, num_slots))


def spread(num_layers: int, num_experts: int, num_ranks: int, num_redundant: int = 0) -> Placement:
    """Experts in order over the ranks, then the replicas, evenly chosen, so that no rank holds an expert twice.

    Raises ValueError if experts and replicas do not divide evenly by the ranks, or if a rank would hold one twice.
    """
    total = num_experts + num_redundant
    if num_ranks < 1 or num_redundant < 0 or total % num_ranks:
        raise ValueError(
            f"{num_experts} experts and {num_redundant} redundant ones do not divide evenly over {num_ranks} ranks."
        )
    num_slots = total // num_ranks
    if num_slots > num_experts:
        raise ValueError(f"{num_slots} slots on a rank are more than the {num_experts} experts there are.")
    slots = np.empty((num_layers, num_ranks, num_slots), np.int16)
    for layer in range(num_layers):
        # Another part of the experts is doubled in each layer: nobody knows yet which ones are hot.
        extra = (np.arange(num_redundant) * num_experts // max(num_redundant, 1) + layer) % num_experts
        # In a row of experts repeated by num_redundant / num_experts, equal ones are num_experts apart at least.
        row = np.concatenate((np.arange(num_experts), extra))
        slots[layer] = row.reshape(num_slots, num_ranks).T
    return Placement(num_experts, _without_doubles(slots))


def without(placement: Placement, lost: Collection[int]) -> Placement:
    """The placement when ranks are lost: what they held alone goes to the survivors with the fewest replicas.

    Survivors keep what they have; slots are added where they need more. Raises ValueError if nobody survives.
    """
    survivors = [rank for rank in range(placement.num_ranks) if rank not in lost]
    if not survivors:
        raise ValueError("no rank survives.")
    held = [
        [[int(e) for e in placement.slot_to_expert_LRS[layer, rank] if e != EMPTY] if rank in survivors else []
         for rank in range(placement.num_ranks)]
        for layer in range(placement.num_layers)
    ]  # fmt: skip
    for rank_to_experts in held:
        present = {expert for experts in rank_to_experts for expert in experts}
        for expert in range(placement.num_experts):
            if expert not in present:
                target = min(survivors, key=lambda rank: (len(rank_to_experts[rank]), rank))
                rank_to_experts[target].append(expert)
    num_slots = max(placement.num_slots, max(len(experts) for layer in held for experts in layer))
    slots = np.full((placement.num_layers, placement.num_ranks, num_slots), EMPTY, np.int16)
    for layer, rank_to_experts in enumerate(held):
        for rank, experts in enumerate(rank_to_experts):
            slots[layer, rank, : len(experts)] = experts
    return Placement(placement.num_experts, slots)


def _without_doubles(slots_LRS: NDArray[np.int16]) -> NDArray[np.int16]:
    """Swap a redundant replica with a later rank's where a rank would hold an expert twice."""
    for layer in slots_LRS:
        for rank in range(len(layer)):
            for slot in range(layer.shape[1]):
                if int(np.count_nonzero(layer[rank] == layer[rank, slot])) < 2:
                    continue
                other = _swap_partner(layer, rank, slot)
                layer[rank, slot], layer[other] = layer[other], layer[rank, slot]
    return slots_LRS


def _swap_partner(layer: NDArray[np.int16], rank: int, slot: int) -> tuple[int, int]:
    """A slot elsewhere whose expert is not here and whose rank does not hold ours."""
    ours = layer[rank, slot]
    for other in range(len(layer)):
        if other == rank or ours in layer[other]:
            continue
        for candidate in range(layer.shape[1]):
            if layer[other, candidate] not in layer[rank]:
                return other, candidate
    raise ValueError("no placement without an expert twice on a rank was found; use fewer redundant experts.")
