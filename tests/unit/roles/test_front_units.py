"""UnitBook: counts, capacity, and silence."""

from __future__ import annotations

from hadal.core.messages import UnitUp
from hadal.roles.front_units import UnitBook


def book() -> UnitBook:
    made = UnitBook()
    for name, blocks in (("prefill-0", 10), ("prefill-1", 30), ("decode-0", 20)):
        made.add(UnitUp(name, name.split("-")[0], "e", blocks, 4), 1.0)
    return made


def test_capacity_is_the_largest_unit_of_the_smaller_role() -> None:
    made = book()
    assert made.capacity_tokens() == 20 * 64
    del made.by_name["decode-0"]
    assert made.capacity_tokens() is None


def test_what_was_sent_shows_in_the_views() -> None:
    made = book()
    made.sent_to_prefill("prefill-0", 100)
    made.sent_to_decode("decode-0", 3)
    assert [(view.num_tokens_waiting, view.num_requests) for view in made.prefill_views()] == [(100, 1), (0, 0)]
    assert [(view.num_blocks_used, view.num_requests) for view in made.decode_views()] == [(3, 1)]
    made.left_prefill("prefill-0", 100)
    made.left_decode("decode-0", 3)
    assert made.check([]) == []


def test_leaving_a_unit_that_is_down_counts_nowhere() -> None:
    made = book()
    made.left_prefill("prefill-9", 5)
    made.left_decode("decode-9", 5)
    assert made.check([]) == []


def test_downstream_is_all_decode_units() -> None:
    view = book().downstream(5, 6, 7)
    assert (view.num_slots, view.num_blocks, view.num_requests, view.num_blocks_used, view.num_transferring) == (
        4, 20, 5, 6, 7,
    )  # fmt: skip


def test_silence_counts_from_the_last_sign() -> None:
    made = book()
    made.by_name["decode-0"].seen_s = 9.0
    assert made.silent(11.0, 5.0) == ["prefill-0", "prefill-1"]


def test_check_sees_a_count_for_nobody() -> None:
    made = book()
    made.sent_to_decode("decode-0", 3)
    assert made.check([])
