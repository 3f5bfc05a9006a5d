"""The memory plan of a deployment: bytes of weights, KV pools and buffers of each rank, before
anything starts.

Pure arithmetic on the deployment and config.json; loads no torch, allocates nothing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import msgspec

from hadal.comm.layout import MessageLayout, deepep_buffer_bytes, low_latency_buffers, mean_rows
from hadal.core.config import (
    DECODE,
    PREFILL,
    ROLES,
    Deployment,
    UnitsConfig,
    num_cache_layers,
    num_drafts_max,
)
from hadal.core.errors import ConfigError
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import SCALE_BLOCK, ModelConfig
from hadal.roles.leaders import moves_experts
from hadal.runtime.amounts import gb
from hadal.runtime.parameters import (
    Precision,
    count_parameters,
    kv_bytes_per_token,
    model_bytes,
    module_parameters,
    num_moe_layers,
    parameters,
    precision_of,
)
from hadal.runtime.pool_sizes import NUM_SCRATCH_BLOCKS, Room, check_blocks, pool_blocks


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of a unit."""

    num_slots: int
    """Expert replicas per MoE layer."""
    fixed_bytes: int
    """Bytes of all weights but the routed experts', which every rank has: attention, shared expert,
    dense FFNs, norms, gate, embedding, head, MTP module.
    """
    expert_bytes: int
    kv_blocks: int
    """Blocks of the KV pool, including the scratch block."""
    kv_bytes: int
    comm_bytes: int
    """Bytes of the buffers of dispatch and combine; 0 in a unit of one rank."""
    staged_bytes: int = 0
    """Bytes for a second copy of one MoE layer's experts: while replicas move, both the old and the
    new layer are in memory.
    """
    kept_bytes: int = 0
    """Bytes of hidden states that all request slots keep for the MTP module, one block each, in
    FP32 (model/drafts).
    """
    spare_bytes: int = 0
    """Bytes reserved for experts that a rank takes over when a node of its unit is lost; 0 in a
    unit of one node, which is lost with the node.
    """

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that the pool can hold."""
        return (self.kv_blocks - NUM_SCRATCH_BLOCKS) * BLOCK_TOKENS

    @property
    def weight_bytes(self) -> int:
        return self.fixed_bytes + self.expert_bytes

    @property
    def total_bytes(self) -> int:
        beside = self.comm_bytes + self.staged_bytes + self.kept_bytes + self.spare_bytes
        return self.weight_bytes + self.kv_bytes + beside


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a deployment, computed from its fields and the model's shape."""

    num_parameters: int
    num_parameters_active: int
    """Parameters used per token: all except the experts that it is not routed to."""
    block_bytes: int
    prefill: RankMemory
    decode: RankMemory
    num_ranks: tuple[int, int]
    """Ranks of all prefill units and of all decode units, at the fleet's largest size."""
    warnings: tuple[str, ...]
    mapped_bytes: int | None = None
    """Bytes of one copy of the model's weights, if all ranks of a host map the same files. None:
    every rank has its own copy.
    """

    def of(self, role: str) -> RankMemory:
        """Return the memory of a rank of this role."""
        return self.prefill if role == PREFILL else self.decode

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights over all ranks."""
        if self.mapped_bytes is not None:
            return self.mapped_bytes
        return (
            self.num_ranks[0] * self.prefill.weight_bytes
            + self.num_ranks[1] * self.decode.weight_bytes
        )

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of all pools; on CPUs, shared memory must hold them."""
        return self.num_ranks[0] * self.prefill.kv_bytes + self.num_ranks[1] * self.decode.kv_bytes

    @property
    def total_bytes(self) -> int:
        own = (
            num * (rank.total_bytes - rank.weight_bytes)
            for num, rank in zip(self.num_ranks, (self.prefill, self.decode), strict=True)
        )
        return self.weight_bytes + sum(own)


