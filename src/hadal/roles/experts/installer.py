"""Placement in force on all ranks, and the installation of one layer's next placement.

A new placement is in force once all ranks did the step with its flip. If a rank fails to stage or
the formation ends before, the old placement stays in force. After a failure, nothing is staged
until a back-off ends, which doubles with each failure in a row. Independent of loads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from hadal.core.placement import Placement
from hadal.core.plans import FLIP, LayerFlip, Staged, StagePlan, StepDone
from hadal.roles.experts.gain import ExpertTerms, MoveCosts, fractions
from hadal.roles.experts.install import Address, Installation, InstallState
from hadal.roles.experts.moved import ExpertMoves
from hadal.roles.experts.planner import LayerChange, LayerRests
from hadal.roles.ranks.notes import Routine

_SETTLE_INTERVALS = 2
"""Intervals for which a layer rests after a flip or a failure: one to plan by, one to judge by."""


class StageBackoff:
    """Back-off of staging after failures."""

    def __init__(self, terms: ExpertTerms) -> None:
        self.until_s = -math.inf
        self._terms = terms
        self._num_failures = 0
        """Failures since a layer flipped."""

    def fail(self, now_s: float) -> float:
        """Begin a back-off and return its seconds."""
        backoff_s = min(self._terms.backoff_s * 2.0**self._num_failures, self._terms.backoff_max_s)
        self._num_failures = min(self._num_failures + 1, 32)
        self.until_s = now_s + backoff_s
        return backoff_s

    def succeed(self) -> None:
        """Reset the back-off: the next failure begins with the shortest time."""
        self._num_failures = 0


class ExpertInstaller:
    """Owner of the placement in force. `placement`: the unit's first one.

    `notes`: log lines of its owner. `rests` receives layers that flipped or failed to. `costs`
    receives the measured seconds of moves, and `moves` the moves.
    """

    def __init__(
        self,
        placement: Placement,
        terms: ExpertTerms,
        rests: LayerRests,
        costs: MoveCosts,
        moves: ExpertMoves,
        notes: deque[str],
    ) -> None:
        self.placement = placement
        """The placement in force on all ranks."""
        self.issued = placement
        """Placement in the last plans sent: with the flip in flight, if there is one."""
        self.fractions_LRS = fractions(placement)
        """Each expert slot's share of its expert's tokens, for the placement in force."""
        self.installing: Installation | None = None
        self._stage_timeout_s = terms.stage_timeout_s
        self._rests = rests
        self._costs = costs
        self._moves = moves
        self._notes = notes
        self._backoff = StageBackoff(terms)
        self._formation = 0
        self._addresses: dict[int, Address] = {}
        """Addresses of the running formation's ranks; empty if none runs."""
        self._step_id = -1
        """Last step planned."""
        self._stage_id = 0

    # ---- formations ----
    def began(self, formation: int, placement: Placement, addresses: Mapping[int, Address]) -> None:
        """Begin a formation with this placement and these ranks."""
        self._formation = formation
        self._adopt(placement)
        self._addresses = dict(addresses)

    def ended(self) -> None:
        """End the formation. Its ranks have dropped staged weights."""
        if self.installing is not None:
            self._drop("the formation is over")
        self._addresses = {}

    # ---- staging ----
    def may_begin(self, now_s: float) -> bool:
        """Return whether a layer may be staged: all ranks (at least two) are members, no
        installation is under way, and no back-off runs.
        """
        return (
            self.installing is None
            and len(self._addresses) == self.placement.num_ranks > 1
            and now_s >= self._backoff.until_s
        )

    def begin(self, now_s: float, change: LayerChange) -> dict[int, StagePlan]:
        """Begin to install a change of a layer. Returns rank -> StagePlan to send."""
        self._stage_id += 1
        self.installing = Installation(
            change.layer,
            self._stage_id,
            self._formation,
            change.slot_to_expert_RS,
            change.weights_RS,
            change.num_moved,
            now_s + self._stage_timeout_s,
            self._step_id,
        )
        self._notes.append(
            Routine(
                f"MoE layer {change.layer}: staging begins after step {self._step_id}; replicas to"
                f" move: {change.num_moved}"
            )
        )
        return self.installing.stage_plans(self.placement, self._addresses)

    def staged(self, now_s: float, rank: int, staged: Staged) -> bool:
        """Process a rank's answer. Returns False if no installation waits for it."""
        install = self.installing
        if install is None or not install.expects(rank, staged):
            return False
        if staged.error is not None:
            self._fail(now_s, f"rank {rank}: {staged.error}")
            return True
        num_got = staged.num_received + staged.num_read
        if num_got:
            self._costs.staged(staged.elapsed_s / num_got)
        install.staged(rank)
        return True

    def tick(self, now_s: float) -> None:
        """Fail the installation if its staging deadline has passed."""
        install = self.installing
        if (
            install is not None
            and install.state is InstallState.STAGING
            and now_s >= install.deadline_s
        ):
            late = ", ".join(map(str, sorted(install.waiting)))
            self._fail(now_s, f"rank {late} did not stage within {self._stage_timeout_s:g} s")

    def forgive(self, gap_s: float) -> None:
        """Extend the deadline by `gap_s` seconds during which the leader did not run."""
        if self.installing is not None:
            self.installing.deadline_s += gap_s

    # ---- steps ----
    def flips(self, step_id: int) -> tuple[LayerFlip, ...]:
        """Return the flip to send with this step's plans, if one is ready."""
        self._step_id = step_id
        install = self.installing
        if install is None or install.state is not InstallState.READY:
            return ()
        flip = install.flip(step_id)
        self.issued = self.placement.with_layer(
            install.layer, install.slot_to_expert_RS, install.weights_RS
        )
        return (flip,)

    def done(self, step_id: int, parts: Mapping[int, StepDone]) -> bool:
        """Process a step that all ranks did. Returns whether a flip in it changed `placement`."""
        install = self.installing
        if (
            install is None
            or install.state is not InstallState.FLIPPING
            or install.step_id != step_id
        ):
            return False
        pauses_s = [
            time.seconds for part in parts.values() for time in part.op_times if time.op == FLIP
        ]
        if pauses_s:
            self._costs.paused(max(pauses_s))
        self.installing = None
        before = self.placement.of_layer(install.layer)
        self._adopt(self.issued)
        self._moves.flipped(install, before, self.placement.of_layer(install.layer))
        self._notes.append(
            Routine(
                f"MoE layer {install.layer} flipped in step {step_id}, begun after step"
                f" {install.begun_step_id}; replicas moved: {install.num_moved}"
            )
        )
        self._backoff.succeed()
        self._rests.rest(install.layer, _SETTLE_INTERVALS)
        return True

    def _adopt(self, placement: Placement) -> None:
        self.placement = self.issued = placement
        self.fractions_LRS = fractions(placement)

    def _fail(self, now_s: float, reason: str) -> None:
        """Keep the old placement after a failure, and begin a back-off."""
        self._drop(f"{reason}; nothing is staged for {self._backoff.fail(now_s):g} s")

    def _drop(self, reason: str) -> None:
        assert self.installing is not None
        self._notes.append(f"MoE layer {self.installing.layer} keeps its placement: {reason}")
        self._rests.rest(self.installing.layer, _SETTLE_INTERVALS)
        self.installing, self.issued = None, self.placement
        self._moves.num_abandoned += 1

    def check(self) -> list[str]:
        """Return problems; empty when installation, flip in flight and placement in force agree."""
        problems = []
        install = self.installing
        is_flipping = install is not None and install.state is InstallState.FLIPPING
        if not is_flipping and self.issued is not self.placement:
            problems.append("experts: ranks were sent a flip that is not in flight")
        if install is None:
            return problems
        if install.formation != self._formation or not self._addresses:
            problems.append(
                f"experts: layer {install.layer} is {install.state} for formation"
                f" {install.formation}"
            )
        if bool(install.waiting) != (install.state is InstallState.STAGING):
            problems.append(
                f"experts: {install.layer=} is {install.state} and waits for"
                f" {sorted(install.waiting)}"
            )
        if not install.waiting <= self._addresses.keys():
            problems.append(
                f"experts: ranks that are no members stage layer {install.layer}: {sorted(install.waiting)}"
            )
        return problems
