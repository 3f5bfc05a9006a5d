"""The memory plan: what the weights and KV pools of a deployment take, worked out before anything
starts.

Pure arithmetic on config.json and one look at the checkpoint's header; loads no torch, allocates
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import stat
import struct
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hadal.comm.layout import MessageLayout, deepep_buffer_bytes, low_latency_buffers, mean_rows
from hadal.core.balance import OFF
from hadal.core.config import (
    DECODE,
    PREFILL,
    ROLES,
    Deployment,
    UnitsConfig,
    num_cache_layers,
    num_drafts_max,
)
from hadal.core.errors import CheckpointError, ConfigError
from hadal.core.messages import BLOCK_TOKENS
from hadal.core.model_config import SCALE_BLOCK, ModelConfig
from hadal.roles.leaders import moves_experts
from hadal.runtime.pool_sizes import NUM_SCRATCH_BLOCKS, Room, check_blocks, pool_blocks

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit (safetensors)."""


@dataclass(frozen=True)
class Precision:
    """Bytes of a value by what it is."""

    matrix: float = 4.0
    """Projections and experts."""
    other: int = 4
    """Embedding, head and norms."""
    kv: int = 4


def precision_of(device: str, config: ModelConfig, stored: str) -> Precision:
    """What values are held in; `stored`: the dtype of most of the checkpoint, empty where it was
    not looked at (then FP8 as config.json says, else BF16, as the family is released).

    On CPUs weights stay as they are stored where kernels compute from that: FP8 matrices with an
    FP32 scale a block, beside BF16. On GPUs, an FP8 checkpoint is planned for fused kernels: the
    same, and KV in BF16. All else is FP32, as it is served; see `ranks_in_fp32`.
    """
    kind = stored or ("F8_E4M3" if config.weight_block_size is not None else "BF16")
    is_fp8 = kind == "F8_E4M3" and config.weight_block_size is not None
    if is_fp8:
        rows, columns = config.weight_block_size or (1, 1)
        return Precision(1.0 + 4.0 / (rows * columns), 2, 2 if device == "cuda" else 4)
    return Precision(2.0, 2) if device == "cpu" and kind == "BF16" else Precision()


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of a unit."""

    num_slots: int
    """Expert replicas in each MoE layer."""
    fixed_bytes: int
    """Weights that every rank has: attention, shared expert, dense FFNs, gate, embedding and
    head.
    """
    expert_bytes: int
    kv_blocks: int
    """The scratch block included."""
    kv_bytes: int
    comm_bytes: int
    """Buffers of dispatch and combine; 0 in a unit of one rank."""
    staged_bytes: int = 0
    """One MoE layer's experts once more: while replicas move, a layer is in memory as it was and as
    it will be.
    """
    kept_bytes: int = 0
    """What each slot keeps of a block for the MTP module, in FP32 (model/drafts)."""
    spare_bytes: int = 0
    """Room for the experts that a rank takes over when a node of its unit is lost; 0 in a unit of
    one node, which is lost with it.
    """

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds."""
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
    """Bytes of a deployment, worked out from its fields and the model's shape."""

    num_parameters: int
    num_parameters_active: int
    """Used by one token: all but the experts it is not sent to."""
    block_bytes: int
    prefill: RankMemory
    decode: RankMemory
    num_ranks: tuple[int, int]
    """Ranks of all prefill units together, and of all decode units together."""
    warnings: tuple[str, ...]
    mapped_bytes: int | None = None
    """The model's weights once, where all ranks of a host map the same files. None: every rank has
    its own.
    """

    @property
    def weight_bytes(self) -> int:
        """Of all ranks together."""
        if self.mapped_bytes is not None:
            return self.mapped_bytes
        return (
            self.num_ranks[0] * self.prefill.weight_bytes
            + self.num_ranks[1] * self.decode.weight_bytes
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pools: on CPUs, what shared memory must hold."""
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
    """Choose the blocks of each pool. `deployment.device` is not "auto" any more; `stored`: see
    `precision_of`. `is_plain`: there are no kernels, and torch computes in FP32. `room`: see
    `pool_blocks`.

    Raises ConfigError if a pool could not hold a single token's block, if experts do not divide by
    ranks, or if a rank does not fit in `device_memory_gb`.
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
            _model_bytes(config, precision, has_drafts=num_drafts_max(deployment, config) > 0)
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
    """Return the rank with what its device has room for, and warnings. Raises ConfigError if the
    device has too little for what it serves with.
    """
    warnings = []
    _check_device_memory(kind, rank, deployment)
    asked_bytes = rank.spare_bytes
    rank = _with_what_fits_of_spare_room(rank, deployment)
    if rank.spare_bytes < asked_bytes:
        warnings.append(
            f"{kind}: a rank has room for {gb(rank.spare_bytes)} of the {gb(asked_bytes)} of"
            " experts that it takes over when a node of its unit is"
            " lost. Where that is too little, the unit starts anew then. Less KV"
            f" ({kind}.kv_memory_mb) or more ranks would make room."
        )
    if deployment.device == "cuda" and config.weight_block_size is not None:
        now = ranks_in_fp32(deployment, config, rank.kv_blocks)[ROLES.index(kind)]
        warnings.append(
            f"{kind}: FP8 matrices take fused kernels; the plain torch ops that are there hold"
            f" everything in FP32, {gb(now.total_bytes)} a rank instead of"
            f" {gb(rank.total_bytes)}."
        )
    return rank, warnings


def _model_bytes(config: ModelConfig, precision: Precision, *, has_drafts: bool) -> int:
    """All weights of the main model, and of the MTP module where it drafts."""
    matrices, others, gates, expert = _parameters(config)
    in_matrices = matrices + num_moe_layers(config) * config.n_routed_experts * expert
    if has_drafts:
        matrices, norms, gates_of_module, num_experts = _module_parameters(config)
        in_matrices += matrices + num_experts * expert
        others += norms
        gates += gates_of_module
    return int(in_matrices * precision.matrix) + others * precision.other + 4 * gates


def ranks_in_fp32(
    deployment: Deployment, config: ModelConfig, kv_blocks: int = 0
) -> tuple[RankMemory, RankMemory]:
    """What a prefill and a decode rank hold with plain torch ops, on any device: weights and KV in
    FP32.

    `kv_blocks`: of each, if the deployment has not got them filled in.
    """
    prefill, decode = (
        _rank_memory(kind, deployment, config, Precision(), kv_blocks or units.kv_blocks)
        for kind, units in ((PREFILL, deployment.prefill), (DECODE, deployment.decode))
    )
    return prefill, decode


def num_slots(kind: str, units: UnitsConfig, config: ModelConfig) -> int:
    """Replicas of a rank in each MoE layer. Raises ConfigError saying which counts would divide
    evenly.
    """
    total = config.n_routed_experts + units.redundant_experts
    if total % units.ranks:
        below = total // units.ranks * units.ranks - config.n_routed_experts
        nearest = [n for n in (below, below + units.ranks) if n >= 0]
        raise ConfigError(
            f"{kind}: {config.n_routed_experts} experts and {units.redundant_experts} redundant"
            f" ones do not divide evenly over {units.ranks} ranks. {kind}.redundant_experts ="
            f" {' or '.join(map(str, nearest))} would."
        )
    slots = total // units.ranks
    if slots > config.n_routed_experts:
        raise ConfigError(
            f"{kind}: {slots} replicas on a rank are more than the {config.n_routed_experts}"
            f" experts there are. Lower {kind}.redundant_experts."
        )
    return slots


def max_step_tokens(kind: str, deployment: Deployment, config: ModelConfig) -> int:
    """Most tokens of a rank in one micro-batch."""
    if kind == PREFILL:
        return deployment.chunk_tokens
    return deployment.decode.max_requests * (1 + num_drafts_max(deployment, config))


def mode_of(kind: str, units: UnitsConfig) -> str:
    """How tokens travel: as the file says, else normal in prefill and low-latency in decode."""
    return units.mode or ("normal" if kind == PREFILL else "low_latency")


def with_blocks(deployment: Deployment, plan: MemoryPlan) -> Deployment:
    """The deployment with the plan's blocks written in."""
    return msgspec.structs.replace(
        deployment,
        prefill=msgspec.structs.replace(deployment.prefill, kv_blocks=plan.prefill.kv_blocks),
        decode=msgspec.structs.replace(deployment.decode, kv_blocks=plan.decode.kv_blocks),
    )


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Return (all, used by one token) of the main model; the MTP module is not loaded for
    serving.
    """
    matrices, others, gates, expert = _parameters(config)
    fixed = matrices + others + gates
    num_moe = num_moe_layers(config)
    return (
        fixed + num_moe * config.n_routed_experts * expert,
        fixed + num_moe * config.num_experts_per_tok * expert,
    )


def kv_bytes_per_token(
    config: ModelConfig, precision: Precision, num_layers: int | None = None
) -> int:
    """What all layers cache of one token. `num_layers`: the model's if None."""
    return (num_layers or config.num_hidden_layers) * config.entry_dim * precision.kv


def why_not_fit(plan: MemoryPlan, there_bytes: int) -> str:
    """What is too much for a host of this memory, and what would make it fit; empty where it fits."""
    if plan.total_bytes <= there_bytes:
        return ""
    beside = plan.total_bytes - plan.weight_bytes
    parts = f"weights {gb(plan.weight_bytes)}, KV {gb(plan.kv_bytes)}"
    if beside > plan.kv_bytes:
        parts += f", buffers {gb(beside - plan.kv_bytes)}"
    if plan.total_bytes - plan.kv_bytes < there_bytes:
        remedy = (
            "Lower prefill.kv_memory_mb and decode.kv_memory_mb (below a whole context: kv_blocks)."
        )
    else:
        remedy = (
            "The weights alone do not fit: take a checkpoint of fewer bytes a weight, a smaller model,"
            f" or a machine with {gb(plan.total_bytes)}."
        )
    return (
        f"{gb(plan.total_bytes)} are needed ({parts}), and there are {gb(there_bytes)} of memory."
        f" {remedy}"
    )


def num_moe_layers(config: ModelConfig) -> int:
    return sum(config.is_moe(index) for index in range(config.num_hidden_layers))


def _parameters(config: ModelConfig) -> tuple[int, int, int, int]:
    """(in matrices every rank has, in embedding, head and norms, in gates, in one expert of one
    layer).
    """
    c = config
    dim, num_moe = c.hidden_size, num_moe_layers(c)
    norms = (c.q_lora_rank or 0) + c.kv_lora_rank + 2 * dim + 2 * (c.index_head_dim or 0)
    expert = 3 * dim * c.moe_intermediate_size
    matrices = (
        c.num_hidden_layers * c.attention_weights
        + (c.num_hidden_layers - num_moe) * 3 * dim * c.intermediate_size
    )
    matrices += num_moe * c.n_shared_experts * expert
    others = c.num_hidden_layers * norms + 2 * c.vocab_size * dim + dim
    return matrices, others, num_moe * c.n_routed_experts * (dim + 1), expert


def _module_parameters(config: ModelConfig) -> tuple[int, int, int, int]:
    """Of the MTP module (in matrices that every rank has, in norms, in its gate, its routed
    experts): one layer and a projection of two hidden states; embedding and head are the model's.
    """
    c, dim = config, config.hidden_size
    is_moe = c.mtp_is_moe
    width = c.n_shared_experts * c.moe_intermediate_size if is_moe else c.intermediate_size
    matrices = c.attention_weights + 2 * dim * dim + 3 * dim * width
    norms = (c.q_lora_rank or 0) + c.kv_lora_rank + 5 * dim + 2 * (c.index_head_dim or 0)
    num_experts = c.n_routed_experts if is_moe else 0
    return matrices, norms, num_experts * (dim + 1), num_experts


@dataclass(frozen=True)
class StoredWeights:
    """A checkpoint's weights as its files hold them, by their headers alone."""

    num_files: int
    dtype_to_bytes: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.dtype_to_bytes.values())

    @property
    def precision(self) -> str:
        """The dtype most bytes are in."""
        return max(self.dtype_to_bytes, key=self.dtype_to_bytes.__getitem__, default="empty")


