"""Test the nodes as the supervisor uses them: reports on found but useless nodes, and which of this
host's addresses leads to them.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hadal.core.config import ClusterConfig, Deployment, GatewayConfig, UnitsConfig
from hadal.core.errors import ConfigError
from hadal.core.messages.base import NODE_PROVIDER
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.nodes import (
    Address,
    KeepNodes,
    NodeNews,
    NodeOrders,
    NodesKept,
    Printed,
    ProcessNews,
)
from hadal.roles.nodes import agent_name
from hadal.runtime.addresses import address_path
from hadal.runtime.kept_run import is_same, kept_run
from hadal.runtime.nodes import LiveNodes, address_here
from hadal.runtime.topology import launch_plan

DEPLOYMENT = Deployment(
    prefill=UnitsConfig(ranks_per_node=1),
    decode=UnitsConfig(ranks=2, ranks_per_node=1),
    cluster=ClusterConfig(on="ray", place_timeout_s=5.0, lease_s=10.0),
)
VERSIONS = {"hadal": "1"}


class Told:
    """Wire that can only send."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, AnyMessage]] = []
        self.forgotten: list[str] = []

    def send(self, to: str, message: AnyMessage) -> None:
        self.sent.append((to, message))

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)


class World:
    def __init__(self, folder: Path, *, adopts: bool = False) -> None:
        self.folder = folder
        self.wire = Told()
        self.plans = {plan.name: plan for plan in launch_plan(DEPLOYMENT)}
        self.nodes = LiveNodes(
            DEPLOYMENT,
            self.plans.values(),
            folder,
            self.wire,  # type: ignore[arg-type]
            VERSIONS,
            adopts=adopts,
        )
        self.nodes.keep(0.0, {0, 1, 2})

    def speak(
        self, now_s: float, node: int, *processes: ProcessNews, boot: str = "b", **versions: str
    ) -> None:
        news = NodeNews(
            node,
            boot,
            Address(0, f"tcp://10.0.0.{node}:1"),
            f"host-{node}",
            processes,
            {**VERSIONS, "cpu": "x", **versions},
        )
        self.nodes.handle(now_s, news)

    def found(self, now_s: float) -> None:
        self.nodes.handle(now_s, NodesKept("", ((0,), (1, 2))))


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        yield World(Path(folder))


@pytest.mark.promise(
    "the nodes of a stopped unit go back to Ray, and are acquired again before it starts"
)
@pytest.mark.promise("waits for the nodes of each unit, all of them or none")
def test_groups_are_asked_for_whole_and_given_back(world: World) -> None:
    assert world.wire.sent == [(NODE_PROVIDER, KeepNodes(((0,), (1, 2))))]
    world.nodes.keep(0.1, {0, 1, 2})
    assert len(world.wire.sent) == 1, "it was just said"
    world.nodes.keep(0.2, {2})
    assert world.wire.sent[1:] == [(NODE_PROVIDER, KeepNodes(((1, 2),)))]
    world.speak(0.3, 0)
    told = (agent_name(0, "b"), NodeOrders((), is_over=True))
    assert world.wire.sent[2:] == [told], "its node was given back"


