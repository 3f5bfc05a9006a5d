"""`kill -9` of a leader whose ranks live: the next one takes them over while answers stream.

The ranks are the same processes before and after, requests in decode keep their KV, and the texts
are what they would have been. `HADAL_LEVEL=all`: 30 rounds.
"""

from __future__ import annotations

import signal
import statistics
import threading
import time
from random import Random

import httpx
import pytest

from tests.dist.conftest import StartServer
from tests.dist.serving import RANKED, START_TIMEOUT_S, Server
from tests.dist.test_rank_processes import complete, metric
from tests.dist.test_supervision import stream
from tests.fresh import fresh
from tests.levels import FULL
from tests.waiting import wait_until

NUM_ROUNDS = 30 if FULL else 2
BACK_S = 3.0
BUSY_S = 2.0
"""More where other tests run beside this one."""
NUM_TOKENS = 400 if FULL else 160
NUM_UNSTEADY = 2
STEADY_S = 10.5
"""A leader that falls before it ran so long is started later each time: what is measured from the
third round on is a leader that was steady.
"""
FEW_TOKENS = 20
"""Enough to show KV or experts that are not as they were."""
STRUCK_AT = 0.02, 0.3
"""Share of every stream's text that has come when the leader is struck."""


class Streams:
    """Answers that stream in threads of their own, and when each piece came."""

    def __init__(self, server: Server, number: int) -> None:
        self.texts = [""] * number
        self.came_s: list[float] = []
        self._server, self._model = server, server.model
        self._threads = [
            threading.Thread(target=self._read, args=(index,)) for index in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, index: int) -> None:
        for piece in stream(self._server, NUM_TOKENS, self._model):
            self.texts[index] += piece
            self.came_s.append(time.monotonic())

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(120)
        return self.texts

    def still_for_s(self, since_s: float) -> float:
        """How long nothing came after this moment."""
        return (
            min((came_s for came_s in self.came_s if came_s > since_s + 0.1), default=since_s)
            - since_s
        )


def ranks_of(server: Server, unit: str) -> dict[str, int]:
    return {name: pid for name, pid in server.pids().items() if name.startswith(f"{unit}.")}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leaders_ranks_are_taken_over_with_their_kv_while_answers_stream(
    ranked: Server, number: signal.Signals
) -> None:
    server, random = ranked, Random(fresh().randrange(2**40))
    undisturbed = Streams(server, 1).join()[0]
    ranks, back_s, num_lost = ranks_of(server, "decode-0"), [], 0.0
    for round_index in range(NUM_ROUNDS if number == signal.SIGKILL else 1):
        if round_index >= NUM_UNSTEADY:
            time.sleep(STEADY_S)
        streams, least = Streams(server, 3), random.uniform(*STRUCK_AT) * len(undisturbed)
        wait_until(
            lambda streams=streams, least=least: min(map(len, streams.texts)) >= least,
            "all answers are in decode",
        )
        retries = _retries(server)
        killed_s = time.monotonic()
        old_pid = server.kill("decode-0", number)
        assert streams.join() == [undisturbed] * 3
        back_s.append(streams.still_for_s(killed_s))
        server.wait_restarted("decode-0", old_pid)
        num_lost += _retries(server) - retries
    print(
        f"{number.name}: still for {statistics.median(back_s):.2f} s, at worst {max(back_s):.2f} s"
    )
    assert num_lost <= max(1, len(back_s) // 4), "KV was lost that did not travel from rank to rank"
    assert ranks_of(server, "decode-0") == ranks
    assert httpx.get(f"{server.url}/audit", timeout=30).status_code == 200
    assert max(back_s) < BACK_S + BUSY_S + (number == signal.SIGSTOP) * BACK_S


def test_prefill_ranks_are_kept_as_well(ranked: Server) -> None:
    server = ranked
    undisturbed = complete(server, FEW_TOKENS)
    ranks = ranks_of(server, "prefill-0")
    old_pid, killed_s = server.kill("prefill-0"), time.monotonic()
    assert complete(server, FEW_TOKENS) == undisturbed
    server.wait_restarted("prefill-0", old_pid)
    print(f"prefill-0: back after {time.monotonic() - killed_s:.2f} s")
    assert ranks_of(server, "prefill-0") == ranks
    assert httpx.get(f"{server.url}/audit", timeout=30).status_code == 200


def test_ranks_that_no_leader_can_take_over_are_ended_and_started_again(
    start_server: StartServer,
) -> None:
    server = start_server(**RANKED)
    undisturbed, ranks = complete(server, FEW_TOKENS), ranks_of(server, "decode-0")
    pid = 0
    for _ in range(3):
        wait_until(lambda pid=pid: server.pids()["decode-0"] not in (0, pid), "a leader is started")
        pid = server.kill("decode-0")
    for name, old_pid in ranks.items():
        server.wait_restarted(name, old_pid, 2 * START_TIMEOUT_S)
    assert "decode-0.0 ends with its leader" in server.log()
    assert complete(server, FEW_TOKENS) == undisturbed
    assert metric(server, "hadal_unit_ranks")["decode-0"] == len(ranks)


def _retries(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("hadal_retries_total"))
