"""A host with far more to do than it can: nobody is given up for it, and no answer is lost. And who
really is frozen?

Server and spinning processes share one processor, so that whatever else runs here is left alone.
`HADAL_LEVEL=all`: for two minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.dist.conftest import StartServer
from tests.dist.serving import RANKED, Server
from tests.dist.test_rank_processes import complete, metric
from tests.dist.test_supervision import stream
from tests.levels import FULL
from tests.waiting import wait_until

NUM_SPINNING = 15
"""On one processor: the load that thirty make on two."""
SPIN_S = 120.0 if FULL else 6.0
FEW_TOKENS = 16
"""Of an answer on a starved processor."""
NUM_TOKENS = 200 if FULL else 80
"""Of one during which a leader freezes."""
NOTICED_S = 3.0
BUSY_S = 1.5
"""More where other tests run beside this one."""
START_S = 180.0


@contextmanager
def on_one_processor() -> Iterator[None]:
    """What is started meanwhile stays on one processor."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def spinning(number: int) -> Iterator[None]:
    with on_one_processor():
        processes = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)
        ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_starved_server_gives_nobody_up_and_loses_nothing(start_server: StartServer) -> None:
    with on_one_processor():
        server = start_server(**RANKED, wait=False, is_plain=True)  # A fork would be elsewhere.
    server.wait_ready(START_S)
    undisturbed = complete(server, FEW_TOKENS)
    pids, generations = server.pids(), metric(server, "hadal_unit_formation")
    answers: list[str] = []
    with spinning(NUM_SPINNING):
        end_s = time.monotonic() + SPIN_S

        def ask() -> None:
            while time.monotonic() < end_s:
                answers.append(complete(server, FEW_TOKENS))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(answers) >= len(threads)
    assert set(answers) == {undisturbed}
    assert server.pids() == pids
    assert metric(server, "hadal_unit_formation") == generations
    assert "process is ended" not in server.log()


@pytest.mark.parametrize("unit", ["decode-0", "prefill-0"])
def test_a_frozen_leader_is_noticed_within_three_seconds(ranked: Server, unit: str) -> None:
    server = ranked
    model = server.model
    undisturbed = "".join(stream(server, NUM_TOKENS, model))
    pieces: list[str] = []
    asking = threading.Thread(target=lambda: pieces.extend(stream(server, NUM_TOKENS, model)))
    asking.start()
    wait_until(lambda: len(pieces) > 2, "it streams")
    stopped_s = time.monotonic()
    old_pid = server.kill(unit, signal.SIGSTOP)
    wait_until(lambda: f"{unit} has sent no heartbeat" in server.log(), "it is noticed")
    noticed_s = time.monotonic() - stopped_s
    print(f"{unit}: noticed after {noticed_s:.2f} s")
    asking.join(120)
    assert "".join(pieces) == undisturbed
    server.wait_restarted(unit, old_pid)
    assert noticed_s < NOTICED_S + BUSY_S
