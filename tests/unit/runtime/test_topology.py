"""Test where ranks lie: names, nodes, and what a host cannot run."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from hadal.core.config import (
    ClusterConfig,
    ConsoleConfig,
    Deployment,
    FleetConfig,
    GatewayConfig,
    UnitsConfig,
    read_deployment,
)
from hadal.runtime.topology import (
    launch_plan,
    node_groups,
    num_nodes,
    place_units,
    rank_name,
    unit_and_rank,
    why_not_here,
)

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
V3 = Deployment(
    device="cuda",
    transport="deepep",
    prefill=UnitsConfig(units=3, ranks=32, redundant_experts=32),
    decode=UnitsConfig(ranks=144, redundant_experts=32),
)


def test_a_name_says_what_it_is() -> None:
    assert unit_and_rank("decode-0") == ("decode-0", None)
    assert unit_and_rank(rank_name("decode-0", 12)) == ("decode-0", 12)


def test_units_of_one_rank_are_one_process_and_larger_ones_have_a_leader() -> None:
    deployment = Deployment(decode=UnitsConfig(units=2, ranks=2, threads=3))
    plans = launch_plan(deployment)
    assert [(plan.name, plan.role, plan.threads) for plan in plans] == [
        ("prefill-0", "prefill", 0),
        ("decode-0", "decode", 1),
        ("decode-0.0", "decode", 3),
        ("decode-0.1", "decode", 3),
        ("decode-1", "decode", 1),
        ("decode-1.0", "decode", 3),
        ("decode-1.1", "decode", 3),
        ("gateway", "gateway", 1),
        ("console", "console", 1),
    ]
    leader, rank = plans[1:3]
    assert leader.ready_after == ("decode-0.0", "decode-0.1")
    assert rank.arguments == ("--unit", "decode-0", "--role", "decode", "--rank", "0")
    assert {(plan.node, plan.device) for plan in plans[:-2]} == {(0, None)}
    assert [plan.node for plan in plans[-2:]] == [None, None], "beside the supervisor"
    silent = msgspec.structs.replace(deployment, console=ConsoleConfig("off"))
    assert launch_plan(silent) == plans[:-1]


def test_a_fleet_s_plan_names_every_process_once_and_fills_whole_nodes() -> None:
    fleet = msgspec.structs.replace(
        V3,
        prefill=msgspec.structs.replace(V3.prefill, units=29),
        decode=msgspec.structs.replace(V3.decode, units=9),
    )
    plans = launch_plan(fleet)
    assert len({plan.name for plan in plans}) == len(plans) == 29 * 33 + 9 * 145 + 2
    gpus = [(plan.node, plan.device) for plan in plans if plan.device is not None]
    assert sorted(gpus) == [(node, device) for node in range(278) for device in range(8)]
    nodes_of = {unit.name: unit.nodes for unit in place_units(fleet)}
    for plan in plans[:-2]:
        assert plan.node in nodes_of[unit_and_rank(plan.name)[0]]
        assert (plan.device is None) == bool(plan.ready_after)


def test_the_published_peak_of_278_nodes_is_one_group_a_unit() -> None:
    """DeepSeek-V3/R1 inference overview: 278 nodes at the peak, here nine decode and 29 prefill
    units.
    """
    fleet = msgspec.structs.replace(
        read_deployment(CONFIGS / "v3_ep32_ep144.toml"),
        fleet=FleetConfig(mode="auto", prefill_max=29, decode_max=9),
        cluster=ClusterConfig(on="ray"),
    )
    units = place_units(fleet)
    assert Counter(len(unit.nodes) for unit in units) == {4: 29, 18: 9}
    assert [node for unit in units for node in unit.nodes] == list(range(278)), "none twice"

    *plans, gateway, provider, console = launch_plan(fleet)
    assert [(plan.name, plan.node) for plan in (console, gateway, provider)] == [
        ("console", None),
        ("gateway", None),
        ("ray", None),
    ]
    name_to_plan = {plan.name: plan for plan in plans}
    assert len(name_to_plan) == len(plans) == 29 * 33 + 9 * 145
    for unit in units:
        leader = name_to_plan.pop(unit.name)
        assert (leader.node, leader.device) == (unit.nodes[0], None), "it leads from the first"
        ranks = [name_to_plan.pop(name) for name in leader.ready_after]
        assert [plan.node for plan in ranks] == [node for node in unit.nodes for _ in range(8)]
        assert [plan.device for plan in ranks] == [*range(8)] * len(unit.nodes)
    assert not name_to_plan, "each is of a unit"


def test_gateways_on_nodes_come_behind_units_and_are_one_group() -> None:
    deployment = Deployment(
        host="0.0.0.0",
        prefill=UnitsConfig(units=2, ranks=2, ranks_per_node=1),
        gateway=GatewayConfig(processes=2, nodes=3),
        cluster=ClusterConfig(on="ray"),
    )
    assert node_groups(deployment) == ((0, 1), (2, 3), (4,), (5, 6, 7))
    gateways = [plan for plan in launch_plan(deployment) if plan.role == "gateway"]
    assert [(plan.name, plan.node) for plan in gateways] == [
        ("gateway", None),
        ("gateway-1", None),
        ("gateway-2", 5),
        ("gateway-3", 6),
        ("gateway-4", 7),
    ]
    without = msgspec.structs.replace(deployment, gateway=GatewayConfig())
    assert node_groups(without) == ((0, 1), (2, 3), (4,))


def test_the_published_bundle_is_thirty_nodes() -> None:
    placed = place_units(V3)
    assert num_nodes(placed) == 30
    assert [len(unit.nodes) for unit in placed] == [4, 4, 4, 18]
    assert sorted(node for unit in placed for node in unit.nodes) == list(range(30))
    (reason,) = why_not_here(V3, 2, 0)
    assert "30 nodes of 8 GPUs" in reason
    assert "2 cores and no GPU" in reason


def test_small_units_share_a_node_as_long_as_it_has_gpus() -> None:
    units = UnitsConfig(ranks=4)
    deployment = Deployment(device="cuda", transport="nccl", prefill=units, decode=units)
    assert [(unit.nodes, unit.first_device) for unit in place_units(deployment)] == [
        ((0,), 0),
        ((0,), 4),
    ]
    two = msgspec.structs.replace(deployment, prefill=UnitsConfig(units=2, ranks=4))
    assert [unit.nodes for unit in place_units(two)] == [(0,), (0,), (1,)]
    # CPU ranks are processes: one host takes any number.
    assert num_nodes(place_units(msgspec.structs.replace(two, device="cpu", transport="tcp"))) == 1


def test_units_that_fill_a_node_of_a_cluster_have_it_for_themselves() -> None:
    def nodes_of(**tables: UnitsConfig) -> list[tuple[int, ...]]:
        deployment = Deployment(
            cluster=ClusterConfig(on="ray"), fleet=FleetConfig("auto", decode_max=3), **tables
        )
        return [unit.nodes for unit in place_units(deployment)]

    one = UnitsConfig(ranks_per_node=1)
    assert nodes_of(prefill=one, decode=one) == [(0,), (1,), (2,), (3,)]
    assert nodes_of(prefill=UnitsConfig(), decode=UnitsConfig()) == [(0,)] * 4
    large = UnitsConfig(ranks=4, ranks_per_node=2)
    assert nodes_of(prefill=large, decode=UnitsConfig()) == [(0, 1), (2,), (2,), (2,)], (
        "small units share a node, and none that another fills"
    )


@pytest.mark.parametrize(
    ("device", "transport", "num_gpus", "words"),
    [
        ("cpu", "tcp", 0, ""),
        ("cpu", "gloo", 0, ""),
        ("cuda", "nccl", 8, ""),
        ("cuda", "nccl", 4, ""),
        ("cuda", "nccl", 3, "a unit needs 4 GPUs"),
        ("cuda", "gloo", 1, ""),
        ("cuda", "gloo", 0, "device is 'cuda'"),
        ("cuda", "tcp", 8, "'tcp' works only for CPUs"),
        ("cuda", "deepep", 8, "'deepep' can be planned but not served"),
    ],
)
def test_what_a_host_lacks_is_said(device: str, transport: str, num_gpus: int, words: str) -> None:
    units = UnitsConfig(ranks=4)
    deployment = Deployment(device=device, transport=transport, prefill=units, decode=units)
    reasons = why_not_here(deployment, 2, num_gpus)
    assert words in "; ".join(reasons)
    assert bool(reasons) == bool(words)


def test_ranks_of_a_node_have_places_of_their_own() -> None:
    units = UnitsConfig(ranks=4)
    deployment = Deployment(device="cuda", transport="nccl", prefill=units, decode=units)
    devices = [plan.device for plan in launch_plan(deployment) if plan.device is not None]
    assert devices == list(range(8))
    of_v3 = {plan.name: plan.device for plan in launch_plan(V3)}
    assert [of_v3[f"decode-0.{rank}"] for rank in (0, 7, 8, 143)] == [0, 7, 0, 7]


def test_units_of_one_rank_may_share_a_gpu() -> None:
    assert why_not_here(Deployment(device="cuda", transport="nccl"), 2, 1) == []
