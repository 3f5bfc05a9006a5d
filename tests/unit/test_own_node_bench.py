"""The study of replicas on a token's own node, in small."""

from __future__ import annotations

import pytest

from bench import own_node
from hadal.core.config import DECODE


def test_what_stays_on_a_node_is_at_least_what_stayed_by_chance() -> None:
    for num_ranks in (16, 144):
        with_replicas, now, first = own_node.shares(DECODE, num_ranks, 2)
        assert now == pytest.approx(1 - own_node.RANKS_PER_NODE / num_ranks)
        assert 0 < now - first <= with_replicas * now, "all others keep one node's part"


def test_a_quick_run_shows_every_unit(capsys: pytest.CaptureFixture[str]) -> None:
    own_node.main(["--quick"])
    shown = capsys.readouterr().out
    for role, num_ranks in own_node.UNITS:
        assert f"{role} EP{num_ranks}" in shown