def stored_weights(folder: Path) -> StoredWeights | None:
    """Sum up the headers of all *.safetensors; None where there are none. Raises CheckpointError
    naming the file.
    """
    paths = _weight_files(folder)
    num_bytes: Counter[str] = Counter()
    for path in paths:
        header = read_header(path)
        for entry in header.values():
            begin, end = entry.data_offsets
            if entry.dtype:
                num_bytes[entry.dtype] += end - begin
    return StoredWeights(len(paths), dict(num_bytes)) if paths else None


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


class TensorEntry(msgspec.Struct):
    """Entry of a tensor in a file's header. The entry of `__metadata__` has defaults only."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return tensor -> entry, from a file's header. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: damaged or cut off; its header claims {length} bytes."
                )
            header = msgspec.json.decode(file.read(length), type=dict[str, TensorEntry])
            end = 8 + length + max((entry.data_offsets[1] for entry in header.values()), default=0)
            size = os.fstat(file.fileno()).st_size
            if size != end:
                raise CheckpointError(
                    f"{path}: damaged or cut off; its tensors end at byte {end}, the file at {size}."
                )
    except (
        OSError,
        struct.error,
        UnicodeDecodeError,
        RecursionError,
        msgspec.MsgspecError,
    ) as error:
        raise CheckpointError(
            f"{path}: damaged or cut off, not a whole safetensors file ({error})."
        ) from error
    return header


def _rank_memory(
    kind: str, deployment: Deployment, config: ModelConfig, precision: Precision, kv_blocks: int
) -> RankMemory:
    units: UnitsConfig = getattr(deployment, kind)
    matrices, others, gates, expert = _parameters(config)
    slots = num_slots(kind, units, config)
    replicas, kept_bytes = num_moe_layers(config) * slots, 0
    if num_drafts_max(deployment, config):
        of_module, norms, gates_of_module, num_experts = _module_parameters(config)
        others += norms
        if kind == PREFILL:  # It writes the module's entries, and needs no more of it.
            matrices += config.hidden_size * (2 * config.hidden_size + config.latent_dim)
        else:
            matrices, gates = matrices + of_module, gates + gates_of_module
            replicas += slots if num_experts else 0
            kept_bytes = 4 * units.max_requests * BLOCK_TOKENS * config.hidden_size
    num_layers = num_cache_layers(deployment, config)
    return RankMemory(
        num_slots=slots,
        # The gate stays FP32 everywhere: a rounded score sends a token elsewhere.
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
    """Expert replicas of a layer that each survivor has to take at most when a node is lost: all that
    the node's ranks held, if nobody else holds any of them.
    """
    survivors = units.ranks - units.ranks_per_node
    return math.ceil(units.ranks_per_node * num_slots / survivors) if survivors > 0 else 0


def _comm_bytes(kind: str, deployment: Deployment, config: ModelConfig) -> int:
    """Fixed buffers in low-latency mode; in normal mode what two micro-batches hold when choices
    spread evenly.
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
    # Out and in, back and forth; and the received rows decoded for the experts.
    return (
        2 * rows * layout.row_bytes + 2 * pairs * layout.back_bytes + 4 * rows * config.hidden_size
    )


