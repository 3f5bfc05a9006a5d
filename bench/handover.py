"""What a hand-over costs: pulls of KV blocks by every transport, beside a copy and a raw socket of
the same bytes.

    python -m bench.handover [--quick] [--no-live]

Two processes on this host. Blocks are those of hadal-tiny, of the mid model and of DeepSeek-V3 in
BF16; each figure is the median of pulls taken in turn with a copy of the same blocks from the same
mapped memory, and with a TCP socket that sends them as one run of bytes, nothing checked. NIXL
twice: as it comes (on one host UCX copies from process to process) and over TCP, as between hosts.
Then, live, what a client sees of it (bench/handover_live).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import handover_live
from bench.checkpoints import MID, ROOT, SHIPPED
from hadal.core.messages import BLOCK_TOKENS, KvLease
from hadal.core.model_config import read_model_config
from hadal.runtime.transfer.grants import Grant, Grants
from hadal.runtime.transfer.kv import KvTransfer
from hadal.runtime.transfer.nixl import package
from hadal.runtime.transfer.pool import KvPool, PoolAddress, Shape, pool_name, remove_shared_memory

HOST = "127.0.0.1"
SECRET = b"bench of pulls ..."
COUNTS = (1, 16, 64, 512)
TIMEOUT_S = 300.0
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "shm": ("shm", {}),
    "tcp": ("tcp", {}),
    "nixl": ("nixl", {}),
    "nixl over tcp": ("nixl", {"UCX_TLS": "tcp,self"}),
}
"""Column -> handover, environment of both processes."""


class SelfGrants(Grants):
    """Of a reader that takes what it likes: it holds the secret, so it can."""

    def of(self, lease: KvLease) -> Grant:
        return self.grant(self.name, lease)


@dataclass(frozen=True)
class Blocks:
    """Whose blocks: layers, channels of a latent, and how they are kept."""

    model: str
    num_layers: int
    latent: int
    dtype: str

    def shape(self, num_blocks: int) -> Shape:
        return (1 + num_blocks, self.num_layers, BLOCK_TOKENS, self.latent)

    @property
    def num_bytes(self) -> int:
        return self.num_layers * BLOCK_TOKENS * self.latent * (4 if self.dtype == "float32" else 2)


def all_blocks() -> tuple[Blocks, ...]:
    tiny = read_model_config(SHIPPED)
    return (
        Blocks("hadal-tiny", tiny.num_hidden_layers, tiny.entry_dim, "float32"),
        Blocks(
            "mid",
            MID["num_hidden_layers"],
            MID["kv_lora_rank"] + MID["qk_rope_head_dim"],
            "float32",
        ),
        Blocks("DeepSeek-V3", 61, 512 + 64, "bfloat16"),  # arXiv 2412.19437, section 4.2.
    )


def fill(pool: KvPool) -> None:
    """What an owner has in its pool."""
    pool.blocks[:] = np.arange(pool.blocks.size, dtype=np.uint8).reshape(pool.blocks.shape)


def receive(connection: socket.socket, pool: KvPool, num_bytes: int) -> None:
    """Have an owner's raw socket send so many bytes, into the pool."""
    connection.sendall(num_bytes.to_bytes(8, "little"))
    view = pool.cache[pool.block_bytes : pool.block_bytes + num_bytes]
    while view:
        view = view[connection.recv_into(view) :]


def pull(transfer: KvTransfer, lease: KvLease) -> None:
    """Pull to where the blocks are at the owner. Raises RuntimeError."""
    error = transfer.pull(lease, lease.block_ids)
    if error is not None:
        raise RuntimeError(error)


def in_turn(acts: Sequence[Callable[[], None]], seconds: float) -> list[float]:
    """Seconds of the median call of each, which take turns for so long, three times at least."""
    times: list[list[float]] = [[] for _ in acts]
    for act in acts:
        act()  # Connections, pages, agents.
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s or len(times[0]) < 3:
        for taken, act in zip(times, acts, strict=True):
            begun_s = time.perf_counter()
            act()
            taken.append(time.perf_counter() - begun_s)
    return [statistics.median(taken) for taken in times]


def own(run: str, handover: str, shape: Shape, dtype: str, host: str = HOST) -> None:
    """The owner: its pool served, and the same bytes to whoever asks a raw socket for so many of
    them. `host`: the address of both.
    """
    pool = KvPool.create(pool_name(run, "prefill-0", "1"), shape, dtype)
    fill(pool)
    transfer = KvTransfer(
        pool, handover, host=host, secret=SECRET, grants=SelfGrants(SECRET, pool.name)
    )
    listener = socket.create_server((host, 0))
    print(json.dumps((transfer.address, listener.getsockname()[1])), flush=True)

    def send() -> None:
        connection, _ = listener.accept()
        while word := connection.recv(8):
            connection.sendall(
                pool.cache[pool.block_bytes : pool.block_bytes + int.from_bytes(word, "little")]
            )

    threading.Thread(target=send, daemon=True).start()
    sys.stdin.read()
    transfer.close()
    pool.close()


