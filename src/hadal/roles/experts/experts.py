"""Placement of a unit's experts while it serves: measured, planned layer by layer, installed one
layer at a time.

    counted steps --> window of loads --> a change pays? --> RankStage to ranks that need weights --> flip in a step

`counts` measures, `planner` chooses a layer and a change to try, and `installer` owns the placement
in force. A flip switches all ranks to a layer's new placement. Nothing is planned unless every
rank is a member of the formation.

Sans-IO: independent of the wire and of requests. Its owner (roles/ranks) calls it with events and
sends the messages that it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from hadal.core.messages.questions import Trace
from hadal.core.overview import UnitExperts
from hadal.core.placement import Placement
from hadal.core.plans import Staged, StagePlan, StepDone, StepPlan
from hadal.policy.experts.balance import rank_loads
from hadal.roles.experts.counts import ExpertCounts
from hadal.roles.experts.gain import ExpertTerms, MoveCosts
from hadal.roles.experts.install import Address
from hadal.roles.experts.installer import ExpertInstaller
from hadal.roles.experts.moved import ExpertMoves, describe
from hadal.roles.experts.planner import ExpertPlanner, LayerRests
from hadal.roles.experts.window import CountsWindow
from hadal.roles.unit.report import ExpertFigures

_NUM_NOTES = 256
"""Maximum number of notes that are kept if the owner does not remove them after every event."""


class ExpertBalancer:
    """Expert balancer of one unit. `placement`: the unit's first one. `is_planning` False: the
    balancer only measures.

    `nodes`: rank -> its node. `num_groups`: number of the gate's groups, if each group should stay
    on one node as far as balance allows; 0: nodes do not matter.
    """

    def __init__(
        self,
        placement: Placement,
        nodes: tuple[int, ...],
        *,
        terms: ExpertTerms | None = None,
        is_planning: bool = True,
        num_groups: int = 0,
    ) -> None:
        terms = terms if terms is not None else ExpertTerms()
        window = CountsWindow(
            placement.num_layers, placement.num_experts, terms.num_intervals, terms.half_life
        )
        rests, costs = LayerRests(window, placement.num_layers), MoveCosts(terms)
        self.notes: deque[str] = deque(maxlen=_NUM_NOTES)
        self.counts = ExpertCounts(window, terms.count_every_steps, self.notes)
        self.moves = ExpertMoves()
        self.installer = ExpertInstaller(placement, terms, rests, costs, self.moves, self.notes)
        self._planner = ExpertPlanner(window, rests, costs, terms, nodes, num_groups)
        self._is_planning = is_planning
        self._checked: tuple[Placement, list[str]] | None = None
        """The placement last checked, and its problems."""

    @property
    def placement(self) -> Placement:
        """The placement in force on all ranks."""
        return self.installer.placement

    # ---- formations ----
    def began(self, formation: int, placement: Placement, addresses: Mapping[int, Address]) -> None:
        """Begin a formation with this placement and these ranks; drop a pending installation."""
        self.ended()
        self.installer.began(formation, placement, addresses)

    def ended(self) -> None:
        """End the formation: its ranks dropped staged weights, and no step in flight will finish."""
        self.installer.ended()
        self.counts.ended()

    # ---- steps ----
    def planned(self, step_id: int, plans: tuple[StepPlan, ...]) -> tuple[StepPlan, ...]:
        """Return the plans to send: marked if the step is counted, with a flip if one is ready."""
        flips = self.installer.flips(step_id)
        is_counted = self.counts.planned(
            step_id, self.installer.issued, is_traced=plans[0].is_traced
        )
        if not is_counted and not flips:
            return plans
        return tuple(
            msgspec.structs.replace(plan, is_counted=is_counted, flips=flips) for plan in plans
        )

    def done(self, step_id: int, parts: Mapping[int, StepDone]) -> bool:
        """Process a step that all ranks did. Return whether a flip in it changed `placement`."""
        self._planner.done()
        self.counts.done(step_id, parts)
        return self.installer.done(step_id, parts)

    # ---- planning ----
    def may_plan(self, now_s: float) -> bool:
        """Return whether `plan` would examine a layer now."""
        return self._is_planning and self.installer.may_begin(now_s) and self._planner.is_due

    def plan(self, now_s: float, growing_s: float) -> dict[int, StagePlan]:
        """Examine one layer. If another split or placement of it pays, begin to install that and
        return rank -> StagePlan to send.

        `growing_s`: part of one MoE layer's expert time in a step that grows with tokens, seconds.
        """
        if not self.may_plan(now_s):
            return {}
        change = self._planner.look(self.placement, self.installer.fractions_LRS, growing_s)
        return {} if change is None else self.installer.begin(now_s, change)

    # ---- staging ----
    def staged(self, now_s: float, rank: int, staged: Staged) -> bool:
        """Process a rank's answer to a StagePlan. Returns False if no installation waits for it."""
        return self.installer.staged(now_s, rank, staged)

    def tick(self, now_s: float) -> None:
        """Check the deadline of staging."""
        self.installer.tick(now_s)

    def forgive(self, gap_s: float) -> None:
        """Extend the deadline of staging by `gap_s` seconds during which the leader did not run."""
        self.installer.forgive(gap_s)

    # ---- reports ----
    def figures(self) -> ExpertFigures:
        """Return the balancer's part of the unit's report."""
        balance, moves = self.counts.window.balance(), self.moves
        return ExpertFigures(balance, moves.num_replicas_moved, moves.num_layers_flipped)

    def described(self) -> UnitExperts:
        """Return placement, recent loads and last moves, for people."""
        installer, loads_LE = self.installer, self.counts.window.summed()
        loads_LR = rank_loads(installer.placement, loads_LE, installer.fractions_LRS)
        return describe(installer.placement, loads_LE, loads_LR, self.moves)

    def traced(self, trace: Trace) -> Trace:
        """Return the trace with the balancedness of its steps. A step's value covers all tokens
        since the counted step before it.
        """
        return self.counts.traced(trace)

    def check(self) -> list[str]:
        """Return problems; empty when installation, steps in flight and placement in force agree."""
        if self._checked is None or self._checked[0] is not self.placement:
            # Checked only here, because it would delay steps: 58 layers on 144 ranks take tens of ms.
            self._checked = self.placement, self.placement.check()
        problems = [f"experts: {problem}" for problem in self._checked[1]]
        return [*problems, *self.installer.check()]
