"""Test reads in flight and the rates measured from them. test_cache tests reads with a leader."""

from __future__ import annotations

import pytest

from hadal.policy.cached_prefix import NOTHING, Prefix
from hadal.roles.prefill.prompts import PrefillAttempt
from hadal.roles.prefill.reads import KNOWN_S, DiskReads, ReadMeter
from tests.unit.roles.driving import generation


def test_a_line_through_reads_of_several_sizes() -> None:
    meter = ReadMeter()
    assert meter.rates(0.0) is None
    for num_blocks in (1, 10, 4, 30, 2):
        meter.observe(1.0, num_blocks, 0.005 + 0.001 * num_blocks)
    rates = meter.rates(1.0)
    assert rates is not None
    assert (rates.load_s, rates.block_s) == (pytest.approx(0.005), pytest.approx(0.001))
    assert rates.seconds(20) == pytest.approx(0.025)


def test_reads_of_one_size_are_taken_by_the_block() -> None:
    meter = ReadMeter()
    for _ in range(3):
        meter.observe(0.0, 8, 0.016)
    rates = meter.rates(0.0)
    assert rates is not None
    assert (rates.load_s, rates.block_s) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.002))


def test_nothing_is_negative_and_old_measurements_fade_and_end() -> None:
    meter = ReadMeter()
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


def started(
    membership: DiskReads, now_s: float, name: str, prefix: Prefix = NOTHING
) -> PrefillAttempt:
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
    membership.begin(now_s, prompt, 1, 2)
    return prompt


def test_reads_of_a_rank_are_one_behind_the_other() -> None:
    membership = DiskReads()
    membership.meter.observe(0.0, 2, 0.5)
    one, two = (started(membership, 1.0, name) for name in "ab")
    assert membership.queued_s() == {0: pytest.approx(1.0)}
    assert [load.into for load in membership.of_rank(0)] == [(2, 3), (2, 3)]
    membership.end(2.0, 0, 2)
    one.is_loading = False
    meter = ReadMeter()
    meter.observe(0.0, 2, 0.5)
    meter.observe(2.0, 2, 1.0)
    assert membership.meter.rates(2.0) == meter.rates(2.0)
    membership.end(2.5, 1, 2)  # Took 0.5 s: until 2.0 s it waited for the first.
    two.is_loading = False
    meter.observe(2.5, 2, 0.5)
    assert membership.meter.rates(2.5) == meter.rates(2.5)
    assert (len(membership), membership.check(), membership.next_deadline_s) == (0, [], None)


def test_check_sees_a_prompt_that_does_not_know() -> None:
    membership = DiskReads()
    prompt = started(membership, 0.0, "a")
    assert membership.check() == []
    prompt.is_loading = False
    assert membership.check() == ["a prompt waits for a read and is not marked as loading"]


def test_a_read_that_was_predicted_to_take_long_is_waited_for_as_long() -> None:
    """The read has many blocks, or many reads before it; computing would take even longer."""
    membership = DiskReads(timeout_s=5.0)
    started(membership, 0.0, "a", Prefix(1, 0, 2, load_s=4.0))
    started(membership, 1.0, "b")
    assert membership.next_deadline_s == 6.0
    assert [load.read_id for load in membership.overdue(7.9)] == [1]
    assert [load.read_id for load in membership.overdue(8.0)] == [0, 1]
