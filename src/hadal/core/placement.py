"""Expert placement of a unit as one frozen value: the replica in each expert slot of each rank.

Independent of loads and tensors: `spread` is the even start, and a balancer may make another
placement. Logical experts are replicated ("redundant experts", DeepSeek-V3/R1 inference overview:
256 + 32 replicas). An expert slot, or slot for short, holds one replica or none.

Shapes: L MoE layers, R ranks of the deployment, S expert slots of a rank, E logical experts, M
longest list of `Placement.replicas`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats, Ints
from hadal.core.plans import LayerFlip

EMPTY = -1
"""Value of an expert slot without a replica."""
SPLIT_PARTS = 16
"""Number of equal parts in which an expert's tokens are divided among its replicas."""


@dataclass(frozen=True, eq=False)
class Placement:
    """Placement of experts: `slot_to_expert_LRS[l, r, s]` is the expert in slot s of rank r in MoE
    layer l, or EMPTY.

    A dead rank's slots are all empty. An expert slot's id in the whole unit is r * S + s.
    """

    num_experts: int
    slot_to_expert_LRS: NDArray[np.int16]
    weights_LRS: NDArray[np.uint8] | None = None
    """Parts of its expert's tokens that an expert slot takes. They add up to SPLIT_PARTS per
    expert, or are all 1 if replicas take equal parts. None: equal parts everywhere.
    """

    @property
    def num_layers(self) -> int:
        return int(self.slot_to_expert_LRS.shape[0])

    @property
    def num_ranks(self) -> int:
        return int(self.slot_to_expert_LRS.shape[1])

    @property
    def num_expert_slots(self) -> int:
        return int(self.slot_to_expert_LRS.shape[2])

    def replicas(self, layer: int) -> tuple[Ints, Ints]:
        """Return (ids of the expert slots [E, M] that take an expert's tokens in turn, padded with
        one of them; number of valid ids [E]).

        With equal parts these are its replicas in ascending order. Otherwise each slot is repeated
        once per part, evenly spread, so that even few tokens are divided close to the split.
        """
        if self.weights_LRS is not None:
            return self._in_turn(layer, self.weights_LRS[layer])
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

    def _in_turn(self, layer: int, weights_RS: NDArray[np.uint8]) -> tuple[Ints, Ints]:
        experts, weights = self.slot_to_expert_LRS[layer].reshape(-1), weights_RS.reshape(-1)
        slots = np.repeat(np.arange(experts.size), np.where(experts == EMPTY, 0, weights))
        counts = np.bincount(experts[slots], minlength=self.num_experts)
        # An expert slot's k-th of n parts is placed at (k + 1/2) / n of its expert's turns.
        number = np.arange(slots.size) - np.searchsorted(slots, slots)
        way = (number + 0.5) / weights[slots]
        in_turn = slots[np.lexsort((slots, way, experts[slots]))]
        first = np.cumsum(counts) - counts
        column = np.arange(max(int(counts.max(initial=1)), 1))
        at = first[:, None] + np.where(column < counts[:, None], column, 0)
        if not in_turn.size:
            return np.full(at.shape, EMPTY), counts
        return (
            np.where(counts[:, None] > 0, in_turn[np.minimum(at, in_turn.size - 1)], EMPTY),
            counts,
        )

    def by_expert(self, amounts_LRS: Floats) -> Floats:
        """Return the sum over each expert's slots [L, E]; amounts of empty slots are ignored."""
        sizes = (self.num_layers, self.num_experts)
        slots = self.slot_to_expert_LRS.astype(np.int64)
        at = (
            np.where(slots == EMPTY, 0, slots)
            + self.num_experts * np.arange(self.num_layers)[:, None, None]
        )
        amounts = np.where(slots == EMPTY, 0.0, amounts_LRS)
        return (
            np.bincount(at.ravel(), amounts.ravel(), sizes[0] * sizes[1])
            .astype(np.float64)
            .reshape(sizes)
        )

    def with_layer(
        self, layer: int, slot_to_expert_RS: NDArray[np.int16], weights_RS: NDArray[np.uint8] | None
    ) -> Placement:
        """Return the placement with these experts and weights in this layer, as after a LayerFlip.
        Raises ValueError if the number of ranks or of expert slots differs.
        """
        if slot_to_expert_RS.shape != self.slot_to_expert_LRS.shape[1:]:
            raise ValueError(
                f"shape {slot_to_expert_RS.shape} does not fit {self.slot_to_expert_LRS.shape}."
            )
        slots = self.slot_to_expert_LRS.copy()
        slots[layer] = slot_to_expert_RS
        weights = self.weights_LRS
        if weights is not None or weights_RS is not None:
            weights = np.ones(slots.shape, np.uint8) if weights is None else weights.copy()
            weights[layer] = 1 if weights_RS is None else weights_RS
        return replace(self, slot_to_expert_LRS=slots, weights_LRS=weights)

    def of_layer(self, layer: int) -> Placement:
        """Return the placement of this layer alone."""
        one = slice(layer, layer + 1)
        weights = None if self.weights_LRS is None else self.weights_LRS[one]
        return replace(self, slot_to_expert_LRS=self.slot_to_expert_LRS[one], weights_LRS=weights)

    def missing(self) -> list[set[int]]:
        """Return the experts without a replica, per layer."""
        everyone = set(range(self.num_experts))
        return [everyone - set(np.unique(layer).tolist()) for layer in self.slot_to_expert_LRS]

    def check(self) -> list[str]:
        """Return problems; empty if in every layer each expert has a replica that takes tokens, and
        no rank holds an expert twice.
        """
        problems = []
        for layer, experts in enumerate(self.missing()):
            if experts:
                problems.append(f"layer {layer}: no replica of experts {sorted(experts)[:8]}")
        for layer, rank_slots in enumerate(self.slot_to_expert_LRS):
            for rank, slots in enumerate(rank_slots):
                held = slots[slots != EMPTY]
                if len(np.unique(held)) != len(held):
                    problems.append(f"layer {layer}: rank {rank} holds an expert twice")
        if self.weights_LRS is not None:
            for layer in range(self.num_layers):
                none = np.flatnonzero(self.replicas(layer)[1] == 0).tolist()
                if none and not problems:
                    problems.append(f"layer {layer}: no replica takes tokens of experts {none[:8]}")
        return problems

    def to_bytes(self) -> bytes:
        return np.ascontiguousarray(self.slot_to_expert_LRS, np.int16).tobytes()

    def weights_bytes(self) -> bytes:
        """Return the weights' bytes; empty if `weights_LRS` is None."""
        return (
            b""
            if self.weights_LRS is None
            else np.ascontiguousarray(self.weights_LRS, np.uint8).tobytes()
        )

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        num_experts: int,
        num_ranks: int,
        num_expert_slots: int,
        weights: bytes = b"",
    ) -> Placement:
        """Return the placement that `to_bytes` and `weights_bytes` wrote. Raises ValueError if the
        sizes do not fit.
        """
        shape = (-1, num_ranks, num_expert_slots)
        weights_LRS = np.frombuffer(weights, np.uint8).reshape(shape) if weights else None
        return cls(num_experts, np.frombuffer(data, np.int16).reshape(shape), weights_LRS)


