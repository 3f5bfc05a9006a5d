"""Values read from a result, and numbers as text."""

from __future__ import annotations

import math

import pytest

from hadal.results.values import (
    NOTHING,
    as_number,
    compact,
    dollars,
    duration,
    hour_label,
    number,
    numbers,
    percent,
    plain,
    ratio,
    rows,
    signed_percent,
)


@pytest.mark.parametrize("value", [None, "12", True, math.nan, math.inf, 1e301, 10**400, [1], {}])
def test_what_is_no_finite_number_is_nothing(value: object) -> None:
    assert as_number(value) is None
    assert number({"a": {"b": value}}, "a", "b") is None
    assert (
        plain(as_number(value)) == compact(as_number(value)) == dollars(as_number(value)) == NOTHING
    )


def test_missing_paths_are_nothing() -> None:
    assert number({"a": 1}, "a", "b") is None
    assert number({"a": {"b": 2}}, "a", "b") == 2.0
    assert numbers({"a": [1, None, "x", 2.5]}, "a") == [1.0, None, None, 2.5]
    assert numbers({"a": 3}, "a") == numbers({}, "a") == []
    assert rows({"a": [{"b": 1}, 3, None]}, "a") == [{"b": 1}]
    assert ratio(1.0, 0.0) is None
    assert ratio(1e300, 1e-300) is None
    assert ratio(None, 2.0) is None
    assert ratio(1.0, 2.0) == 0.5


def test_numbers_as_people_write_them() -> None:
    assert [compact(value) for value in (608.3e9, 73_700, 0.5624, 0, 999_999_999, -2500, 3e21)] == [
        "608 B",
        "73.7 k",
        "0.562",
        "0",
        "1 B",
        "−2.5 k",
        "3e+21",
    ]
    assert [plain(value) for value in (226.75, 4989.4, 1e16, -0.5)] == [
        "226.8",
        "4,989",
        "1e+16",
        "−0.5",
    ]
    assert [dollars(value) for value in (87_072.0, 0.5, -12.0, 562_027e3)] == [
        "$87,072",
        "$0.50",
        "−$12.00",
        "$562 M",
    ]
    assert [duration(value) for value in (0.0469, 2.1, 0.0, 123.4)] == [
        "46.9 ms",
        "2.1 s",
        "0 ms",
        "123 s",
    ]
    assert [percent(56.25), signed_percent(0.0123), signed_percent(-0.5)] == [
        "56.2 %",
        "+1.2 %",
        "−50.0 %",
    ]
    assert [hour_label(value) for value in (0.0, 23.0, 24.0, None)] == [
        "00:00",
        "23:00",
        "00:00",
        NOTHING,
    ]
