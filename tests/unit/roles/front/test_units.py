"""Test FrontUnits: counts, capacity, and missing heartbeats."""

from __future__ import annotations

from hadal.core.messages.units import UnitReport, UnitUp
from hadal.core.request import Transition
from hadal.roles.front.requests import FrontRequests
from hadal.roles.front.units import FrontUnits
from tests.unit.roles.driving import generation


def membership() -> FrontUnits:
    made = FrontUnits(2.0, 0.5)
    for name, blocks in (("prefill-0", 10), ("prefill-1", 30), ("decode-0", 20)):
        made.add(UnitUp(name, name.split("-")[0], "e", blocks, 4), 1.0)
    return made


def test_capacity_is_the_largest_unit_of_the_smaller_role() -> None:
    made = membership()
    assert made.capacity_tokens() == 20 * 64
    made.remove("decode-0")
    assert made.capacity_tokens() is None


def test_what_was_sent_shows_in_the_views() -> None:
    made = membership()
    record = FrontRequests().add(generation(prompt=100), 9.0)
    record.num_cached = 60
    made.sent_to_prefill("prefill-0", record)
    made.sent_to_decode("decode-0", 3)
    views = made.prefill_views("")
    assert [(view.num_tokens_waiting, view.num_requests) for view in views] == [(40, 1), (0, 0)]
    assert views[0].num_pairs_waiting == sum(range(61, 101))
    assert [(view.num_blocks_used, view.num_requests) for view in made.decode_views("")] == [(3, 1)]
    made.left_prefill("prefill-0", record)
    made.left_decode("decode-0", 3)
    assert made.check([]) == []


def test_leaving_a_unit_that_is_down_counts_nowhere() -> None:
    made = membership()
    made.left_prefill("prefill-9", FrontRequests().add(generation(), 9.0))
    made.left_decode("decode-9", 5)
    assert made.check([]) == []


def test_downstream_is_all_decode_units() -> None:
    view = membership().downstream("", 5, 6, 7)
    found = (
        view.num_slots,
        view.num_blocks,
        view.num_requests,
        view.num_blocks_used,
        view.num_transferring,
    )
    assert found == (4, 20, 5, 6, 7)


def test_silence_counts_from_the_last_sign() -> None:
    made = membership()
    made.by_name["decode-0"].seen_s = 10.9
    assert [name for name, _ in made.frozen(11.0)] == ["prefill-0", "prefill-1"]
    assert made.suspects.to_ask(11.0) == ["prefill-0", "prefill-1"]


def test_the_views_say_what_the_units_measured() -> None:
    made = membership()
    load = UnitReport("prefill-1", "e", 30, 0, 0, 4, 0, num_ranks=3, token_s=2e-5, pair_s=1e-9)
    made.update(made.by_name["prefill-1"], load, 2.0)
    known = [(view.num_ranks, view.token_s, view.pair_s) for view in made.prefill_views("")]
    assert known == [(1, 0.0, 0.0), (3, 2e-5, 1e-9)]


def test_views_that_were_shown_once_follow_what_changes() -> None:
    made = membership()
    shown = made.prefill_views(""), made.decode_views("")
    assert (made.prefill_views(""), made.decode_views("")) == shown
    made.update(
        made.by_name["prefill-0"], UnitReport("prefill-0", "e", 30, 0, 0, 7, 0, token_s=2e-5), 2.0
    )
    made.update(made.by_name["decode-0"], UnitReport("decode-0", "e", 25, 0, 0, 7, 0), 2.0)
    found = [(view.num_requests_max, view.token_s) for view in made.prefill_views("")]
    assert found == [(7, 2e-5), (4, 0.0)]
    assert [(view.num_requests_max, view.num_blocks) for view in made.decode_views("")] == [(7, 25)]
    made.grew("decode-0", 2)
    assert [view.num_blocks_used for view in made.decode_views("")] == [2]
    made.grew("decode-0", 0)
    made.grew("decode-9", 2)
    assert [view.num_blocks_used for view in made.decode_views("")] == [2]


def test_a_unit_that_is_down_is_not_shown_and_its_next_life_is_shown_as_it_is() -> None:
    made = membership()
    made.sent_to_decode("decode-0", 3)
    assert [view.num_blocks_used for view in made.decode_views("")] == [3]
    made.remove("decode-0")
    assert made.decode_views("") == []
    made.add(UnitUp("decode-0", "decode", "e2", 21, 4), 2.0)
    assert [(view.num_blocks, view.num_blocks_used) for view in made.decode_views("")] == [(21, 0)]
    made.add(UnitUp("decode-0", "decode", "e3", 22, 4), 3.0)
    assert [view.num_blocks for view in made.decode_views("")] == [22]
    assert made.check([]) == []


def test_check_sees_a_wrong_sum_of_pairs() -> None:
    made, requests = membership(), FrontRequests()
    record = requests.add(generation(prompt=100), 9.0)
    requests.move(record, Transition.PLACE)
    record.prefill_unit = "prefill-0"
    made.sent_to_prefill("prefill-0", record)
    assert made.check([record]) == []
    record.num_cached = 1
    assert made.check([record])


def test_check_sees_a_count_for_nobody() -> None:
    made = membership()
    made.sent_to_decode("decode-0", 3)
    assert made.check([])


def test_capacity_follows_the_ranks_that_live() -> None:
    made = FrontUnits(2.0, 0.5)
    made.add(UnitUp("prefill-0", "prefill", "e", 40, 16, 10), 1.0)
    made.add(UnitUp("decode-0", "decode", "e", 80, 16, 20), 1.0)
    assert made.capacity_tokens() == 10 * 64  # A request is on one rank.
    found = (made.decode_views("")[0].num_blocks, made.decode_views("")[0].num_blocks_request)
    assert found == (80, 20)
    assert made.prefill_views("")[0].num_blocks == 10
    unit = made.by_name["decode-0"]
    made.update(
        unit, UnitReport("decode-0", "e", 60, 3, 1, 12, 0, num_ranks=3, num_blocks_request=20), 2.0
    )
    found = (unit.num_blocks, unit.num_requests_max, unit.num_blocks_request, unit.seen_s)
    assert found == (60, 12, 20, 2.0)
    assert made.downstream("", 0, 0, 0).num_slots == 12
    made.update(unit, UnitReport("decode-0", "e", 0, 0, 0, 0, 0, num_ranks=0), 3.0)
    assert made.capacity_tokens() is None  # No prompt is refused as too long; it waits.
