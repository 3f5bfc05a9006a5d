"""What it costs that processes prove themselves: pulls of KV over TCP and exchanges of the mesh,
and what tags cost.

    python -m bench.secret_cost [--quick] [--before FOLDER]

Two processes on this host for each figure. `--before` names a checkout of an earlier commit, such
as 6ec73ee, whose processes knew no secret: its rounds and ours are taken in turn, and the ratio is
the median of the rounds' own. *Tagged* is ours as between hosts, where every record carries a tag.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"
SECRET = bytes(32)
BLOCKS = (1, 16, 64)
LAYERS = 20
"""A block is of 64 tokens, 80 channels, 4 bytes and so many layers: 400 KiB, as the mid model's."""
SIZES = (1_000, 100_000)
TIMEOUT_S = 120.0
BEFORE, NOW, TAGGED = "before", "now", "tagged"


# ---- one of the two processes: `hadal` is whichever PYTHONPATH names, so nothing of it is imported
# above ----
# The owner is rank 0 afterwards, the puller rank 1: most of what two more processes take is imports.
def between_hosts() -> None:
    """Let this process take every peer for one on another host."""
    from hadal.comm.mesh import mesh
    from hadal.runtime.transfer import peers

    peers.is_near = mesh.is_near = lambda address: False


def transfer_of(unit: str, num_blocks: int) -> tuple[Any, Any]:
    """A pool and what it is pulled from, or pulls, with."""
    from hadal.runtime.transfer.kv import KvTransfer
    from hadal.runtime.transfer.pool import KvPool, pool_name

    pool = KvPool.create(
        pool_name(f"cost{os.getppid()}", unit, str(os.getpid())), (num_blocks, LAYERS, 64, 80)
    )
    try:
        from hadal.runtime.transfer.grants import Grants
    except ImportError:  # Before there was a secret.
        return pool, KvTransfer(pool, "tcp", host=HOST, key=SECRET[:16])
    return pool, KvTransfer(pool, "tcp", host=HOST, secret=SECRET, grants=Grants(SECRET, unit))


def hand_over(transfer: Any, lease: Any) -> None:
    """Let the puller have the lease as it would over the wire."""
    try:
        from hadal.core.messages import PullEarly
        from hadal.runtime.transfer.grants import Grants
    except ImportError:
        return
    message = PullEarly(None, lease)  # type: ignore[arg-type]
    transfer._grants.keep(message, Grants(SECRET, "front").to("decode-0", message))


def own() -> None:
    """Serve a pool until the other has pulled."""
    pool, transfer = transfer_of("prefill-0", max(BLOCKS) + 1)
    print(json.dumps(transfer.address), flush=True)
    sys.stdin.readline()
    transfer.close()
    pool.close()


def pull(num_rounds: int) -> None:
    """Pull again and again; print microseconds of the median pull by number of blocks."""
    from hadal.core.messages import KvLease

    address = json.loads(sys.stdin.readline())
    pool, transfer = transfer_of("decode-0", max(BLOCKS) + 1)
    found = {}
    for count in BLOCKS:
        into = tuple(range(1, count + 1))
        lease = KvLease(address, into, (0,) * count, 64 * count)
        hand_over(transfer, lease)

        def once(lease: KvLease = lease, into: tuple[int, ...] = into) -> None:
            error = transfer.pull(lease, into)
            assert error is None, error

        found[f"pull of {count} x {pool.block_bytes >> 10} KiB"] = timed(
            once, num_rounds // count + 20
        )
    print(json.dumps(found), flush=True)
    transfer.close()
    pool.close()


