"""A stream of 15 minutes, under a timeout of one minute."""

from __future__ import annotations

import time

import pytest

from tests.dist import gate
from tests.dist.answers import Streams, complete
from tests.dist.serving import StartServer

NUM_TOKENS = 3500
NUM_HOLDS = 20
STEPS_A_HOLD = 100
HELD_S = 46.0
"""Seconds for which the gate holds the stream each time: less than the timeout of 60 s; 15 minutes in all."""


@pytest.mark.full
def test_a_stream_that_makes_tokens_has_no_deadline(start_server: StartServer) -> None:
    """`make test` has this in simulated time (tests/sim/test_waiting.py)."""
    server = start_server(limits={"request_timeout_s": 60.0})
    server.gate.hold(gate.DECODE, STEPS_A_HOLD)
    streams = Streams(server, 1, NUM_TOKENS)
    for _ in range(NUM_HOLDS):
        time.sleep(HELD_S)
        server.gate.hold(gate.DECODE, STEPS_A_HOLD)
    server.gate.open()
    assert streams.join() == [complete(server, NUM_TOKENS)]