def plan_memory(
    deployment: Deployment,
    config: ModelConfig,
    stored: str = "",
    *,
    is_plain: bool = False,
    room: Room | None = None,
) -> MemoryPlan:
    """Choose the number of blocks of each pool. `deployment.device` must be resolved, not "auto";
    `stored`: see `precision_of`. `is_plain`: there are no kernels, and torch computes in FP32.
    `room`: see `pool_blocks`.

    Raises ConfigError if a pool could not hold one token's block, if replicas do not divide by
    ranks or are too many, or if a rank does not fit in `device_memory_gb`.
    """
    is_converted = is_plain or config.weight_block_size not in (None, SCALE_BLOCK)
    is_mapped = deployment.device == "cpu" and not is_converted
    precision = (
        precision_of(deployment.device, config, stored)
        if is_mapped or deployment.device == "cuda"
        else Precision()
    )
    num_layers = num_cache_layers(deployment, config)
    context_tokens = config.max_position_embeddings
    total, active = count_parameters(config)
    without_kv = MemoryPlan(
        num_parameters=total,
        num_parameters_active=active,
        block_bytes=BLOCK_TOKENS * kv_bytes_per_token(config, precision, num_layers),
        prefill=_rank_memory(PREFILL, deployment, config, precision, 0),
        decode=_rank_memory(DECODE, deployment, config, precision, 0),
        num_ranks=(
            deployment.num_units_max(PREFILL) * deployment.prefill.ranks,
            deployment.num_units_max(DECODE) * deployment.decode.ranks,
        ),
        warnings=(),
        mapped_bytes=(
            model_bytes(config, precision, has_drafts=num_drafts_max(deployment, config) > 0)
            if is_mapped
            else None
        ),
    )
    role_to_blocks = pool_blocks(
        deployment, without_kv.block_bytes, context_tokens, without_kv.total_bytes, room
    )
    ranks, warnings = [], []
    for kind in ROLES:
        warnings += check_blocks(kind, deployment, context_tokens)
        rank = _rank_memory(kind, deployment, config, precision, role_to_blocks[kind])
        rank, more = _checked(kind, rank, deployment, config)
        ranks.append(rank)
        warnings += more
    return dataclasses.replace(
        without_kv, prefill=ranks[0], decode=ranks[1], warnings=tuple(warnings)
    )


def _checked(
    kind: str, rank: RankMemory, deployment: Deployment, config: ModelConfig
) -> tuple[RankMemory, list[str]]:
    """Return the rank, with `spare_bytes` cut to what its device can hold, and warnings. Raises
    ConfigError if the rest does not fit on the device.
    """
    warnings = []
    _check_device_memory(kind, rank, deployment)
    asked_bytes = rank.spare_bytes
    rank = _with_spare_cut(rank, deployment)
    if rank.spare_bytes < asked_bytes:
        warnings.append(
            f"{kind}: a rank has memory for {gb(rank.spare_bytes)} of the {gb(asked_bytes)} of"
            " experts that it may have to take over if a node of its unit is lost. If they do not"
            f" fit, the unit restarts. Lower {kind}.kv_memory_mb or add ranks to make"
            " room."
        )
    if deployment.device == "cuda" and config.weight_block_size is not None:
        now = ranks_in_fp32(deployment, config, rank.kv_blocks)[ROLES.index(kind)]
        warnings.append(
            f"{kind}: FP8 matrices need fused kernels. Until Hadal has them, plain torch ops keep"
            f" all weights in FP32: {gb(now.total_bytes)} per rank instead of"
            f" {gb(rank.total_bytes)}."
        )
    return rank, warnings


def ranks_in_fp32(
    deployment: Deployment, config: ModelConfig, kv_blocks: int = 0
) -> tuple[RankMemory, RankMemory]:
    """Return the memory of a prefill and a decode rank with plain torch ops, which keep weights and
    KV in FP32 on any device.

    `kv_blocks`: blocks per rank; 0: as the deployment sets them.
    """
    prefill, decode = (
        _rank_memory(kind, deployment, config, Precision(), kv_blocks or units.kv_blocks)
        for kind, units in ((PREFILL, deployment.prefill), (DECODE, deployment.decode))
    )
    return prefill, decode


