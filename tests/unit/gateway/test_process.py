"""The gateway's process without its supervisor: how it starts, drains and fails."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from hadal.core.config import GATEWAY_HEARTBEAT_S, BatchesConfig, Deployment
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.gateways import GatewayHeartbeat
from hadal.core.messages.units import Drain
from hadal.gateway import process
from hadal.gateway.assembly import make_gateway
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.salts import salt_of
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.process import listener_of, serve
from hadal.kv.names import extend, root_of
from hadal.runtime.process.forks import API_KEYS
from hadal.runtime.process.process import EXIT_FATAL, LISTEN_FD, Run
from tests.waiting import DEADLINE_S, wait_for

from .fake_units import FakeUnits
from .world import gateway_of, spell


@asynccontextmanager
async def served(
    gateway: Gateway, units: FakeUnits, deployment: Deployment | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a gateway that serves until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        serving = asyncio.create_task(
            serve(deployment or Deployment(model="x"), gateway, listening)
        )
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
            yield client
        units.tell(Drain())
        assert await serving == 0


def test_no_torch_and_a_quick_start() -> None:
    code = (
        "import sys, hadal.gateway.process; assert 'torch' not in sys.modules and 'transformers'"
        " not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}
    )


@pytest.mark.promise("The gateway is started again on the same listening socket")
@pytest.mark.promise("No process of Hadal listens beyond a node's own address.")
def test_listener_is_the_supervisors() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as given,
        listener_of(Run("r", Deployment()), {LISTEN_FD: str(socket.dup(given.fileno()))}) as taken,
    ):
        assert taken.getsockname() == given.getsockname()
    on_a_node = Run("r", Deployment(host="0.0.0.0", port=0), address="127.0.0.1")
    with listener_of(on_a_node, {}) as own:
        assert own.getsockname()[0] == "127.0.0.1", "at the node's address and no other"


@pytest.mark.promise("Running streams finish, new requests get 503, then everything ends.")
@pytest.mark.parametrize("in_time", [True, False])
async def test_drain_lets_streams_finish(
    model: ServedModel,
    in_time: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A drain message arrives while a stream runs. The stream ends by itself or at its deadline,
    and then the process ends. Until then the log reports now and then what is still open.
    """
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(process, "_TELL_S", 0.02)
    if not in_time:
        monkeypatch.setattr(process, "_SHUTDOWN_S", 0.2)

    def num_told() -> int:
        return caplog.text.count("draining: 1 generations still run")

    units = FakeUnits(spell(model, "abc", then_stop=False), step_s=0.002)
    gateway = gateway_of(model, units)
    deployment = Deployment(model="x", drain_timeout_s=DEADLINE_S if in_time else 0.1)
    working = asyncio.create_task(units.run())
    async with served(gateway, units, deployment) as client:
        await wait_for(lambda: gateway.link.snapshot().can_serve, "the units are up")
        body = {"model": "small", "prompt": "hi", "stream": True, "ignore_eos": True}
        body["max_tokens"] = 100
        units.held_at = 20
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            units.tell(Drain())
            await wait_for(lambda: gateway.link.draining, "it drains")
            if in_time:
                refused = await client.post("/v1/completions", json=body)
                assert refused.status_code == 503
                await wait_for(lambda: num_told() >= 2, "it says twice what runs")
                units.let_go()
                assert (await reply.aread()).rstrip().endswith(b"data: [DONE]")
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    await reply.aread()
    working.cancel()
    assert num_told() >= 1
    assert ("did not end" in caplog.text) != in_time


async def test_failed_front_ends_the_process(model: ServedModel) -> None:
    units = FakeUnits(spell(model, "abc"))
    gateway = gateway_of(model, units)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(serve(Deployment(model="x"), gateway, listening))
        await wait_for(lambda: gateway.link.snapshot().can_serve, "the units are up")
        units.tell(object())  # type: ignore[arg-type]  # No message at all: the front raises.
        assert await serving == EXIT_FATAL


