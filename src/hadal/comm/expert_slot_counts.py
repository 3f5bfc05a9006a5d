"""How many (token, expert) pairs a rank's expert slots received, layer by layer, on the device where
the tokens are.

Knows no experts: an expert slot's count is its expert's as long as the placement stays. Adding is
one op on the device, or one addition per pair where the kernels unpack (kernels/message): nobody
waits and nothing is copied before `take`.

Shapes: L MoE layers, S expert slots of the rank, M received pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertSlotCounts:
    """int64 [L, S]. One compute thread calls it."""

    def __init__(self, num_layers: int, num_expert_slots: int, device: str) -> None:
        self._counts_LS = torch.zeros(
            (num_layers, num_expert_slots), dtype=torch.int64, device=device
        )
        self._one = torch.ones((), dtype=torch.int64, device=device)
        self.rows_S = tuple(self._counts_LS.unbind(0))
        """A view of every layer's: made once, because dispatch asks for one per layer and step."""

    def add(self, layer: int, expert_slot_M: Tensor) -> None:
        """Count pairs by their expert slot (int64)."""
        # Not bincount: on a GPU it waits for the largest index, to know how long its result is.
        self.rows_S[layer].scatter_add_(0, expert_slot_M, self._one.expand(expert_slot_M.shape[0]))

    def add_sums(self, layer: int, counts_S: Tensor) -> None:
        """Count what was counted elsewhere."""
        self.rows_S[layer].add_(counts_S)

    def clear(self, layer: int) -> None:
        self.rows_S[layer].zero_()

    def take(self) -> Tensor:
        """Everything since the last time, on the CPU: the one copy from the device."""
        taken_LS = self._counts_LS.to("cpu", copy=True)
        self._counts_LS.zero_()
        return taken_LS
