"""KV cache of one rank: one tensor of 64-token blocks over all layers. kv/ assigns blocks to
requests.

A token's entry in a layer is its latent, [normed c_kv ; rotated k_rope] (DeepSeek-V3, arXiv
2412.19437, eq. 1-5), followed by the indexer's key if the model has an indexer. All layers of a
block are contiguous, so that a KV transfer copies a block at once. Block 0 is scratch: padding is
written there.

On a CPU the cache is the pool that other processes read. On a GPU the cache is in GPU memory, and the
pool is a staging copy:

    prefill   blocks are read from disk into the pool, fetch: pool -> cache ... chunks write the cache, and after each
              step publish: cache -> pool ... another rank pulls from the pool, or the disk cache stores its blocks
    decode    a pull fills the pool ... the request joins, fetch: pool -> cache ... steps write the cache and
              publish full blocks

Shapes: P blocks, L layers, S tokens of a block, D values of an entry.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hadal.core.messages.base import BLOCK_TOKENS, SCRATCH_BLOCK
from hadal.core.model_config import ModelConfig

log = logging.getLogger(__name__)


def block_bytes(
    config: ModelConfig, dtype: torch.dtype = torch.float32, num_layers: int | None = None
) -> int:
    """Return the bytes of one block: 64 tokens of every layer. `num_layers`: the model's if None."""
    return (
        (num_layers or config.num_hidden_layers) * BLOCK_TOKENS * config.entry_dim * dtype.itemsize
    )


class KvCache:
    """Cache tensor `cache_PLSD`, in its own memory or in the caller's buffer (a shared-memory file
    that other processes read). A staged cache has its own memory, and the buffer is a copy of it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        buffer: Any = None,
        *,
        num_layers: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        is_staged: bool | None = None,
    ) -> None:
        """`buffer`: writable memory of at least num_blocks * block_bytes, kept alive by the caller
        and not zeroed here. `num_layers`: None means the model's; pass one more if there is an MTP
        module. `is_staged`: the cache has its own memory, on `device`, and `buffer` is the pool for
        publish and fetch. None: True unless `device` is the CPU. Raises ValueError if `buffer` is
        too small or if num_blocks is below 2.
        """
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; block {SCRATCH_BLOCK} is scratch, so at least 2 are"
                " needed."
            )
        shape = (
            num_blocks,
            num_layers or config.num_hidden_layers,
            BLOCK_TOKENS,
            config.entry_dim,
        )
        self.num_blocks = num_blocks
        self._pool_PLSD: Tensor | None = None
        if buffer is None:
            self.cache_PLSD = torch.zeros(shape, dtype=dtype, device=device)
            return
        num_bytes = math.prod(shape) * dtype.itemsize
        if memoryview(buffer).nbytes < num_bytes:
            raise ValueError(
                f"the buffer has {memoryview(buffer).nbytes} bytes; {num_blocks} blocks need"
                f" {num_bytes}."
            )
        pool_PLSD = torch.frombuffer(buffer, dtype=dtype, count=num_bytes // dtype.itemsize).view(
            shape
        )
        if is_staged is None:
            is_staged = torch.device(device).type != "cpu"
        if not is_staged:
            self.cache_PLSD = pool_PLSD
            return
        self.cache_PLSD = torch.zeros(shape, dtype=dtype, device=device)
        self._pool_PLSD = pool_PLSD
        if self.cache_PLSD.is_cuda:
            _pin(pool_PLSD, self.cache_PLSD.device)

    def publish(self, block_ids: Sequence[int]) -> None:
        """Copy these blocks from the cache to the pool. Then other processes may read them."""
        if self._pool_PLSD is None:
            return
        for first, end in _runs(block_ids):
            self._pool_PLSD[first:end].copy_(self.cache_PLSD[first:end], non_blocking=True)
        if self.cache_PLSD.is_cuda:
            torch.cuda.current_stream(self.cache_PLSD.device).synchronize()

    def fetch(self, block_ids: Sequence[int]) -> None:
        """Copy these blocks from the pool to the cache, before any work queued on the device later.
        The pool's copies must not change until the step ends.
        """
        if self._pool_PLSD is None:
            return
        for first, end in _runs(block_ids):
            self.cache_PLSD[first:end].copy_(self._pool_PLSD[first:end], non_blocking=True)


def _pin(pool_PLSD: Tensor, device: torch.device) -> None:
    """Pin the pool for direct access by the device. If that fails, copies pass through the driver's
    memory.
    """
    num_bytes = pool_PLSD.numel() * pool_PLSD.element_size()
    status = int(torch.cuda.cudart().cudaHostRegister(pool_PLSD.data_ptr(), num_bytes, 0))  # type: ignore[no-untyped-call]
    if status == 0:
        return
    log.warning(
        "the KV pool of %d MiB cannot be pinned (CUDA error %d): copies are slower",
        num_bytes >> 20,
        status,
    )
    try:
        torch.zeros(1, device=device).add_(
            1
        )  # CUDA reports the refusal again at the next kernel; this one absorbs the report.
    except RuntimeError as error:
        log.debug("reported again: %s", error)


def _runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Merge adjacent blocks into runs: (first, end), end exclusive."""
    runs: list[tuple[int, int]] = []
    for block_id in sorted(block_ids):
        if runs and runs[-1][1] == block_id:
            runs[-1] = (runs[-1][0], block_id + 1)
        else:
            runs.append((block_id, block_id + 1))
    return runs
