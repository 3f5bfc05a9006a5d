"""Size of each KV pool: set by the deployment, else a share of what weights leave, or FIXED_MB.

Pure arithmetic. `hadal serve` decides once and writes the blocks into the deployment. So units,
their restarts and their successors have equal pools, even if the free memory has changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.balance import AUTO
from hadal.core.config import ROLES, Deployment, units_of
from hadal.core.errors import ConfigError
from hadal.core.messages.base import BLOCK_TOKENS

NUM_SCRATCH_BLOCKS = 1
"""Number of scratch blocks: SCRATCH_BLOCK takes the writes of padding."""
FIXED_MB = 256
"""Default MiB of a rank's pool on a GPU, in a cluster, or if the host's memory is unknown. Ranks of
a cluster need one size, which a new supervisor must compute again.
"""
MEMORY_PARTS = 4
"""Pools take 1/MEMORY_PARTS of the memory that weights and buffers leave; others need the rest."""
SHM_PARTS = 2
"""Pools take 1/SHM_PARTS of /dev/shm: readers may still map the old pool of a restarted rank."""
MOST_BYTES = 16 << 30
"""Largest default pool. A rank reserves its pool at its start, at 4 GB/s here, so this adds 4 s."""
_KEPT_BITS = 5


@dataclass(frozen=True)
class Room:
    """Memory of a host before a deployment is loaded."""

    free_bytes: int
    """Bytes for weights, buffers and pools together."""
    shm_bytes: int
    """Free bytes of /dev/shm, where pools are files."""


def pool_blocks(
    deployment: Deployment,
    block_bytes: int,
    context_tokens: int,
    beside_bytes: int,
    room: Room | None,
) -> dict[str, int]:
    """Return role -> KV blocks of a rank, including the scratch block.

    `beside_bytes`: weights and buffers of all ranks. `room`: memory of their host; None: unknown. A
    pool holds at least one whole context, unless `kv_blocks` says otherwise. If its size
    is a share of memory, it holds at most `max_requests` whole contexts: running requests fill no
    more of a decode pool, and a prefill pool then caches one conversation per request of its rank.
    """
    context_blocks = -(-context_tokens // BLOCK_TOKENS)
    least = NUM_SCRATCH_BLOCKS + context_blocks
    is_shared = (
        room is not None and deployment.device == "cpu" and not deployment.cluster.spans_hosts
    )
    found: dict[str, int] = {}
    role_to_blocks_max: dict[str, int] = {}
    role_to_bytes = {}  # Role -> bytes of one block in all of its pools.
    for role in ROLES:
        units = units_of(deployment, role)
        role_to_bytes[role] = block_bytes * deployment.num_units_max(role) * units.ranks
        if units.kv_blocks:
            found[role] = units.kv_blocks
        elif units.kv_memory_mb == AUTO and is_shared:
            contexts = NUM_SCRATCH_BLOCKS + units.max_requests * context_blocks
            role_to_blocks_max[role] = min(contexts, MOST_BYTES // block_bytes)
        else:
            pool_mb = FIXED_MB if isinstance(units.kv_memory_mb, str) else units.kv_memory_mb
            found[role] = max(pool_mb * 2**20 // block_bytes, least)
    if room is None or not role_to_blocks_max:
        return found
    named_bytes = sum(blocks * role_to_bytes[role] for role, blocks in found.items())
    left_bytes = _rounded(
        min(
            (room.free_bytes - beside_bytes - named_bytes) // MEMORY_PARTS,
            (room.shm_bytes - named_bytes) // SHM_PARTS,
        )
    )
    # The role with the smaller maximum comes first, so that the other one can use what it leaves.
    roles = sorted(
        role_to_blocks_max, key=lambda role: role_to_blocks_max[role] * role_to_bytes[role]
    )
    for num_others, role in zip(reversed(range(len(roles))), roles, strict=True):
        share = left_bytes // (1 + num_others) // role_to_bytes[role]
        found[role] = max(min(share, role_to_blocks_max[role]), least)
        left_bytes -= found[role] * role_to_bytes[role]
    return found


def _rounded(num_bytes: int) -> int:
    """Round down by a sixteenth at most. Free memory always varies a little, but a plan, a dry run
    and a start should agree.
    """
    shift = max(0, num_bytes.bit_length() - _KEPT_BITS)
    return max(0, num_bytes) >> shift << shift


def check_blocks(role: str, deployment: Deployment, context_tokens: int) -> list[str]:
    """Return a warning if a role's `kv_blocks` hold less than one whole context. Raises ConfigError
    if they hold nothing.
    """
    asked = units_of(deployment, role).kv_blocks
    if 0 < asked < NUM_SCRATCH_BLOCKS + 1:
        raise ConfigError(
            f"{role}.kv_blocks is {asked}; one block is scratch, so at least 2 are needed."
        )
    least = NUM_SCRATCH_BLOCKS + -(-context_tokens // BLOCK_TOKENS)
    if not 0 < asked < least:
        return []
    return [
        f"{role}.kv_blocks = {asked} holds {(asked - 1) * BLOCK_TOKENS} tokens, less than one whole"
        f" context of {context_tokens}; longer requests will fail. {least} blocks would hold one."
    ]
