"""Charts of the day: every value of the result is in one, at a height that is in proportion."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from hadal.commands.day_figures import (
    HALF,
    WIDE,
    balance_words,
    by_rank,
    distribution,
    hit_rate,
    income_and_cost,
    load_and_nodes,
    users_speed,
    what_ifs,
)
from tests.unit.commands.day_result import result
from tests.unit.commands.pages import Page

RESULT = result()


def bars(page: Page, class_: str) -> list[dict[str, float]]:
    keys = ("x", "y", "width", "height")
    return [
        {key: float(attrs[key] or "nan") for key in keys}
        for tag, attrs in page.tags
        if tag == "rect" and attrs.get("class") == class_
    ]


def drawn(chart: str | None) -> Page:
    assert chart
    return Page(chart)


def test_income_and_cost_stand_side_by_side_in_every_hour() -> None:
    page = drawn(income_and_cost(RESULT["hours"]))
    income, cost = bars(page, "income"), bars(page, "cost")
    assert len(income) == len(cost) == 24
    for hour, high, low in zip(RESULT["hours"], income, cost, strict=True):
        assert high["height"] / low["height"] == pytest.approx(
            hour["income_usd"] / hour["cost_usd"], rel=0.01
        )
        assert high["x"] + high["width"] <= low["x"]
    assert "12:00 income $26,840" in page.titles[0].replace("  ", " ")


def test_nodes_by_the_minute_are_in_tooltips_with_their_roles() -> None:
    page = drawn(load_and_nodes(RESULT["minutes"], 12))
    assert len(page.titles) == 96
    minutes = RESULT["minutes"]
    for index in (0, 47, 95):
        at = 15 * index
        prefill, decode = minutes["prefill_nodes"][at], minutes["decode_nodes"][at]
        assert f"{prefill + decode} nodes: {prefill} prefill, {decode} decode" in page.titles[index]
        assert page.titles[index].startswith(f"{(12 + index // 4) % 24:02}:{15 * (index % 4):02}")
    assert (
        page.num("path", "prefill") == page.num("path", "decode") == page.num("path", "demand") == 1
    )


def test_nodes_without_roles_and_minutes_without_demand_are_shown() -> None:
    page = drawn(load_and_nodes({"nodes": [10, 20, None, 30]}, 0))
    assert len(page.titles) == 4
    assert "20 nodes" in page.titles[2], "a gap keeps what was before it"
    assert load_and_nodes({}, 0) is None


def test_bars_of_a_histogram_have_their_shares_as_heights() -> None:
    histogram = {
        "edges": [0.0, 1.0, 2.0, 3.0, 4.0],
        "counts": [0, 30, 60, 10],
        "p50": 2.3,
        "p90": 2.9,
        "p99": 3.8,
    }
    page = drawn(distribution(histogram, "TTFT"))
    heights = [bar["height"] for bar in bars(page, "histogram")]
    assert [height / heights[0] for height in heights] == pytest.approx([1.0, 2.0, 1 / 3], rel=0.01)
    assert page.titles == ["1 s to 2 s: 30.0 %", "2 s to 3 s: 60.0 %", "3 s to 4 s: 10.0 %"]
    assert "median 2.3 s p90 2.9 s p99 3.8 s" in page.text
    assert page.num("line", "mark") == 3


def test_bins_of_unequal_width_are_shown_by_density() -> None:
    page = drawn(distribution({"edges": [0.0, 1.0, 3.0], "counts": [50, 50]}, "x"))
    narrow, wide = bars(page, "histogram")
    assert narrow["height"] == pytest.approx(2 * wide["height"], rel=0.01)


def test_a_wide_histogram_has_a_logarithmic_axis() -> None:
    edges = [0.01 * 2.0**i for i in range(11)]
    found = bars(drawn(distribution({"edges": edges, "counts": [5] * 10}, "x")), "histogram")
    assert [bar["width"] for bar in found] == pytest.approx([found[0]["width"]] * 10, rel=0.01)


@pytest.mark.parametrize(
    "broken", [{}, {"edges": [1], "counts": []}, {"edges": [0, 1], "counts": [0]}]
)
def test_no_histogram_where_nothing_was_counted(broken: dict[str, Any]) -> None:
    assert distribution(broken, "x") is None


def test_ranks_are_sorted_and_each_has_its_value() -> None:
    page = drawn(by_rank([3.0, 5.0, None, 4.0], "KV", "decode"))
    assert page.titles == ["rank 1: 5", "rank 3: 4", "rank 0: 3"]
    heights = [bar["height"] for bar in bars(page, "decode")]
    assert [height / heights[0] for height in heights] == pytest.approx([1.0, 0.8, 0.6], rel=0.01)
    assert balance_words([3.0, 5.0, 4.0]) == "maximum 5, mean 4, 1.250 times the mean"
    assert by_rank([], "KV", "decode") is None
    assert by_rank([None], "KV", "decode") is None


def test_thousands_of_ranks_are_shown_by_neighbours() -> None:
    page = drawn(by_rank([2.0 * rank for rank in range(2400)], "KV", "decode"))
    assert len(page.titles) == 200
    assert page.titles[0] == "mean of 12 ranks: 4.787 k"


def test_hours_have_a_line_and_dots_of_windows() -> None:
    page = drawn(hit_rate(RESULT["hours"], 56.2))
    first = RESULT["hours"][0]
    assert page.num("circle", "window") == 24
    assert (
        f"12:00  cache day: {100 * first['tokens_hit'] / first['tokens_in']:.1f} %" in page.titles
    )
    assert f"12:00  windows: {first['window']['hit_percent']:.1f} %" in page.titles
    hours = [{**hour, "window": None} for hour in RESULT["hours"]]
    page = drawn(users_speed(hours, None))
    assert page.num("circle", "window") == 0
    assert len(page.titles) == 24


def test_cases_are_measured_against_the_first() -> None:
    page = drawn(what_ifs(RESULT["what_ifs"]))
    asked, dearer = bars(page, "asked"), bars(page, "case")
    assert dearer[0]["width"] / asked[0]["width"] == pytest.approx(512.0 / 226.1, rel=0.01)
    assert "$196,608 (+126.4 %)" in page.text
    assert what_ifs(RESULT["what_ifs"][:1]) is None
    assert "not known" in drawn(what_ifs([*RESULT["what_ifs"], {"name": "x"}])).text


@pytest.mark.parametrize("width", [WIDE, HALF])
def test_charts_across_the_page_fit_a_phone_as_well(width: float) -> None:
    """Bars and the labels of axes stay within the chart, and apart: seven pixels a letter at a
    phone's size of text.
    """
    for chart in (
        load_and_nodes(RESULT["minutes"], 12, width),
        income_and_cost(RESULT["hours"], width),
        what_ifs(RESULT["what_ifs"], width),
    ):
        page = drawn(chart)
        [view] = [attrs["viewbox"] for tag, attrs in page.tags if tag == "svg"]
        assert (view or "").split()[2] == f"{width:g}"
        for tag, attrs in page.tags:
            if tag == "rect":
                x = float(attrs["x"] or "nan")
                assert 0 <= x <= x + float(attrs["width"] or 0) <= width
        places = sorted(
            float(attrs["x"] or "nan")
            for tag, attrs in page.tags
            if tag == "text" and attrs.get("text-anchor") == "middle"
        )
        assert all(right - left > 5 * 8 for left, right in pairwise(places))


def test_labels_of_quantiles_stand_below_each_other_and_hide_lines() -> None:
    page = drawn(
        distribution(
            {"edges": [1, 2, 3], "counts": [1, 1], "p50": 2.0, "p90": 2.1, "p99": 2.2}, "times"
        )
    )
    heights = [float(attrs["y"] or 0) for tag, attrs in page.tags if attrs.get("class") == "label"]
    assert [low - high for high, low in pairwise(heights)] == [17.0, 17.0], (
        "15 is a phone's size of text"
    )
    kinds = [attrs.get("class") or "" for tag, attrs in page.tags if tag in ("line", "text")]
    assert kinds[-3:] == ["label"] * 3, "drawn last"


def test_every_chart_tells_its_values_where_one_points() -> None:
    """As tooltips, without a script."""
    for chart in (
        load_and_nodes(RESULT["minutes"], 12),
        income_and_cost(RESULT["hours"]),
        users_speed(RESULT["hours"], 21.0),
        hit_rate(RESULT["hours"], 56.0),
        distribution(RESULT["ttft_s"], "times"),
        by_rank(RESULT["ranks"]["kv_share"], "KV", "decode"),
        what_ifs(RESULT["what_ifs"]),
    ):
        assert len(drawn(chart).titles) >= 2
