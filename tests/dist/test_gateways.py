"""`hadal serve --gateways 2`: two processes on one port. Each may die, hang or be asked to end
while answers stream.
"""

from __future__ import annotations

import os
import signal
import threading

import httpx
import pytest

from tests.dist.serving import Server, StartServer, blocks_used
from tests.dist.test_supervision import complete, stream
from tests.levels import FULL
from tests.waiting import wait_until

NUM_TOKENS = 1500 if FULL else 500
FRONT, OTHER = "gateway", "gateway-1"


class Asking:
    """A stream that one of the gateways serves, read in a thread from `start` on. The other one is
    stopped while it connects, for less time than is noticed.
    """

    def __init__(self, server: Server, gateway: str) -> None:
        self.text = ""
        self.is_broken = False
        self._server = server
        self._client = httpx.Client(limits=httpx.Limits(max_connections=1))
        stopped = server.kill(OTHER if gateway == FRONT else FRONT, signal.SIGSTOP)
        try:
            # The connection is kept, and with it who accepted it.
            self._model = self._client.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        finally:
            os.kill(stopped, signal.SIGCONT)
        self._thread = threading.Thread(target=self._read)

    def start(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        try:
            for piece in stream(self._server, NUM_TOKENS, self._model, self._client):
                self.text += piece
        except httpx.TransportError:
            self.is_broken = True

    def end(self) -> str:
        """Wait for it to end by itself; returns its text."""
        self._thread.join(120)
        assert not self._thread.is_alive()
        self._client.close()
        return self.text


def streaming(server: Server, *gateways: str) -> dict[str, Asking]:
    """A stream of each, all of which have just begun: each connects before any of them does."""
    asking = {gateway: Asking(server, gateway) for gateway in gateways}
    for one in asking.values():
        one.start()
    wait_until(lambda: all(len(one.text) > 20 for one in asking.values()), "they stream")
    return asking


@pytest.mark.timeout(600)
def test_the_end_of_one_gateway_costs_its_own_streams_alone(start_server: StartServer) -> None:
    """The front goes with the first, and the other's streams go on under the next one, where they
    stopped.
    """
    server = start_server("--gateways", "2")
    undisturbed = complete(server, NUM_TOKENS)
    for victim, number in (
        (FRONT, signal.SIGKILL),
        (OTHER, signal.SIGKILL),
        (FRONT, signal.SIGSTOP),
        (OTHER, signal.SIGSTOP),
    ):
        asking = streaming(server, FRONT, OTHER)
        old_pid = server.kill(victim, number)
        wait_until(
            lambda name=victim, gone=old_pid: server.pids()[name] != gone,
            "its end was noticed",
        )
        # Nobody is refused meanwhile.
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
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert {name for name in (FRONT, OTHER) if f'gateway="{name}"' in text} == {FRONT, OTHER}


def test_a_drain_waits_for_the_streams_of_both(start_server: StartServer) -> None:
    server = start_server("--gateways", "2")
    undisturbed = complete(server, NUM_TOKENS)
    asking = streaming(server, FRONT, OTHER)
    server.process.terminate()
    assert [one.end() for one in asking.values()] == [undisturbed] * 2
    assert server.process.wait(30) == 0
    assert "did not end within" not in server.log()


def test_a_drain_while_the_front_is_being_replaced_waits_for_the_other_s_streams(
    start_server: StartServer,
) -> None:
    server = start_server("--gateways", "2")
    undisturbed = complete(server, NUM_TOKENS)
    asking = streaming(server, OTHER)[OTHER]
    server.kill(FRONT, signal.SIGKILL)
    server.process.terminate()
    assert asking.end() == undisturbed
    assert not asking.is_broken
    assert server.process.wait(60) == 0
    assert "did not end within" not in server.log()
