"""A rank's routed experts: which replica lies in which slot, and how that changes with a new placement.

What stays is copied within memory and what is new is read from the checkpoint; layers that stay as they are cost
nothing. What changed is in memory twice until the caller lets go of the old weights. Knows no ranks and no tokens.

Shapes: L MoE layers, S slots, I expert width, D hidden.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hadal.core.placement import EMPTY
from hadal.model.checkpoint import Checkpoint
from hadal.model.weights import read_expert
from hadal.reference.params import ModelWeights, MoeWeights

Slots = NDArray[np.int16]


class ExpertStore:
    """Keeps the experts in a model's weights as its placement says."""

    def __init__(self, folder: Path, num_layers: int, slots_LS: Slots | None = None) -> None:
        """`slots_LS`: what the weights held when they were loaded; None: no expert."""
        self._folder = folder
        self.slots_LS: Slots = np.empty((num_layers, 0), np.int16) if slots_LS is None else slots_LS.copy()

    def install(self, weights: ModelWeights, slots_LS: Slots) -> tuple[ModelWeights, int]:
        """Return the weights with these experts in their slots and how many replicas were read for it.

        Raises CheckpointError; the given weights are as they were then. Raises ValueError for another number of layers.
        """
        if len(slots_LS) != len(self.slots_LS):
            raise ValueError(f"a placement of {len(slots_LS)} MoE layers; the model has {len(self.slots_LS)}.")
        config, layers, num_read = weights.config, list(weights.layers), 0
        with Checkpoint(self._folder, config.weight_block_size) as checkpoint:
            for layer, (old, new) in enumerate(zip(self.slots_LS, slots_LS, strict=True)):
                index = config.first_k_dense_replace + layer
                moe = layers[index].moe
                assert moe is not None
                if not np.array_equal(old, new):
                    moe, count = _rearrange(checkpoint, index, moe, old.tolist(), new.tolist())
                    layers[index] = replace(layers[index], moe=moe)
                    num_read += count
        self.slots_LS = slots_LS.copy()
        return replace(weights, layers=tuple(layers)), num_read


def _rearrange(
    checkpoint: Checkpoint, index: int, moe: MoeWeights, old: list[int], new: list[int]
) -> tuple[MoeWeights, int]:
    gate_up = moe.gate_up_E.new_empty(len(new), *moe.gate_up_E.shape[1:])
    down = moe.down_E.new_empty(len(new), *moe.down_E.shape[1:])
    slot_of = {expert: slot for slot, expert in enumerate(old) if expert != EMPTY}
    num_read = 0
    for slot, expert in enumerate(new):
        if expert == EMPTY:
            continue
        if expert in slot_of:
            gate_up[slot].copy_(moe.gate_up_E[slot_of[expert]])
            down[slot].copy_(moe.down_E[slot_of[expert]])
        else:
            read_expert(checkpoint, index, expert, gate_up[slot], down[slot])
            num_read += 1
    return replace(moe, gate_up_E=gate_up, down_E=down), num_read
