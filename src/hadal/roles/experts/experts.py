"""Where a unit's experts lie while it serves: measured, planned layer by layer, installed one layer
at a time.

    counted steps --> window of loads --> a layer pays? --> RankStage to ranks that need weights -->
    flip in a step

First a new split of a layer's tokens is tried, which moves nothing, then a placement some moves
away. What is installed counts as the unit's placement when all ranks did the step with its flip;
until then, and whenever a rank fails to stage or the formation ends, the placement before it stays
in force. Nothing is planned unless every rank is there.

Sans-IO: knows no wire and no requests. Its owner (roles/ranks) says what happened and sends what it
returns.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from hadal.core.messages.questions import Trace
from hadal.core.messages.units import UnitReport
from hadal.core.overview import LayerMove, UnitExperts
from hadal.core.placement import EMPTY, Placement, parts_of
from hadal.core.plans import FLIP, LayerFlip, Staged, StagePlan, StepDone, StepPlan
from hadal.policy.experts.balance import Cluster, balance, rank_loads
from hadal.policy.experts.splits import split_loads
from hadal.roles.experts.gain import ExpertTerms, fractions, heaviest, pays, sure_gain
from hadal.roles.experts.install import Address, Installation, InstallState
from hadal.roles.experts.window import CountsWindow, Floats
from hadal.roles.ranks.membership import Routine

_SMOOTHING = 0.2
"""Weight of a new measurement of a pause or a replica: the last five count for two thirds."""
_OUTLIER = 3.0
"""What took so many times what is known counts as that at most. They are measured only when layers
move: one hiccup must not make moving look too dear ever to be measured again.
"""
_NUM_TRACED = 2048
"""Traced steps whose balance is remembered until their trace passes: as many as may be asked for at
once.
"""
_SETTLE_INTERVALS = 2
"""A layer that flipped is left alone so long: one interval to judge by and one to plan by are new
then.
"""
_FEW = 0.25
"""Share of the budget of moves that is tried when the whole would help and does not pay."""
_NUM_MOVES = 8
"""Layers that moved last, as they are shown."""
_NUM_NOTES = 256
"""The owner takes them out after every event; a stream of failures that nobody takes out has an
end.
"""


@dataclass(frozen=True, slots=True)
class _Counted:
    placement: Placement
    """The placement in force in that step."""
    is_traced: bool
    is_whole: bool
    """An interval ends with it. Others are counted because they are traced: looking must not change
    what is decided.
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
        self.placement = placement
        """The placement in force on all ranks."""
        self.terms = terms if terms is not None else ExpertTerms()
        self.num_replicas_moved = 0
        self.num_layers_flipped = 0
        self.num_abandoned = 0
        """Installations that came to nothing."""
        self.notes: deque[str] = deque(maxlen=_NUM_NOTES)
        self._moves: deque[tuple[Installation, Placement, Placement]] = deque(maxlen=_NUM_MOVES)
        """What was installed, and its layer's placement before and after."""
        self.window = CountsWindow(
            placement.num_layers,
            placement.num_experts,
            self.terms.num_intervals,
            self.terms.half_life,
        )
        self.installing: Installation | None = None
        self._nodes = nodes
        self._num_groups = num_groups
        self._is_planning = is_planning
        self._formation = 0
        self._addresses: dict[int, Address] = {}
        """Addresses of the ranks of a formation that runs; empty otherwise."""
        self._issued = placement
        """The placement with the flip that is in flight."""
        self._fractions_LRS = fractions(placement)
        self._checked: tuple[Placement, list[str]] | None = None
        """The placement that was last looked at for problems, and what was found."""
        self._counted: dict[int, _Counted] = {}
        """Steps in flight whose counts are to come."""
        self._traced: OrderedDict[int, dict[str, float]] = OrderedDict()
        self._is_wrong_noted = False
        self._num_uncounted = 0
        """Steps planned since an interval ended."""
        self._step_id = -1
        """Step of the last plan."""
        self._num_unplanned = 0
        """Steps since the last planning call."""
        self._rested_until = np.zeros(placement.num_layers, np.int64)
        """The interval until which each layer rests."""
        self._rested_lack = np.ones(placement.num_layers)
        """What each layer lacked to perfect balance when it was put to rest. If it lacks more, the
        rest is over.
        """
        self._next_try: tuple[int, float] | None = None
        """A layer for which something did not pay, and the share of the budget of moves to try
        next.
        """
        self._stage_id = 0
        self._num_failures = 0
        self._retry_s = -math.inf
        self._replica_s = self.terms.replica_s
        self._pause_s = self.terms.pause_s

    # ---- formations ----
    def began(self, formation: int, placement: Placement, addresses: Mapping[int, Address]) -> None:
        """A formation runs, with this placement and these ranks. What was under way in the one
        before is void.
        """
        self.ended()
        self._formation = formation
        self._adopt(placement)
        self._addresses = dict(addresses)

    def ended(self) -> None:
        """The formation is over: ranks have dropped what they had staged, and no step in flight
        will be done.
        """
        if self.installing is not None:
            self._drop("the formation is over")
        self._addresses = {}
        self._counted.clear()
        self._num_uncounted = 0
        self.window.drop_part()
        self._is_wrong_noted = False

    # ---- steps ----
    def planned(self, step_id: int, plans: tuple[StepPlan, ...]) -> tuple[StepPlan, ...]:
        """The plans as they are sent: counted every so many steps, with a flip if one is ready."""
        self._step_id = step_id
        flips: tuple[LayerFlip, ...] = ()
        install = self.installing
        if install is not None and install.state is InstallState.READY:
            flips = (install.flip(step_id),)
            self._issued = self.placement.with_layer(
                install.layer, install.slot_to_expert_RS, install.weights_RS
            )
        self._num_uncounted += 1
        is_traced = plans[0].is_traced
        is_whole = self._num_uncounted >= self.terms.count_every_steps
        is_counted = is_traced or is_whole
        if is_counted:
            self._counted[step_id] = _Counted(self._issued, is_traced, is_whole)
        if is_whole:
            self._num_uncounted = 0
        if not is_counted and not flips:
            return plans
        return tuple(
            msgspec.structs.replace(plan, is_counted=is_counted, flips=flips) for plan in plans
        )

    def done(self, step_id: int, parts: Mapping[int, StepDone]) -> bool:
        """All ranks did a step. Whether a flip went with it: `placement` is another one from now
        on.
        """
        self._num_unplanned += 1
        counted = self._counted.pop(step_id, None)
        if counted is not None:
            self._count(step_id, counted, parts)
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
        self._pause_s = _toward(self._pause_s, max(pauses_s, default=self._pause_s))
        self.installing = None
        before = self.placement.of_layer(install.layer)
        self._adopt(self._issued)
        self._moves.append((install, before, self.placement.of_layer(install.layer)))
        self.num_layers_flipped += 1
        self.num_replicas_moved += install.num_moved
        self.notes.append(
            Routine(
                f"MoE layer {install.layer} flipped in step {step_id}, begun after step"
                f" {install.begun_step_id}; replicas moved: {install.num_moved}"
            )
        )
        self._num_failures = 0
        self._rest(install.layer, _SETTLE_INTERVALS)
        return True

    def _adopt(self, placement: Placement) -> None:
        self.placement = self._issued = placement
        self._fractions_LRS = fractions(placement)

    def _count(self, step_id: int, counted: _Counted, parts: Mapping[int, StepDone]) -> None:
        shape = counted.placement.slot_to_expert_LRS.shape
        counts_LRS = np.zeros(shape, np.int64)
        for rank, part in parts.items():
            if len(part.expert_slot_counts) != 8 * shape[0] * shape[2]:
                if not self._is_wrong_noted:
                    self.notes.append(
                        f"rank {rank} counts {len(part.expert_slot_counts)} bytes where {shape} slots are"
                    )
                self._is_wrong_noted = True
                return
            counts_LRS[:, rank] = np.frombuffer(part.expert_slot_counts, np.int64).reshape(
                shape[0], shape[2]
            )
        found = self.window.add(
            counted.placement, counts_LRS, parts.keys(), is_whole=counted.is_whole
        )
        if counted.is_traced and found:
            self._traced[step_id] = found
            while len(self._traced) > _NUM_TRACED:
                self._traced.popitem(last=False)

    # ---- planning ----
    def may_plan(self, now_s: float) -> bool:
        """Whether `plan` would look at a layer."""
        return (
            self._is_planning
            and self.installing is None
            and len(self._addresses) == self.placement.num_ranks > 1
            and self._num_unplanned >= self.terms.plan_every_steps
            and now_s >= self._retry_s
            and len(self.window) >= self.terms.num_intervals_min
        )

    def plan(self, now_s: float, growing_s: float) -> dict[int, StagePlan]:
        """Look at one layer; if another split or placement of it pays, begin to install that: what
        to send to whom.

        `growing_s`: seconds of the experts of one MoE layer in a step, as far as they grow with
        tokens.
        """
        if not self.may_plan(now_s):
            return {}
        self._num_unplanned = 0
        loads_LR = self._rank_loads()
        layer_s = _layer_seconds(loads_LR, growing_s)
        layer, share = self._next_try or (self._most_promising(loads_LR, layer_s), 0.0)
        self._next_try = None
        if layer is None:
            return {}
        to_plan, to_judge = self.window.halves(layer)
        slot_to_expert_RS, weights_RS = (
            self._moved(layer, to_plan, share) if share else self._split(layer, to_plan)
        )
        now = self.placement.slot_to_expert_LRS[layer]
        new = Placement(
            self.placement.num_experts,
            slot_to_expert_RS[None],
            None if weights_RS is None else weights_RS[None],
        )
        before_and_after = zip(now.tolist(), slot_to_expert_RS.tolist(), strict=True)
        num_new = [len(set(after) - set(before) - {EMPTY}) for before, after in before_and_after]
        gain = sure_gain(
            heaviest(to_judge, now, self._fractions_LRS[layer]),
            heaviest(to_judge, slot_to_expert_RS, fractions(new)[0]),
            self.terms,
        )
        if not pays(
            gain, float(layer_s[layer]), max(num_new), self._replica_s, self._pause_s, self.terms
        ):
            if not share:
                self._next_try = (layer, 1.0)
            elif share > _FEW and gain > 0.0:
                self._next_try = (layer, _FEW)  # Too dear: the first moves save most.
            else:
                lack = 1.0 - float(loads_LR[layer].mean()) / max(
                    float(loads_LR[layer].max()), 1e-12
                )
                # What little there was to judge by has doubled by then.
                num_intervals = min(self.terms.rest_intervals, len(self.window))
                self._rest(layer, num_intervals, lack + self.terms.worse_min)
            return {}
        self._stage_id += 1
        self.installing = Installation(
            layer,
            self._stage_id,
            self._formation,
            slot_to_expert_RS,
            weights_RS,
            sum(num_new),
            now_s + self.terms.stage_timeout_s,
            self._step_id,
        )
        self.notes.append(
            Routine(
                f"MoE layer {layer}: staging begins after step {self._step_id}; replicas to move:"
                f" {sum(num_new)}"
            )
        )
        return self.installing.stage_plans(self.placement, self._addresses)

    def _rank_loads(self) -> Floats:
        """Faded loads that the ranks would have had under the placement in force [L, R]."""
        return rank_loads(self.placement, self.window.summed(), self._fractions_LRS)

    def _most_promising(self, loads_LR: Floats, layer_s: Floats) -> int | None:
        """The layer in which perfect balance would save most, of those worth a look."""
        heaviest_L = loads_LR.max(axis=1)
        lack_L = np.where(
            heaviest_L > 0,
            1.0 - loads_LR.mean(axis=1) / np.where(heaviest_L > 0, heaviest_L, 1.0),
            0.0,
        )
        saved_L = lack_L * layer_s * self.terms.horizon_steps
        is_due = (self._rested_until <= self.window.number) | (lack_L > self._rested_lack)
        is_due &= lack_L >= self.terms.gain_min
        is_due &= saved_L > self.terms.payback * self._pause_s
        tokens_min = self.terms.tokens_per_expert_min * self.placement.num_experts
        for layer in np.argsort(-saved_L, kind="stable").tolist():
            if is_due[layer] and self.window.num_tokens(layer) >= tokens_min:
                return int(layer)
        return None

    def _rest(self, layer: int, num_intervals: int, lack: float = 1.0) -> None:
        self._rested_until[layer] = self.window.number + num_intervals
        self._rested_lack[layer] = lack

    def _split(
        self, layer: int, loads_TE: Floats
    ) -> tuple[NDArray[np.int16], NDArray[np.uint8] | None]:
        """The layer's expert slots as they are, and the parts that level its ranks."""
        slot_to_expert_RS = self.placement.slot_to_expert_LRS[layer]
        split = split_loads(slot_to_expert_RS[None].astype(np.int64), loads_TE.sum(axis=0)[None])
        return slot_to_expert_RS, _weights(slot_to_expert_RS, split[0])

    def _moved(
        self, layer: int, loads_TE: Floats, share: float
    ) -> tuple[NDArray[np.int16], NDArray[np.uint8] | None]:
        """A better placement of the layer within a share of the budget of moves, and its parts."""
        slots = self.placement.slot_to_expert_LRS[layer : layer + 1]
        num_moves = max(
            2, int(share * self.terms.moves_share * int((slots != EMPTY).sum()))
        )  # Two are a trade.
        plan = balance(
            loads_TE[:, None],
            Cluster((slots.shape[2],) * slots.shape[1], self._nodes),
            target=self.terms.target,
            mode="hybrid" if self._num_groups else "global",
            num_groups=max(self._num_groups, 1),
            current=Placement(self.placement.num_experts, slots),
            max_moves=num_moves,
            weighted=True,
        )
        slot_to_expert_RS = plan.placement.slot_to_expert_LRS[0]
        assert plan.split_LRS is not None
        return slot_to_expert_RS, _weights(slot_to_expert_RS, plan.split_LRS[0])

    # ---- staging ----
    def staged(self, now_s: float, rank: int, staged: Staged) -> bool:
        """A rank of this formation answers. False: to something that is not asked any more."""
        install = self.installing
        if install is None or not install.expects(rank, staged):
            return False
        if staged.error is not None:
            self._fail(now_s, f"rank {rank}: {staged.error}")
            return True
        num_got = staged.num_received + staged.num_read
        if num_got:
            self._replica_s = _toward(self._replica_s, staged.elapsed_s / num_got)
        install.staged(rank)
        return True

    def tick(self, now_s: float) -> None:
        """Look at the deadline of staging."""
        install = self.installing
        if (
            install is not None
            and install.state is InstallState.STAGING
            and now_s >= install.deadline_s
        ):
            late = ", ".join(map(str, sorted(install.waiting)))
            self._fail(now_s, f"rank {late} did not stage within {self.terms.stage_timeout_s:g} s")

    def forgive(self, gap_s: float) -> None:
        """The leader itself stood still for so long."""
        if self.installing is not None:
            self.installing.deadline_s += gap_s

    def _fail(self, now_s: float, reason: str) -> None:
        """Staging came to nothing: the old placement stays, and the next attempt waits, longer each
        time.
        """
        backoff_s = min(self.terms.backoff_s * 2.0**self._num_failures, self.terms.backoff_max_s)
        self._num_failures = min(self._num_failures + 1, 32)
        self._retry_s = now_s + backoff_s
        self._drop(f"{reason}; nothing is staged for {backoff_s:g} s")

    def _drop(self, reason: str) -> None:
        assert self.installing is not None
        self.notes.append(f"MoE layer {self.installing.layer} keeps its placement: {reason}")
        self._rest(self.installing.layer, _SETTLE_INTERVALS)
        self.installing, self._issued = None, self.placement
        self.num_abandoned += 1

    # ---- what is seen of it ----
    def seen(self, load: UnitReport) -> UnitReport:
        """The unit's load with what is known here."""
        return msgspec.structs.replace(
            load,
            balance={**load.balance, **self.window.balance()},
            num_replicas_moved=self.num_replicas_moved,
            num_layers_flipped=self.num_layers_flipped,
        )

    def described(self) -> UnitExperts:
        """For people: where everything lies, what it bore lately, and what moved last."""
        loads_LE, loads_LR = self.window.summed(), self._rank_loads()
        first = self.num_layers_flipped - len(self._moves)
        return UnitExperts(
            _relative(loads_LR),
            _relative(loads_LE),
            tuple(
                tuple(
                    np.bincount(held[held != EMPTY], minlength=self.placement.num_experts).tolist()
                )
                for held in self.placement.slot_to_expert_LRS
            ),
            tuple(
                LayerMove(
                    first + index,
                    install.step_id,
                    install.layer,
                    install.num_moved,
                    _rows(before.slot_to_expert_LRS[0]),
                    _rows(after.slot_to_expert_LRS[0]),
                    _evenness(before, loads_LE[install.layer]),
                    _evenness(after, loads_LE[install.layer]),
                )
                for index, (install, before, after) in enumerate(self._moves)
            ),
        )

    def traced(self, trace: Trace) -> Trace:
        """The trace with the balancedness of its steps; each counts from the counted step before
        it.
        """
        steps = tuple(
            msgspec.structs.replace(
                step, balance={**step.balance, **self._traced.pop(step.step_id, {})}
            )
            for step in trace.steps
        )
        return msgspec.structs.replace(trace, steps=steps)

    def check(self) -> list[str]:
        """Problems; empty when what is installed, in flight and in force agrees."""
        if self._checked is None or self._checked[0] is not self.placement:
            # Only when asked: of 58 layers on 144 ranks it takes tens of milliseconds, for which
            # steps would wait.
            self._checked = self.placement, self.placement.check()
        problems = [f"experts: {problem}" for problem in self._checked[1]]
        install = self.installing
        is_flipping = install is not None and install.state is InstallState.FLIPPING
        if not is_flipping and self._issued is not self.placement:
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


