"""Alternative days: each changes one thing and names the parts that it shares with the first."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from hadal.core.balance import OFF, TURNS
from hadal.lab.sim.day.study import Study, UnitsStudy
from hadal.lab.sim.day.what_ifs import same_cache, same_units, what_ifs
from hadal.lab.sim.sessions import WorkloadParams
from tests.unit.lab.sim.studies import small


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            name: leaf
            for key, one in value.items()
            for name, leaf in leaves(one, f"{path}.{key}").items()
        }
    return {path[1:]: value}


def test_each_changes_what_it_says_and_nothing_else() -> None:
    day = Study()
    before = leaves(asdict(day))
    changed = {
        name: {key: value for key, value in leaves(asdict(other)).items() if before[key] != value}
        for name, other in what_ifs(day)
    }
    assert list(changed.values()) == [
        {"prefill.request_balance": TURNS, "decode.request_balance": TURNS},
        {"prefill.expert_balance": OFF, "decode.expert_balance": OFF},
        {"hardware": "h200", "gpu_hour_usd": 2.5},
        {"cache.disk_pb": pytest.approx(day.cache.disk_pb / 10)},
        {"prices": "deepseek-reasoner"},
        {"drafts": 0},
    ]
    assert len(changed) == 6, "each has a name of its own"
    assert "H200 at $2.50 an hour" in changed


def test_what_is_so_already_is_no_alternative() -> None:
    day = Study(prices="deepseek-reasoner", drafts=0, cache=replace(Study().cache, disk_pb=0.0))
    assert [name for name, _ in what_ifs(day)] == [name for name, _ in what_ifs(Study())][:3]


def test_what_does_not_fit_is_no_alternative() -> None:
    """Check that all experts fit into 8 ranks of 141 GB, but not into 8 of 80 GB."""
    assert not any(other.hardware == "h800" for _, other in what_ifs(small()))
    assert any(other.hardware == "h800" for _, other in what_ifs(Study(hardware="h200")))
    trays = UnitsStudy(36, 32, 64, bundle=0, extra=0, units_min=1, units_max=9, use=0.9)
    on_trays = Study(hardware="gb200", prefill=trays, decode=trays)
    # 36 ranks fill no nodes of 8.
    assert {other.hardware for _, other in what_ifs(on_trays)} == {"gb200"}


@pytest.mark.parametrize(
    ("changes", "units", "cache"),
    [
        ({"prices": "1/2/3"}, True, True),
        ({"gpu_hour_usd": 9.0}, True, True),
        ({"tpot_ms": 50.0}, True, True),
        ({"hardware": "h200"}, False, True),
        ({"drafts": 0}, False, True),
        ({"seed": 2}, False, False),
        ({"cache": replace(Study().cache, disk_pb=1.0)}, True, False),
        ({"workload": WorkloadParams(sessions_per_day=1e6)}, False, False),
        ({"fleet": replace(Study().fleet, hold_s=1.0)}, True, True),
        ({"decode": replace(Study().decode, use=0.5)}, True, True),
        ({"decode": replace(Study().decode, max_requests=99)}, False, True),
        ({"prefill": replace(Study().prefill, request_balance=OFF)}, False, True),
        ({"window": replace(Study().window, seconds=9.0)}, False, True),
    ],
)
def test_what_is_measured_again(changes: dict[str, Any], units: bool, cache: bool) -> None:
    other = replace(Study(), **changes)
    assert (same_units(Study(), other), same_cache(Study(), other)) == (units, cache)