@pytest.mark.promise("takes the running units over with their streams and starts nothing anew")
def test_what_another_supervisor_left_is_found_before_anything_is_done_about_it() -> None:
    leader = ProcessNews("decode-0", 7, 70, address=Address(7, "tcp://10.0.0.1:7"))
    later = ProcessNews("decode-0", 8, 80, address=Address(8, "tcp://10.0.0.2:8"))
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), adopts=True)
        assert world.nodes.is_adopting
        assert world.wire.sent == [], "no group is given back, and none asked for"
        world.nodes.tick(100.0)
        assert world.nodes.is_adopting, "the node provider has not spoken, so no agent can"
        world.found(101.0)
        world.speak(101.1, 1, leader)
        [found] = world.nodes.take_adopted()
        assert (found.pid, found.process.order.epoch_number, found.node) == (70, 7, 1)
        world.speak(101.2, 2, later)
        [followed] = world.nodes.take_adopted()
        assert (followed.pid, found.poll(), followed.poll()) == (80, -9, None)
        world.nodes.tick(101.3)
        assert world.nodes.is_adopting, "node 0 may come"
        told = [message for _, message in world.wire.sent if isinstance(message, NodeOrders)]
        assert {orders.addresses is None for orders in told} == {True}, "nobody is forgotten yet"
        world.speak(101.4, 0)
        world.nodes.tick(101.5)
        assert not world.nodes.is_adopting
        assert world.nodes.take_adopted() == []
        (orders,) = [m.addresses for to, m in world.wire.sent[-3:] if to == agent_name(1, "b")]
        assert orders == {"decode-0": later.address}
        world.nodes.keep(101.6, {0, 1, 2})
        assert (NODE_PROVIDER, KeepNodes(((0,), (1, 2)))) in world.wire.sent


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, ""),
        ({"model": "/other", "model_name": "other"}, "rollout --model"),
        ({"prefill": UnitsConfig(threads=7, ranks_per_node=1)}, ""),
        ({"chunk_tokens": 64}, "(chunk_tokens)"),
        ({"cluster": ClusterConfig(on="ray", name="x")}, "cluster.name"),
    ],
)
def test_what_runs_is_taken_over_if_it_is_what_is_asked_for(
    fields: dict[str, object], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = msgspec.structs.replace(DEPLOYMENT, **fields)
    assert is_same(DEPLOYMENT, asked) == (not says.startswith(("(", "cl")))
    assert says in caplog.text


@pytest.mark.parametrize(
    ("code", "says", "expected"),
    [
        ("import sys; print('no Ray at 10.0.0.9', file=sys.stderr); sys.exit(2)", "no Ray at", 0),
        ("raise RuntimeError('broken')", "broken", 0),
        ("", "", None),
    ],
)
def test_what_ray_cannot_say_is_not_taken_for_nothing(
    code: str, says: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run
    monkeypatch.setattr(
        "hadal.runtime.kept_run.subprocess.run",
        lambda command, **more: run([command[0], "-c", code], **more),
    )
    if expected is None:
        assert kept_run(ClusterConfig(on="ray", name="x")) is None
        return
    with pytest.raises(ConfigError, match=says):
        kept_run(ClusterConfig(on="ray", name="x"))


def test_agents_that_do_not_speak_to_the_next_supervisor_are_not_waited_for() -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), adopts=True)
        world.found(1.0)
        world.nodes.tick(5.9)
        assert world.nodes.is_adopting
        world.nodes.tick(6.1)
        assert not world.nodes.is_adopting


def test_a_node_that_is_found_and_silent_is_told_of(world: World) -> None:
    world.found(1.0)
    for node in (0, 1):
        world.speak(2.0, node)
    world.nodes.tick(5.9)
    assert world.nodes.complaint() == ""
    world.nodes.tick(6.1)
    assert world.nodes.complaint().startswith(
        "no report from the agent of node 2, 5 s after Ray found"
    )
    assert world.nodes.complaint() == "", "once"


def test_a_node_that_was_given_back_is_not_said_to_be_silent(world: World) -> None:
    world.found(1.0)
    for node in range(3):
        world.speak(2.0, node)
    world.nodes.keep(10.0, {1, 2})
    world.nodes.tick(10.1)
    assert world.nodes.complaint() == ""


@pytest.mark.promise("A cell refuses nodes of another version")
def test_a_node_that_would_compute_something_else_is_not_used(world: World) -> None:
    world.found(1.0)
    world.speak(1.0, 0)
    world.speak(1.0, 1, cpu="y")
    world.speak(1.0, 2, hadal="2")
    world.nodes.tick(1.1)
    assert world.nodes.node_for(world.plans["prefill-0"]) == 0
    assert world.nodes.node_for(world.plans["decode-0.0"]) is None
    assert world.nodes.node_for(world.plans["decode-0.1"]) is None
    assert world.nodes.wrong.startswith("node 1 (host-1) is not used: cpu 'y' there and 'x'")


