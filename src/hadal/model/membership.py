"""A rank's place in its unit: the group it exchanges with and the experts it holds, formation by
formation.

Knows no requests and no steps. `form` and everything that exchanges is called by the computing
thread; `abort` and `lost` by any.
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
    """The formation is over; nothing may run before the next one is formed."""


class Membership:
    """One rank of a unit of many. `comm` is the model's, over `group`; `store` keeps the experts of
    its weights.
    """

    def __init__(self, rank: int, group: Group, comm: ExpertComm, store: ExpertStore) -> None:
        self.rank = rank
        self._group = group
        self._comm = comm
        self._store = store
        self._is_over = threading.Event()
        self._is_over.set()  # Until the first is formed.
        self._formation = 0
        self._lost_ranks: tuple[int, ...] = ()
        self._placement: Placement | None = None
        """The placement in force."""

    def form(self, plan: FormPlan, model: DeepseekV3) -> Formed:
        """Join the plan's formation, read the replicas that are new, drop those that went. Answers
        with its errors.
        """
        self._formation = plan.formation
        self._is_over.clear()
        self._lost_ranks = ()
        num_loaded = 0
        error: str | None = None
        try:
            # Connect first: nobody need wait in a connection's deadline for one who has much to
            # read.
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
        """Let a layer's experts lie where they have been staged, and its tokens go there, between
        two steps.

        Raises ValueError if the flip does not fit the placement, InvariantError if it was not
        staged. A caller notes either as lost: what the other ranks flipped has to be formed anew.
        """
        assert self._placement is not None, "the formation was checked before"
        slot_to_expert_RS, weights_RS = flip_arrays(flip, self._placement.num_expert_slots)
        placement = self._placement.with_layer(flip.layer, slot_to_expert_RS, weights_RS)
        weights = self._store.flip(model.weights, flip, self.rank)
        self._comm.install_layer(flip.layer, placement)
        model.weights, self._placement = weights, placement

    def check(self) -> None:
        """Raise Aborted unless the formation goes on."""
        if self._is_over.is_set():
            raise Aborted(f"formation {self._formation} is over")

    def note_lost(self, failure: Exception) -> None:
        """A step failed: whatever the cause, this formation is over, for the peers too."""
        if isinstance(failure, PeerLost):
            self._lost_ranks = failure.ranks
        self.abort()

    def abort(self) -> None:
        """End the formation: every wait for a peer fails. From any thread."""
        self._is_over.set()
        self._group.abort()

    @property
    def lost(self) -> tuple[int, ...]:
        """Peers that are held responsible for the last failure, or whose connection broke. From any
        thread.
        """
        return tuple(sorted({*self._lost_ranks, *self._group.lost()}))

    def take_waits(self) -> Waited:
        """Return how long the rank waited for its peers since the last call."""
        return self._group.take_waits()

    def close(self) -> None:
        self._group.close()


def log_failure(what: str, failure: Exception) -> None:
    """A lost peer is an event, not a bug: one line, none for what only follows from it. Else the
    traceback.
    """
    if isinstance(failure, PeerLost):
        _log.warning("%s: %s", what, failure)
    elif isinstance(failure, Aborted):
        _log.debug("%s: %s", what, failure)
    else:
        _log.error("%s", what, exc_info=failure)