def num_slots(kind: str, units: UnitsConfig, config: ModelConfig) -> int:
    """Return a rank's replicas per MoE layer. Raises ConfigError if they are uneven or too many."""
    total = config.n_routed_experts + units.redundant_experts
    if total % units.ranks:
        below = total // units.ranks * units.ranks - config.n_routed_experts
        nearest = [n for n in (below, below + units.ranks) if n >= 0]
        raise ConfigError(
            f"{kind}: {config.n_routed_experts} experts and {units.redundant_experts} redundant"
            f" ones do not divide evenly over {units.ranks} ranks. Set {kind}.redundant_experts to"
            f" {' or '.join(map(str, nearest))}."
        )
    slots = total // units.ranks
    if slots > config.n_routed_experts:
        raise ConfigError(
            f"{kind}: {slots} replicas per rank are more than the model's"
            f" {config.n_routed_experts} experts. Lower {kind}.redundant_experts."
        )
    return slots


def max_step_tokens(kind: str, deployment: Deployment, config: ModelConfig) -> int:
    """Return the largest number of tokens of a rank in one micro-batch."""
    if kind == PREFILL:
        return deployment.chunk_tokens
    return deployment.decode.max_requests * (1 + num_drafts_max(deployment, config))


def mode_of(kind: str, units: UnitsConfig) -> str:
    """Return the dispatch mode; by default normal in prefill, low-latency in decode."""
    return units.mode or ("normal" if kind == PREFILL else "low_latency")


def with_blocks(deployment: Deployment, plan: MemoryPlan) -> Deployment:
    """Return the deployment with the plan's block counts filled in."""
    return msgspec.structs.replace(
        deployment,
        prefill=msgspec.structs.replace(deployment.prefill, kv_blocks=plan.prefill.kv_blocks),
        decode=msgspec.structs.replace(deployment.decode, kv_blocks=plan.decode.kv_blocks),
    )


def why_not_fit(plan: MemoryPlan, there_bytes: int) -> str:
    """Return a sentence with what exceeds a host's memory and how to make it fit; empty if it fits."""
    if plan.total_bytes <= there_bytes:
        return ""
    beside = plan.total_bytes - plan.weight_bytes
    parts = f"weights {gb(plan.weight_bytes)}, KV {gb(plan.kv_bytes)}"
    if beside > plan.kv_bytes:
        parts += f", buffers {gb(beside - plan.kv_bytes)}"
    if plan.total_bytes - plan.kv_bytes < there_bytes:
        remedy = "Lower prefill.kv_memory_mb and decode.kv_memory_mb. For pools below one context, set kv_blocks."
    else:
        remedy = (
            "It does not fit even without KV: take a checkpoint with fewer bytes per weight, a smaller model,"
            f" or a machine with {gb(plan.total_bytes)}."
        )
    return (
        f"{gb(plan.total_bytes)} of memory are needed ({parts}), and {gb(there_bytes)} are available."
        f" {remedy}"
    )


def _rank_memory(
    kind: str, deployment: Deployment, config: ModelConfig, precision: Precision, kv_blocks: int
) -> RankMemory:
    units: UnitsConfig = getattr(deployment, kind)
    matrices, others, gates, expert = parameters(config)
    slots = num_slots(kind, units, config)
    replicas, kept_bytes = num_moe_layers(config) * slots, 0
    if num_drafts_max(deployment, config):
        of_module, norms, gates_of_module, num_experts = module_parameters(config)
        others += norms
        if kind == PREFILL:  # Prefill only writes the module's KV entries.
            matrices += config.hidden_size * (2 * config.hidden_size + config.latent_dim)
        else:
            matrices, gates = matrices + of_module, gates + gates_of_module
            replicas += slots if num_experts else 0
            kept_bytes = 4 * units.max_requests * BLOCK_TOKENS * config.hidden_size
    num_layers = num_cache_layers(deployment, config)
    return RankMemory(
        num_slots=slots,
        # The gate stays FP32 everywhere: a rounded score would route a token to another expert.
        fixed_bytes=int(matrices * precision.matrix) + others * precision.other + 4 * gates,
        expert_bytes=int(replicas * expert * precision.matrix),
        kv_blocks=kv_blocks,
        kv_bytes=kv_blocks * BLOCK_TOKENS * kv_bytes_per_token(config, precision, num_layers),
        comm_bytes=_comm_bytes(kind, deployment, config),
        staged_bytes=int(slots * expert * precision.matrix) if moves_experts(units) else 0,
        kept_bytes=kept_bytes,
        spare_bytes=int(
            replicas // slots * num_spare_slots(units, slots) * expert * precision.matrix
        ),
    )


