"""Where a unit's experts lie while it serves: measured, planned layer by layer, installed one layer
at a time.

    counted steps --> window of loads --> a layer pays? --> RankStage to ranks that need weights -->
    flip in a step

`counts` measures, `planner` chooses a layer and what to try for it, and `installer` owns the
placement in force. Nothing is planned unless every rank is there.

Sans-IO: knows no wire and no requests. Its owner (roles/ranks) says what happened and sends what it
returns.
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
"""The owner takes them out after every event; a stream of failures that nobody takes out has an
end.
"""


class ExpertBalancer:
    """`placement`: the unit's first. `is_planning` False: it only measures.

    `nodes`: by rank, the node it is on. `num_groups`: the gate's groups, if each is to stay on a
    node as far as balance allows; 0: nodes do not matter.
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
        """The placement that was last looked at for problems, and what was found."""

    @property
    def placement(self) -> Placement:
        """The placement in force on all ranks."""
        return self.installer.placement

    # ---- formations ----
    def began(self, formation: int, placement: Placement, addresses: Mapping[int, Address]) -> None:
        """A formation runs, with this placement and these ranks. What was under way in the one
        before is void.
        """
        self.ended()
        self.installer.began(formation, placement, addresses)

    def ended(self) -> None:
        """The formation is over: ranks have dropped what they had staged, and no step in flight
        will be done.
        """
        self.installer.ended()
        self.counts.ended()

    # ---- steps ----
    def planned(self, step_id: int, plans: tuple[StepPlan, ...]) -> tuple[StepPlan, ...]:
        """The plans as they are sent: counted every so many steps, with a flip if one is ready."""
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
        """All ranks did a step. Whether a flip went with it: `placement` is another one from now
        on.
        """
        self._planner.done()
        self.counts.done(step_id, parts)
        return self.installer.done(step_id, parts)

    # ---- planning ----
    def may_plan(self, now_s: float) -> bool:
        """Whether `plan` would look at a layer."""
        return self._is_planning and self.installer.may_begin(now_s) and self._planner.is_due

    def plan(self, now_s: float, growing_s: float) -> dict[int, StagePlan]:
        """Look at one layer; if another split or placement of it pays, begin to install that: what
        to send to whom.

        `growing_s`: seconds of the experts of one MoE layer in a step, as far as they grow with
        tokens.
        """
        if not self.may_plan(now_s):
            return {}
        change = self._planner.look(self.placement, self.installer.fractions_LRS, growing_s)
        return {} if change is None else self.installer.begin(now_s, change)

    # ---- staging ----
    def staged(self, now_s: float, rank: int, staged: Staged) -> bool:
        """A rank of this formation answers. False: to something that is not asked any more."""
        return self.installer.staged(now_s, rank, staged)

    def tick(self, now_s: float) -> None:
        """Look at the deadline of staging."""
        self.installer.tick(now_s)

    def forgive(self, gap_s: float) -> None:
        """The leader itself stood still for so long."""
        self.installer.forgive(gap_s)

    # ---- what is seen of it ----
    def figures(self) -> ExpertFigures:
        """Return the balancer's part of the unit's report."""
        balance, moves = self.counts.window.balance(), self.moves
        return ExpertFigures(balance, moves.num_replicas_moved, moves.num_layers_flipped)

    def described(self) -> UnitExperts:
        """For people: where everything lies, what it bore lately, and what moved last."""
        installer, loads_LE = self.installer, self.counts.window.summed()
        loads_LR = rank_loads(installer.placement, loads_LE, installer.fractions_LRS)
        return describe(installer.placement, loads_LE, loads_LR, self.moves)

    def traced(self, trace: Trace) -> Trace:
        """The trace with the balancedness of its steps; each counts from the counted step before
        it.
        """
        return self.counts.traced(trace)

    def check(self) -> list[str]:
        """Problems; empty when what is installed, in flight and in force agrees."""
        if self._checked is None or self._checked[0] is not self.placement:
            # Only when asked: of 58 layers on 144 ranks it takes tens of milliseconds, for which
            # steps would wait.
            self._checked = self.placement, self.placement.check()
        problems = [f"experts: {problem}" for problem in self._checked[1]]
        return [*problems, *self.installer.check()]
