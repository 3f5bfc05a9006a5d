"""A heavily overloaded host: no process is given up because of it, and no answer is lost.

Server and spinning processes share one processor, so that other work here is undisturbed. That a
frozen process is still detected there is asserted in simulated time (tests/sim/test_starving.py).
`HADAL_LEVEL=all`: some minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.dist.answers import complete
from tests.dist.conftest import StartServer
from tests.dist.served import PROCESSOR
from tests.dist.serving import RANKED, metric
from tests.levels import FULL

NUM_SPINNING = 15
"""Spinning processes on one processor: the load per processor of 30 on two."""
NUM_ANSWERS = 100 if FULL else 6
FEW_TOKENS = 16
ONE = max(os.sched_getaffinity(0))
ON_ONE_PROCESSOR = {PROCESSOR: str(ONE)}
"""Environment of a server that stays on one processor."""


@contextmanager
def spinning(number: int) -> Iterator[None]:
    """Keep processor ONE busy with `number` processes within the block."""
    spin = f"import os; os.sched_setaffinity(0, {{{ONE}}})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.more("tests/sim/test_starving.py asserts it in simulated time")
@pytest.mark.slow("fifteen spinning processes share its processor")
@pytest.mark.timeout(3600)
def test_a_starved_server_gives_no_process_up_and_loses_nothing(start_server: StartServer) -> None:
    server = start_server(environment=ON_ONE_PROCESSOR, **RANKED)
    undisturbed = complete(server, FEW_TOKENS)
    pids = server.pids()
    with spinning(NUM_SPINNING), ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: complete(server, FEW_TOKENS), range(NUM_ANSWERS)))
    assert answers == [undisturbed] * NUM_ANSWERS
    assert server.pids() == pids
    assert metric(server, "hadal_unit_formation") == 2.0, "a unit has formed anew"
    assert "process is ended" not in server.log()
