"""`hadal serve` with a fleet: units start when they are needed and stop when they are not, without
effect on streams.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from hadal.runtime.process.status import read_fleet
from tests.dist.answers import Streams, complete, under_way
from tests.dist.serving import Server, StartServer, metric
from tests.waiting import DEADLINE_S, join, wait_until

NUM_TOKENS = 60
FLEET: dict[str, Any] = {
    "mode": "auto",
    "decode_max": 2,
    "decode_use": 0.7,
    "start_s": 1.0,
    "period_s": 0.1,
    "hold_s": 0.5,
}
SLOW = {**FLEET, "decode_tokens_per_s": 0.01}
"""Fleet configuration with which any load is too much for one unit."""
HEARTBEAT_S = 0.1
"""Seconds between two reports of the demand to the fleet, which forgets demand after 15 samples."""


def phase(server: Server, name: str) -> str:
    return server.status().processes[name].phase


@contextmanager
def asking(server: Server) -> Iterator[None]:
    """Within the block, send one-token requests one after another; prefill alone computes them."""
    is_enough = threading.Event()

    def ask() -> None:
        while not is_enough.is_set():
            complete(server, 1)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    is_enough.set()
    join(thread)


def on_both(server: Server) -> list[Streams]:
    """Start a stream on each decode unit; the second unit starts because of the load. The gate
    holds both, and once the load ends, one unit is not needed.
    """
    first = under_way(server, "decode-0", NUM_TOKENS)
    with asking(server):
        wait_until(lambda: phase(server, "decode-1") == "ready", "a second unit works")
        second = Streams(server, 1, NUM_TOKENS)
        wait_until(
            lambda: metric(server, "hadal_kv_blocks_used", 'unit="decode-1"'), "it has a stream"
        )
    return [first, second]


def wait_for_one_to_rest(server: Server) -> None:
    """Wait until a decode unit rests; it may be either of the two."""
    units = ("decode-0", "decode-1")
    wait_until(lambda: "resting" in [phase(server, unit) for unit in units], "one of them rests")


@pytest.mark.slow("a unit is started and drained")
def test_a_unit_comes_when_it_is_needed_and_goes_when_its_stream_has_ended(
    start_server: StartServer,
) -> None:
    server = start_server(heartbeat_s=HEARTBEAT_S, fleet=SLOW)
    assert (phase(server, "decode-1"), server.pids()["decode-1"]) == ("resting", 0)
    both = on_both(server)
    wait_until(lambda: "draining decode-" in server.log(), "one of them drains")
    server.gate.open()
    texts = [text for streams in both for text in streams.join()]
    wait_for_one_to_rest(server)
    wait_until(
        lambda: (
            httpx.get(f"{server.url}/health", timeout=DEADLINE_S).json()["units_up"]["decode"] == 1
        ),
        "one is up",
    )
    assert texts == [complete(server, NUM_TOKENS)] * 2
    assert server.stop() == 0


@pytest.mark.more("simulated fleets have drains of all lengths")
def test_a_drain_that_takes_too_long_moves_the_streams(start_server: StartServer) -> None:
    server = start_server(heartbeat_s=HEARTBEAT_S, fleet={**SLOW, "drain_timeout_s": 0.3})
    both = on_both(server)
    wait_until(lambda: metric(server, "hadal_retries_total"), "a stream is moved")
    server.gate.open()
    texts = [text for streams in both for text in streams.join()]
    wait_for_one_to_rest(server)
    assert texts == [complete(server, NUM_TOKENS)] * 2
    assert server.stop() == 0


@pytest.mark.full  # test_supervision kills units; tests/unit/roles/test_fleet kills a fleet's.
def test_a_unit_of_the_fleet_that_dies_is_replaced(start_server: StartServer) -> None:
    """Units measure their own rate here, so one unit is enough for this load."""
    server = start_server(fleet=FLEET)
    undisturbed = complete(server, NUM_TOKENS)

    def is_measured() -> bool:
        seen = read_fleet(server.folder)
        return seen is not None and seen.roles["decode"].unit_rate > 0

    wait_until(is_measured, "the fleet knows how fast a unit is")
    old_pid = server.kill("decode-0")
    server.wait_restarted("decode-0", old_pid)
    assert complete(server, NUM_TOKENS) == undisturbed
    assert phase(server, "decode-1") == "resting"