def test_a_lender_that_is_silent_waits_for_ray(world: World) -> None:
    world.nodes.tick(100.0)
    assert world.nodes.wrong == "", "it has not begun"
    world.found(100.0)
    for now_s in (100.0, 101.0):
        for node in range(3):
            world.speak(now_s, node)
        world.nodes.tick(now_s)
    assert world.nodes.wrong == ""
    assert world.nodes.tick(106.0)
    assert world.nodes.wrong.startswith("Ray does not answer")
    world.found(106.1)
    world.nodes.tick(106.2)
    assert world.nodes.wrong == ""


@pytest.mark.promise(
    "another leader on another node of the unit takes the ranks over, with weights and KV"
)
def test_a_leader_goes_to_another_node_only_if_its_own_is_lost(world: World) -> None:
    leader = world.plans["decode-0"]
    world.speak(1.0, 2)
    world.nodes.tick(1.0)
    assert world.nodes.node_for(leader) is None, "its own may soon be there"
    world.speak(1.1, 1)
    assert world.nodes.node_for(leader) == 1
    for step in range(1, 20):
        world.speak(1.1 + 0.25 * step, 2)
        world.nodes.tick(1.1 + 0.25 * step)
    assert world.nodes.node_for(leader) == 2
    assert world.nodes.node_for(world.plans["decode-0.0"]) is None


def test_lines_are_those_of_the_present_life_and_end_with_it(world: World) -> None:
    world.speak(1.0, 0)
    first = world.nodes.start(world.plans["prefill-0"], 0, ("m",), 1)
    world.nodes.handle(1.1, Printed(0, "prefill-0", 1, (b"one\n",)))
    world.nodes.handle(1.1, Printed(0, "prefill-0", 2, (b"not yet\n",)))
    world.nodes.handle(1.1, Printed(1, "prefill-0", 1, (b"not there\n",)))
    world.speak(1.2, 0, ProcessNews("prefill-0", 1, 7, 3))
    assert first.poll() == 3
    assert list(first.stdout) == [b"one\n"]
    second = world.nodes.start(world.plans["prefill-0"], 0, ("m",), 2)
    third = world.nodes.start(world.plans["prefill-0"], 0, ("m",), 3)
    assert list(second.stdout) == [], "nobody reads it any more"
    assert third.poll() is None


def test_an_agent_whose_place_another_took_is_forgotten_after_its_lease(world: World) -> None:
    world.speak(1.0, 0, boot="a")
    world.speak(2.0, 0, boot="b")
    old = agent_name(0, "a")
    assert address_path(world.folder, old).exists()
    world.speak(10.9, 0, boot="b")
    world.nodes.tick(10.9)
    assert not world.wire.forgotten
    world.nodes.tick(11.1)
    assert world.wire.forgotten == [old]
    assert not address_path(world.folder, old).exists()
    assert address_path(world.folder, agent_name(0, "b")).exists()


def test_a_number_that_no_node_has_is_nothing(world: World) -> None:
    world.speak(1.0, 3)
    assert [node.phase for node in world.nodes.status()] == ["absent"] * 3


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:6379", "a loopback address"),
        ("nobody", "cannot be used"),
        ("auto", "cannot be used"),
    ],
)
def test_a_cluster_that_hosts_cannot_share_is_a_clear_error(
    address: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("hadal.runtime.nodes._RAY_ADDRESS", tmp_path / "none")
    with pytest.raises(ConfigError, match=says):
        address_here(ClusterConfig(on="ray", address=address))


def test_without_a_cluster_nobody_else_is_to_reach_it() -> None:
    assert address_here(ClusterConfig()) == "127.0.0.1"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"handover": "shm"}, "reaches no other host"),
        ({"cluster": ClusterConfig(on="ray", node_timeout_s=0.5)}, "must be 1 s at least"),
        ({"cluster": ClusterConfig(on="ray", lease_s=4.0)}, "four times"),
        ({"gateway": GatewayConfig(nodes=1)}, "Set host to 0.0.0.0"),
        ({"gateway": GatewayConfig(nodes=1), "host": "0.0.0.0", "port": 0}, "Choose one"),
        ({"gateway": GatewayConfig(nodes=1), "cluster": ClusterConfig()}, "gateway.processes"),
    ],
)
def test_what_cannot_work_over_hosts_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Deployment(**{"cluster": ClusterConfig(on="ray"), **fields})  # type: ignore[arg-type]
