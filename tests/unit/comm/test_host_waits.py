"""Times in which an exchange waited for a single host."""

from __future__ import annotations

import pytest

from hadal.comm.host_waits import HostWaits
from hadal.comm.mesh.mesh import MeshGroup
from hadal.core.plans import NO_WAIT, Member, Waited
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
        ({1: 1.0, 2: 1.5, 3: 3.0, 4: 2.0}, {"b": 1.0}),  # A host's last rank counts.
        ({1: 1.0, 2: 2.0, 3: 2.0, 4: 5.0}, {"c": 3.0}),
        ({1: 4.0, 2: 2.0, 3: 2.0, 4: 5.0}, {"c": 1.0}),  # A rank of its own host was missing, too.
        ({1: 7.0, 2: 2.0, 3: 2.0, 4: 5.0}, {}),
        ({1: 1.0, 2: 0.2, 3: 0.3, 4: 0.9}, {}),  # All arrived before the wait began.
        ({1: 1.0, 2: 0.2, 3: 0.3, 4: 1.5}, {"c": 0.5}),
        ({1: 1.0, 2: 2.0, 3: 2.0}, {"c": 6.0}),  # Rank 4 never arrived.
        ({1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0}, {}),  # Either host may be late because of the other.
    ],
)
def test_a_host_is_waited_for_alone(
    arrived_s: dict[int, float], expected: dict[str, float]
) -> None:
    waits = waits_of()
    waits.add(1.0, 8.0, arrived_s)
    assert waits.take() == Waited(7.0, expected)
    assert waits.take() == NO_WAIT


def test_a_formation_begins_without_waits() -> None:
    waits = waits_of()
    waits.add(1.0, 8.0, {})
    waits.form(0, [Member(0, "e0", "a", 1), Member(2, "e2", "b", 1)])
    waits.add(0.0, 9.0, {2: 0.25})
    assert waits.take() == Waited(9.0, {"b": 0.25})


def test_a_unit_on_one_host_blames_none() -> None:
    waits = HostWaits()
    waits.form(0, [Member(0, "e0", "a", 1), Member(1, "e1", "a", 1)])
    waits.add(0.0, 9.0, {1: 3.0})
    assert waits.take() == Waited(9.0)


def test_the_mesh_counts_its_exchanges() -> None:
    """Count a mesh's waits per host; each rank has a loopback address as its host."""
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
        for _ in range(10):
            run_threads([lambda group=group: exchange_sized(group, 300_000) for group in groups])  # type: ignore[misc]
        waited = [group.take_waits() for group in groups]
        assert sum(each.seconds for each in waited) > 0.0
        assert sum(sum(each.alone_s.values()) for each in waited) > 0.0
        assert all(f"127.0.0.{1 + rank}" not in each.alone_s for rank, each in enumerate(waited))
        assert groups[0].take_waits() == NO_WAIT
    finally:
        for group in groups:
            group.close()
