"""A unit's deciding core out of its deployment: the same for a unit of one process and for the leader of many ranks."""

from __future__ import annotations

from hadal.core.config import PREFILL, Deployment
from hadal.core.model_config import ModelConfig
from hadal.roles.decode import DecodeLeader
from hadal.roles.prefill import PrefillLeader
from hadal.runtime.memory import num_moe_layers
from hadal.runtime.topology import units_of


def make_core(
    deployment: Deployment, config: ModelConfig, unit: str, role: str, epoch: str, pool_name: str = ""
) -> PrefillLeader | DecodeLeader:
    """`pool_name`: of a unit that is one process; ranks bring their own."""
    units = units_of(deployment, role)
    if role == PREFILL:
        return PrefillLeader(
            unit, epoch, pool_name, units.kv_blocks, chunk_tokens=deployment.chunk_tokens,
            num_requests_max=units.max_requests, num_waiting_max=units.max_waiting, lease_s=deployment.lease_s,
            heartbeat_s=deployment.heartbeat_s, num_ranks=units.ranks, overlap=units.overlap,
            min_split_tokens=units.min_split_tokens, num_layers=config.num_hidden_layers,
            num_moe_layers=num_moe_layers(config),
        )  # fmt: skip
    return DecodeLeader(
        unit, epoch, units.kv_blocks, num_slots=units.max_requests, num_waiting_max=units.max_waiting,
        max_context=config.max_position_embeddings, heartbeat_s=deployment.heartbeat_s, num_ranks=units.ranks,
        overlap=units.overlap, min_split_tokens=units.min_split_tokens, num_layers=config.num_hidden_layers,
        num_moe_layers=num_moe_layers(config),
    )  # fmt: skip
