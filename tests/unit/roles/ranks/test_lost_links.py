"""Who lost whom."""

from __future__ import annotations

from hadal.roles.ranks.lost_links import LostLinks, name_peers


def test_members_blame_members() -> None:
    blame, members = LostLinks(), (0, 1, 2)
    blame.add(0, (1, 0, 7), members)
    blame.add(2, (1,), members)
    blame.add(1, (2,), members)
    blame.add(2, (1,), members)
    assert list(blame) == [1, 2]
    assert (blame.observers(1), blame.observers(2), blame.observers(0)) == ({0, 2}, {1}, set())
    assert blame.most_lost() == 1
    blame.clear()
    assert (list(blame), blame.most_lost()) == ([], None)


def test_in_words() -> None:
    assert name_peers((1, 3)) == "its connection to rank 1, 3"
    assert name_peers(()) == "a peer"
