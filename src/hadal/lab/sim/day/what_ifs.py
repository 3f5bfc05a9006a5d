"""Studies of alternatives: a study with one thing changed, to find the worth of that thing.

Each is a complete study, so it goes through the same stages. Measurements that it shares with the
original are not repeated (`same_units`, `same_cache`). Simulates nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hadal.core.balance import OFF, TURNS
from hadal.core.config import ROLES
from hadal.lab.perf.rent import RENTS
from hadal.lab.sim.day.study import Study
from hadal.stats.prices import R1


def what_ifs(study: Study) -> list[tuple[str, Study]]:
    """Return (description of the change, changed study), balancers first. Changes that change
    nothing or are impossible are left out, such as units that do not fit the other hardware.
    """
    other = "h800" if study.hardware.lower() == "h200" else "h200"
    wanted: list[tuple[str, dict[str, Any]]] = [
        (
            "requests to ranks in turn (round-robin)",
            {role: replace(study.units_of(role), request_balance=TURNS) for role in ROLES},
        ),
        (
            "no expert balancer",
            {role: replace(study.units_of(role), expert_balance=OFF) for role in ROLES},
        ),
        (
            f"{other.upper()} at ${RENTS[other].usd:.2f} an hour",
            {"hardware": other, "gpu_hour_usd": RENTS[other].usd},
        ),
        ("a tenth of the cache", {"cache": replace(study.cache, disk_pb=study.cache.disk_pb / 10)}),
        ("R1's prices as charged, cheaper at night", {"prices": R1.name}),
        ("no drafts in decode", {"drafts": 0}),
    ]
    found = []
    for name, changes in wanted:
        try:
            changed = replace(study, **changes)
        except ValueError:
            continue
        if changed != study:
            found.append((name, changed))
    return found


def same_units(one: Study, other: Study) -> bool:
    """Return True if one measurement of units serves both studies: units and load are equal."""
    return _units(one) == _units(other)


def same_cache(one: Study, other: Study) -> bool:
    """Return True if the cache has the same hits in both studies."""
    return (one.workload, one.cache, one.seed) == (other.workload, other.cache, other.seed)


def _units(study: Study) -> tuple[object, ...]:
    units = tuple(
        (of.ranks, of.redundant_experts, of.max_requests, of.request_balance, of.expert_balance)
        for of in (study.prefill, study.decode)
    )
    return (
        study.hardware,
        study.chunk_tokens,
        study.drafts,
        study.mtp_accept,
        units,
        study.workload,
        study.window,
        study.seed,
    )
