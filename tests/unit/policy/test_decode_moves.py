"""Moves of requests between ranks: few, only where they pay, only to ranks with capacity."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from hadal.policy.decode_moves import (
    Move,
    MoveTerms,
    RunningView,
    choose_moves,
    is_uneven,
    terms_of,
)
from hadal.policy.views import DecodeRanksView
from tests.fresh import fresh

SEEDS = [*range(20), *(fresh().randrange(1 << 30) for _ in range(5))]
TERMS = MoveTerms(gain_steps=1000.0)


def unit(
    blocks_RS: list[list[int]], *, blocks: int = 1000, worst: int = 0
) -> tuple[DecodeRanksView, RunningView]:
    """Return ranks 10, 11, ... with requests of `blocks_RS` blocks (0: a free slot), which may grow by
    `worst` blocks.
    """
    held_RS = np.array(blocks_RS, np.int64)
    longest_RS = np.where(held_RS > 0, held_RS + worst, 0)
    size, slots = held_RS.shape
    view = DecodeRanksView(
        np.arange(10, 10 + size),
        np.full(size, blocks),
        held_RS.sum(axis=1),
        longest_RS.sum(axis=1),
        np.count_nonzero(held_RS, axis=1),
        np.full(size, slots),
    )
    return view, RunningView(held_RS, longest_RS)


def test_the_request_that_levels_two_ranks_moves() -> None:
    found = choose_moves(*unit([[60, 20, 20, 0], [40, 20, 0, 0]]), TERMS, preempts=True)
    assert found == [Move(10, 1, 11)]


def test_nothing_moves_below_the_trigger() -> None:
    even = unit([[50, 51, 0], [50, 50, 0]])
    assert choose_moves(*even, TERMS, preempts=True) == []
    uneven = unit([[60, 30, 30, 0], [40, 20, 0, 0]])
    assert choose_moves(*uneven, replace(TERMS, trigger=1.5), preempts=True) == []
    assert choose_moves(*uneven, TERMS, preempts=True)


def test_nothing_moves_that_does_not_pay() -> None:
    uneven = unit([[60, 20, 20, 0], [40, 20, 0, 0]])
    assert choose_moves(*uneven, replace(TERMS, stall_steps=1e6), preempts=True) == []
    assert choose_moves(*uneven, replace(TERMS, gain_steps=0.0), preempts=True) == []


def test_a_budget_of_none_and_a_rank_alone() -> None:
    uneven = unit([[60, 20, 20, 0], [40, 20, 0, 0]])
    assert choose_moves(*uneven, replace(TERMS, num_moves_max=0), preempts=True) == []
    assert choose_moves(*unit([[60, 20]]), TERMS, preempts=True) == []
    assert choose_moves(*unit([[0, 0], [0, 0]]), TERMS, preempts=True) == []


def test_a_full_rank_takes_nobody() -> None:
    view, running = unit([[60, 20, 20], [10, 10, 10]])
    assert choose_moves(view, running, TERMS, preempts=True) == []
    view, running = unit([[60, 20, 20, 0], [10, 10, 10, 5], [50, 20, 0, 0]])
    assert [move.to_rank for move in choose_moves(view, running, TERMS, preempts=True)] == [12]


def test_the_worst_case_counts_without_a_plan_to_preempt() -> None:
    uneven = unit([[60, 20, 20, 0], [40, 20, 0, 0]], blocks=150, worst=40)
    assert choose_moves(*uneven, TERMS, preempts=False) == []
    assert choose_moves(*uneven, TERMS, preempts=True)


def test_what_cannot_be_moved_stays() -> None:
    view, running = unit([[60, 20, 20, 0], [40, 20, 0, 0]])
    running.num_blocks_RS[0, 1:] = 0
    assert all(move.slot == 0 for move in choose_moves(view, running, TERMS, preempts=True))


def test_the_trigger_alone_says_whether_to_look() -> None:
    assert not is_uneven(unit([[50, 51, 0], [50, 50, 0]])[0], TERMS)
    assert is_uneven(unit([[60, 30, 0], [50, 20, 0]])[0], TERMS)
    assert not is_uneven(unit([[60, 20]])[0], TERMS)
    assert not is_uneven(unit([[0], [0]])[0], TERMS)


def test_shares_come_from_what_steps_took() -> None:
    assert terms_of(0.0, 0.0, 0.0, TERMS) == terms_of(0.0, 0.01, 0.05, TERMS) == TERMS
    terms = terms_of(0.01, 0.02, 0.1, TERMS)
    assert (terms.kv_time_share, terms.request_time_share) == pytest.approx((0.1, 0.2))
    assert terms_of(0.03, 0.01, 0.01, TERMS).kv_time_share == pytest.approx(0.75)
    uneven = unit([[60, 20, 20, 0], [40, 20, 0, 0]])
    assert choose_moves(*uneven, terms_of(1e-6, 0.01, 0.1, TERMS), preempts=True) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("preempts", [False, True])
def test_moves_level_and_keep_every_limit(seed: int, preempts: bool) -> None:
    print("seed", seed)
    random = Random(seed)
    size, slots = random.randint(2, 12), random.randint(1, 20)
    held_RS = [
        [random.choice([0, random.randint(1, 60)]) for _ in range(slots)] for _ in range(size)
    ]
    view, running = unit(
        held_RS, blocks=random.randint(1, 3) * 30 * slots + 60, worst=random.randint(0, 5)
    )
    terms = replace(
        TERMS, num_moves_max=random.randint(1, 6), trigger=random.choice([1.0, 1.02, 1.2])
    )
    moves = choose_moves(view, running, terms, preempts=preempts)
    assert moves == choose_moves(view, running, terms, preempts=preempts)
    assert len(moves) <= terms.num_moves_max
    assert len({(move.from_rank, move.slot) for move in moves}) == len(moves)
    used = view.num_blocks_used.copy()
    worst = view.num_blocks_worst.copy()
    requests = view.num_requests.copy()
    gave = set()
    for move in moves:
        gave.add(move.from_rank)
        assert move.to_rank not in gave  # Blocks left there are not free yet.
        source, target = move.from_rank - 10, move.to_rank - 10
        num = running.num_blocks_RS[source, move.slot]
        longest = running.num_blocks_worst_RS[source, move.slot]
        assert source != target
        assert num > 0
        for array, amount in ((used, num), (worst, longest), (requests, 1)):
            array[source] -= amount
            array[target] += amount
        fits_now = used[target] <= view.num_blocks[target]
        assert fits_now if preempts else worst[target] <= view.num_blocks[target]
        assert requests[target] <= slots
    if moves:
        assert used.max() <= view.num_blocks_used.max()
