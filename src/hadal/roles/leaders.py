"""Leader of a unit, made from a deployment and a model's config: the same when it serves, is
simulated or is replayed. Also the first placement of a unit's experts, on which leader and ranks
must agree.

If ranks are processes of their own, their leader is made around this one (roles/ranks/ranks).
"""

from __future__ import annotations

from hadal.core.balance import OFF
from hadal.core.config import DECODE, PREFILL, Deployment, UnitsConfig, num_drafts_max, units_of
from hadal.core.model_config import ModelConfig
from hadal.core.placement import Placement, spread, spread_by_node
from hadal.kv.disk_index import BlockIndex
from hadal.perf.shapes import num_moe_layers
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.prefill.leader import PrefillLeader


def make_leader(
    deployment: Deployment,
    config: ModelConfig,
    unit: str,
    role: str,
    epoch: str,
    pool_name: str = "",
    *,
    fingerprint: str = "",
    index: BlockIndex | None = None,
) -> PrefillLeader | DecodeLeader:
    """Return the state machine that decides for a unit.

    `pool_name`: KV pool of a unit that is one process (else each rank has its own). `fingerprint`: KV
    fingerprint (kv/names). `index`: blocks known to be on disk, for a prefill unit; None: no blocks
    yet.
    """
    if role == PREFILL:
        return PrefillLeader(
            unit, epoch, deployment, config, pool_name, fingerprint=fingerprint, index=index
        )
    return DecodeLeader(unit, epoch, deployment, config, pool_name, fingerprint=fingerprint)


def first_placement(deployment: Deployment, config: ModelConfig, role: str) -> Placement:
    """Return the first placement of a unit's experts, on which its leader and every rank must agree."""
    units = units_of(deployment, role)
    num_layers = num_moe_layers(config)
    if role == DECODE and config.mtp_is_moe and num_drafts_max(deployment, config):
        num_layers += 1  # The MTP module's layer, after the last.
    sizes = num_layers, config.n_routed_experts, units.ranks, units.redundant_experts
    return (
        spread_by_node(*sizes, num_nodes(units))
        if keeps_groups(units, config, role)
        else spread(*sizes)
    )


def num_nodes(units: UnitsConfig) -> int:
    """Return the number of nodes of a unit."""
    return -(-units.ranks // units.ranks_per_node)


def keeps_groups(units: UnitsConfig, config: ModelConfig, role: str) -> bool:
    """Return whether a group of experts of this unit stays on a node; see `groups_fit_nodes`."""
    return groups_fit_nodes(role, num_nodes(units), config.n_group, units.redundant_experts)


def groups_fit_nodes(role: str, num_nodes: int, num_groups: int, num_redundant: int) -> bool:
    """Return whether a group of experts stays on a node, so that a token goes to few nodes. Only
    for prefill: its traffic between nodes is large, and a decode unit has more nodes than the gate
    has groups (DeepSeek EPLB's two policies).
    """
    divides = num_groups % num_nodes == 0 and num_redundant % num_nodes == 0
    return role == PREFILL and num_nodes > 1 and divides


def moves_experts(units: UnitsConfig) -> bool:
    """Return whether replicas may move to other ranks while the unit serves. Its ranks then send
    expert weights to other ranks, and load weights for a layer's next placement in the background.
    """
    return units.ranks > 1 and units.expert_balance != OFF