async def test_what_fails_beside_the_streams_begins_again(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_AGAIN_S", 0.01)
    looks = 0

    async def count(gateway: Gateway) -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise ZeroDivisionError("no such unit")
        await asyncio.Event().wait()

    monkeypatch.setattr(process, "_count_nodes", count)
    units = FakeUnits(spell(model, "abc"))
    gateway = gateway_of(model, units)
    async with served(gateway, units) as client:
        await wait_for(lambda: looks == 3, "it looks a third time")
        assert (await client.get("/v1/models")).status_code == 200
    assert looks == 3
    assert caplog.text.count("recording which units are up failed") == 2
    assert "no such unit" in caplog.text


@pytest.mark.promise(
    "While the store is down, /v1/files and /v1/batches answer 503 and running lines "
    "wait until it works again."
)
async def test_batches_come_when_their_database_does(model: ServedModel, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    folder.write_text("a file is in its place")
    units = FakeUnits(spell(model, "abc"))
    gateway = gateway_of(model, units)
    deployment = Deployment(model="x", batches=BatchesConfig(url=str(folder / "batches.sqlite")))
    async with served(gateway, units, deployment) as client:
        reply = await client.get("/v1/batches")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "no_batches"
        folder.unlink()
        assert (await client.get("/v1/batches")).json()["data"] == []


async def test_the_run_s_fingerprint_names_blocks_and_keys_are_tenants(folder: Path) -> None:
    units = FakeUnits(lambda generation, index: 5)
    gateway = make_gateway(Deployment(model=str(folder)), units, {API_KEYS: "a, b,"}, "f9")  # type: ignore[arg-type]
    try:
        tenant = gateway.tenancy.keys.check("Bearer b")
        body = b'{"model": "small", "prompt": [%s]}' % b", ".join([b"7"] * 64)
        work = await gateway.service.completion(body, "r", tenant)
    finally:
        gateway.service.close()
    assert tenant == Tenant(salt_of(b"b"))
    assert work.choices[0].generation.chain == extend(root_of(b"f9"), b"", [7] * 64, tenant.salt)


class _Heard(FakeUnits):
    """Fake units that record the heartbeats sent to the supervisor."""

    def __init__(self) -> None:
        super().__init__(lambda generation, index: 5)
        self.beats: list[GatewayHeartbeat] = []

    def send(self, to: str, message: AnyMessage) -> None:
        if isinstance(message, GatewayHeartbeat):
            assert to == SUPERVISOR
            self.beats.append(message)
        super().send(to, message)


async def test_the_supervisor_hears_of_it_from_when_it_answers_and_as_long_as_its_loop_turns(
    model: ServedModel,
) -> None:
    units = _Heard()
    gateway = gateway_of(model, units)
    async with served(gateway, units) as client:
        await wait_for(lambda: len(units.beats) >= 3, "three beats were sent")
        await client.get("/health")
        num_heard = len(units.beats)
        time.sleep(4 * GATEWAY_HEARTBEAT_S)  # Blocks the event loop.
        assert len(units.beats) == num_heard
    assert {heartbeat.pid for heartbeat in units.beats} == {os.getpid()}


@pytest.mark.parametrize("has_served", [False, True])
def test_requests_wait_for_units_where_the_server_has_served(
    folder: Path, has_served: bool
) -> None:
    units = FakeUnits(lambda generation, index: 5)
    gateway = make_gateway(Deployment(model=str(folder)), units, {}, has_served=has_served)  # type: ignore[arg-type]
    try:
        if has_served:
            gateway.readiness.check_open()
        else:
            with pytest.raises(ApiError, match="starting"):
                gateway.readiness.check_open()
    finally:
        gateway.service.close()


def test_module_needs_its_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hadal.gateway.process", "--folder", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode != 0
    assert "run folder" in done.stderr
