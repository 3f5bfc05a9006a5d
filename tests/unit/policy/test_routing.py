"""Routing: least waiting prefill unit; the decode unit whose scarcer resource is least used."""

from __future__ import annotations

from hadal.policy.routing import choose_decode_unit, choose_prefill_unit
from hadal.policy.views import DecodeUnitView, PrefillUnitView


def prefill(name: str, waiting: int = 0, requests: int = 0, blocks: int = 10) -> PrefillUnitView:
    return PrefillUnitView(name, blocks, waiting, requests, 4)


def decode(name: str, used: int = 0, requests: int = 0, blocks: int = 10, slots: int = 4) -> DecodeUnitView:
    return DecodeUnitView(name, blocks, used, requests, slots, blocks)


def test_prefill_goes_where_fewest_tokens_wait() -> None:
    assert choose_prefill_unit([prefill("p0", 100), prefill("p1", 50, 3)], 1) == "p1"


def test_prefill_ties_break_by_name() -> None:
    assert choose_prefill_unit([prefill("p1"), prefill("p0")], 1) == "p0"


def test_prefill_skips_full_and_small_units() -> None:
    assert choose_prefill_unit([prefill("p0", 0, 4), prefill("p1", 9, 0, 2), prefill("p2", 99)], 3) == "p2"
    assert choose_prefill_unit([prefill("p0", 0, 4)], 1) is None


def test_decode_balances_kv_when_kv_is_scarce() -> None:
    assert choose_decode_unit([decode("d0", used=8), decode("d1", used=2, requests=1)], 1, 1) == "d1"


def test_decode_balances_requests_when_slots_are_scarce() -> None:
    assert choose_decode_unit([decode("d0", used=1, requests=3), decode("d1", used=5, requests=0)], 1, 1) == "d1"


def test_decode_may_choose_a_full_unit_but_not_one_too_small() -> None:
    full = decode("d0", used=10, requests=4)
    assert choose_decode_unit([full, decode("d1", blocks=3)], 2, 5) == "d0"
    assert choose_decode_unit([full], 2, 11) is None
