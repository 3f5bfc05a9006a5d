"""Answers of /health for deployments that are complete, lack units or ranks, or cannot serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hadal.core.config import Deployment, FleetConfig, GatewayConfig, UnitsConfig
from hadal.core.messages.snapshot import FrontSnapshot, Totals
from hadal.core.messages.units import UnitReport
from hadal.gateway.desk.health import health_of
from hadal.roles.nodes import NodePhase
from hadal.runtime.process.status import NodeStatus, Status, wrong_nodes

DEPLOYMENT = Deployment(prefill=UnitsConfig(units=2), decode=UnitsConfig(units=1, ranks=4))
FLEET = Deployment(prefill=UnitsConfig(units=1), fleet=FleetConfig(mode="auto", prefill_max=3))
WHOLE = {"prefill": {"prefill-0": 1, "prefill-1": 1}, "decode": {"decode-0": 4}}


def load(unit: str, num_ranks: int, *absent: int) -> UnitReport:
    return UnitReport(unit, "e", 100, 0, 0, 8, 0, num_ranks=num_ranks, absent=absent)


def seen(
    deployment: Deployment,
    units: dict[str, dict[str, int]],
    *loads: UnitReport,
    has_begun: bool = True,
    is_draining: bool = False,
    gateways: tuple[str, ...] = ("gateway",),
    wrong: Sequence[str] = (),
) -> tuple[int, Any]:
    snapshot = FrontSnapshot(is_draining, {}, {load.unit: load for load in loads}, units, Totals())
    return health_of(
        deployment,
        snapshot,
        gateways,
        has_begun=has_begun,
        is_draining=is_draining,
        wrong=wrong,
    )


def test_whole() -> None:
    code, fields = seen(DEPLOYMENT, WHOLE, load("decode-0", 4))
    assert (code, fields) == (
        200,
        {
            "status": "ready",
            "units_up": {"prefill": 2, "decode": 1},
            "units_wanted": {"prefill": 2, "decode": 1},
            "ranks_up": {"prefill-0": 1, "prefill-1": 1, "decode-0": 4},
            "ranks_wanted": {"prefill-0": 1, "prefill-1": 1, "decode-0": 4},
            "missing": [],
        },
    )


@pytest.mark.promise(
    "/health has one of the states starting, ready, degraded or draining, and names "
    "the missing units, ranks and gateways"
)
@pytest.mark.promise("its status is 200 as long as both roles have a living rank")
def test_a_unit_and_a_rank_are_missing() -> None:
    code, fields = seen(
        DEPLOYMENT, {"prefill": {"prefill-1": 1}, "decode": {"decode-0": 3}}, load("decode-0", 3, 2)
    )
    assert (code, fields["status"], fields["missing"]) == (
        200,
        "degraded",
        ["prefill-0", "decode-0.2"],
    )


@pytest.mark.promise(
    "/health has one of the states starting, ready, degraded or draining, and names "
    "the missing units, ranks and gateways"
)
def test_a_gateway_is_missing() -> None:
    deployment = Deployment(gateway=GatewayConfig(processes=2))
    units = {"prefill": {"prefill-0": 1}, "decode": {"decode-0": 1}}
    code, fields = seen(deployment, units)
    assert (code, fields["status"], fields["missing"]) == (200, "degraded", ["gateway-1"])
    assert seen(deployment, units, gateways=("gateway", "gateway-1"))[1]["status"] == "ready"


@pytest.mark.promise("its status is 200 as long as both roles have a living rank")
@pytest.mark.parametrize("decode", [{"decode-0": 0}, {}])
def test_nothing_to_serve_with(decode: dict[str, int]) -> None:
    units = {**WHOLE, "decode": decode}
    code, fields = seen(DEPLOYMENT, units, *(load(unit, 0, 0, 1, 2, 3) for unit in decode))
    names = ["decode-0.0", "decode-0.1", "decode-0.2", "decode-0.3"] if decode else ["decode-0"]
    assert (code, fields["status"], fields["missing"]) == (503, "degraded", names)


def test_a_unit_whose_ranks_wait_for_a_leader_is_missing() -> None:
    code, fields = seen(DEPLOYMENT, {**WHOLE, "decode": {"decode-0": 0}}, load("decode-0", 4))
    assert (code, fields["status"], fields["missing"]) == (503, "degraded", ["decode-0"])


@pytest.mark.promise(
    "/health has one of the states starting, ready, degraded or draining, and names "
    "the missing units, ranks and gateways"
)
def test_before_the_first_and_after_the_last_request() -> None:
    code, fields = seen(DEPLOYMENT, {"prefill": {"prefill-0": 1}}, has_begun=False)
    assert (code, fields["status"], fields["missing"]) == (
        503,
        "starting",
        ["prefill-1", "decode-0"],
    )
    code, fields = seen(DEPLOYMENT, WHOLE, is_draining=True)
    assert (code, fields["status"]) == (503, "draining")


def test_a_fleet_wants_its_floor_whichever_units_those_are() -> None:
    assert (
        seen(FLEET, {"prefill": {"prefill-2": 1}, "decode": {"decode-0": 1}})[1]["status"]
        == "ready"
    )
    assert seen(FLEET, {"decode": {"decode-0": 1}})[1]["missing"] == ["prefill-0"]


def test_a_cluster_without_a_node_or_without_its_lender_is_degraded_and_serves() -> None:
    nodes = (NodeStatus(0, NodePhase.UP, "host-a"), NodeStatus(1, NodePhase.LOST, "host-b"))
    status = Status("", "", 1, True, False, 0.0, {}, nodes, "Ray does not answer")
    wrong = wrong_nodes(status)
    assert wrong == ["node 1 (host-b) is lost.", "Ray does not answer."]
    code, fields = seen(DEPLOYMENT, WHOLE, load("decode-0", 4), wrong=wrong)
    assert (code, fields["status"], fields["nodes"]) == (200, "degraded", wrong)
    assert "nodes" not in seen(DEPLOYMENT, WHOLE, load("decode-0", 4))[1]
