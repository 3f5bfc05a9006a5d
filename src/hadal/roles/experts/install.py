"""Installation of one layer's new placement: ranks that lack weights stage them (load them in the
background), then all ranks flip (switch to the placement) in one step.

    STAGING --all staged--> READY --next plans--> FLIPPING --step done by all--> gone, adopted
       |        (a change of the split alone begins here)
       +-- error, deadline; in any state, end of the formation: gone, the old placement stays

Independent of loads and of the reason for the change. Its owner drops it when the formation ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hadal.core.errors import InvariantError
from hadal.core.placement import EMPTY, Placement
from hadal.core.plans import LayerFlip, Source, Staged, StagePlan

Address = tuple[str, int]
"""(host, port) at which a rank serves expert weights to others; port 0: it does not."""


class InstallState(StrEnum):
    STAGING = "staging"
    READY = "ready"
    FLIPPING = "flipping"


_NEXT: dict[tuple[InstallState, str], InstallState] = {
    (InstallState.STAGING, "staged"): InstallState.READY,
    (InstallState.READY, "flip"): InstallState.FLIPPING,
}


@dataclass(slots=True)
class Installation:
    """Installation of one layer. `slot_to_expert_RS` and `weights_RS` (None: equal parts) are the
    layer's new placement.
    """

    layer: int
    stage_id: int
    formation: int
    slot_to_expert_RS: NDArray[np.int16]
    weights_RS: NDArray[np.uint8] | None
    num_moved: int
    deadline_s: float
    begun_step_id: int = -1
    """Last step planned before the installation began."""
    waiting: set[int] = field(default_factory=set)
    """Ranks that have not staged."""
    state: InstallState = InstallState.STAGING
    step_id: int = -1
    """Step of the flip, once it is in flight."""

    def stage_plans(
        self, placement: Placement, addresses: Mapping[int, Address]
    ) -> dict[int, StagePlan]:
        """Return rank -> StagePlan to send, and expect answers of these ranks. Empty if only the
        split changes; the installation is then READY immediately.
        """
        before = placement.slot_to_expert_LRS[self.layer]
        missing = {
            rank: [
                e
                for e in self.slot_to_expert_RS[rank].tolist()
                if e != EMPTY and e not in before[rank]
            ]
            for rank in np.flatnonzero((before != self.slot_to_expert_RS).any(axis=1)).tolist()
        }
        sources = choose_sources(missing, before, addresses)
        self.waiting = set(missing)
        if not missing:
            self.move("staged")
        return {
            rank: StagePlan(
                self.formation,
                self.stage_id,
                self.layer,
                tuple(self.slot_to_expert_RS[rank].tolist()),
                tuple(sources[rank]),
            )
            for rank in missing
        }

    def expects(self, rank: int, staged: Staged) -> bool:
        """Return whether the installation waits for this answer of the rank."""
        about = (staged.formation, staged.stage_id, staged.layer)
        return rank in self.waiting and about == (self.formation, self.stage_id, self.layer)

    def staged(self, rank: int) -> None:
        """Note that a rank has staged its weights."""
        self.waiting.discard(rank)
        if not self.waiting:
            self.move("staged")

    def flip(self, step_id: int) -> LayerFlip:
        """Return the flip to send with this step's plans."""
        self.move("flip")
        self.step_id = step_id
        weights = b"" if self.weights_RS is None else self.weights_RS.tobytes()
        return LayerFlip(
            self.layer,
            self.stage_id,
            np.ascontiguousarray(self.slot_to_expert_RS, np.int16).tobytes(),
            weights,
        )

    def move(self, move: str) -> None:
        try:
            self.state = _NEXT[self.state, move]
        except KeyError:
            raise InvariantError(f"layer {self.layer} is {self.state} and cannot {move}") from None


def choose_sources(
    missing: Mapping[int, list[int]],
    slot_to_expert_RS: NDArray[np.int16],
    addresses: Mapping[int, Address],
) -> dict[int, list[Source]]:
    """Return the sources of each rank's new experts. Of an expert's holders, the one that sends the
    fewest experts so far is chosen.

    Experts with few holders choose first, so that experts with more can avoid busy holders. An
    expert without a holder that serves weights is read from the checkpoint.
    """
    num_sent = dict.fromkeys(addresses, 0)
    holders = {
        expert: [
            r
            for r in np.flatnonzero((slot_to_expert_RS == expert).any(axis=1)).tolist()
            if addresses.get(r, ("", 0))[1]
        ]
        for expert in {expert for experts in missing.values() for expert in experts}
    }
    wanted = sorted(
        ((expert, rank) for rank, experts in missing.items() for expert in experts),
        key=lambda one: (len(holders[one[0]]), one),
    )
    result: dict[int, list[Source]] = {rank: [] for rank in missing}
    for expert, rank in wanted:
        if not holders[expert]:
            result[rank].append(Source(expert))
            continue
        giver = min(holders[expert], key=lambda one: (num_sent[one], one))
        num_sent[giver] += 1
        result[rank].append(Source(expert, *addresses[giver]))
    return result
