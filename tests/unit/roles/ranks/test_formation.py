"""Test the reports of a formation's members."""

from __future__ import annotations

from hadal.core.plans import Formed
from hadal.roles.ranks.formation import Formation, name_peers


def test_members_blame_members() -> None:
    formation = Formation(1, {0: "a", 1: "b", 2: "c"})
    formation.lost(0, (1, 0, 7))
    formation.lost(2, (1,))
    formation.lost(1, (2,))
    formation.lost(2, (1,))
    assert formation.blamed == [1, 2]
    found = formation.observers(1), formation.observers(2), formation.observers(0)
    assert found == ({0, 2}, {1}, set())
    assert formation.most_lost() == 1
    assert (Formation(2, {0: "a"}).blamed, Formation(2, {0: "a"}).most_lost()) == ([], None)


def test_answers_are_missing_until_every_member_formed_or_failed() -> None:
    formation = Formation(1, {0: "a", 2: "c"})
    formation.answered(2, Formed(1, None, num_loaded=3))
    assert (formation.missing, formation.num_loaded, formation.failed_s) == ({0}, 3, None)
    formation.answered(0, Formed(1, "PeerLost", (2,)))
    formation.failed(1.0, 0, (2,))
    formation.failed(2.0, 2, ())
    assert (formation.missing, formation.failed_s, formation.blamed) == (set(), 1.0, [2])


def test_in_words() -> None:
    assert name_peers((1, 3)) == "its connection to rank 1, 3"
    assert name_peers(()) == "a peer"
