"""Test RequestRouting: which part of a prompt counts as cached where, and an output's length."""

from __future__ import annotations

import msgspec
import pytest

from hadal.core.cache import num_names
from hadal.core.config import CacheConfig, LimitsConfig
from hadal.core.messages.units import Cached, UnitUp
from hadal.core.request import Transition
from hadal.roles.front.cache import FrontCache
from hadal.roles.front.names import FrontNames
from hadal.roles.front.record import Record
from hadal.roles.front.requests import FrontRequests
from hadal.roles.front.routing import RequestRouting
from hadal.roles.front.units import FrontUnits
from tests.unit.roles.driving import generation

NAMES = FrontNames(CacheConfig(), "f0")


def routing(**limits: int) -> RequestRouting:
    units = FrontUnits(2.0, 0.5, "f0")
    for name in ("prefill-0", "prefill-1", "decode-0"):
        units.add(UnitUp(name, name.split("-")[0], "e", 20, 2), 0.0)
    return RequestRouting(FrontRequests(), units, LimitsConfig(**limits), 10_000)


def record_of(
    made: RequestRouting, name: str = "a", prompt: int = 200, max_tokens: int = 5
) -> Record:
    return made.requests.add(NAMES.named(generation(name, prompt, max_tokens=max_tokens)), 99.0)


def knows(made: RequestRouting, unit: str, record: Record, num_blocks: int) -> None:
    made.units.cached(Cached(unit, "e", record.generation.chain[: 16 * num_blocks], b""))


def test_a_prompt_goes_where_its_prefix_is() -> None:
    made = routing()
    record = record_of(made)
    assert made.prefill_unit(record) == ("prefill-0", 0, 0)
    knows(made, "prefill-1", record, 2)
    assert made.prefill_unit(record) == ("prefill-1", 128, 0)
    knows(made, "prefill-0", record, 3)
    assert made.prefill_unit(record) == ("prefill-0", 192, 128)
    # Requests queued at prefill-0 take longer than its cached prefix saves.
    other = record_of(made, "b", 1000)
    made.requests.move(other, Transition.PLACE)
    made.units.sent_to_prefill("prefill-0", other)
    assert made.prefill_unit(record) == ("prefill-1", 128, 192)


@pytest.mark.parametrize(
    ("num_prompt", "num_cached"), [(63, 0), (64, 0), (65, 64), (128, 64), (129, 128)]
)
def test_the_last_position_is_never_cached(num_prompt: int, num_cached: int) -> None:
    made = routing()
    record = record_of(made, prompt=num_prompt)
    knows(made, "prefill-1", record, num_names(record.generation.chain))
    room = made.prefill_unit(record)
    assert room is not None
    assert room[1] == num_cached


def test_a_full_unit_is_not_chosen_whatever_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    made = routing()
    record = record_of(made)
    knows(made, "prefill-1", record, 3)
    for name in "bc":
        made.units.sent_to_prefill("prefill-1", record_of(made, name, 10))
    assert made.prefill_unit(record) == ("prefill-0", 0, 0)
    for name in "de":
        made.units.sent_to_prefill("prefill-0", record_of(made, name, 10))
    asked: list[str] = []

    def noted(cache: FrontCache, chain: bytes, units: list[str]) -> dict[str, int]:
        asked.extend(units)
        return {}

    monkeypatch.setattr(FrontCache, "prefixes", noted)
    assert made.prefill_unit(record) is None
    assert asked == [], "one that waits is not looked up at every event"


def test_room_is_bounded_by_what_runs() -> None:
    made = routing(max_running=1)
    assert made.has_room(generation("b"))
    made.requests.move(record_of(made), Transition.PLACE)
    assert not made.has_room(generation("b"))


def test_an_output_is_capped_once() -> None:
    made = routing()
    record = record_of(made, prompt=20 * 64 - 3, max_tokens=100)
    assert made.fit(record) is None
    assert record.generation.max_tokens == 4
    record.generation = msgspec.structs.replace(record.generation, max_tokens=50)
    assert made.fit(record) is None
    assert record.generation.max_tokens == 50, "it was looked at before"
    assert "holds 1280 at most" in (made.fit(record_of(made, "b", 20 * 64 + 1)) or "")
