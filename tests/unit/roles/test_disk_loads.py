"""Reads under way, and what they are measured to take. Deadlines and owners: test_prefill_cache."""

from __future__ import annotations

import pytest

from hadal.policy.routing import NOTHING, Prefix
from hadal.roles.prefill.cache import KNOWN_S, LoadBook, LoadMeter
from hadal.roles.prefill.prompts import PrefillAttempt
from tests.unit.roles.driving import generation


def test_a_line_through_reads_of_several_sizes() -> None:
    meter = LoadMeter()
    assert meter.rates(0.0) is None
    for num_blocks in (1, 10, 4, 30, 2):
        meter.observe(1.0, num_blocks, 0.005 + 0.001 * num_blocks)
    rates = meter.rates(1.0)
    assert rates is not None
    assert (rates.load_s, rates.block_s) == (pytest.approx(0.005), pytest.approx(0.001))
    assert rates.seconds(20) == pytest.approx(0.025)


def test_reads_of_one_size_are_taken_by_the_block() -> None:
    meter = LoadMeter()
    for _ in range(3):
        meter.observe(0.0, 8, 0.016)
    rates = meter.rates(0.0)
    assert rates is not None
    assert (rates.load_s, rates.block_s) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.002))


def test_nothing_is_negative_and_old_measurements_fade_and_end() -> None:
    meter = LoadMeter()
    meter.observe(0.0, 1, 1.0)
    meter.observe(0.0, 100, 0.1)
    rates = meter.rates(0.0)
    assert rates is not None
    assert min(rates.load_s, rates.block_s) >= 0.0
    for _ in range(100):
        meter.observe(5.0, 10, 0.01)
    rates = meter.rates(5.0)
    assert rates is not None
    assert rates.seconds(10) == pytest.approx(0.01, rel=0.05)
    assert meter.rates(5.0 + KNOWN_S) is not None
    assert meter.rates(5.1 + KNOWN_S) is None


def started(book: LoadBook, now_s: float, name: str, prefix: Prefix = NOTHING) -> PrefillAttempt:
    prompt = PrefillAttempt(
        generation(name, 200),
        tuple(range(200)),
        rank=0,
        block_ids=(1, 2, 3, 4),
        prefix=prefix,
        is_loading=True,
    )
    prompt.generation = type(prompt.generation)(
        name, prompt.tokens, (), 5, (), 0, prompt.generation.sampling, 0, chain=bytes(48)
    )
    book.begin(now_s, prompt, 1, 2)
    return prompt


def test_reads_of_a_rank_are_one_behind_the_other() -> None:
    book = LoadBook()
    book.meter.observe(0.0, 2, 0.5)
    one, two = (started(book, 1.0, name) for name in "ab")
    assert book.queued_s() == {0: pytest.approx(1.0)}
    assert [load.into for load in book.of_rank(0)] == [(2, 3), (2, 3)]
    book.end(2.0, 0, 2)
    one.is_loading = False
    meter = LoadMeter()
    meter.observe(0.0, 2, 0.5)
    meter.observe(2.0, 2, 1.0)
    assert book.meter.rates(2.0) == meter.rates(2.0)
    book.end(2.5, 1, 2)  # Half a second, for it waited behind the other.
    two.is_loading = False
    meter.observe(2.5, 2, 0.5)
    assert book.meter.rates(2.5) == meter.rates(2.5)
    assert (len(book), book.check(), book.next_deadline_s) == (0, [], None)


def test_check_sees_a_prompt_that_does_not_know() -> None:
    book = LoadBook()
    prompt = started(book, 0.0, "a")
    assert book.check() == []
    prompt.is_loading = False
    assert book.check() == ["a prompt is waited for and does not know it"]


def test_a_read_that_was_predicted_to_take_long_is_waited_for_as_long() -> None:
    """Many blocks, or many reads before it: it was begun because computing takes longer still."""
    book = LoadBook(timeout_s=5.0)
    started(book, 0.0, "a", Prefix(1, 0, 2, load_s=4.0))
    started(book, 1.0, "b")
    assert book.next_deadline_s == 6.0
    assert [load.load_id for load in book.overdue(7.9)] == [1]
    assert [load.load_id for load in book.overdue(8.0)] == [0, 1]
