"""The off-peak example job with a fake Ray: it releases nodes for other jobs' waiting groups, and
does each piece once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from examples import valley
from examples.valley import NODE_LABEL, Piece, Valley, work


@dataclass
class OneNode:
    """Stand-in for a placement group of the job, on one node."""

    name: str
    node: str
    bundle_specs: list[dict[str, float]]


@dataclass
class Cluster:
    """Fake cluster of three nodes, with groups by name, and running pieces that the test ends."""

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    at_hand: dict[int, Piece] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    num_given: int = 0

    def nodes(self) -> list[dict[str, Any]]:
        head = {"NodeID": "head", "Alive": True, "Resources": {"memory": 1.0}}
        names = ("a", "b", "c")
        return [head, *({"NodeID": n, "Alive": True, "Resources": {"CPU": 2.0}} for n in names)]

    def place(
        self, bundles: Sequence[Any], name: str, bundle_label_selector: Sequence[dict[str, str]]
    ) -> OneNode:
        node = bundle_label_selector[0][NODE_LABEL]
        assert name not in self.groups, "Ray wants different names"
        self.add(name, "CREATED", node)
        return OneNode(name, node, list(bundles))

    def add(self, name: str, state: str, *nodes: str, num_bundles: int = 1) -> None:
        self.groups[name] = {
            "name": name,
            "state": state,
            "bundles": dict.fromkeys(range(num_bundles)),
            "bundles_to_node_id": dict(enumerate(nodes)),
        }

    def table(self, group: OneNode | None = None) -> Any:
        return self.groups if group is None else self.groups[group.name]

    def remove(self, group: OneNode) -> None:
        self.groups[group.name]["state"] = "REMOVED"

    def give(self, piece: Piece, piece_s: float) -> int:
        self.num_given += 1
        self.at_hand[self.num_given] = piece
        return self.num_given

    def wait(self, results: list[int], timeout: float) -> tuple[list[int], list[int]]:
        done = [one for one in results if one not in self.at_hand]
        return done, [one for one in results if one in self.at_hand]

    def get(self, result: int) -> int:
        if result in self.lost:
            raise RayActorError
        return 1

    def finish(self) -> None:
        self.at_hand.clear()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    worker = SimpleNamespace(do=SimpleNamespace(remote=cluster.give))
    context = SimpleNamespace(get_job_id=lambda: "01")
    for name, function in {
        "nodes": cluster.nodes,
        "wait": cluster.wait,
        "get": cluster.get,
        "get_runtime_context": lambda: context,
    }.items():
        monkeypatch.setattr(valley.ray, name, function)
    monkeypatch.setattr(valley, "placement_group", cluster.place)
    monkeypatch.setattr(valley, "placement_group_table", cluster.table)
    monkeypatch.setattr(valley, "remove_placement_group", cluster.remove)
    monkeypatch.setattr(valley, "start", lambda group: worker)
    return cluster


def turn(job: Valley) -> None:
    job.look()
    job.go_on(0.0)


@pytest.mark.promise("examples/ has a job for the nodes that a fleet leaves free")
def test_it_takes_what_is_free_and_gives_what_others_wait_for(cluster: Cluster) -> None:
    job = Valley(limit=1000, piece_size=10, piece_s=0.0)
    turn(job)
    assert set(job.nodes) == {"a", "b", "c"}
    assert sorted(cluster.at_hand.values()) == [(0, 10), (10, 20), (20, 30)]
    cluster.add("unit", "PENDING", num_bundles=2)
    turn(job)
    turn(job)
    assert sum(lent.is_leaving for lent in job.nodes.values()) == 2, "they are asked once"
    assert len(job.nodes) == 3, "the pieces are not done yet"
    cluster.finish()
    turn(job)
    assert len(job.nodes) == 1
    assert len(job.results) == 3
    turn(job)
    assert len(job.nodes) == 1, "nothing is taken while one waits"
    gone = sorted({"a", "b", "c"} - set(job.nodes))
    cluster.add("unit", "CREATED", *gone, num_bundles=2)
    turn(job)
    assert len(job.nodes) == 1
    cluster.groups["unit"]["state"] = "REMOVED"
    turn(job)
    assert len(job.nodes) == 3


def test_every_piece_is_done_once_and_one_of_a_lost_node_again(cluster: Cluster) -> None:
    job = Valley(limit=55, piece_size=10, piece_s=0.0)
    turn(job)
    cluster.lost.add(2)
    while not job.is_done:
        cluster.finish()
        turn(job)
    assert sorted(job.results) == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50), (50, 55)]
    assert cluster.num_given == 7
    assert {group["state"] for group in cluster.groups.values()} == {"REMOVED"}


def test_it_ends_with_the_pieces_at_hand(cluster: Cluster) -> None:
    job = Valley(limit=1000, piece_size=10, piece_s=0.0)
    turn(job)
    job.is_ending = True
    turn(job)
    assert not job.is_done
    cluster.finish()
    turn(job)
    assert job.is_done
    assert sorted(job.results) == [(0, 10), (10, 20), (20, 30)]


def test_pieces_add_up() -> None:
    assert sum(work((begin, begin + 1000)) for begin in range(0, 10_000, 1000)) == 1229
    assert work((0, 3)) == 1