def flip_arrays(
    flip: LayerFlip, num_expert_slots: int
) -> tuple[NDArray[np.int16], NDArray[np.uint8] | None]:
    """Return the expert in each expert slot [R, S] after `flip`, and the weights [R, S] (None:
    equal parts). Raises ValueError if the sizes do not fit.
    """
    if not num_expert_slots:
        raise ValueError("a layer without slots cannot flip.")
    slot_to_expert_RS = np.frombuffer(flip.slot_to_expert, np.int16).reshape(-1, num_expert_slots)
    return slot_to_expert_RS, (
        np.frombuffer(flip.weights, np.uint8).reshape(slot_to_expert_RS.shape)
        if flip.weights
        else None
    )


def parts_of(
    slot_to_expert_RS: NDArray[np.int16], split_RS: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """Convert a layer's split [R, S], fractions of each expert's tokens, into parts of SPLIT_PARTS,
    by largest remainder.

    If all replicas of an expert get the same number of parts, each gets 1, which keeps the list of
    turns short. Empty expert slots get 0.
    """
    slots, split = slot_to_expert_RS.reshape(-1), split_RS.reshape(-1)
    parts = np.zeros(slots.shape, np.uint8)
    for expert in np.unique(slots[slots != EMPTY]).tolist():
        at = np.flatnonzero(slots == expert)
        wanted = split[at] * (SPLIT_PARTS / max(float(split[at].sum()), 1e-12))
        whole = np.floor(wanted).astype(np.int64)
        rest = SPLIT_PARTS - int(whole.sum())
        if not 0 <= rest <= len(at):  # The expert had no tokens to split.
            whole[:] = 1
        else:
            whole[np.argsort(whole - wanted, kind="stable")[:rest]] += 1
        parts[at] = 1 if (whole == whole[0]).all() else whole
    return parts.reshape(slot_to_expert_RS.shape)


def spread(num_layers: int, num_experts: int, num_ranks: int, num_redundant: int = 0) -> Placement:
    """Deal the experts to the ranks in turn, then evenly chosen redundant replicas, so that no rank
    holds an expert twice.

    Raises ValueError if experts and replicas do not divide evenly by the ranks, or if a rank would
    hold one twice.
    """
    total = num_experts + num_redundant
    if num_ranks < 1 or num_redundant < 0 or total % num_ranks:
        raise ValueError(
            f"{num_experts} experts and {num_redundant} redundant ones do not divide evenly over"
            f" {num_ranks} ranks."
        )
    num_expert_slots = total // num_ranks
    if num_expert_slots > num_experts:
        raise ValueError(
            f"{num_expert_slots} slots on a rank are more than the {num_experts} experts there are."
        )
    slots = np.empty((num_layers, num_ranks, num_expert_slots), np.int16)
    for layer in range(num_layers):
        # Each layer duplicates other experts, because it is not known yet which ones are hot.
        extra = (
            np.arange(num_redundant) * num_experts // max(num_redundant, 1) + layer
        ) % num_experts
        # Entry i goes to rank i % num_ranks; _without_doubles repairs ranks with an expert twice.
        row = np.concatenate((np.arange(num_experts), extra))
        slots[layer] = row.reshape(num_expert_slots, num_ranks).T
    return Placement(num_experts, _without_doubles(slots))


def spread_by_node(
    num_layers: int, num_experts: int, num_ranks: int, num_redundant: int, num_nodes: int
) -> Placement:
    """Apply `spread` within each node to its part of the experts: neighbouring experts, such as a
    gate's group, are on one node.

    A token that is limited to a few groups therefore goes to few nodes (DeepSeek-V3, arXiv
    2412.19437, 2.1.2). Raises ValueError as `spread` does, or if something does not divide evenly
    over the nodes.
    """
    if (
        num_nodes < 1
        or num_experts % num_nodes
        or num_ranks % num_nodes
        or num_redundant % num_nodes
    ):
        raise ValueError(
            f"{num_experts} experts, {num_redundant} redundant ones and {num_ranks} ranks do not"
            f" divide evenly over {num_nodes} nodes."
        )
    of_node = num_experts // num_nodes
    part = spread(
        num_layers, of_node, num_ranks // num_nodes, num_redundant // num_nodes
    ).slot_to_expert_LRS
    return Placement(
        num_experts, np.concatenate([part + node * of_node for node in range(num_nodes)], axis=1)
    )


def without(placement: Placement, lost: Collection[int]) -> Placement:
    """Return the placement after ranks are lost: experts held only by them go to the survivors with
    the fewest replicas.

    Survivors keep their experts; expert slots are added if needed. All replicas take equal parts,
    because the old split was made for the lost replicas too. Raises ValueError if no rank survives.
    """
    survivors = [rank for rank in range(placement.num_ranks) if rank not in lost]
    if not survivors:
        raise ValueError("no rank survives.")
    held = [
        [
            (
                [int(e) for e in placement.slot_to_expert_LRS[layer, rank] if e != EMPTY]
                if rank in survivors
                else []
            )
            for rank in range(placement.num_ranks)
        ]
        for layer in range(placement.num_layers)
    ]
    for rank_to_experts in held:
        present = {expert for experts in rank_to_experts for expert in experts}
        for expert in range(placement.num_experts):
            if expert not in present:
                target = min(survivors, key=lambda rank: (len(rank_to_experts[rank]), rank))
                rank_to_experts[target].append(expert)
    num_expert_slots = max(
        placement.num_expert_slots, max(len(experts) for layer in held for experts in layer)
    )
    slots = np.full((placement.num_layers, placement.num_ranks, num_expert_slots), EMPTY, np.int16)
    for layer, rank_to_experts in enumerate(held):
        for rank, experts in enumerate(rank_to_experts):
            slots[layer, rank, : len(experts)] = experts
    return Placement(placement.num_experts, slots)


def _without_doubles(slot_to_expert_LRS: NDArray[np.int16]) -> NDArray[np.int16]:
    """Swap a replica with another rank's where a rank would hold an expert twice."""
    for layer in slot_to_expert_LRS:
        for rank in range(len(layer)):
            for slot in range(layer.shape[1]):
                if int(np.count_nonzero(layer[rank] == layer[rank, slot])) < 2:
                    continue
                other = _swap_partner(layer, rank, slot)
                layer[rank, slot], layer[other] = layer[other], layer[rank, slot]
    return slot_to_expert_LRS


def _swap_partner(layer: NDArray[np.int16], rank: int, slot: int) -> tuple[int, int]:
    """Return (rank, slot) of an expert that this rank lacks, on a rank that lacks ours."""
    ours = layer[rank, slot]
    for other in range(len(layer)):
        if other == rank or ours in layer[other]:
            continue
        for candidate in range(layer.shape[1]):
            if layer[other, candidate] not in layer[rank]:
                return other, candidate
    raise ValueError(
        "no placement without an expert twice on a rank was found; use fewer redundant experts."
    )
