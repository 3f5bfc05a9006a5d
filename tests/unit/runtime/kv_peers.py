"""Processes for tests of the KV transfer: the owner of a pool (its blocks record their id and
generation), and a puller that never stops.

    python kv_peers.py owner RUN HANDOVER HOST NUM_BLOCKS [LAYERS]
    python kv_peers.py puller RUN HANDOVER ADDRESS NUM_BLOCKS [LAYERS]

An owner prints its address, then answers the lines that it reads: "free 3", "churn", "connections",
"threads". Its timeout for silent pullers is longer than in production, for a busy machine.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from hadal.core.messages.units import KvLease
from hadal.runtime.transfer import peers
from hadal.runtime.transfer.grants import Grant, Grants
from hadal.runtime.transfer.kv import KvWire
from hadal.runtime.transfer.pool import KvPool, Shape, pool_name

SOURCE = Path(__file__).resolve().parents[3] / "src"
RUN = f"kv{os.getpid()}"
LAYERS = 8
"""Layers per block: 64 tokens x 64 channels x 4 bytes each, 128 KiB for a block."""
PATIENCE_S = 180.0


class SelfGrants(Grants):
    """Grants of a reader that grants itself any lease: it holds the secret, so it can."""

    def of(self, lease: KvLease) -> Grant:
        return self.grant(self.name, lease)


def secret_of(run: str) -> bytes:
    return run.encode().ljust(32, b".")


def wire_of(
    pool: KvPool, handover: str, run: str = RUN, host: str = "127.0.0.1", lease_s: float = 30.0
) -> KvWire:
    secret = secret_of(run)
    return KvWire(
        pool,
        handover,
        host=host,
        secret=secret,
        grants=SelfGrants(secret, pool.name),
        lease_s=lease_s,
    )


def shape_of(num_blocks: int, layers: int = LAYERS) -> Shape:
    return (num_blocks, layers, 64, 64)


def write(pool: KvPool, block_id: int, generation: int) -> None:
    """Fill a block so that every 8 bytes encode block, generation and place."""
    words = pool.blocks[block_id].view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64) + np.uint64(
        (block_id << 44) | (generation << 24)
    )


def is_written(pool: KvPool, at: int, block_id: int, generation: int) -> bool:
    """Return True if own block `at` has what `write` wrote for that block and generation."""
    words: NDArray[np.uint64] = pool.blocks[at].view(np.uint64)
    wanted = np.arange(len(words), dtype=np.uint64) + np.uint64(
        (block_id << 44) | (generation << 24)
    )
    return bool(np.array_equal(words, wanted))


def make_pool(
    run: str, unit: str, num_blocks: int, layers: int = LAYERS, dtype: str = "float32"
) -> KvPool:
    pool = KvPool.create(pool_name(run, unit, "1"), shape_of(num_blocks, layers), dtype)
    for block_id in range(num_blocks):
        write(pool, block_id, 0)
    return pool


def lease_of(address: str, *block_ids: int, versions: tuple[int, ...] | None = None) -> KvLease:
    return KvLease(address, block_ids, versions or (0,) * len(block_ids), 64 * len(block_ids))


class Peer:
    """Handle of an owner or puller process."""

    def __init__(
        self,
        what: str,
        run: str,
        handover: str,
        *rest: object,
        prefix: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        command = [*prefix, sys.executable, __file__, what, run, handover, *map(str, rest)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), **(environment or {})},
        )
        self.address = self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


def own(run: str, handover: str, host: str, num_blocks: int, layers: int = LAYERS) -> None:
    peers.SILENCE_S = PATIENCE_S
    pool = make_pool(run, "prefill-0", num_blocks, layers)
    wire = wire_of(pool, handover, run, host)
    print(wire.address, flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "free":
            pool.free(tuple(map(int, words)))
            print("freed", flush=True)
        elif verb == "churn":
            threading.Thread(target=churn, args=(pool,), daemon=True).start()
            print("churning", flush=True)
        elif verb == "connections":
            print(wire._server.peers.num_connections if wire._server else 0, flush=True)
        elif verb == "threads":
            print(threading.active_count(), flush=True)
    wire.close()
    pool.close()


def churn(pool: KvPool) -> None:
    """Free blocks and write others in their place, forever. Block 0 records the generation of each
    block that is completely written.
    """
    whole = pool.blocks[0].view(np.int64)
    whole[:] = 0
    random = np.random.default_rng(3)
    while True:
        block_id = int(random.integers(1, pool.num_blocks))
        pool.free((block_id,))
        write(pool, block_id, int(pool.versions[block_id]))
        whole[block_id] = pool.versions[block_id]
        time.sleep(0.002)


def pull_for_ever(
    run: str, handover: str, address: str, num_blocks: int, layers: int = LAYERS
) -> None:
    """Pull forever; print each outcome as JSON: the error or null, whether the bytes are right, and
    the transport.
    """
    pool = make_pool(run, f"decode-{os.getpid()}", num_blocks, layers)
    wire = wire_of(pool, handover, run, lease_s=20.0)
    ids = tuple(range(1, num_blocks))
    lease = lease_of(address, *ids)
    while True:
        pool.blocks[1:, ::512] = 0
        error = wire.pull(lease, ids)
        is_right = error is None and all(
            is_written(pool, i, i, 0) for i in (1, len(ids) // 2, len(ids))
        )
        print(json.dumps((error, is_right, wire.transport_of(address))), flush=True)


if __name__ == "__main__":
    what, run, handover, where, *sizes = sys.argv[1:]
    {"owner": own, "puller": pull_for_ever}[what](run, handover, where, *map(int, sizes))
