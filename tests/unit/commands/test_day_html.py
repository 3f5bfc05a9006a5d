"""The report as a page: whole, small, alone, and sound whatever the result lacks."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import numpy as np
import pytest

from hadal.commands.day_html import report_html
from tests.unit.commands.day_result import result
from tests.unit.commands.pages import Page

SECTIONS = (
    "The day",
    "Load and nodes",
    "Income and cost",
    "What users get, and what the cache saves",
    "Latency",
    "Balance over ranks",
    "Fluid beside windows",
    "What if",
    "Assumptions",
)
NUMBERS = (-1e300, 1e300, 5e-324, -1e-300, 10**400, math.nan, math.inf, 0, True)
DAMAGE = (None, "<b>", *NUMBERS, [], {}, [None], {"p50": 1.0})
BAD = "<script>alert('&\"')</script>"


def damaged(value: Any, rng: np.random.Generator, share: float) -> Any:
    """The same with other things in a share of its places, at any depth."""
    if rng.random() < share:
        return DAMAGE[int(rng.integers(len(DAMAGE)))]
    if isinstance(value, dict):
        return {
            key: damaged(inner, rng, share)
            for key, inner in value.items()
            if rng.random() > share / 4
        }
    return [damaged(inner, rng, share) for inner in value] if isinstance(value, list) else value


def shortened(value: Any) -> Any:
    """The same with at most 2 elements of each list."""
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    return [shortened(inner) for inner in value[:2]] if isinstance(value, list) else value


RESULT = result()
SHORT = shortened(RESULT)


def test_a_page_has_every_section_and_stays_small() -> None:
    text = report_html(RESULT)
    page = Page(text)
    assert len(text.encode()) < 300_000
    assert all(section in page.words for section in SECTIONS)
    assert page.num("svg") == 13 + 3, (
        "nodes, income, two by hour, two latencies, six by rank, what-ifs; three twice"
    )
    assert page.num("div", "at-narrow") == page.num("div", "at-wide") == 3, (
        "charts that a phone would cut"
    )
    assert all(
        attrs["role"] == "img" and attrs["aria-label"] for tag, attrs in page.tags if tag == "svg"
    )
    assert "Decode with 1 draft token is outside" in page.text
    assert page.row("fleet.bundle") == ["fleet.bundle", "[3, 1]"]


def test_it_loads_nothing_and_runs_nothing() -> None:
    text = report_html(RESULT)
    assert not re.search(r"://|url\(|@import|\bsrc=|\bhref=|<script|<link|<iframe| on\w+=", text)
    assert "default-src &#x27;none&#x27;" in text


def test_the_result_is_left_as_it_was_and_makes_the_same_page_again() -> None:
    before = copy.deepcopy(RESULT)
    assert report_html(RESULT) == report_html(RESULT)
    assert before == RESULT


def test_what_it_is_told_stays_text() -> None:
    bad = copy.deepcopy(RESULT)
    bad["study"] = {"name": BAD, BAD: BAD}
    bad["notes"] = [BAD]
    bad["what_ifs"][1]["name"] = BAD
    bad["ranks"]["decode_unit"] = BAD
    page = Page(report_html(bad))
    assert page.num("script") == 0
    assert page.words.count(BAD) >= 5
    assert any(BAD in title for title in page.titles)


@pytest.mark.parametrize("seed", range(60))
def test_it_stands_whatever_is_in_its_places(seed: int) -> None:
    rng = np.random.default_rng(seed)
    share = (0.02, 0.1, 0.3)[seed % 3]
    page = Page(report_html({key: damaged(value, rng, share) for key, value in SHORT.items()}))
    assert all(section in page.words for section in SECTIONS)
    assert page.num("b", None) < 12, "text does not become markup"
    for tag, attrs in page.tags:
        if tag in ("rect", "path", "line", "circle", "text"):
            places = "".join(attrs.get(key) or "" for key in ("x", "y", "d", "cx", "cy", "height"))
            assert not re.search("nan|inf", places)


def test_an_empty_result_and_one_hour_are_pages() -> None:
    page = Page(report_html({}))
    assert all(section in page.words for section in SECTIONS)
    assert page.num("svg") == 0
    minutes = {key: values[:60] for key, values in RESULT["minutes"].items()}
    page = Page(report_html({**RESULT, "hours": RESULT["hours"][:1], "minutes": minutes}))
    assert page.num("svg") == 13 + 3
    assert "12:00" in page.text


def test_without_windows_the_rest_is_there() -> None:
    hours = [{**hour, "window": None} for hour in RESULT["hours"]]
    page = Page(
        report_html(
            {**RESULT, "hours": hours, "ttft_s": None, "tpot_s": {}, "ranks": None, "what_ifs": []}
        )
    )
    assert page.num("svg") == 4 + 2
    assert page.text.count("No window ran") == 4
    assert "No other case was asked for." in page.text


def test_a_page_of_a_huge_unit_stays_readable() -> None:
    ranks = {
        key: value * 20 if isinstance(value, list) else value
        for key, value in RESULT["ranks"].items()
    }
    cases = [
        {**RESULT["what_ifs"][1], "name": f"case {index} " + "long " * 40} for index in range(20)
    ]
    assert len(report_html({**RESULT, "ranks": ranks, "what_ifs": cases}).encode()) < 400_000
