"""`hadal serve --gateways 2`: two processes on one port. Each may die, hang or drain while answers
stream.
"""

from __future__ import annotations

import json
import os
import signal
import threading

import httpx
import pytest

from tests.dist import gate
from tests.dist.answers import asked, complete
from tests.dist.serving import Server, StartServer, blocks_used
from tests.dist.test_supervision import wait_replaced
from tests.waiting import DEADLINE_S, PATIENCE_S, join, wait_until

NUM_TOKENS = 60
FRONT, OTHER = "gateway", "gateway-1"
pytestmark = pytest.mark.more("one gateway is killed in `make test`")


class Asking:
    """A stream from one of the gateways, read in a thread once `start` is called."""

    def __init__(self, server: Server, gateway: str) -> None:
        self.text = ""
        self.is_broken = False
        self._server = server
        self._client = httpx.Client(
            timeout=PATIENCE_S, limits=httpx.Limits(max_connections=1), trust_env=False
        )
        self._body = asked(server, NUM_TOKENS) | {"stream": True}
        self._connect(gateway)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> str:
        """Wait for the normal end of the stream; return its text."""
        join(self._thread)
        self._client.close()
        return self.text

    def has_begun(self) -> bool:
        return self.text != "" or self.is_broken

    def _connect(self, gateway: str) -> None:
        """Open the persistent connection while the other gateway is frozen, so that this one accepts it."""
        stopped = self._server.kill(OTHER if gateway == FRONT else FRONT, signal.SIGSTOP)
        try:
            self._client.get(f"{self._server.url}/v1/models")
        finally:
            os.kill(stopped, signal.SIGCONT)

    def _read(self) -> None:
        url = f"{self._server.url}/v1/completions"
        try:
            with self._client.stream("POST", url, json=self._body) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        self.text += "".join(choice["text"] for choice in event["choices"])
        except httpx.TransportError:
            self.is_broken = True


def streaming(server: Server, *gateways: str) -> dict[str, Asking]:
    """Start a held stream of each gateway. All connect before any starts; return once all have begun."""
    while True:
        pids = server.pids()
        asking = {gateway: Asking(server, gateway) for gateway in gateways}
        server.gate.hold(gate.DECODE, after=NUM_TOKENS // 2)
        for one in asking.values():
            one.start()
        wait_until(lambda each=asking: all(one.has_begun() for one in each.values()), "they stream")
        if server.pids() == pids:
            return asking
        # On a busy machine a gateway can be frozen for longer than its heartbeat timeout.
        server.gate.open()
        for one in asking.values():
            one.end()
        server.wait_ready()


@pytest.mark.promise(
    "They send their open requests to the next front, with the tokens delivered, and "
    "those streams continue."
)
@pytest.mark.slow("a gateway that hangs is noticed after 2 s, and four of them end")
def test_the_end_of_one_gateway_costs_its_own_streams_alone(mortal: StartServer) -> None:
    """The front ends with the first gateway; the other's streams continue under the next front."""
    server = mortal("--gateways", "2")
    undisturbed = complete(server, NUM_TOKENS)
    for victim, number in (
        (FRONT, signal.SIGKILL),
        (OTHER, signal.SIGKILL),
        (FRONT, signal.SIGSTOP),
        (OTHER, signal.SIGSTOP),
    ):
        asking = streaming(server, FRONT, OTHER)
        old_pid = server.kill(victim, number)
        wait_replaced(server, victim, old_pid)
        server.gate.open()
        # No request is refused during the replacement.
        begun = complete(server, 8)
        assert begun
        assert undisturbed.startswith(begun)
        spared = OTHER if victim == FRONT else FRONT
        assert asking[spared].end() == undisturbed, f"{number.name} of {victim}"
        assert not asking[spared].is_broken
        asking[victim].end()
        assert asking[victim].is_broken
        assert undisturbed.startswith(asking[victim].text)
        server.wait_restarted(victim, old_pid)
        wait_until(lambda: blocks_used(server) == 0, "all blocks are free")
    text = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
    assert {name for name in (FRONT, OTHER) if f'gateway="{name}"' in text} == {FRONT, OTHER}


@pytest.mark.parametrize("is_front_killed", [False, True])
def test_a_drain_waits_for_the_streams_of_both(ending: StartServer, is_front_killed: bool) -> None:
    """A drain waits for the other gateway's streams too, while the front is being replaced."""
    server = ending("--gateways", "2")
    undisturbed = complete(server, NUM_TOKENS)
    asking = streaming(server, *([OTHER] if is_front_killed else [FRONT, OTHER]))
    if is_front_killed:
        server.kill(FRONT)
    server.process.terminate()
    wait_until(lambda: server.status().draining, "it drains")
    server.gate.open()
    assert {one.end() for one in asking.values()} == {undisturbed}
    assert not any(one.is_broken for one in asking.values())
    assert server.process.wait(DEADLINE_S) == 0
    assert "did not end within" not in server.log()
