"""Other days: a study with one thing changed, to see what it is worth.

Each is a whole study of its own, so it goes through the same stages; what it has in common with
the first is not measured twice (`same_units`, `same_cache`). Simulates nothing.
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
    """(what is changed, the study), the balancers first. What is so already, or cannot be with
    these units (they may not fit the other hardware), is left out.
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
    """Whether a unit does the same in both."""
    return _units(one) == _units(other)


def same_cache(one: Study, other: Study) -> bool:
    """Whether a cache finds the same in both."""
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