def _rows(slot_to_expert_RS: NDArray[np.int16]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in slot_to_expert_RS.tolist())


def _relative(loads: Floats) -> tuple[tuple[float, ...], ...]:
    """Each layer's loads by their mean; zeros where nothing was counted."""
    means = loads.mean(axis=1, keepdims=True)
    shares = loads / np.where(means > 0, means, 1.0)
    return tuple(tuple(row) for row in np.round(shares, 3).tolist())


def _evenness(layer: Placement, loads_E: Floats) -> float:
    """Mean over maximum of the ranks' load in a layer; 1 where there is none."""
    loads_R = rank_loads(layer, loads_E[None], fractions(layer))[0]
    most = float(loads_R.max(initial=0.0))
    return round(float(loads_R.mean()) / most, 4) if most > 0 else 1.0


def _toward(known_s: float, measured_s: float) -> float:
    return known_s + _SMOOTHING * (min(measured_s, _OUTLIER * known_s) - known_s)


def _layer_seconds(loads_LR: Floats, growing_s: float) -> Floats:
    """Each layer's part of all layers' growing seconds is as its heaviest rank's of all layers'
    heaviest.
    """
    heaviest_L = loads_LR.max(axis=1)
    mean = float(heaviest_L.mean())
    return np.asarray(growing_s * heaviest_L / mean if mean > 0 else np.zeros(len(heaviest_L)))


def _weights(slot_to_expert_RS: NDArray[np.int16], split_RS: Floats) -> NDArray[np.uint8] | None:
    """A split in parts; None where all replicas take equal ones."""
    parts = parts_of(slot_to_expert_RS, split_RS)
    return None if (parts[slot_to_expert_RS != EMPTY] == 1).all() else parts