def _device_bytes(deployment: Deployment) -> float:
    """Of a GPU; without end where there is none or the file does not say."""
    is_known = deployment.device == "cuda" and deployment.device_memory_gb
    return deployment.device_memory_gb * 1e9 if is_known else math.inf


def _with_what_fits_of_spare_room(rank: RankMemory, deployment: Deployment) -> RankMemory:
    """A unit serves without the room, so what a rank needs to serve comes before it."""
    most = max(0.0, _device_bytes(deployment) - (rank.total_bytes - rank.spare_bytes))
    return dataclasses.replace(rank, spare_bytes=int(min(rank.spare_bytes, most)))


def _check_device_memory(kind: str, rank: RankMemory, deployment: Deployment) -> None:
    """Raise ConfigError if a rank has no room for what it serves with, `spare_bytes` left out."""
    limit_bytes, needed = _device_bytes(deployment), rank.total_bytes - rank.spare_bytes
    if needed <= limit_bytes:
        return
    parts = (
        f"weights {gb(rank.weight_bytes)}, KV {gb(rank.kv_bytes)}, buffers {gb(rank.comm_bytes)}"
    )
    if rank.staged_bytes:
        parts += f", a layer being staged {gb(rank.staged_bytes)}"
    if rank.kept_bytes:
        parts += f", what drafts are made of {gb(rank.kept_bytes)}"
    if needed - rank.kv_bytes < limit_bytes:
        excess_mb = (needed - limit_bytes) / 2**20
        remedy = (
            f"Lower {kind}.kv_memory_mb by {excess_mb:.0f} or more (below a whole context:"
            f" {kind}.kv_blocks)."
        )
    else:
        remedy = (
            f"The weights alone do not fit: raise {kind}.ranks, or take GPUs with more memory"
            " (device_memory_gb)."
        )
    raise ConfigError(
        f"a {kind} rank needs {gb(needed)} ({parts}), and a GPU has"
        f" {gb(int(limit_bytes))}. {remedy}"
    )


