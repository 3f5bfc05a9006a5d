"""Content of /health: can requests be answered, and what is missing from the deployment?

    starting   requests could not be served yet        503
    ready      everything is available                 200
    degraded   something is missing                    200, or 503 if a role has no rank left
    draining   running requests may finish, none begins  503

No I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hadal.core.config import ROLES, Deployment, units_of
from hadal.core.messages.snapshot import FrontSnapshot
from hadal.runtime.topology import gateway_names, rank_name


def health_of(
    deployment: Deployment,
    snapshot: FrontSnapshot,
    gateways: Collection[str],
    *,
    has_begun: bool,
    is_draining: bool,
    wrong: Sequence[str] = (),
) -> tuple[int, dict[str, Any]]:
    """Return the reply's status and fields. `gateways`: present gateways; `has_begun`: requests
    could be served at least once; `wrong`: problems of a cluster's nodes.
    """
    missing = [name for name in gateway_names(deployment) if name not in gateways]
    missing += missing_of(deployment, snapshot)
    can_serve = snapshot.can_serve and not is_draining
    if is_draining:
        status = "draining"
    elif not has_begun:
        status = "starting"
    else:
        status = "degraded" if missing or wrong else "ready"
    return 200 if can_serve else 503, {
        "status": status,
        "units_up": {role: len(units) for role, units in snapshot.role_to_units.items()},
        "units_wanted": {role: units_of(deployment, role).units for role in ROLES},
        "ranks_up": {
            unit: num for units in snapshot.role_to_units.values() for unit, num in units.items()
        },
        "ranks_wanted": {
            unit: units_of(deployment, role).ranks
            for role, units in snapshot.role_to_units.items()
            for unit in units
        },
        "missing": missing,
        **({"nodes": list(wrong)} if wrong else {}),
    }


def missing_of(deployment: Deployment, snapshot: FrontSnapshot) -> Iterator[str]:
    """Yield names of units that are not up or have no leader ("decode-1"), and of missing ranks
    ("decode-0.2").

    If a role has fewer units than the deployment wants (for a fleet: than its minimum), the
    difference is missing. The missing units are named by the lowest unused numbers.
    """
    for role in ROLES:
        up, wanted = snapshot.role_to_units.get(role, {}), units_of(deployment, role).units
        down = [unit for index in range(wanted) if (unit := f"{role}-{index}") not in up]
        yield from down[: max(0, wanted - len(up))]
        for unit, num_led in up.items():
            load = snapshot.unit_to_report.get(unit)
            absent = load.absent if load is not None else ()
            if not num_led and not absent:
                # The leader's last report is outdated: its ranks wait for a new leader.
                yield unit
            yield from (rank_name(unit, rank) for rank in absent)
