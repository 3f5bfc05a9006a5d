"""Where ranks lie: names, nodes, and what a host cannot run."""

import msgspec
import pytest

from hadal.core.config import Deployment, UnitsConfig
from hadal.runtime.topology import (
    device_index,
    num_nodes,
    place_units,
    process_names,
    rank_name,
    unit_of,
    why_not_here,
)

V3 = Deployment(
    device="cuda",
    transport="deepep",
    prefill=UnitsConfig(units=3, ranks=32, redundant_experts=32),
    decode=UnitsConfig(ranks=144, redundant_experts=32),
)


def test_a_name_says_what_it_is() -> None:
    assert unit_of("decode-0") == ("decode-0", None)
    assert unit_of(rank_name("decode-0", 12)) == ("decode-0", 12)


def test_units_of_one_rank_are_one_process_and_larger_ones_have_a_leader() -> None:
    deployment = Deployment(decode=UnitsConfig(units=2, ranks=2))
    assert list(process_names(deployment)) == [
        ("prefill-0", "prefill", None),
        ("decode-0", "decode", None),
        ("decode-0.0", "decode", 0),
        ("decode-0.1", "decode", 1),
        ("decode-1", "decode", None),
        ("decode-1.0", "decode", 0),
        ("decode-1.1", "decode", 1),
    ]


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
        ("cuda", "tcp", 8, "'tcp' moves the memory of CPUs"),
        ("cuda", "deepep", 8, "'deepep' is not there"),
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
    names = ("prefill-0", "decode-0")
    assert [device_index(deployment, name, rank) for name in names for rank in range(4)] == list(
        range(8)
    )
    assert [device_index(V3, "decode-0", rank) for rank in (0, 7, 8, 143)] == [0, 7, 0, 7]


def test_units_of_one_rank_may_share_a_gpu() -> None:
    assert why_not_here(Deployment(device="cuda", transport="nccl"), 2, 1) == []
