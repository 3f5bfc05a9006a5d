"""Operator's view of a deployment: values that a live server and a simulated one report alike.

    GET /status          Overview, made by the gateway with the front
    fleet.json           FleetSeen, written by the supervisor into its run folder

As JSON, every field is written by its name, except for UnitReport within the snapshot, which is an
array as in messages.
"""

from __future__ import annotations

import msgspec

from hadal.core.messages.snapshot import FrontSnapshot


class Buckets(msgspec.Struct, frozen=True):
    """Histogram since the server's start: `counts[i]` values were at most `bounds[i]`. `counts` has
    one more entry, the number of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]


class LayerMove(msgspec.Struct, frozen=True):
    """New placement or token split of a layer's experts. Balance is the mean over the maximum of
    the ranks' load, computed for both placements from recently counted tokens.
    """

    number: int
    """Number of the move among all moves of this unit, from 0."""
    step_id: int
    layer: int
    """Index among the MoE layers, from 0."""
    num_moved: int
    """Replicas on ranks that lacked the expert before; 0: only the split of tokens changed."""
    before: tuple[tuple[int, ...], ...]
    """Expert in each slot of each rank, -1: none."""
    after: tuple[tuple[int, ...], ...]
    balance_before: float
    balance_after: float


EXPERTS_MAX = 4
"""Maximum number of units for which expert loads are returned at once."""


class UnitExperts(msgspec.Struct, frozen=True):
    """Placement of a unit's experts and their load."""

    rank_loads: tuple[tuple[float, ...], ...]
    """Recently counted tokens, by MoE layer and rank; 1 is the layer's mean."""
    expert_loads: tuple[tuple[float, ...], ...]
    """Recently counted tokens, by MoE layer and expert; 1 is the layer's mean."""
    num_replicas: tuple[tuple[int, ...], ...]
    """Copies of each expert, by MoE layer and expert."""
    moves: tuple[LayerMove, ...] = ()
    """Recent moves, the latest last."""


class Overview(msgspec.Struct, frozen=True):
    """State of the deployment at one instant."""

    unix_s: float
    model: str
    status: str
    """Status as reported by /health."""
    missing: tuple[str, ...]
    units_wanted: dict[str, int]
    ranks_wanted: dict[str, int]
    """Role -> ranks of a unit."""
    snapshot: FrontSnapshot
    latency: dict[str, Buckets] = {}
    """"first_token" or "per_token" -> histogram of seconds."""
    experts: dict[str, UnitExperts] = {}
    """Requested unit -> its experts."""
    ranks_per_node: dict[str, int] = {}
    """Role -> ranks per node, from the deployment."""
    cores: dict[str, tuple[int, ...]] = {}
    """Process -> logical cores for its computing threads, one each, unless other programs need
    them. Processes without such threads are left out.
    """


class RoleSeen(msgspec.Struct, frozen=True):
    """A role's units, and the demand for them in tokens per second."""

    num_wanted: int
    states: dict[str, int]
    """State -> number of units in it."""
    times_s: tuple[float, ...]
    rates: tuple[float, ...]
    ahead_s: tuple[float, ...]
    """Times of `forecast`, in seconds from now."""
    forecast: tuple[float, ...]
    unit_rate: float
    """Rate that one unit can serve; 0: not known yet."""


class FleetChange(msgspec.Struct, frozen=True):
    """Decision that changed the number of wanted units."""

    at_s: float
    prefill: int
    decode: int
    why: str


class FleetSeen(msgspec.Struct, frozen=True):
    """State of the fleet at one instant. Times are on the clock of the demand: unix seconds in a
    live server.
    """

    now_s: float
    num_nodes: int
    num_nodes_max: int
    why: str
    """Reason of the last decision, whether or not it changed anything."""
    roles: dict[str, RoleSeen]
    changes: tuple[FleetChange, ...] = ()
