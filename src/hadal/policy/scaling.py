"""Decide how many prefill and decode units the fleet wants: enough for the demand until another
unit could be started.

    need      = (forecast + backlog / catch_up) / (a unit's throughput x its planned use)     in units, by role
    soon      = its maximum over the next start-up and period: grow to that, at once
    kept      = its maximum over the last `hold_s` and the next, plus a margin: shrink to that, when it is less

Between the two, the fleet stays as it is, so it releases no unit that by the forecast it would need
again within `hold_s`. Roles grow in bundles if there are any (DeepSeek's day: steps of 30 nodes = 1
decode and 3 prefill units), else separately. A pure function, independent of unit names, clock and
machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from hadal.core.arrays import Floats
from hadal.core.config import DECODE, PREFILL
from hadal.policy.capacity import units_needed
from hadal.policy.demand import FLAT, DayShape, forecast

GRID_S = 300.0
"""Seconds between points of the forecast: a day's shape has no finer detail."""
_EPSILON = 1e-9
"""Tolerance, so that a need just above a whole number by rounding adds no unit."""


@dataclass(frozen=True, slots=True)
class Units:
    """Whole units of each role."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill} prefill + {self.decode} decode"


@dataclass(frozen=True, slots=True)
class RoleRules:
    """Fixed rules for the units of one role."""

    unit_nodes: int
    use: float
    """Highest mean utilization of a unit: the rest absorbs bursts and failed units."""
    num_min: int
    num_max: int
    num_bundle: int = 0
    """Units of this role in a bundle; 0 for both roles: there are no bundles."""
    num_extra: int = 0
    """Units besides the bundles, always present. Without any, the published peak of 278 nodes (9
    decode and 29 prefill units) would be 270.
    """


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """Fixed rules for the fleet. Raises ValueError for rules that no fleet can satisfy."""

    prefill: RoleRules
    decode: RoleRules
    num_nodes_max: int
    """Nodes available to the fleet."""
    start_s: float
    """Time from a decision until the unit works."""
    period_s: float = 60.0
    """Time between decisions."""
    hold_s: float = 1800.0
    """Scale down only units that were not needed for this long, and will not be for as long."""
    margin: float = 0.02
    """Hysteresis: scale down only if the need is lower by this fraction."""
    catch_up_s: float = 600.0
    """Time in which a backlog is to be worked off."""

    def __post_init__(self) -> None:
        for name, role in ((PREFILL, self.prefill), (DECODE, self.decode)):
            if not 0 < role.num_min <= role.num_max:
                raise ValueError(
                    f"{name}: num_min is {role.num_min}; it must be 1 to num_max, {role.num_max}."
                )
            if not 0.0 < role.use <= 1.0 or role.unit_nodes < 1:
                raise ValueError(
                    f"{name}: use is {role.use:g} and must be above 0, at most 1; unit_nodes is"
                    f" {role.unit_nodes} and must be 1 or more."
                )
            if min(role.num_bundle, role.num_extra) < 0:
                raise ValueError(
                    f"{name}: num_bundle is {role.num_bundle}, and num_extra is {role.num_extra};"
                    " neither may be below 0."
                )
        if bool(self.prefill.num_bundle) != bool(self.decode.num_bundle):
            raise ValueError("num_bundle must be above 0 for both roles, or 0 for both.")
        if (
            min(self.start_s, self.hold_s, self.margin) < 0
            or min(self.period_s, self.catch_up_s) <= 0
        ):
            raise ValueError(
                "start_s, hold_s and margin cannot be negative; period_s and catch_up_s must be"
                " positive."
            )
        if self.num_nodes(self.floor) > self.num_nodes_max:
            raise ValueError(
                f"the minimum of {self.floor} takes {self.num_nodes(self.floor)} nodes, and there are"
                f" {self.num_nodes_max}. Lower it, or give the fleet more nodes."
            )

    @property
    def floor(self) -> Units:
        return Units(self.prefill.num_min, self.decode.num_min)

    @property
    def has_bundles(self) -> bool:
        return self.prefill.num_bundle > 0

    def num_nodes(self, units: Units) -> int:
        """Return the nodes that `units` take."""
        return units.prefill * self.prefill.unit_nodes + units.decode * self.decode.unit_nodes


@dataclass(frozen=True, slots=True)
class RoleView:
    """Demand for one role, as measured."""

    times_s: tuple[float, ...]
    """Times of the samples by the clock of the day, ascending."""
    rates: tuple[float, ...]
    """Tokens per second at `times_s`."""
    unit_tokens_per_s: float
    """Throughput of one unit within the latency SLO, measured or predicted."""
    backlog_tokens: float = 0.0
    shape: DayShape = FLAT
    need_held: float = 0.0
    """Highest need in the last `hold_s`, in units."""


@dataclass(frozen=True, slots=True)
class ScalingView:
    """State of the fleet at one instant."""

    now_s: float
    """Time of the decision by the clock of the day."""
    prefill: RoleView
    decode: RoleView
    levels: Units
    """Units of the last decision before floor, limit and nodes bounded them."""


class ScalingStep(StrEnum):
    GROW = "grow"
    HOLD = "hold"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True)
class Why:
    """Reason for a decision, to print. Needs are in units of `role`, which has the larger need."""

    step: ScalingStep
    role: str
    need_now: float
    need_soon: float
    need_kept: float
    bound: str = ""
    """"floor" or "limit" of that role, or "nodes", if one of them decided; else empty."""

    def __str__(self) -> str:
        bound = f", bounded by {self.bound}" if self.bound else ""
        return (
            f"{self.step}: {self.role} needs {self.need_now:.2f} units now, {self.need_soon:.2f}"
            f" soon, keeps {self.need_kept:.2f}{bound}"
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """Number of units wanted from now on."""

    units: Units
    levels: Units
    need_prefill: float
    """Need now, in units: the caller remembers it for `hold_s`."""
    need_decode: float
    why: Why


@dataclass(frozen=True, slots=True)
class _Need:
    """Need of one role, in its units or in bundles."""

    now: float
    soon: float
    kept: float

    def of(self, num_extra: int, num_bundle: int) -> _Need:
        """Return the need in bundles, beside `num_extra` units."""
        return _Need(
            *((need - num_extra) / num_bundle for need in (self.now, self.soon, self.kept))
        )

    def or_more(self, other: _Need) -> _Need:
        """Return the larger need of both at each time."""
        return _Need(
            max(self.now, other.now), max(self.soon, other.soon), max(self.kept, other.kept)
        )

    def level(self, before: int) -> int:
        """Return whole units, or bundles: grown to `soon`, shrunk to `kept`, or unchanged."""
        return max(_whole(self.soon), min(before, _whole(self.kept)))


def decide(view: ScalingView, rules: ScalingRules) -> Decision:
    """Return the wanted size of the fleet. Raises ValueError for a unit without throughput."""
    ahead_s = _ahead_s(rules)
    prefill = _need(view.prefill, rules.prefill, rules, view.now_s, ahead_s)
    decode = _need(view.decode, rules.decode, rules, view.now_s, ahead_s)
    if rules.has_bundles:
        levels = _bundled(prefill, decode, view.levels, rules)
    else:
        levels = Units(
            _alone(prefill, view.levels.prefill, rules.prefill),
            _alone(decode, view.levels.decode, rules.decode),
        )
    limited = Units(_limited(levels.prefill, rules.prefill), _limited(levels.decode, rules.decode))
    units = _on_nodes(limited, prefill, decode, rules)
    why = _why(view.levels, levels, prefill, decode, rules)
    bound = "nodes" if units != limited else _bound(levels, limited, why.role)
    return Decision(units, levels, prefill.now, decode.now, replace(why, bound=bound))


def _ahead_s(rules: ScalingRules) -> Floats:
    """Return the forecast's times, seconds from now, until a unit released now could be back."""
    horizon_s = rules.start_s + max(rules.period_s, rules.hold_s)
    grid = np.arange(0.0, horizon_s, GRID_S)
    return np.unique(np.append(grid, [rules.start_s + rules.period_s, horizon_s]))


