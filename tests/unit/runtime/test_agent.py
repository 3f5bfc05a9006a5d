"""Test a node's agent as a process: what it starts, reports and ends. The test plays its
supervisor, on another host.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec
import pytest

from hadal.core.config import ClusterConfig, Deployment, GatewayConfig, UnitsConfig
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.nodes import (
    Address,
    NodeNews,
    NodeOrders,
    Printed,
    ProcessNews,
    ProcessOrder,
)
from hadal.roles.nodes import agent_name
from hadal.runtime.addresses import address_path, read_address, write_address
from hadal.runtime.agent import Joining
from hadal.runtime.process.forks import environment
from hadal.runtime.process.process import EXIT_LEASE, FOLDER_PREFIX, Run, read_run
from hadal.runtime.resolve import resolve
from hadal.runtime.topology import GATEWAY_MODULE, UNIT_MODULE, launch_plan
from hadal.runtime.wire import ZmqWire
from hadal.runtime.wire_sockets import Network
from tests.processes import children_of
from tests.waiting import DEADLINE_S, Hang, wait_until

LOOPBACK, SECRET = "127.0.0.1", b"s" * 32
KEY = "a-key-of-ours"
UNITS = UnitsConfig(threads=1, kv_blocks=16)
NO_UNIT = (UNIT_MODULE, "--unit", "decode-0", "--role", "none")
"""Arguments of a unit that ends immediately, because there is no such role."""


@dataclass
class Agent:
    """Agent process, and what it reported."""

    process: subprocess.Popen[bytes]
    wire: ZmqWire
    supervisor_folder: Path
    temporary: Path
    port: int
    """Port of gateways."""
    joining: Joining
    news: NodeNews | None = None
    said: NodeOrders | None = None
    printed: list[bytes] = field(default_factory=list)
    num_news: int = 0
    """Number of NodeNews received; the agent sends one at least every heartbeat."""

    @property
    def folder(self) -> Path:
        [found] = self.temporary.glob(f"{FOLDER_PREFIX}*")
        return found

    def tell(self, joining: Joining) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(joining) + b"\n")
        self.process.stdin.flush()

    def order(self, *orders: ProcessOrder, **more: object) -> None:
        """Send orders: the processes that the agent must run."""
        self.said = NodeOrders(orders, **more)  # type: ignore[arg-type]
        self._say()

    def hear(self, until: Callable[[], object]) -> None:
        """Receive the agent's reports, and repeat the orders, until a condition holds."""

        def is_so() -> object:
            if found := until():
                return found
            for message in self.wire.receive(0.1):
                self._take(message)
            self._say()
            return None

        try:
            wait_until(is_so, "the agent says so")
        except Hang:
            print(b"".join(self.printed[-30:]).decode())
            raise

    def _say(self) -> None:
        """Repeat the orders, as at every heartbeat."""
        if self.news is not None and self.said is not None:
            self.wire.send(agent_name(3, self.news.boot), self.said)

    def of(self, name: str) -> ProcessNews | None:
        assert self.news is not None
        return next((one for one in self.news.processes if one.name == name), None)

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, NodeNews):
            self.news = message
            self.num_news += 1
            path = agent_name(message.node, message.boot)
            if not address_path(self.supervisor_folder, path).exists():
                write_address(self.supervisor_folder, path, message.agent)
        elif isinstance(message, Printed):
            self.printed += message.lines


