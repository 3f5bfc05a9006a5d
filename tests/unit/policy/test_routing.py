"""Routing: the prefill unit that is done first; the decode unit with most of its scarcer resource."""

from __future__ import annotations

from random import Random
from typing import Any

from hadal.core.rates import StepRates
from hadal.policy.routing import choose_decode_unit, choose_prefill_unit
from hadal.policy.views import DecodeUnitView, PrefillUnitView


def prefill(
    name: str, waiting: int = 0, requests: int = 0, blocks: int = 10, **more: Any
) -> PrefillUnitView:
    return PrefillUnitView(name, blocks, waiting, requests, 4, **more)


def decode(
    name: str, used: int = 0, requests: int = 0, blocks: int = 10, slots: int = 4
) -> DecodeUnitView:
    return DecodeUnitView(name, blocks, used, requests, slots, blocks)


def test_prefill_goes_where_fewest_tokens_wait() -> None:
    assert choose_prefill_unit([prefill("p0", 100), prefill("p1", 50, 3)], 1, 10) == "p1"


def test_prefill_ties_break_by_name() -> None:
    assert choose_prefill_unit([prefill("p1"), prefill("p0")], 1, 10) == "p0"


def test_prefill_skips_full_and_small_units() -> None:
    found = choose_prefill_unit(
        [prefill("p0", 0, 4), prefill("p1", 9, 0, 2), prefill("p2", 99)], 3, 150
    )
    assert found == "p2"
    assert choose_prefill_unit([prefill("p0", 0, 4)], 1, 10) is None


def test_prefill_counts_attention_ranks_and_speed() -> None:
    """Compare pairs in which p0 has fewer queued tokens than p1, or as many, but would be done later."""
    fast = {"token_s": 1e-5, "pair_s": 1e-9}
    slow = {"token_s": 1e-4, "pair_s": 1e-8}
    for worse, better in (
        (prefill("p0", 100, num_pairs_waiting=10**9), prefill("p1", 200, num_pairs_waiting=10**4)),
        (prefill("p0", 1000, num_ranks=1), prefill("p1", 1500, num_ranks=4)),
        (prefill("p0", 1000, **slow), prefill("p1", 1500, **fast)),
        # Empty queues: the prompt's own time decides.
        (prefill("p0", **slow), prefill("p1", **fast)),
    ):
        assert choose_prefill_unit([worse, better], 1, 1000) == "p1"


def test_a_cached_prefix_is_context_and_not_work() -> None:
    units = [prefill("p0", 3000), prefill("p1", 5000, num_cached=9000)]
    assert choose_prefill_unit(units, 1, 10_000) == "p1"
    # The prefix covers all tokens but one, but the queue there is too long.
    assert choose_prefill_unit(units, 1, 100) == "p0"
    # Attention to context is expensive here: 1,000 tokens after a prefix are not cheap.
    rates = {"token_s": 1e-5, "pair_s": 1e-6}
    units = [
        prefill("p0", 400, num_pairs_waiting=9_000_000, num_cached=9000, **rates),
        prefill("p1", 0, **rates),
    ]
    assert choose_prefill_unit(units, 1, 10_000) == "p0"
    units[0] = prefill("p0", 400, num_pairs_waiting=90_000_000, num_cached=9000, **rates)
    assert choose_prefill_unit(units, 1, 10_000) == "p1"


def test_a_unit_that_measured_nothing_is_taken_to_be_like_the_others() -> None:
    slow = {"token_s": 1.0, "pair_s": 1e-3}
    assert choose_prefill_unit([prefill("p0", 5000), prefill("p1", 4000, **slow)], 1, 100) == "p1"
    assert choose_prefill_unit([prefill("p0", 3000), prefill("p1", 4000, **slow)], 1, 100) == "p0"


def test_the_choice_is_what_each_view_by_itself_says() -> None:
    """Compare with each view's own sum: earliest end, then fewest requests, then name."""
    random = Random("routing")
    for _ in range(200):
        units = [
            prefill(
                f"p{index}",
                random.randrange(3) * 1000,
                random.randrange(5),
                random.randrange(1, 12),
                num_pairs_waiting=random.randrange(3) * 10**6,
                num_ranks=random.choice((1, 4)),
                token_s=random.choice((1e-5, 2e-5)),
                pair_s=1e-9,
                num_cached=random.choice((0, 0, 640)),
            )
            for index in range(6)
        ]
        num_tokens = random.randrange(1, 3000)
        done_s = {
            unit.unit: (
                unit.num_tokens_waiting * unit.token_s + unit.num_pairs_waiting * unit.pair_s
            )
            / unit.num_ranks
            + StepRates(unit.token_s, unit.pair_s).chunk_s(
                min(unit.num_cached, num_tokens - 1),
                num_tokens - min(unit.num_cached, num_tokens - 1),
            )
            for unit in units
            if unit.num_requests < 4 and unit.num_blocks >= 5
        }
        requests = {unit.unit: unit.num_requests for unit in units}
        best = min(done_s, key=lambda name: (done_s[name], requests[name], name), default=None)
        assert [choose_prefill_unit(units, 5, num_tokens) for _ in range(2)] == [best, best]


def test_decode_balances_kv_when_kv_is_scarce() -> None:
    found = choose_decode_unit([decode("d0", used=8), decode("d1", used=2, requests=1)], 1, 1)
    assert found == "d1"


def test_decode_balances_requests_when_slots_are_scarce() -> None:
    found = choose_decode_unit(
        [decode("d0", used=1, requests=3), decode("d1", used=5, requests=0)], 1, 1
    )
    assert found == "d1"


def test_decode_may_choose_a_full_unit_but_not_one_too_small() -> None:
    full = decode("d0", used=10, requests=4)
    assert choose_decode_unit([full, decode("d1", blocks=3)], 2, 5) == "d0"
    assert choose_decode_unit([full], 2, 11) is None
