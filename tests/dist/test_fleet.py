"""`hadal serve` with a fleet: units come when they are needed and go when they are not, and no
stream notices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx

from tests.dist.serving import Server, StartServer
from tests.waiting import wait_until

PROMPT = list(range(10, 130))
NUM_SLOTS = 4
FLEET: dict[str, Any] = {
    "mode": "auto",
    "decode_max": 2,
    "decode_use": 0.7,
    "start_s": 1.0,
    "period_s": 0.3,
    "hold_s": 1.0,
}


def body(server: Server, num_tokens: int) -> dict[str, Any]:
    return {
        "model": server.model,
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": False,
    }


def complete(server: Server, num_tokens: int) -> str:
    reply = httpx.post(f"{server.url}/v1/completions", json=body(server, num_tokens), timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == num_tokens
    return str(reply.json()["choices"][0]["text"])


def phase(server: Server, name: str = "decode-1") -> str:
    return server.status().processes[name].phase


class Crowd:
    """Clients that ask one thing after another, until it is enough."""

    def __init__(self, server: Server, num_clients: int, num_tokens: int) -> None:
        self.answers: list[str] = []
        self._enough = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(server, num_tokens))
            for _ in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, server: Server, num_tokens: int) -> None:
        while not self._enough.is_set():
            self.answers.append(complete(server, num_tokens))

    def until(self, condition: Callable[[], bool], what: str) -> list[str]:
        """Go on until it holds; returns all answers."""
        try:
            wait_until(condition, what)
        finally:
            self._enough.set()
            for thread in self._threads:
                thread.join(120)
        return self.answers


def test_a_unit_comes_with_the_crowd_and_goes_after_it(start_server: StartServer) -> None:
    server = start_server(decode={"max_requests": NUM_SLOTS}, fleet=FLEET)
    undisturbed = complete(server, 200)
    assert (phase(server), server.pids()["decode-1"]) == ("resting", 0)
    assert phase(server, "decode-0") == "ready"
    answers = Crowd(server, 3 * NUM_SLOTS, 200).until(
        lambda: phase(server) == "ready", "a second unit works"
    )
    assert set(answers) == {undisturbed}
    # One long answer on each of both: that is work for one of them. The other's goes on, there or
    # elsewhere.
    answers = Crowd(server, 2, 1500).until(
        lambda: phase(server, resting(server)) == "resting", "one of them rests"
    )
    assert len(set(answers)) == 1
    assert next(iter(answers)).startswith(undisturbed)
    wait_until(
        lambda: httpx.get(f"{server.url}/health", timeout=5).json()["units_up"]["decode"] == 1,
        "one is up",
    )
    assert complete(server, 200) == undisturbed
    assert server.stop() == 0


def resting(server: Server) -> str:
    """Either may be the one that goes."""
    return next(
        (name for name in ("decode-0", "decode-1") if phase(server, name) == "resting"), "decode-1"
    )


def test_a_drain_that_takes_too_long_moves_the_streams(start_server: StartServer) -> None:
    server = start_server(
        decode={"max_requests": NUM_SLOTS}, fleet={**FLEET, "drain_timeout_s": 0.3}
    )
    undisturbed = complete(server, 3000)
    for _ in range(3):  # The unit that goes may be between two answers.
        Crowd(server, 3 * NUM_SLOTS, 200).until(
            lambda: phase(server, resting(server)) == "ready", "a second unit works"
        )
        answers = Crowd(server, 2, 3000).until(
            lambda: phase(server, resting(server)) == "resting", "one of them rests"
        )
        assert set(answers) == {undisturbed}
        if retries(server) > 0.0:
            break
    assert retries(server) > 0.0
    assert server.stop() == 0


def retries(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=5).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("hadal_retries_total"))


def test_a_unit_of_the_fleet_that_dies_is_replaced(start_server: StartServer) -> None:
    server = start_server(decode={"max_requests": NUM_SLOTS}, fleet=FLEET)
    undisturbed = complete(server, 100)
    old_pid = server.kill("decode-0")
    server.wait_restarted("decode-0", old_pid)
    assert complete(server, 100) == undisturbed
    assert phase(server) == "resting"