@contextmanager
def running(lease_s: float = 60.0, gateways: int = 0) -> Iterator[Agent]:
    with socket.create_server((LOOPBACK, 0)) as found:
        port = found.getsockname()[1]
    asked = Deployment(
        host="0.0.0.0",
        port=port,
        gateway=GatewayConfig(nodes=gateways),
        prefill=UNITS,
        decode=UNITS,
        cluster=ClusterConfig(
            on="ray" if gateways else "local", lease_s=lease_s, node_timeout_s=1.0
        ),
    )
    resolved = resolve(asked)
    run = Run("r0", resolved.deployment, model_digest=resolved.model_digest, secret=SECRET)
    with tempfile.TemporaryDirectory(prefix="hadal-a-") as here:
        supervisor, temporary = Path(here) / "s", Path(here) / "t"
        supervisor.mkdir()
        temporary.mkdir()
        wire = ZmqWire(SUPERVISOR, supervisor, epoch_number=1, network=Network(LOOPBACK, SECRET))
        process = subprocess.Popen(
            [sys.executable, "-m", "hadal.runtime.agent"],
            stdin=subprocess.PIPE,
            env={**environment(), "TMPDIR": str(temporary), "HADAL_LEDGER": "off"},
        )
        joining = Joining(3, LOOPBACK, Address(1, wire.endpoint), run, KEY)
        agent = Agent(process, wire, supervisor, temporary, port, joining)
        agent.tell(joining)
        assert process.stdin is not None
        try:
            agent.hear(lambda: agent.news or process.poll() is not None)
            yield agent
        finally:
            process.stdin.close()
            process.kill()
            process.wait(DEADLINE_S)
            agent.wire.close()


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with running() as agent:
        yield agent


def test_it_says_who_it_is(agent: Agent) -> None:
    assert agent.news is not None
    assert (agent.news.node, agent.news.host) == (3, os.uname().nodename)
    assert agent.news.versions.keys() == {"hadal", "python", "torch", "cpu"}


def test_an_end_is_told_behind_the_last_words_and_once_a_life(agent: Agent) -> None:
    agent.order(ProcessOrder("decode-0", 1, NO_UNIT, 1))
    agent.hear(lambda: (news := agent.of("decode-0")) and news.code is not None)
    assert agent.of("decode-0") == ProcessNews("decode-0", 1, agent.of("decode-0").pid, 2)  # type: ignore[union-attr]
    assert any(b"invalid choice" in line for line in agent.printed)
    agent.printed.clear()
    agent.order(ProcessOrder("decode-0", 2, NO_UNIT, 1))
    agent.hear(lambda: (news := agent.of("decode-0")) and (news.epoch_number, news.code) == (2, 2))
    assert any(b"invalid choice" in line for line in agent.printed)
    agent.order()
    agent.hear(lambda: agent.of("decode-0") is None)


def test_another_supervisor_is_heard_in_the_place_of_the_one_before() -> None:
    """A later supervisor takes over: the run's processes go on, and orders of the earlier supervisor are
    ignored. When the run is over, the agent ends all its processes and leaves.
    """
    plan = next(p for p in launch_plan(Deployment(prefill=UNITS)) if p.name == "prefill-0")
    order = ProcessOrder("prefill-0", 1, (plan.module, *plan.arguments), 1)
    with running() as agent, tempfile.TemporaryDirectory(prefix="hadal-a-") as folder:
        agent.order(order)
        agent.hear(lambda: (news := agent.of("prefill-0")) and news.pid)
        pid = agent.of("prefill-0").pid  # type: ignore[union-attr]
        before, network = agent.wire, Network(LOOPBACK, SECRET)
        agent.wire = ZmqWire(SUPERVISOR, Path(folder), epoch_number=2, network=network)
        agent.supervisor_folder = Path(folder)
        agent.news, agent.said = None, None
        run = replace(agent.joining.run, fingerprint="of other weights", term=2)
        agent.tell(replace(agent.joining, run=run, supervisor=Address(2, agent.wire.endpoint)))
        agent.hear(lambda: agent.news)
        assert agent.of("prefill-0") is not None
        assert agent.of("prefill-0").pid == pid  # type: ignore[union-attr]
        name, num_news = agent_name(3, agent.news.boot), agent.num_news  # type: ignore[attr-defined]
        agent.order(order)

        def have_both_spoken() -> bool:
            before.send(name, NodeOrders((), is_over=True))
            return agent.num_news > num_news + 2

        agent.hear(have_both_spoken)
        assert agent.of("prefill-0").pid == pid  # type: ignore[union-attr]
        assert read_run(agent.folder).fingerprint == "of other weights"
        before.close()
        agent.order(is_over=True)
        assert agent.process.wait(DEADLINE_S) == 0
        assert not list(agent.temporary.glob(f"{FOLDER_PREFIX}*"))