def num_spare_slots(units: UnitsConfig, num_slots: int) -> int:
    """Return the maximum number of replicas per layer that a surviving rank takes over when a node
    is lost: an even share of the node's replicas, as if no survivor had any of those experts. 0 if
    no rank survives.
    """
    survivors = units.ranks - units.ranks_per_node
    return math.ceil(units.ranks_per_node * num_slots / survivors) if survivors > 0 else 0


def _comm_bytes(kind: str, deployment: Deployment, config: ModelConfig) -> int:
    """Return the bytes of the fixed buffers in low-latency mode; in normal mode, of a step's
    messages with evenly spread routing.
    """
    units: UnitsConfig = getattr(deployment, kind)
    if units.ranks == 1:
        return 0
    tokens, top_k = max_step_tokens(kind, deployment, config), config.num_experts_per_tok
    layout = MessageLayout(deployment.dispatch_format, config.hidden_size)
    if mode_of(kind, units) == "low_latency":
        replicas = config.n_routed_experts + units.redundant_experts
        if deployment.transport == "deepep":
            return deepep_buffer_bytes(tokens, config.hidden_size, replicas)
        return low_latency_buffers(
            layout, tokens, top_k, units.ranks, replicas // units.ranks
        ).total
    rows = round((units.ranks - 1) * mean_rows(tokens, top_k, units.ranks))
    pairs = tokens * top_k
    # Rows out and in, for both directions, and the received rows decoded for the experts.
    return (
        2 * rows * layout.row_bytes + 2 * pairs * layout.back_bytes + 4 * rows * config.hidden_size
    )


def _device_bytes(deployment: Deployment) -> float:
    """Return the memory of a GPU; infinite if there is none or the deployment does not give it."""
    is_known = deployment.device == "cuda" and deployment.device_memory_gb
    return deployment.device_memory_gb * 1e9 if is_known else math.inf


def _with_spare_cut(rank: RankMemory, deployment: Deployment) -> RankMemory:
    """Reduce `spare_bytes` to what fits: a unit serves without it, but not without the rest."""
    most = max(0.0, _device_bytes(deployment) - (rank.total_bytes - rank.spare_bytes))
    return dataclasses.replace(rank, spare_bytes=int(min(rank.spare_bytes, most)))


def _check_device_memory(kind: str, rank: RankMemory, deployment: Deployment) -> None:
    """Raise ConfigError if a rank does not fit on its device even without `spare_bytes`."""
    limit_bytes, needed = _device_bytes(deployment), rank.total_bytes - rank.spare_bytes
    if needed <= limit_bytes:
        return
    parts = (
        f"weights {gb(rank.weight_bytes)}, KV {gb(rank.kv_bytes)}, buffers {gb(rank.comm_bytes)}"
    )
    if rank.staged_bytes:
        parts += f", a layer being staged {gb(rank.staged_bytes)}"
    if rank.kept_bytes:
        parts += f", hidden states for drafts {gb(rank.kept_bytes)}"
    if needed - rank.kv_bytes < limit_bytes:
        excess_mb = (needed - limit_bytes) / 2**20
        remedy = (
            f"Lower {kind}.kv_memory_mb by {excess_mb:.0f} or more. For a pool"
            f" below one context, set {kind}.kv_blocks."
        )
    else:
        remedy = (
            f"It does not fit even without KV: raise {kind}.ranks, or take GPUs with more memory"
            " (device_memory_gb)."
        )
    raise ConfigError(
        f"a {kind} rank needs {gb(needed)} ({parts}), and a GPU has"
        f" {gb(int(limit_bytes))}. {remedy}"
    )
