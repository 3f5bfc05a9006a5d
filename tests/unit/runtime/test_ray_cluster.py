"""Test the node provider with a fake Ray: what it requests, in which order, and what it releases."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hadal.core.config import ClusterConfig, Deployment, FleetConfig, UnitsConfig
from hadal.core.errors import ConfigError
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.nodes import Address, KeepNodes, NodesKept
from hadal.runtime import ray_cluster
from hadal.runtime.agent import Joining
from hadal.runtime.process.process import Run
from hadal.runtime.ray_cluster import Group, RayNodeProvider

DEPLOYMENT = Deployment(
    prefill=UnitsConfig(threads=2, ranks_per_node=1),
    decode=UnitsConfig(ranks=2, threads=1, ranks_per_node=1),
    fleet=FleetConfig("auto", decode_max=2),
    cluster=ClusterConfig(on="ray", name="cell-0", label="hadal=gpu", place_timeout_s=60.0),
)
"""Node 0 is for prefill; nodes 1 and 2, and 3 and 4, are for decode units."""
PREFILL, DECODE_0, DECODE_1 = (0,), (1, 2), (3, 4)
CPU_2, CPU_1 = {"CPU": 2.0}, {"CPU": 1.0}
ADDRESS = Address(1, "tcp://10.0.0.1:1")


@dataclass(frozen=True)
class PlayedGroup:
    name: str

    @property
    def id(self) -> bytes:
        return self.name.encode()


@dataclass
class PlayedRay:
    """Stand-in for Ray: placement groups by name, and requests to the autoscaler."""

    states: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    floors: list[Sequence[dict[str, float]]] = field(default_factory=list)
    selectors: list[Any] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    """Names of groups that Ray lists as removed, even if another group has the name."""
    actors: list[str] = field(default_factory=list)
    """Names of live actors; removing a group does not end them."""
    kept: dict[bytes, bytes] = field(default_factory=lambda: {ray_cluster._STORAGE_TAG: b"rocksdb"})
    now_s: float = 0.0

    def place(self, bundles: Sequence[Any], *, name: str, **_: Any) -> PlayedGroup:
        self.states[name] = "PENDING"
        self.asked.append(name.removeprefix("run-"))
        return PlayedGroup(name)

    def table(self, group: PlayedGroup | None = None) -> Any:
        if group is not None:
            return {"state": self.states[group.name]}
        listed = {name: {"name": name, "state": state} for name, state in self.states.items()}
        return listed | {
            f"{name} before": {"name": name, "state": "REMOVED"} for name in self.removed
        }

    def remove(self, group: PlayedGroup) -> None:
        self.states[group.name] = "REMOVED"
        self.removed.append(group.name)

    def actor(self, name: str) -> str:
        if name not in self.actors:
            raise ValueError(name)
        return name

    def set_floor(self, bundles: Sequence[dict[str, float]], bundle_label_selectors: Any) -> None:
        self.floors.append(bundles)
        self.selectors.append(bundle_label_selectors)

    def put(self, key: bytes, value: bytes, overwrite: bool = True, namespace: bytes = b"") -> None:
        if overwrite or key not in self.kept:
            self.kept[key] = value

    def find(self, group: Group) -> None:
        """Provide nodes for a group."""
        self.states[f"run-{'-'.join(map(str, group))}"] = "CREATED"

    def waiting(self) -> list[str]:
        return [name for name, state in self.states.items() if state == "PENDING"]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedRay:
    played = PlayedRay()
    for name, function in {
        "placement_group": played.place,
        "placement_group_table": played.table,
        "get_placement_group": PlayedGroup,
        "remove_placement_group": played.remove,
        "request_resources": played.set_floor,
        "_join": lambda address: None,
        "_lets_anybody_in": lambda: False,
        "_internal_kv_get": lambda key, namespace: played.kept.get(key),
        "_internal_kv_put": played.put,
        "_internal_kv_del": lambda key, namespace: played.kept.pop(key, None),
        "_ray_nodes": list,
    }.items():
        monkeypatch.setattr(ray_cluster, name, function)
    monkeypatch.setattr(ray_cluster.ray, "get_actor", played.actor)
    monkeypatch.setattr(ray_cluster.ray, "kill", played.actors.remove)
    monkeypatch.setattr(
        RayNodeProvider,
        "_start",
        lambda _, node, bundle, group, index: played.actors.append(
            ray_cluster._actor_name(group, index)
        ),
    )
    monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: played.now_s)
    return played


@pytest.fixture
def provider(played: PlayedRay) -> RayNodeProvider:
    return RayNodeProvider(Run("run", DEPLOYMENT), ADDRESS)


def have(played: PlayedRay, provider: RayNodeProvider, group: Group) -> None:
    """Request only `group`, and let Ray place it."""
    provider.move((group,))
    played.find(group)
    provider.move((group,))


def test_a_cluster_where_anybody_may_run_code_is_refused_unless_it_is_allowed(
    played: PlayedRay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_cluster, "_lets_anybody_in", lambda: True)
    with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE=token.*cluster\.open_ray"):
        RayNodeProvider(Run("run", DEPLOYMENT), ADDRESS)
    assert not played.asked
    cluster = msgspec.structs.replace(DEPLOYMENT.cluster, open_ray="allow")
    allowed = msgspec.structs.replace(DEPLOYMENT, cluster=cluster)
    RayNodeProvider(Run("run", allowed), ADDRESS)
    assert "requires no token" in caplog.text


def test_an_autoscaler_hears_of_all_nodes_while_groups_are_asked_for_one_by_one(
    played: PlayedRay, provider: RayNodeProvider
) -> None:
    wanted = (PREFILL, DECODE_0)
    provider.move(wanted)
    assert played.asked == ["1-2"], "the largest first"
    assert played.floors == [[CPU_2, CPU_1, CPU_1]]
    assert played.selectors == [[{"hadal": "gpu"}] * 3]
    played.now_s = 20.0
    provider.move(wanted)
    assert len(played.floors) == 1, "nothing changed"
    played.find(DECODE_0)
    provider.move(wanted)
    provider.move(wanted)
    assert played.asked == ["1-2", "0"]
    played.now_s = 40.0
    provider.move(wanted)
    assert len(played.floors) == 2, "somebody else may have said something else"
    provider.move((PREFILL,))
    assert played.floors[-1] == [CPU_2]
    provider.move(())
    assert played.floors[-1] == []
    played.now_s = 1000.0
    provider.move(())
    assert len(played.floors) == 4, "a floor that is nothing is said once"


@pytest.mark.promise(
    "If nodes are missing after place_timeout_s, the start ends with an error that "
    "says what the cluster has."
)
def test_nodes_that_others_have_are_asked_for_again_and_again(
    played: PlayedRay, provider: RayNodeProvider
) -> None:
    assert provider.move((PREFILL,)) == ""
    played.now_s = 61.0
    assert "node 0 not found within 61 s" in provider.move((PREFILL,))
    provider.move((PREFILL,))
    assert played.asked == ["0", "0"]
    assert played.waiting() == ["run-0"]
    played.find(PREFILL)
    assert provider.move((PREFILL,)) == ""
    assert provider.found == (PREFILL,)


@pytest.mark.promise(
    "the nodes of a stopped unit go back to Ray, and are acquired again before it starts"
)
def test_the_actors_of_a_group_that_is_given_back_end_with_it(
    played: PlayedRay, provider: RayNodeProvider
) -> None:
    """Removing a group does not end an actor that Ray must restart whenever it ends."""
    have(played, provider, DECODE_0)
    assert len(set(played.actors)) == 2
    provider.move(())
    assert played.actors == []
    assert played.states == {"run-1-2": "REMOVED"}


def test_an_autoscaler_that_cannot_be_told_is_told_later(
    played: PlayedRay, provider: RayNodeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: Any) -> None:
        raise ray_cluster.RpcError("the head is away")

    with monkeypatch.context() as patch:
        patch.setattr(ray_cluster, "request_resources", fail)
        provider.move((PREFILL,))
    assert played.asked == ["0"]
    played.now_s = 31.0
    provider.move((PREFILL,))
    assert played.floors == [[CPU_2]]


@pytest.mark.promise("takes the running units over with their streams and starts nothing anew")
def test_the_next_supervisor_finds_the_run_and_the_one_before_gives_nothing_back(
    played: PlayedRay, provider: RayNodeProvider, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    have(played, provider, PREFILL)
    assert ray_cluster._find("cell-0", "10.0.0.1:1") == 0
    found = msgspec.json.decode(capfdbinary.readouterr().out, type=Joining)
    assert (found.run, found.supervisor) == (provider._joining.run, ADDRESS)

    later = Run("run", DEPLOYMENT, term=2)
    num_actors = len(played.actors)
    RayNodeProvider(later, Address(2, "tcp://10.0.0.2:2"))
    assert len(played.actors) == 2 * num_actors, "the actor there is told"
    assert provider.is_superseded
    other = RayNodeProvider(later, Address(2, "tcp://10.0.0.3:3"))
    assert other.is_superseded, "of two that follow at once, the first does"
    other.end()
    assert played.states == {"run-0": "CREATED"}
    kept = dict(played.kept)
    again = RayNodeProvider(Run("run", DEPLOYMENT), ADDRESS)
    assert again.is_superseded
    assert played.kept == kept, "one that is started again does not take the run back"
    provider.end()
    assert played.states == {"run-0": "CREATED"}


def test_a_run_that_follows_another_under_its_name_is_a_later_one(played: PlayedRay) -> None:
    """A new run with a changed deployment does not take over the earlier run."""
    RayNodeProvider(Run("run", DEPLOYMENT, term=2), Address(2, "tcp://10.0.0.1:2"))
    new = RayNodeProvider(Run("new", DEPLOYMENT, term=3), Address(3, "tcp://10.0.0.1:3"))
    assert not new.is_superseded
    new.end()
    assert played.kept.keys() == {ray_cluster._STORAGE_TAG}, "nothing is left"


def test_a_group_that_misses_a_node_is_taken_over_as_it_is(played: PlayedRay) -> None:
    played.states["run-1-2"] = "RESCHEDULING"
    provider = RayNodeProvider(Run("run", DEPLOYMENT, term=2), Address(2, "tcp://10.0.0.2:2"))
    assert len(played.actors) == 2, "both are told: Ray starts the missing one again"
    assert provider.found == (DECODE_0,)
    played.now_s = 100.0
    provider.move((DECODE_0,))
    assert played.states["run-1-2"] == "RESCHEDULING", "it is not given back"


def test_a_group_that_its_agents_gave_back_is_asked_for_again(
    played: PlayedRay, provider: RayNodeProvider
) -> None:
    have(played, provider, PREFILL)
    played.states["run-0"] = "REMOVED"
    played.now_s = 31.0
    provider.move((PREFILL,))
    assert played.asked == ["0", "0"]


def test_a_group_is_still_there_although_one_before_it_was_given_back(
    played: PlayedRay, provider: RayNodeProvider
) -> None:
    for wanted in ((PREFILL,), (), (PREFILL,)):
        provider.move(wanted)
        if wanted:
            played.find(PREFILL)
        provider.move(wanted)
    played.now_s = 31.0
    provider.move((PREFILL,))
    assert played.asked == ["0", "0"]
    assert provider.found == (PREFILL,)


def test_a_run_that_ended_is_not_found(
    played: PlayedRay, provider: RayNodeProvider, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    provider.move((PREFILL,))
    assert not provider.is_superseded
    provider.end()
    assert played.states == {"run-0": "REMOVED"}
    assert ray_cluster._find("cell-0", "10.0.0.1:1") == 0
    assert capfdbinary.readouterr().out == b""


def test_a_lender_that_is_started_again_gives_nothing_back_before_it_is_told_to(
    played: PlayedRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A restarted node provider keeps its predecessor's nodes until the supervisor's first request."""
    states: list[dict[str, str]] = []

    class PlayedWire:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.sent: list[AnyMessage] = []

        def receive(self, timeout_s: float) -> list[AnyMessage]:
            states.append(dict(played.states))
            if len(states) == 3:
                return [KeepNodes((DECODE_0,))]
            if len(states) == 5:
                raise KeyboardInterrupt
            return []

        def send(self, to: str, message: AnyMessage) -> None:
            assert isinstance(message, NodesKept)

        def close(self) -> None:
            pass

    played.states = {"run-1-2": "CREATED", "run-3-4": "CREATED", "other-7": "CREATED"}
    monkeypatch.setattr(ray_cluster, "ZmqWire", PlayedWire)
    monkeypatch.setattr(ray_cluster, "enter_child", lambda *_: Run("run", DEPLOYMENT))
    monkeypatch.setattr(ray_cluster, "read_run", lambda *_: Run("run", DEPLOYMENT))
    monkeypatch.setattr(ray_cluster, "read_address", lambda path: ADDRESS)
    monkeypatch.setattr(ray_cluster.signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        sys, "argv", ["ray_cluster", "--folder", str(tmp_path), "--epoch-number", "2"]
    )
    with pytest.raises(KeyboardInterrupt):
        ray_cluster.main()
    assert set(states[2].values()) == {"CREATED"}
    assert states[4] == {"run-1-2": "CREATED", "run-3-4": "REMOVED", "other-7": "CREATED"}
