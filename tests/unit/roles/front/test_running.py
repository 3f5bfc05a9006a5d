"""Test rows of requests in decode: attempt ids, counts, and messages that arrive too late."""

from __future__ import annotations

import pytest

from hadal.core.errors import InvariantError
from hadal.kv.blocks import blocks_for
from hadal.roles.front.record import Record
from hadal.roles.front.running import MAX_ROWS, Running
from tests.columns import tokens_message
from tests.unit.roles.driving import generation


def record(name: str, prompt: int = 10, unit: str = "decode-0") -> Record:
    made = Record(generation(name, prompt), 0, 9.0, 0.0, [5], 1, decode_unit=unit)
    made.num_blocks = blocks_for(made.num_tokens + 1)
    return made


def placed(running: Running, *records: Record) -> list[int]:
    attempt_ids = [running.enter(one) for one in records]
    for one in records:
        running.pulled(one)
    return attempt_ids


def test_tokens_of_a_unit_are_counted_together() -> None:
    running = Running(num_rows=2)
    records = [record("a", 62), record("b", 61), record("c")]
    a, b, c = placed(running, *records)
    taken = running.take(
        0.0, tokens_message("decode-0", [(c, 1, 7, None), (a, 1, 8, None), (b, 1, 9, "stop")])
    )
    assert (taken.good.tolist(), taken.gaps, taken.unknown) == ([0, 1, 2], (), ())
    assert taken.num_blocks == 1, "64 tokens of a are known, and the next one needs a place"
    for one in records:
        running.sync(one)
        assert (one.num_output, one.num_blocks) == (2, blocks_for(one.num_tokens + 1))
    assert running.check() == []


def test_blocks_grow_as_they_are_counted_for_a_request_by_itself() -> None:
    running, one = Running(), record("a", 50)
    (attempt_id,) = placed(running, one)
    for index in range(1, 300):
        before = one.num_blocks
        taken = running.take(0.0, tokens_message("decode-0", [(attempt_id, index, 7, None)]))
        running.sync(one)
        assert one.num_blocks == before + taken.num_blocks == blocks_for(one.num_tokens + 1)


def test_what_is_late_doubled_or_missing() -> None:
    running, a, b = Running(), record("a"), record("b")
    first, second = placed(running, a, b)
    again = [(first, 1, 7, None), (second, 3, 7, None)]
    taken = running.take(0.0, tokens_message("decode-0", again))
    assert (taken.good.tolist(), taken.gaps) == ([0], (b,))
    taken = running.take(0.0, tokens_message("decode-0", again[:1]))
    assert (taken.good.size, taken.gaps, taken.unknown, taken.num_blocks) == (0, (), (), 0)
    running.leave(a)
    assert (a.row, a.num_output) == (-1, 2)
    taken = running.take(
        0.0, tokens_message("decode-0", [(first, 2, 7, None), (first, 2, 7, "stop")])
    )
    assert taken.unknown == (first,), "one that ends anyway need not be told"
    other = running.take(0.0, tokens_message("decode-7", [(second, 1, 7, None)]))
    assert other.unknown == (second,), "another unit's"


def test_a_attempt_id_is_never_given_out_twice() -> None:
    running, seen = Running(num_rows=1), set()
    for _ in range(50):
        one = record("a")
        (attempt_id,) = placed(running, one)
        assert running.record_of(attempt_id) is one
        assert running.attempt_id_of(one) == attempt_id
        seen.add(attempt_id)
        running.leave(one)
        running.leave(one)
    assert (len(seen), len(running)) == (50, 0)


def test_more_rows_are_made_as_they_are_needed() -> None:
    running = Running(num_rows=1)
    records = [record(f"r{index}") for index in range(70)]
    attempt_ids = placed(running, *records)
    assert (len(set(attempt_ids)), len(running)) == (70, 70)
    assert running.check() == []
    assert all(attempt_id % MAX_ROWS < 128 for attempt_id in attempt_ids)


def test_early_ones_are_those_that_nobody_said_were_pulled() -> None:
    running, a, b = Running(), record("a"), record("b", unit="decode-1")
    first, second = running.enter(a), running.enter(b)
    message = tokens_message(
        "decode-0", [(first, 1, 7, None), (second, 1, 7, None), (1 << 60, 1, 7, None)]
    )
    assert running.early(message) == [a]
    running.pulled(a)
    assert running.early(message) == []


def test_nobody_is_seated_twice_or_without_a_unit() -> None:
    running, one = Running(), record("a")
    running.enter(one)
    with pytest.raises(InvariantError, match="cannot enter"):
        running.enter(one)
    with pytest.raises(InvariantError, match="cannot enter"):
        running.enter(Record(generation("b"), 0, 9.0, 0.0, []))


def test_check_sees_a_row_that_is_somebody_else_s() -> None:
    running, one = Running(), record("a")
    placed(running, one)
    one.row += 1
    assert "says 1" in running.check()[0]
    one.row = 0
    one.decode_unit = "decode-5"
    assert "its row on another" in running.check()[0]