def exchange(rank: int, num_rounds: int) -> None:
    """Exchange with the other rank; print microseconds of the median exchange by size."""
    import torch

    from hadal.comm.mesh.mesh import MeshGroup
    from hadal.core.plans import Member

    torch.set_num_threads(1)
    try:
        group = MeshGroup(rank, f"e{rank}", host=HOST, deadline_s=TIMEOUT_S, key=SECRET)
    except TypeError:  # Before there was a key.
        group = MeshGroup(rank, f"e{rank}", host=HOST, deadline_s=TIMEOUT_S)  # type: ignore[call-arg]
    print(group.port, flush=True)
    ports = json.loads(sys.stdin.readline())
    group.form(1, [Member(peer, f"e{peer}", HOST, port) for peer, port in enumerate(ports)])
    found = {}
    for size in SIZES:
        sent = torch.zeros(size, dtype=torch.uint8)

        def once(sent: torch.Tensor = sent) -> None:
            group.exchange({1 - rank: sent}).wait()

        found[f"exchange of {size:,} bytes"] = timed(once, num_rounds)
    print(json.dumps(found), flush=True)
    sys.stdin.readline()  # Both are done: one that leaves ends the other's generation.
    group.close()


def timed(once: Callable[[], Any], num_rounds: int) -> float:
    """Microseconds of the median call, after some to warm up."""
    taken_s = []
    for number in range(num_rounds + 20):
        start_s = time.perf_counter()
        once()
        if number >= 20:
            taken_s.append(time.perf_counter() - start_s)
    return 1e6 * statistics.median(taken_s)


# ---- the two together ----
def start(source: Path, *arguments: str, is_tagged: bool) -> subprocess.Popen[str]:
    tagged = ["--tagged"] if is_tagged else []
    return subprocess.Popen(
        [sys.executable, __file__, *arguments, *tagged],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source / "src"), "OMP_WAIT_POLICY": "PASSIVE"},
    )


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a process ended without an answer; its own words stand above"
    return json.loads(line)


def one_round(source: Path, num_rounds: int, *, is_tagged: bool) -> dict[str, float]:
    """Microseconds by what was measured."""
    owner = start(source, "--as", "own", "--rounds", str(num_rounds), is_tagged=is_tagged)
    puller = start(source, "--as", "pull", "--rounds", str(num_rounds), is_tagged=is_tagged)
    both = (owner, puller)
    try:
        say(puller, json.dumps(hear(owner)))
        found: dict[str, float] = hear(puller)
        say(owner, "pulled")
        ports = json.dumps([hear(rank) for rank in both])
        for rank in both:
            say(rank, ports)
        first, _ = [hear(rank) for rank in both]
        return found | first
    finally:
        for process in both:
            process.communicate(timeout=TIMEOUT_S)  # Closes what it reads from, which ends it.


def main(arguments: list[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument(
        "--before", type=Path, help="a checkout of an earlier commit to compare with"
    )
    parser.add_argument("--as", dest="role", choices=("own", "pull"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--tagged", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.role:
        if asked.tagged:
            between_hosts()
        own() if asked.role == "own" else pull(asked.rounds)
        exchange(0 if asked.role == "own" else 1, asked.rounds)
        return
    from rich.console import Console
    from rich.table import Table

    variants = {NOW: (ROOT, False), TAGGED: (ROOT, True)}
    if asked.before:
        variants = {BEFORE: (asked.before.resolve(), False), **variants}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(1 if asked.quick else 7):
        order = list(variants)[:: 1 if number % 2 else -1]
        took = {}
        for name in order:
            source, is_tagged = variants[name]
            took[name] = one_round(source, 50 if asked.quick else 400, is_tagged=is_tagged)
        rounds.append(took)
    table = Table(
        title="what proofs, grants and tags cost, µs: median of rounds (fastest to slowest)"
    )
    table.add_column("")
    for name in (*variants, *([f"{NOW} / {BEFORE}"] if asked.before else [])):
        table.add_column(name, justify="right")
    for what in rounds[0][NOW]:
        cells = []
        for name in variants:
            values = [took[name][what] for took in rounds]
            cells.append(
                f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"
            )
        if asked.before:
            ratios = [took[NOW][what] / took[BEFORE][what] for took in rounds]
            cells.append(
                f"{statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        table.add_row(what, *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