def gb(number: int) -> str:
    """Bytes as people compare them with a GPU's memory: 10^9."""
    return f"{number / 1e9:.1f} GB" if number >= 1e8 else f"{number / 1e6:.1f} MB"


# What a deployment's KV cache will hold and where, for those who start it; and what is wrong with
# its folder.
#
# A plan looks at the folder's file system and makes nothing; a start makes the folder, and ends
# where nothing can be kept in it. One that fails later costs hits and nothing else.


_FORGIVEN_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a folder that is of use all the same: it may have room later, or something to find."""


def absolute_folder(folder: str) -> str:
    """The folder as every process finds it, wherever it runs; empty stays empty. Raises
    ConfigError.
    """
    if not folder:
        return ""
    if "\0" in folder:
        raise ConfigError(
            f"cache.folder is {folder!r}; no file system takes a zero byte in a name."
        )
    try:
        path = Path(folder).expanduser().absolute()
    except RuntimeError:
        user = folder.partition("/")[0]
        raise ConfigError(
            f"cache.folder is {folder}: {user} has no home here. Give the whole path."
        ) from None
    if os.path.exists(path) and not os.path.isdir(
        path
    ):  # Neither raises where the folder cannot be looked at.
        raise ConfigError(
            f"cache.folder is {path}, which is no folder. Name one; it is made where it is missing."
        )
    return str(path)


def make_cache_folder(folder: str) -> None:
    """Make it, for its owner alone, and see that it is of use. Raises ConfigError."""
    if not folder:
        return
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        if error.errno in _FORGIVEN_ERRORS and path.is_dir():
            return
        raise ConfigError(
            f"the cache folder {path} cannot be used ({error.strerror}). Name a folder that you may"
            " write to in --cache-folder or cache.folder, or leave it out: then no KV is kept on"
            " disk."
        ) from error


def pools_text(memory: MemoryPlan) -> str:
    """Blocks and tokens of a rank's pool, by role."""
    sizes = (
        f"{role} {rank.kv_blocks} blocks ({rank.kv_tokens} tokens)"
        for role, rank in zip(ROLES, (memory.prefill, memory.decode), strict=True)
    )
    return f"{', '.join(sizes)} a rank"


