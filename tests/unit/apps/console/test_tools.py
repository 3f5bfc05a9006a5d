"""Answers of the chat's tools, and inputs that they refuse instead of answering wrongly."""

from __future__ import annotations

import json

import pytest

from hadal.apps.console.tools import ToolError, run


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"a": 12345678901234567890.25, "operator": "+", "b": 1}', "12345678901234567891.25"),
        ('{"a": "1,500", "operator": "+", "b": "-2,000,000.5"}', "-1998500.5"),
        ('{"a": 0.1, "operator": "+", "b": 0.2}', "0.3"),
        ('{"a": 2, "operator": "^", "b": -2}', "0.25"),
    ],
)
def test_arithmetic_is_exact(arguments: str, result: str) -> None:
    assert run("calculate", arguments) == result


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "1,5", "operator": "+", "b": 1}',
        '{"a": 0, "operator": "^", "b": -1}',
        f'{{"a": {"1" * 101}, "operator": "+", "b": 1}}',
        '{"a": NaN, "operator": "+", "b": 1}',
        '{"a": "Infinity", "operator": "+", "b": 1}',
        '{"a": true, "operator": "+", "b": 1}',
        '{"a": 1, "operator": "/", "b": 0}',
    ],
)
def test_what_is_no_number_or_has_no_result_is_said(arguments: str) -> None:
    with pytest.raises(ToolError, match=r"a number is needed|no result|divided by zero"):
        run("calculate", arguments)


@pytest.mark.parametrize(
    ("value", "units", "result"),
    [
        ("1", "mm mile", "0.000000621371"),
        ("3", "foot m", "0.9144"),
        ("2.5", "KM metres", "2500"),
        ("-40", "F C", "-40"),
        ("0", "C K", "273.15"),
        ("0", "m km", "0"),
    ],
)
def test_measures_keep_six_figures(value: str, units: str, result: str) -> None:
    begin, end = units.split()
    assert run("convert", json.dumps({"value": value, "from": begin, "to": end})) == result
