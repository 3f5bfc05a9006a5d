"""Micro-batches of equal estimated time: properties over any chunks and rows, and cases worked out
by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hadal.overlap.split import num_pairs_of, split_chunks, split_ranks

RATES = st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-5))
CHUNKS = st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 4096)), max_size=20)


def time_s(start: int, num_tokens: int, token_s: float, pair_s: float) -> float:
    return token_s * num_tokens + pair_s * num_pairs_of(start, num_tokens)


def split_rows(lengths: Sequence[int], token_s: float, pair_s: float) -> list[bool]:
    """Return a mask of the rows in the second micro-batch, for one rank, row by row: the slow
    reference of `split_ranks`. `lengths`: positions that each row attends to.

    Rows are paired by length and each pair is separated, the most unequal pairs first; the longer
    row goes to the smaller side. So counts differ by one at most, times by one pair.
    """
    most_s = max(token_s, pair_s)
    token_s, pair_s = (token_s / most_s, pair_s / most_s) if most_s else (1.0, 0.0)
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    pairs: list[tuple[float, int, int | None]] = []
    for at in range(0, len(rows) - 1, 2):
        longer, shorter = rows[at], rows[at + 1]
        pairs.append((pair_s * (lengths[longer] - lengths[shorter]), longer, shorter))
    if len(rows) % 2:
        pairs.append((token_s + pair_s * lengths[rows[-1]], rows[-1], None))
    is_second = [False] * len(lengths)
    ahead_s = 0.0  # First minus second.
    for differs_s, longest, other in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
        puts_second = ahead_s > 0
        is_second[longest] = puts_second
        if other is not None:
            is_second[other] = not puts_second
        ahead_s += -differs_s if puts_second else differs_s
    return is_second


def test_pairs_are_those_of_causal_attention() -> None:
    for start, num_tokens in [(0, 1), (0, 4), (7, 3), (100, 0)]:
        assert num_pairs_of(start, num_tokens) == sum(start + i + 1 for i in range(num_tokens))


@given(CHUNKS, RATES)
@example([(0, 1)], (1.0, 0.0))
@example([(0, 3), (0, 0), (5, 1)], (1.0, 0.0))
def test_chunks_are_balanced_to_one_token(
    chunks: list[tuple[int, int]], rates: tuple[float, float]
) -> None:
    token_s, pair_s = rates
    taken = split_chunks(chunks, token_s, pair_s)
    most_s = max(token_s, pair_s)
    token_s, pair_s = (token_s / most_s, pair_s / most_s) if most_s else (1.0, 0.0)
    assert len(taken) == len(chunks)
    assert all(
        0 <= first <= num_tokens for first, (_, num_tokens) in zip(taken, chunks, strict=True)
    )
    # The first half is a prefix: whole chunks, then at most one cut chunk, then nothing.
    is_full = [first == num_tokens for first, (_, num_tokens) in zip(taken, chunks, strict=True)]
    rest = is_full.index(False) if False in is_full else len(is_full)
    assert all(first == 0 for first in taken[rest + 1 :])
    first_s = sum(
        time_s(start, k, token_s, pair_s) for k, (start, _) in zip(taken, chunks, strict=True)
    )
    total_s = sum(time_s(start, n, token_s, pair_s) for start, n in chunks)
    one_s = max((token_s + pair_s * (start + n) for start, n in chunks if n), default=0.0)
    assert abs(first_s - (total_s - first_s)) <= one_s * (1 + 1e-6) + total_s * 1e-9


@given(st.lists(st.integers(1, 200_000), max_size=130), RATES)
@example([5], (0.0, 0.0))
def test_rows_are_balanced_in_number_and_time(
    lengths: list[int], rates: tuple[float, float]
) -> None:
    token_s, pair_s = rates
    is_second = split_rows(lengths, token_s, pair_s)
    most_s = max(token_s, pair_s)
    token_s, pair_s = (token_s / most_s, pair_s / most_s) if most_s else (1.0, 0.0)
    assert len(is_second) == len(lengths)
    num_second = sum(is_second)
    assert abs(len(lengths) - 2 * num_second) <= 1
    times = [token_s + pair_s * length for length in lengths]
    ahead_s = sum(-t if second else t for t, second in zip(times, is_second, strict=True))
    ordered = sorted(times, reverse=True)
    bound_s = max(
        (a - b for a, b in zip(ordered[::2], [*ordered[1::2], 0.0], strict=False)), default=0.0
    )
    assert abs(ahead_s) <= bound_s * (1 + 1e-6) + sum(times) * 1e-9


def test_tokens_alone() -> None:
    assert split_chunks([(0, 10), (0, 20), (0, 10)], 1.0, 0.0) == [10, 10, 0]
    assert split_chunks([(0, 10), (0, 20), (0, 10)], 0.0, 0.0) == [10, 10, 0]
    assert split_chunks([(0, 10), (0, 10)], 1.0, 0.0) == [10, 0]
    assert split_chunks([], 1.0, 1.0) == []


def test_a_long_prompt_is_cut_late_where_attention_counts() -> None:
    """Cut a prompt of n tokens at k = n / sqrt(2): the later half of n costs three times the earlier half."""
    assert split_chunks([(0, 4096)], 0.0, 1.0) == [2896]
    # Far into a prompt all tokens cost about the same.
    assert split_chunks([(1_000_000, 4096)], 0.0, 1.0) == [2050]


def test_rows_of_equal_length_alternate() -> None:
    assert sum(split_rows([100] * 7, 1e-3, 1e-6)) in (3, 4)
    assert sum(split_rows([100] * 8, 1e-3, 1e-6)) == 4
    assert split_rows([], 1.0, 1.0) == []
    assert split_rows([3], 1.0, 1.0) == [False]


def test_the_longest_row_is_weighed_against_the_rest() -> None:
    is_second = split_rows([1000, 10, 500, 490], 0.0, 1.0)
    # Equal counts come first (2 and 2), then equal times.
    assert sum(is_second) == 2
    assert is_second[0] == is_second[1]


@pytest.mark.parametrize("rates", [(-1.0, 0.0), (0.0, -1.0)])
def test_negative_rates_are_refused(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        split_chunks([(0, 1)], *rates)
    with pytest.raises(ValueError, match="must not be negative"):
        split_ranks(np.array([[1]]), np.array([[True]]), *rates)


@given(
    st.integers(1, 9).flatmap(
        lambda num_slots: st.lists(
            st.lists(st.integers(-3, 12), min_size=num_slots, max_size=num_slots),
            min_size=1,
            max_size=5,
        )
    ),
    RATES,
)
@example([[5, 5, 5]], (0.0, 0.0))
def test_all_ranks_at_once_are_as_one_by_one(
    slots: list[list[int]], rates: tuple[float, float]
) -> None:
    """Compare with `split_rows`. A length below 1 is no row; few values, so that many are equal."""
    lengths_RS = np.array(slots, np.int64)
    is_second_RS = split_ranks(lengths_RS, lengths_RS > 0, *rates)
    for lengths, is_row, is_second in zip(lengths_RS, lengths_RS > 0, is_second_RS, strict=True):
        assert is_second[is_row].tolist() == split_rows(lengths[is_row].tolist(), *rates)
        assert not is_second[~is_row].any()


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_a_unit_of_many_ranks_is_as_one_by_one(share: float) -> None:
    rng = np.random.default_rng(round(100 * share))
    lengths_RS = rng.integers(1, 60_000, (24, 161))
    is_row_RS = rng.random(lengths_RS.shape) < share
    is_second_RS = split_ranks(lengths_RS, is_row_RS, 2.3e-7, 1.7e-11)
    for lengths, is_row, is_second in zip(lengths_RS, is_row_RS, is_second_RS, strict=True):
        assert is_second[is_row].tolist() == split_rows(lengths[is_row].tolist(), 2.3e-7, 1.7e-11)
