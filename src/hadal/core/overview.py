"""What an operator is shown of a deployment: values that a live server and a simulated one say alike.

    GET /status          Overview, made by the gateway with the front
    fleet.json           FleetSeen, written by the supervisor into its run folder

As JSON, every field by its name, but for UnitReport within the snapshot, which is as messages have
it.
"""

from __future__ import annotations

import msgspec

from hadal.core.messages.snapshot import FrontSnapshot


class Buckets(msgspec.Struct, frozen=True):
    """A histogram since the server began: `counts[i]` values were at most `bounds[i]`; the last
    bound is infinite and left out.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]


class LayerMove(msgspec.Struct, frozen=True):
    """A layer's experts were placed or split anew. Balance is mean over maximum of the ranks' load:
    what each of both would make of the tokens counted lately.
    """

    number: int
    """Of all of this unit, from 0."""
    step_id: int
    layer: int
    """Of the MoE layers, from 0."""
    num_moved: int
    """Replicas whose weights travelled; 0: only tokens were split anew."""
    before: tuple[tuple[int, ...], ...]
    """Expert in each slot of each rank, -1: none."""
    after: tuple[tuple[int, ...], ...]
    balance_before: float
    balance_after: float


EXPERTS_MAX = 4
"""Units whose experts are told at once."""


class UnitExperts(msgspec.Struct, frozen=True):
    """Where a unit's experts lie and what they bear."""

    rank_loads: tuple[tuple[float, ...], ...]
    """Tokens counted lately, by MoE layer and rank; 1 is the layer's mean."""
    expert_loads: tuple[tuple[float, ...], ...]
    """The same by MoE layer and expert."""
    num_replicas: tuple[tuple[int, ...], ...]
    """Copies of each expert, by MoE layer and expert."""
    moves: tuple[LayerMove, ...] = ()
    """The last ones, the latest last."""


class Overview(msgspec.Struct, frozen=True):
    """The deployment at one instant."""

    unix_s: float
    model: str
    status: str
    """As /health has it."""
    missing: tuple[str, ...]
    units_wanted: dict[str, int]
    ranks_wanted: dict[str, int]
    """Ranks of a unit of each role."""
    snapshot: FrontSnapshot
    latency: dict[str, Buckets] = {}
    """"first_token" and "per_token", in seconds."""
    experts: dict[str, UnitExperts] = {}
    """Of the units that were asked for."""
    ranks_per_node: dict[str, int] = {}
    """By role, as the deployment has it."""
    cores: dict[str, tuple[int, ...]] = {}
    """Process -> logical cores that its computing threads take, one each, while nobody else wants
    them; without those that take none.
    """


class RoleSeen(msgspec.Struct, frozen=True):
    """A role's units, and the demand for them in tokens per second."""

    num_wanted: int
    states: dict[str, int]
    """Units in each state."""
    times_s: tuple[float, ...]
    rates: tuple[float, ...]
    ahead_s: tuple[float, ...]
    """Seconds from now."""
    forecast: tuple[float, ...]
    unit_rate: float
    """What a unit can be asked for; 0: not known yet."""


class FleetChange(msgspec.Struct, frozen=True):
    """A decision that changed how many units are wanted."""

    at_s: float
    prefill: int
    decode: int
    why: str


class FleetSeen(msgspec.Struct, frozen=True):
    """The fleet at one instant. Times are by the clock of the day: unix seconds where it is live."""

    now_s: float
    num_nodes: int
    num_nodes_max: int
    why: str
    """Of the last decision, whether it changed anything or not."""
    roles: dict[str, RoleSeen]
    changes: tuple[FleetChange, ...] = ()
