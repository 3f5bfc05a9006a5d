"""Membership of a rank in its unit: its communication group and its experts, per formation.

Independent of requests and steps. The computing thread calls `form` and everything that exchanges;
any thread may call `abort` and `lost`.
"""

from __future__ import annotations

import logging
import threading

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.group import Group, PeerLost
from hadal.core.errors import HadalError
from hadal.core.placement import Placement, flip_arrays
from hadal.core.plans import Formed, FormPlan, LayerFlip, Waited
from hadal.model.deepseek import DeepseekV3
from hadal.model.experts import ExpertStore

_log = logging.getLogger("hadal.model.experts")


class Aborted(HadalError):
    """Error: the formation is over, and no step may run until the unit has formed again."""


class Membership:
    """State of one rank in a unit of several. `comm` is the model's, over `group`; `store` has the
    experts of the model's weights.
    """

    def __init__(self, rank: int, group: Group, comm: ExpertComm, store: ExpertStore) -> None:
        self.rank = rank
        self._group = group
        self._comm = comm
        self._store = store
        self._is_over = threading.Event()
        self._is_over.set()  # Until the first formation.
        self._formation = 0
        self._lost_ranks: tuple[int, ...] = ()
        self._placement: Placement | None = None
        """Placement in force; None before the first formation that succeeded."""

    def form(self, plan: FormPlan, model: DeepseekV3) -> Formed:
        """Join the plan's formation, load its new expert replicas and drop the old ones. Errors are
        returned in `Formed.error`.
        """
        self._formation = plan.formation
        self._is_over.clear()
        self._lost_ranks = ()
        num_loaded = 0
        error: str | None = None
        try:
            # Connect before reading: otherwise a rank with many experts to read would use up its
            # peers' connection deadline.
            self._group.form(plan.formation, plan.members)
            placement = Placement.from_bytes(
                plan.slot_to_expert,
                model.config.n_routed_experts,
                plan.num_ranks,
                plan.num_expert_slots,
                plan.weights,
            )
            model.weights, num_loaded = self._store.install(
                model.weights, placement.slot_to_expert_LRS[:, self.rank], plan.formation
            )
            self._comm.install(placement)
            self._placement = placement
        except Exception as failure:
            log_failure(f"formation {plan.formation} was not formed", failure)
            self._is_over.set()
            self.note_lost(failure)
            error = f"{type(failure).__name__}: {failure}"
        return Formed(plan.formation, error, self.lost, num_loaded)

    def flip(self, flip: LayerFlip, model: DeepseekV3) -> None:
        """Switch a layer to its staged experts, and route its tokens accordingly, between two
        steps. Raises ValueError if the flip does not fit the placement, and InvariantError if it
        was not staged. After an error the caller must call `note_lost`: other ranks may have
        flipped, so the unit has to form again.
        """
        assert self._placement is not None, "the formation was checked before"
        slot_to_expert_RS, weights_RS = flip_arrays(flip, self._placement.num_expert_slots)
        placement = self._placement.with_layer(flip.layer, slot_to_expert_RS, weights_RS)
        weights = self._store.flip(model.weights, flip, self.rank)
        self._comm.install_layer(flip.layer, placement)
        model.weights, self._placement = weights, placement

    def check(self) -> None:
        """Raise Aborted if the formation is over."""
        if self._is_over.is_set():
            raise Aborted(f"formation {self._formation} is over")

    def note_lost(self, failure: Exception) -> None:
        """End the formation after a failed step, so that peers fail too, and note the lost peers."""
        if isinstance(failure, PeerLost):
            self._lost_ranks = failure.ranks
        self.abort()

    def abort(self) -> None:
        """End the formation: every wait for a peer fails. Callable from any thread."""
        self._is_over.set()
        self._group.abort()

    @property
    def lost(self) -> tuple[int, ...]:
        """Peers that caused the last failure or have a broken connection. Readable from any thread."""
        return tuple(sorted({*self._lost_ranks, *self._group.lost()}))

    def take_waits(self) -> Waited:
        """Return the rank's waits for its peers since the last call."""
        return self._group.take_waits()

    def close(self) -> None:
        self._group.close()


def log_failure(what: str, failure: Exception) -> None:
    """Log a failure: a lost peer as a one-line warning, its consequences (Aborted) for debugging
    only, and anything else with its traceback.
    """
    if isinstance(failure, PeerLost):
        _log.warning("%s: %s", what, failure)
    elif isinstance(failure, Aborted):
        _log.debug("%s: %s", what, failure)
    else:
        _log.error("%s", what, exc_info=failure)