def test_a_gateway_is_started_with_its_keys_at_the_nodes_address() -> None:
    """The node has a gateway and no unit. The gateway knows no front here."""
    with running(gateways=4) as agent:  # On nodes 1 to 4.
        arguments = (GATEWAY_MODULE, "--name", "gateway-1")
        agent.order(
            ProcessOrder("decode-0", 1, NO_UNIT, 1), ProcessOrder("gateway-1", 1, arguments, 1)
        )
        url = f"http://{LOOPBACK}:{agent.port}/v1/models"

        def status_of(key: str) -> int:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(url, headers={"Authorization": f"Bearer {key}"}).status_code
            return 0

        agent.hear(lambda: status_of(KEY))
        assert (status_of(KEY), status_of("another")) == (200, 401)
        assert agent.of("decode-0") is None


def test_nothing_but_units_is_started(agent: Agent) -> None:
    agent.order(
        ProcessOrder("decode-0", 3, ("http.server", "0"), 1),
        ProcessOrder("gateway", 1, (GATEWAY_MODULE, "--name", "gateway"), 1),
        ProcessOrder("decode-1", 1, NO_UNIT, 1),
    )
    agent.hear(lambda: (news := agent.of("decode-1")) and news.code is not None)
    assert agent.of("decode-0") is None
    assert agent.of("gateway") is None, "it would let everybody in: it was given no keys"
    agent.order()
    agent.hear(lambda: not agent.news or not agent.news.processes)


def test_a_unit_runs_until_it_is_not_wanted_and_its_successor_elsewhere_stays_known(
    agent: Agent,
) -> None:
    """A leader's node may have been cut off: then the successor's address arrives with the order
    that ends the old process.
    """
    plan = next(p for p in launch_plan(Deployment(prefill=UNITS)) if p.name == "prefill-0")
    order = ProcessOrder("prefill-0", 1, (plan.module, *plan.arguments), 1)
    agent.order(order)
    agent.hear(lambda: (agent.folder / "prefill-0.sock").exists())
    agent.hear(lambda: agent.of("prefill-0"))
    pid = agent.of("prefill-0").pid  # type: ignore[union-attr]
    elsewhere = Address(2, "tcp://10.0.0.9:4001")
    agent.order(addresses={"prefill-0": elsewhere})
    agent.hear(lambda: agent.of("prefill-0") is None)
    agent.hear(lambda: not Path(f"/proc/{pid}").exists())
    agent.hear(lambda: not (agent.folder / "prefill-0.sock").exists())
    assert read_address(address_path(agent.folder, "prefill-0")) == elsewhere


def forks_of(agent: Agent) -> set[int]:
    """Return the pids of fork servers among the agent's children."""
    return set(children_of(agent.process.pid, b"process.forks"))


@pytest.mark.promise(
    "The old unit finishes its requests and ends; a new one starts with the code that "
    "is installed on its node by then."
)
def test_a_rollout_takes_the_code_that_is_installed_by_then(agent: Agent) -> None:
    agent.order()
    agent.hear(lambda: forks_of(agent))
    [before] = forks_of(agent)
    agent.order(num_rollouts=1)
    agent.hear(lambda: forks_of(agent) and before not in forks_of(agent))
    [after] = forks_of(agent)
    assert os.getpriority(os.PRIO_PROCESS, after) == os.getpriority(os.PRIO_PROCESS, 0)
    agent.order(ProcessOrder("decode-0", 7, NO_UNIT, 1), num_rollouts=1)
    agent.hear(lambda: (one := agent.of("decode-0")) is not None and one.code == 2)
    assert forks_of(agent) == {after}


def test_it_leaves_when_nobody_speaks_to_it_any_more() -> None:
    with running(lease_s=1.0) as agent:
        assert agent.process.wait(DEADLINE_S) == EXIT_LEASE
        assert not list(agent.temporary.glob(f"{FOLDER_PREFIX}*"))
