"""Test what a deployment sets for a unit: the first placement of its experts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hadal.core.config import (
    DECODE,
    PREFILL,
    CacheConfig,
    ClusterConfig,
    Deployment,
    UnitsConfig,
    read_deployment,
)
from hadal.core.model_config import read_model_config
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.leaders import first_placement, keeps_groups, make_leader, num_nodes

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.promise(
    "a group's experts start on one node and leave it only as far as balance demands"
)
@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_prefill_keeps_groups_on_nodes(role: str) -> None:
    """The published units: 8 groups on 4 prefill nodes; 18 decode nodes cannot share 8 evenly."""
    deployment = read_deployment(ROOT / "configs" / "v3_ep32_ep144.toml")
    config = read_model_config(Path(deployment.model))
    units = getattr(deployment, role)
    assert num_nodes(units) == (4 if role == PREFILL else 18)
    assert keeps_groups(units, config, role) == (role == PREFILL)
    placement = first_placement(deployment, config, role)
    assert placement.check() == []
    of_first_node = set(placement.slot_to_expert_LRS[:, : units.ranks_per_node].flat)
    assert (max(of_first_node) < config.n_routed_experts // 4) == (role == PREFILL)


def test_one_node_keeps_nothing_apart() -> None:
    deployment = read_deployment(ROOT / "configs" / "v3_ep32_ep144.toml")
    units = msgspec.structs.replace(deployment.prefill, ranks=8)
    config = read_model_config(Path(deployment.model))
    assert not keeps_groups(units, config, PREFILL)
    units = msgspec.structs.replace(deployment.prefill, ranks=96)
    assert not keeps_groups(units, config, PREFILL), "twelve nodes for eight groups"


@pytest.mark.parametrize(
    ("cache", "cluster", "answers"),
    [
        (CacheConfig(), ClusterConfig(), ("f", False)),
        (CacheConfig("off"), ClusterConfig(), ("", False)),
        (CacheConfig(folder="kv"), ClusterConfig(), ("f", True)),
        (CacheConfig("off", "kv"), ClusterConfig(), ("f", True)),
        (CacheConfig(), ClusterConfig("ray"), ("", False)),
        (CacheConfig(folder="kv"), ClusterConfig("ray"), ("f", True)),
    ],
)
def test_answers_are_kept_on_disk_where_there_is_one_and_else_in_memory_on_one_host(
    cache: CacheConfig, cluster: ClusterConfig, answers: tuple[str, bool]
) -> None:
    units = UnitsConfig(kv_blocks=9)
    deployment = Deployment(decode=units, cache=cache, cluster=cluster, handover="auto")
    made = make_leader(deployment, DEEPSEEK_V3, "decode-0", DECODE, "e", "pool", fingerprint="f")
    assert isinstance(made, DecodeLeader)
    is_on, has_disk = made.slots.cache.is_on, made.slots.cache._has_disk
    assert (is_on, has_disk and is_on) == (bool(answers[0]), answers[1])
    assert made.blocks.names == ["pool"]
