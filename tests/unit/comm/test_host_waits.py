"""For whom exchanges waited alone."""

from __future__ import annotations

import pytest

from hadal.comm.host_waits import HostWaits
from hadal.comm.mesh.mesh import MeshGroup
from hadal.core.plans import Member
from tests.unit.comm.groups import DEADLINE_S, KEY, run_threads
from tests.unit.comm.mesh.test_mesh import exchange_sized

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}


def waits_of(rank: int = 0) -> HostWaits:
    waits = HostWaits()
    waits.form(rank, [Member(each, f"e{each}", host, 1) for each, host in HOSTS.items()])
    return waits


@pytest.mark.parametrize(
    ("arrived_s", "expected"),
    [
        ({1: 9.0, 2: 1.5, 3: 3.0, 4: 2.0}, {"b": 1.0}),  # The last of a host's ranks counts.
        ({1: 9.0, 2: 2.0, 3: 2.0, 4: 5.0}, {"c": 3.0}),  # Its own host does not.
        ({1: 1.0, 2: 0.2, 3: 0.3, 4: 0.9}, {}),  # All came before anybody waited.
        ({1: 1.0, 2: 0.2, 3: 0.3, 4: 1.5}, {"c": 0.5}),
        ({1: 1.0, 2: 2.0, 3: 2.0}, {"c": 6.0}),  # It never came.
        ({1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0}, {}),  # Either may be late because of the other.
    ],
)
def test_a_host_is_waited_for_alone(
    arrived_s: dict[int, float], expected: dict[str, float]
) -> None:
    waits = waits_of()
    waits.add(1.0, 8.0, arrived_s)
    assert {host: s for host, s in waits.total().items() if s} == expected


def test_what_was_waited_outlives_a_formation() -> None:
    waits = waits_of()
    waits.add(1.0, 8.0, {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0})
    waits.form(0, [Member(0, "e0", "a", 1), Member(2, "e2", "b", 1)])
    waits.add(0.0, 9.0, {2: 0.25})
    assert (waits.total()["b"], waits.total()["c"]) == (0.25, 1.0)


def test_a_unit_on_one_host_tells_nothing() -> None:
    waits = HostWaits()
    waits.form(0, [Member(0, "e0", "a", 1), Member(1, "e1", "a", 1)])
    waits.add(0.0, 9.0, {1: 3.0})
    assert waits.total() == {}


def test_the_mesh_counts_its_exchanges() -> None:
    """Its hosts are addresses, of which a loopback has many."""
    groups = [
        MeshGroup(rank, f"e{rank}", key=KEY, host=f"127.0.0.{1 + rank}", deadline_s=DEADLINE_S)
        for rank in range(3)
    ]
    try:
        members = [
            Member(group.rank, group.epoch, f"127.0.0.{1 + group.rank}", group.port)
            for group in groups
        ]
        run_threads([lambda group=group: group.form(1, members) for group in groups])  # type: ignore[misc]
        assert groups[0].waits() == dict.fromkeys(("127.0.0.1", "127.0.0.2", "127.0.0.3"), 0.0)
        for _ in range(10):
            run_threads([lambda group=group: exchange_sized(group, 300_000) for group in groups])  # type: ignore[misc]
        waited = [group.waits() for group in groups]
        assert [waits[f"127.0.0.{1 + rank}"] for rank, waits in enumerate(waited)] == [0.0] * 3
        assert sum(sum(waits.values()) for waits in waited) > 0.0
    finally:
        for group in groups:
            group.close()