def cache_rows(deployment: Deployment, memory: MemoryPlan) -> list[tuple[str, str]]:
    """(where, what is kept there)."""
    cache = deployment.cache
    if not cache.is_on:
        return [("off", "every prompt is computed from its first token")]
    rows = [("memory", "nothing: blocks are freed with their request")]
    if cache.memory != OFF:
        rows = [
            (
                "memory",
                (
                    f"{memory.prefill.kv_blocks - NUM_SCRATCH_BLOCKS} blocks of a prefill rank,"
                    f" {memory.prefill.kv_tokens} tokens, until their room is needed"
                ),
            )
        ]
    if not cache.folder:
        return [*rows, ("disk", "nothing: cache.folder is empty")]
    disk_bytes = cache.disk_mb * 2**20
    num_blocks = disk_bytes // memory.block_bytes
    kept = (
        f"up to {gb(disk_bytes)} in {cache.folder}: about {num_blocks} blocks,"
        f" {num_blocks * BLOCK_TOKENS} tokens"
    )
    return [*rows, ("disk", kept)]


def cache_warnings(deployment: Deployment, memory: MemoryPlan) -> list[str]:
    """What will keep the disk cache from holding what it is given, one sentence each."""
    cache = deployment.cache
    if not cache.folder:
        return []
    disk_bytes = cache.disk_mb * 2**20
    if disk_bytes < memory.block_bytes:
        return [
            f"cache.disk_mb = {cache.disk_mb} is less than one block of {gb(memory.block_bytes)}:"
            " nothing is kept."
        ]
    folder = Path(cache.folder)
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            return [f"cache.folder {folder} cannot be written to: nothing is kept there."]
        status = os.statvfs(there)
        free_bytes = status.f_bavail * status.f_frsize + _held_bytes(folder)
        found = folder.stat() if there == folder else None
        # Of ours it is taken from the others when the first process enters it
        # (runtime/store/segments).
        is_ours = (
            found is not None
            and os.geteuid() in (0, found.st_uid)
            and not found.st_mode & stat.S_ISVTX
        )
        is_open = found is not None and bool(found.st_mode & stat.S_IWOTH) and not is_ours
    except OSError as error:
        return [
            f"cache.folder {folder} fails ({error.strerror}): nothing is kept there until it works."
        ]
    warnings = []
    if free_bytes < disk_bytes:
        warnings.append(
            f"cache.disk_mb = {cache.disk_mb} is more than the {gb(free_bytes)} that {folder} has"
            " room for."
        )
    if is_open:
        # Sums find damage, not intent; and names are anybody's guess where no API keys are asked
        # for.
        warnings.append(
            f"cache.folder {folder} can be written to by every user here, who could put false KV in"
            " it: name a folder of your own."
        )
    return warnings


def _held_bytes(folder: Path) -> int:
    """What lies there already: it is written over, not added to."""
    held_bytes = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # Another deployment removed it meanwhile.
            held_bytes += path.stat().st_blocks * 512  # stat(2)
    return held_bytes
