"""What a deployment says of a unit: where its experts lie at first."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hadal.core.config import DECODE, PREFILL, read_deployment
from hadal.core.model_config import read_model_config
from hadal.roles.leaders import first_placement, keeps_groups, num_nodes

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.promise(
    "a group's experts start on one node and leave it only as far as balance demands"
)
@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_prefill_keeps_groups_on_nodes(role: str) -> None:
    """The published units: 8 groups on 4 nodes; 18 nodes share no 8 groups evenly."""
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