def measure(run: str, handover: str, shape: Shape, dtype: str, seconds: float) -> None:
    """The puller: print seconds by number of blocks of a copy, a raw socket and a pull."""
    command = [
        sys.executable,
        "-m",
        "bench.handover",
        "--own",
        json.dumps((run, handover, shape, dtype)),
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        address, port = json.loads(owner.stdout.readline())
        pool = KvPool.create(pool_name(run, "decode-0", "1"), shape, dtype)
        source = KvPool.open(PoolAddress.parse(address).name)
        transfer = KvTransfer(
            pool, handover, host=HOST, secret=SECRET, grants=SelfGrants(SECRET, pool.name)
        )
        with socket.create_connection((HOST, port)) as connection:
            found = {
                count: _compare(transfer, pool, source, address, connection, count, seconds)
                for count in COUNTS
                if count < shape[0]
            }
        transfer.close()
        source.close()
        pool.close()
        owner.stdin.close()
    print(json.dumps(found))


def _compare(
    transfer: KvTransfer,
    pool: KvPool,
    source: KvPool,
    address: str,
    connection: socket.socket,
    count: int,
    seconds: float,
) -> tuple[float, float, float]:
    ids = tuple(range(1, 1 + count))
    lease = KvLease(address, ids, (0,) * count, count * BLOCK_TOKENS)
    copied, received, pulled = in_turn(
        (
            lambda: np.copyto(pool.blocks[1 : 1 + count], source.blocks[1 : 1 + count]),
            lambda: receive(connection, pool, count * pool.block_bytes),
            lambda: pull(transfer, lease),
        ),
        seconds,
    )
    pool.blocks[1:] = 0
    pull(transfer, lease)
    if not np.array_equal(pool.blocks[1 : 1 + count], source.blocks[1 : 1 + count]):
        raise RuntimeError("what was pulled is not what is there")
    return copied, received, pulled


def transports(console: Console, most_blocks: int, seconds: float) -> None:
    """A table for each model: a row for each number of blocks."""
    variants = {name: how for name, how in VARIANTS.items() if how[0] != "nixl" or package()}
    for blocks in all_blocks():
        title = (
            f"pulls of {blocks.model}'s blocks, {blocks.num_bytes / 1024:,.0f} KiB each: GB/s (µs)"
        )
        table = Table("blocks", "copy", "raw socket", *variants, title=title)
        shape, by_variant = blocks.shape(most_blocks), {}
        for name, (handover, environment) in variants.items():
            run = f"bench{secrets.token_hex(4)}"
            arguments = json.dumps((run, handover, shape, blocks.dtype, seconds))
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "bench.handover", "--measure", arguments],
                    cwd=ROOT,
                    check=True,
                    text=True,
                    stdout=subprocess.PIPE,
                    env={**os.environ, **environment},
                    timeout=TIMEOUT_S,
                )
            finally:
                remove_shared_memory(run)
            by_variant[name] = json.loads(done.stdout)
        for count in (count for count in COUNTS if count <= most_blocks):
            rows = [found[str(count)] for found in by_variant.values()]
            beside = [statistics.median(row[i] for row in rows) for i in range(2)]
            times = [*beside, *(row[2] for row in rows)]
            num_bytes = count * blocks.num_bytes
            cells = [f"{num_bytes / taken / 1e9:.2f} ({1e6 * taken:,.0f})" for taken in times]
            table.add_row(str(count), *cells)
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.handover", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="up to 64 blocks, and the live part with hadal-tiny"
    )
    parser.add_argument("--no-live", action="store_true", help="without the served part")
    parser.add_argument("--own", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.own:
        run, handover, shape, dtype, *host = json.loads(options.own)
        own(run, handover, tuple(shape), dtype, *host)
    elif options.measure:
        run, handover, shape, dtype, seconds = json.loads(options.measure)
        measure(run, handover, tuple(shape), dtype, seconds)
    else:
        console = Console(width=140)
        transports(console, 64 if options.quick else 512, 0.3 if options.quick else 1.0)
        if not options.no_live:
            handover_live.main(["--quick"] if options.quick else [])


if __name__ == "__main__":
    main()
