"""What a message costs within a host and between hosts: over a Unix socket, and over TCP with CURVE,
numbers and acknowledgements.

    python -m bench.wire [--quick]

There and back between two processes of this host, one message at a time, and a step's worth of
them, out to 144 ranks and back. The two ways take turns; ratios are of the rounds' medians. Between
real hosts the network's own time comes on top.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hadal.core.messages import Tokens
from hadal.runtime.wire import Network, ZmqWire, address_path, read_address, write_address

ADDRESS, SECRET = "127.0.0.1", bytes(32)
SIZES = (300, 4_000, 442_000)
"""Bytes: a small step's plan, a rank's plan, and all tokens of a decode unit at 144 x 128."""
NUM_RANKS = 144
ROUNDS, QUICK_ROUNDS = 5, 1
TIMEOUT_S = 30.0
NEAR, FAR = "unix", "tcp + curve"


def open_wire(name: str, folder: Path, way: str) -> ZmqWire:
    """One end. Each has a folder of its own where it is on a host of its own."""
    network = Network(ADDRESS, SECRET) if way == FAR else None
    return ZmqWire(name, folder, life=1, network=network)


def echo(folder: Path, way: str) -> None:
    """Be the other process: send back what comes, until standard input ends."""
    wire = open_wire("b", folder / "b" if way == FAR else folder, way)
    print(json.dumps(True), flush=True)
    if way == FAR:
        sys.stdin.readline()  # Until it is told where the asker listens.
    idle_s = 0.0
    while idle_s < TIMEOUT_S:
        messages = wire.receive(0.2)
        idle_s = 0.0 if messages else idle_s + 0.2
        for message in messages:
            if isinstance(message, Tokens) and message.unit == "end":
                return wire.close()
            wire.send("a", message)
    return wire.close()


@contextmanager
def pair(way: str) -> Iterator[ZmqWire]:
    """A wire to a process that answers."""
    with tempfile.TemporaryDirectory(prefix="hadal-b-") as name:
        folder = Path(name)
        for each in ("a", "b"):
            (folder / each).mkdir()
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.wire", "--echo", name, way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        wire = open_wire("a", folder / "a" if way == FAR else folder, way)
        if way == FAR:  # What agents do between hosts.
            write_address(folder / "a", "b", read_address(address_path(folder / "b", "b")))
            write_address(folder / "b", "a", read_address(address_path(folder / "a", "a")))
            process.stdin.write(b"\n")
            process.stdin.flush()
        try:
            yield wire
        finally:
            wire.send("b", Tokens("end", b"", b"", b"", (), {}))
            wire.close()
            process.communicate(timeout=TIMEOUT_S)


def there_and_back_s(wire: ZmqWire, size: int, count: int, num_trips: int) -> tuple[float, float]:
    """(seconds, CPU seconds of this process) of `count` messages out and back; medians."""
    message = Tokens("decode-0", bytes(size), b"", b"", (), {})
    took, cpu = [], []
    for _ in range(num_trips):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            wire.send("b", message)
        num_back = 0
        while num_back < count:
            num_back += len(wire.receive(TIMEOUT_S))
        took.append(time.perf_counter() - began_s)
        cpu.append(time.process_time() - began_cpu_s)
    return statistics.median(took), statistics.median(cpu)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.echo:
        return echo(Path(asked.echo[0]), asked.echo[1])
    num_rounds = QUICK_ROUNDS if asked.quick else ROUNDS
    cases = [(size, count) for size in SIZES for count in (1, NUM_RANKS) if size * count < 2e6]
    rows: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {
        case: {NEAR: [], FAR: []} for case in cases
    }
    for _ in range(num_rounds):
        for way in (NEAR, FAR):
            with pair(way) as wire:
                there_and_back_s(wire, 300, 1, 20)
                for (size, count), ways in rows.items():
                    num_trips = (20 if count > 1 or size > 1e5 else 300) // (
                        5 if asked.quick else 1
                    )
                    ways[way].append(there_and_back_s(wire, size, count, num_trips))
    print(f"{'there and back':<28}{NEAR:>14}{FAR:>14}{'ratio':>8}   CPU ms a message of one side")
    for (size, count), ways in rows.items():
        near, far = (statistics.median(seconds for seconds, _ in ways[way]) for way in (NEAR, FAR))
        cpu = [1e3 * statistics.median(cpu for _, cpu in ways[way]) / count for way in (NEAR, FAR)]
        what = f"{count} x {size:,} bytes"
        print(
            f"{what:<28}{1e3 * near:>11.3f} ms{1e3 * far:>11.3f} ms{far / near:>8.2f}"
            f"   {cpu[0]:.3f}, {cpu[1]:.3f}"
        )
    return None


if __name__ == "__main__":
    main()
