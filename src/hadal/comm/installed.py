"""Placement in the form that a rank's dispatch uses: the replicas of every layer. Also counts the
(token, expert) pairs received per expert slot of the rank, on the tokens' device.

Does not depend on tokens. An expert slot's count is its expert's as long as the placement is
unchanged. Adding is one op on the device, or one addition per pair if kernels unpack
(kernels/message): no thread waits and nothing is copied before `take`.

Shapes: L MoE layers, S expert slots of the rank, M received pairs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hadal.core.placement import EMPTY, Placement
from hadal.reference.route import Replicas

NO_PLACEMENT = Placement(0, np.zeros((0, 1, 0), np.int16))
"""Placement of a rank before one is installed."""


class ExpertSlotCounts:
    """Pairs received per expert slot, int64 [L, S]. One compute thread calls it."""

    def __init__(self, num_layers: int, num_expert_slots: int, device: str) -> None:
        self._counts_LS = torch.zeros(
            (num_layers, num_expert_slots), dtype=torch.int64, device=device
        )
        self._one = torch.ones((), dtype=torch.int64, device=device)
        self.rows_S = tuple(self._counts_LS.unbind(0))
        """View of each layer's counts, made once because dispatch uses one per layer and step."""

    def add(self, layer: int, expert_slot_M: Tensor) -> None:
        """Count pairs by their expert slot (int64)."""
        # Not bincount: on a GPU it waits for the largest index, which sets its result's length.
        self.rows_S[layer].scatter_add_(0, expert_slot_M, self._one.expand(expert_slot_M.shape[0]))

    def clear(self, layer: int) -> None:
        self.rows_S[layer].zero_()

    def take(self) -> Tensor:
        """Return the counts since the last call, on the CPU. This is the only copy from the device."""
        taken_LS = self._counts_LS.to("cpu", copy=True)
        self._counts_LS.zero_()
        return taken_LS


class InstalledPlacement:
    """Replicas of every MoE layer, and counts per expert slot of the rank."""

    def __init__(self, placement: Placement, members: Iterable[int], device: str) -> None:
        """Install `placement`. Raises ValueError unless all experts have replicas, all on members."""
        self._members = frozenset(members)
        self._device = device
        self._check(placement)
        self.num_expert_slots = placement.num_expert_slots
        self.replicas = [
            replicas_of(placement, layer, device) for layer in range(placement.num_layers)
        ]
        self.counts = ExpertSlotCounts(placement.num_layers, self.num_expert_slots, device)

    def install_layer(self, layer: int, placement: Placement) -> None:
        """Replace one layer's placement, as ExpertComm.install_layer does."""
        if (
            not 0 <= layer < len(self.replicas)
            or placement.num_expert_slots != self.num_expert_slots
        ):
            raise ValueError(
                f"layer {layer} with {placement.num_expert_slots} slots per rank does not fit"
                f" {len(self.replicas)} layers with {self.num_expert_slots} slots."
            )
        self._check(placement.of_layer(layer))
        self.replicas[layer] = replicas_of(placement, layer, self._device)
        self.counts.clear(layer)

    def _check(self, placement: Placement) -> None:
        dead = set(range(placement.num_ranks)) - self._members
        if any((placement.slot_to_expert_LRS[:, rank] != EMPTY).any() for rank in dead):
            raise ValueError(
                f"the placement gives experts to ranks {sorted(dead)}, which are not members."
            )
        problems = placement.check()
        if problems:
            raise ValueError(f"the placement cannot be used: {'; '.join(problems[:3])}.")


def replicas_of(placement: Placement, layer: int, device: str) -> Replicas:
    """Return the table from which dispatch chooses a token's replica in this layer."""
    expert_slots_EM, counts_E = (
        torch.from_numpy(a).to(device, torch.int32) for a in placement.replicas(layer)
    )
    return Replicas(
        expert_slots_EM.contiguous(), counts_E, placement.num_ranks, placement.num_expert_slots
    )