def _need(
    role: RoleView, fixed: RoleRules, rules: ScalingRules, now_s: float, ahead_s: Floats
) -> _Need:
    rates = (
        forecast(role.times_s, role.rates, role.shape, now_s, ahead_s)
        + role.backlog_tokens / rules.catch_up_s
    )
    one = units_needed(1.0, role.unit_tokens_per_s, fixed.use)
    needs = rates * one
    soon = float(needs[ahead_s <= rules.start_s + rules.period_s].max())
    kept = max(float(needs.max()), role.need_held) * (1.0 + rules.margin)
    return _Need(float(needs[0]), soon, kept)


def _bundled(prefill: _Need, decode: _Need, before: Units, rules: ScalingRules) -> Units:
    """Return the units in as many bundles as the role with the larger need requires."""
    of_prefill = prefill.of(rules.prefill.num_extra, rules.prefill.num_bundle)
    of_decode = decode.of(rules.decode.num_extra, rules.decode.num_bundle)
    most = of_prefill.or_more(of_decode)
    num_before = max(0, (before.decode - rules.decode.num_extra) // rules.decode.num_bundle)
    num = most.level(num_before)
    return Units(
        rules.prefill.num_extra + num * rules.prefill.num_bundle,
        rules.decode.num_extra + num * rules.decode.num_bundle,
    )


def _alone(need: _Need, before: int, fixed: RoleRules) -> int:
    """Return the units of one role that grows by itself; its extra units do not serve the need."""
    return need.level(before - fixed.num_extra) + fixed.num_extra


def _limited(num: int, fixed: RoleRules) -> int:
    return min(max(num, fixed.num_min), fixed.num_max)


def _on_nodes(wanted: Units, prefill: _Need, decode: _Need, rules: ScalingRules) -> Units:
    """Return the units that the nodes have room for. If nodes are short, bundles are ignored: the
    role with the smaller share of its need gets as much as possible, then the other.
    """
    if rules.num_nodes(wanted) <= rules.num_nodes_max:
        return wanted

    def supply(units: Units) -> tuple[float, float]:
        parts = (
            units.prefill / max(prefill.soon, _EPSILON),
            units.decode / max(decode.soon, _EPSILON),
        )
        return min(*parts, 1.0), min(1.0, parts[0]) + min(1.0, parts[1])

    fitting = []
    for num_decode in range(rules.decode.num_min, wanted.decode + 1):
        num_left = rules.num_nodes_max - num_decode * rules.decode.unit_nodes
        num_prefill = min(wanted.prefill, num_left // rules.prefill.unit_nodes)
        if num_prefill >= rules.prefill.num_min:
            fitting.append(Units(num_prefill, num_decode))
    return max(fitting, key=supply)


def _bound(levels: Units, limited: Units, role: str) -> str:
    """Return the bound that changed the level of `role`, or ""."""
    level, num = (
        (levels.prefill, limited.prefill) if role == PREFILL else (levels.decode, limited.decode)
    )
    return "floor" if num > level else "limit" if num < level else ""


def _why(before: Units, after: Units, prefill: _Need, decode: _Need, rules: ScalingRules) -> Why:
    if rules.num_nodes(after) > rules.num_nodes(before):
        step = ScalingStep.GROW
    else:
        step = (
            ScalingStep.SHRINK
            if rules.num_nodes(after) < rules.num_nodes(before)
            else ScalingStep.HOLD
        )
    p_size, d_size = rules.prefill.num_bundle or 1, rules.decode.num_bundle or 1
    is_prefill = (prefill.soon - rules.prefill.num_extra) / p_size > (
        decode.soon - rules.decode.num_extra
    ) / d_size
    need = prefill if is_prefill else decode
    return Why(step, PREFILL if is_prefill else DECODE, need.now, need.soon, need.kept)


def _whole(need: float) -> int:
    return max(0, math.ceil(need - _EPSILON))
