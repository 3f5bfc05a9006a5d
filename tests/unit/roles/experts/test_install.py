"""Test a layer's installation: which rank stages which expert from where, and its states."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hadal.core.errors import InvariantError
from hadal.core.placement import spread
from hadal.core.plans import Source, Staged
from hadal.roles.experts.install import Installation, InstallState, choose_sources
from tests.fresh import fresh

ADDRESSES = {rank: ("h", 7000 + rank) for rank in range(4)}


def install(slots: np.ndarray, weights: np.ndarray | None = None) -> Installation:
    return Installation(0, 5, 3, slots, weights, 0, 10.0)


def test_only_ranks_whose_slots_change_stage() -> None:
    placement = spread(2, 8, 4)
    slots = placement.slot_to_expert_LRS[0].copy()
    slots[1, 0], slots[2, 0] = slots[2, 0], slots[1, 0]
    installation = install(slots)
    plans = installation.stage_plans(placement, ADDRESSES)
    assert plans.keys() == installation.waiting == {1, 2}
    assert plans[1].slot_to_expert == tuple(slots[1].tolist())
    assert plans[1].sources == (Source(int(slots[1, 0]), "h", 7002),)
    assert (plans[1].formation, plans[1].stage_id, plans[1].layer) == (3, 5, 0)
    assert not installation.expects(3, Staged(3, 5, 0)), "it was not asked"
    assert not installation.expects(1, Staged(3, 4, 0)), "an earlier one"
    assert not installation.expects(1, Staged(2, 5, 0)), "another generation"
    assert installation.expects(1, Staged(3, 5, 0))
    installation.staged(1)
    assert installation.state is InstallState.STAGING
    installation.staged(2)
    assert installation.state is InstallState.READY
    flip = installation.flip(77)
    assert (flip.layer, flip.stage_id, flip.weights) == (0, 5, b"")
    found = np.frombuffer(flip.slot_to_expert, np.int16).reshape(slots.shape).tolist()
    assert found == slots.tolist()
    assert installation.state is InstallState.FLIPPING
    with pytest.raises(InvariantError, match="flipping and cannot flip"):
        installation.flip(78)


def test_a_rank_whose_slots_only_swap_stages_from_itself() -> None:
    placement = spread(1, 8, 4)
    slots = placement.slot_to_expert_LRS[0].copy()
    slots[3] = slots[3, ::-1]
    plans = install(slots).stage_plans(placement, ADDRESSES)
    assert (plans.keys(), plans[3].sources) == ({3}, ())


def test_a_new_split_needs_no_staging() -> None:
    placement = spread(1, 8, 4, 8)
    weights = np.full((4, 4), 8, np.uint8)
    installation = install(placement.slot_to_expert_LRS[0], weights)
    assert installation.stage_plans(placement, ADDRESSES) == {}
    assert installation.state is InstallState.READY
    assert installation.flip(0).weights == weights.tobytes()


def test_sending_is_spread_evenly() -> None:
    seed = fresh().randrange(2**32)
    for number in (seed, *range(20)):
        random = Random(number)
        slots = spread(1, 24, 6, 48).slot_to_expert_LRS[0]
        addresses = {rank: ("h", 7000 + rank) for rank in range(6)}
        missing = {
            rank: random.sample(
                sorted(set(range(24)) - set(slots[rank].tolist())), random.randint(0, 6)
            )
            for rank in range(6)
        }
        sources = choose_sources(missing, slots, addresses)
        num_sent = dict.fromkeys(range(6), 0)
        for rank, chosen in sources.items():
            assert sorted(source.expert for source in chosen) == sorted(missing[rank])
            for source in chosen:
                assert source.expert in slots[source.port - 7000]
                num_sent[source.port - 7000] += 1
        total = sum(num_sent.values())
        assert max(num_sent.values()) <= total / 6 + 2, (number, num_sent)


def test_without_a_giver_the_checkpoint_is_read() -> None:
    slots = np.array([[0, 1], [2, 3]], np.int16)
    sources = choose_sources({0: [2], 1: [0]}, slots, {0: ("h", 7000), 1: ("h", 0)})
    assert sources == {0: [Source(2)], 1: [Source(0, "h", 7000)]}
