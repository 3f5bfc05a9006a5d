"""Charts of the day: every value of the result is in a chart and in its hover text."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest

from hadal.lab.simulate.figures import (
    balance_words,
    by_rank,
    distribution,
    hit_rate,
    income_and_cost,
    load_and_nodes,
    users_speed,
    what_ifs,
)
from hadal.results.figures import Figure
from tests.unit.commands.day_result import result

RESULT = result()
HOURS, MINUTES = RESULT["hours"], RESULT["minutes"]


def traces(figure: Figure | None) -> dict[str, Any]:
    """Return name of a trace -> the trace."""
    assert figure
    json.dumps(figure, allow_nan=False)
    found = {trace["name"]: trace for trace in figure["data"]}
    assert len(found) == len(figure["data"])
    return found


def layout(figure: Figure | None) -> dict[str, Any]:
    assert figure
    found = figure["layout"]
    assert isinstance(found, dict)
    return found


def test_income_and_cost_stand_side_by_side_in_every_hour() -> None:
    found = traces(income_and_cost(HOURS))
    assert list(found) == ["income", "cost"]
    for name, trace in found.items():
        assert trace["type"] == "bar"
        assert trace["y"] == [hour[f"{name}_usd"] for hour in HOURS]
        assert trace["marker"]["color"] == f"--{name}"
        assert trace["x"][0] == "2000-01-01 12:00"
        assert trace["x"][-1] == "2000-01-02 11:00", "the hours after midnight are the next day's"
        assert trace["xperiod"] == 3_600_000, "a bar stands in the middle of its hour"
    assert found["income"]["hovertext"][0] == "12:00  income: $26,840"
    assert income_and_cost([{"cost_usd": None}]) is None


def test_hours_keep_their_distance_and_one_without_a_name_follows() -> None:
    hours = [{"hour_beijing": at, "cost_usd": 1.0} for at in (14, 22, None, 3)]
    assert traces(income_and_cost(hours))["cost"]["x"] == [
        "2000-01-01 14:00",
        "2000-01-01 22:00",
        "2000-01-01 23:00",
        "2000-01-02 03:00",
    ]


def test_nodes_by_the_minute_stand_on_each_other_below_the_demand() -> None:
    figure = load_and_nodes(MINUTES, 12.0)
    found = traces(figure)
    for role in ("prefill", "decode"):
        assert found[role]["y"] == MINUTES[f"{role}_nodes"]
        assert found[role]["stackgroup"] == "nodes"
        assert found[role]["fillcolor"] == f"--{role}"
    assert found["nodes"]["y"] == MINUTES["nodes"]
    assert found["demand"]["y"] == MINUTES["tokens_in_per_s"]
    assert found["demand"]["yaxis"] == "y2"
    assert {trace["x0"] for trace in found.values()} == {"2000-01-01 12:00"}
    assert {trace["dx"] for trace in found.values()} == {60_000}
    assert layout(figure)["yaxis"]["domain"][1] < layout(figure)["yaxis2"]["domain"][0]
    assert f"peak {max(MINUTES['nodes'])}" in (figure or {})["label"]


def test_nodes_without_roles_and_minutes_without_demand_are_shown() -> None:
    found = traces(load_and_nodes({"nodes": [10, 20, None, 30]}, 0.5))
    assert list(found) == ["nodes"]
    assert found["nodes"]["y"] == [10, 20, 20, 30], "a gap keeps what was before it"
    assert found["nodes"]["x0"] == "2000-01-01 00:30"
    found = traces(load_and_nodes({"prefill_nodes": [1, 2], "decode_nodes": [5]}, 0))
    assert found["nodes"]["y"] == [6, 2]
    assert load_and_nodes({}, 0) is None


def test_bars_of_a_histogram_have_their_shares_as_heights() -> None:
    quantiles = {"p50": 2.3, "p90": 2.9, "p99": 3.8}
    histogram = {"edges": [0.0, 1.0, 2.0, 3.0, 4.0], "counts": [0, 30, 60, 10], **quantiles}
    figure = distribution(histogram, "TTFT")
    found = traces(figure)
    bars = found["requests"]
    assert bars["y"] == pytest.approx([30.0, 60.0, 10.0])
    assert bars["x"] == [1.0, 2.0, 3.0], "from its lower edge"
    assert (bars["offset"], bars["width"]) == (0, [1.0, 1.0, 1.0])
    assert bars["hovertext"] == ["1 s to 2 s: 30.0 %", "2 s to 3 s: 60.0 %", "3 s to 4 s: 10.0 %"]
    assert layout(figure)["xaxis"]["type"] == "linear"
    for name, value in zip(("median", "p90", "p99"), (2.3, 2.9, 3.8), strict=True):
        assert found[name]["x"] == [value] * 2
        assert found[name]["text"][1] == f"{name} {value} s"


def test_bins_of_unequal_width_are_shown_by_density() -> None:
    narrow, wide = traces(distribution({"edges": [0.0, 1.0, 3.0], "counts": [50, 50]}, "x"))[
        "requests"
    ]["y"]
    assert narrow == pytest.approx(2 * wide)
    edges = [0.01 * 2**index for index in range(11)]
    figure = distribution({"edges": edges, "counts": [5] * 10}, "x")
    assert traces(figure)["requests"]["y"] == pytest.approx([10.0] * 10), "as wide by their ratio"
    axis = layout(figure)["xaxis"]
    assert axis["type"] == "log"
    assert axis["range"] == pytest.approx([math.log10(0.01), math.log10(10.24)])
    assert axis["ticktext"] == ["10 ms", "100 ms", "1 s", "10 s"]
    axis = layout(distribution({"edges": [0.3, 3.0, 12.0], "counts": [5, 5]}, "x"))["xaxis"]
    assert axis["ticktext"] == ["500 ms", "1 s", "2 s", "5 s", "10 s"]


def test_edges_in_disorder_are_no_error() -> None:
    edges = [0.01, 0.02, -1.0, 3.0, 0.5, 9.0]
    assert len(traces(distribution({"edges": edges, "counts": [1] * 5}, "x"))["requests"]["y"]) == 3


def test_a_quantile_beyond_the_bins_is_marked_at_their_end() -> None:
    found = traces(distribution({"edges": [1, 2, 3], "counts": [5, 5], "p99": 8.0}, "x"))
    assert found["p99"]["x"] == [3.0, 3.0]
    assert found["p99"]["text"][1] == "p99 8 s"


@pytest.mark.parametrize(
    "broken", [{}, {"edges": [1], "counts": []}, {"edges": [0, 1], "counts": [0]}]
)
def test_no_histogram_where_nothing_was_counted(broken: dict[str, Any]) -> None:
    assert distribution(broken, "x") is None


@pytest.mark.parametrize("quantiles", [(1.2, 1.3, 1.4), (1.5, 1.8, 2.9), (2.6, 2.8, 2.9)])
def test_no_line_of_a_quantile_runs_through_the_label_of_another(
    quantiles: tuple[float, float, float],
) -> None:
    named = dict(zip(("p50", "p90", "p99"), quantiles, strict=True))
    found = traces(distribution({"edges": [1, 2, 3], "counts": [1, 1], **named}, "times"))
    marks = [found[name] for name in ("median", "p90", "p99")]
    for left, right in pairwise(marks):
        if right["textposition"] == "middle left":
            assert right["y"][1] > left["y"][1], "it is written across the lines to its left"
        else:
            assert right["y"][1] < left["y"][1], "its line ends below what is written to its left"


def test_ranks_are_sorted_and_each_has_its_value() -> None:
    figure = by_rank([3.0, 5.0, None, 4.0], "KV", "decode", " %")
    bars = traces(figure)["KV"]
    assert bars["y"] == [5.0, 4.0, 3.0]
    assert bars["hovertext"] == ["rank 1: 5 %", "rank 3: 4 %", "rank 0: 3 %"]
    [mean] = layout(figure)["shapes"]
    assert (mean["y0"], mean["y1"], mean["xref"]) == (4.0, 4.0, "paper")
    assert balance_words([3.0, 5.0, 4.0]) == "maximum 5, mean 4, 1.250 times the mean"
    assert by_rank([], "KV", "decode") is None
    assert by_rank([None], "KV", "decode") is None


def test_thousands_of_ranks_are_shown_by_neighbours() -> None:
    bars = traces(by_rank([2.0 * rank for rank in range(2400)], "KV", "decode"))["KV"]
    assert len(bars["y"]) == 200
    assert bars["y"][0] == pytest.approx(2 * (2399 - 5.5))
    assert bars["hovertext"][0] == "mean of 12 ranks: 4.787 k"


def test_hours_have_a_line_and_dots_of_windows() -> None:
    figure = hit_rate(HOURS, 56.2)
    found = traces(figure)
    shares = [100 * hour["tokens_hit"] / hour["tokens_in"] for hour in HOURS]
    assert found["cache day"]["y"] == pytest.approx(shares)
    assert found["cache day"]["hovertext"][0] == f"12:00  cache day: {shares[0]:.1f} %"
    assert found["windows"]["y"] == [hour["window"]["hit_percent"] for hour in HOURS]
    assert found["windows"]["mode"] == "markers"
    [mean] = layout(figure)["shapes"]
    assert (mean["y0"], mean["name"]) == (56.2, "the day: 56.2 %")
    hours = [{**hour, "window": None} for hour in HOURS]
    found = traces(users_speed(hours, None))
    assert list(found) == ["fluid day"]
    assert found["fluid day"]["y"] == [hour["fluid"]["tokens_per_s_user"] for hour in HOURS]
    assert users_speed([{}], 20.0) is None


@pytest.mark.parametrize("values", [(21.0, 21.01), (0.0, 0.0), (-5.0, 5.0), (1e300, 1.0)])
def test_noise_looks_like_noise_and_every_value_is_within_the_axis(
    values: tuple[float, float],
) -> None:
    hours = [{"fluid": {"tokens_per_s_user": value}} for value in values]
    low, high = layout(users_speed(hours, None))["yaxis"]["range"]
    assert low < min(values) <= max(values) < high
    assert high - low >= 0.2 * max(abs(value) for value in values)


def test_cases_are_measured_against_the_first() -> None:
    cases = [*RESULT["what_ifs"], {"name": "x"}, {"name": "<b>" + 80 * "y", "cost_usd": 1.0}]
    figure = what_ifs(cases)
    bars = traces(figure)["cost"]
    assert bars["x"] == [*(case["cost_usd"] for case in RESULT["what_ifs"]), 0.0, 1.0]
    names = layout(figure)["yaxis"]["ticktext"]
    assert names[:2] == ["as asked: $86,822", "H20 instead of H800: $196,608 (+126.4 %)"]
    assert names[5] == "x: not known"
    assert names[6] == f"&lt;b&gt;{40 * 'y'}…: $1.00 (−100.0 %)", "short, and no tag"
    [asked] = layout(figure)["shapes"]
    assert (asked["x0"], asked["yref"]) == (cases[0]["cost_usd"], "paper")
    assert what_ifs(cases[:1]) is None


def test_every_chart_tells_its_values_where_one_points() -> None:
    for figure in (
        load_and_nodes(MINUTES, 12),
        income_and_cost(HOURS),
        users_speed(HOURS, 21.0),
        hit_rate(HOURS, 56.0),
        distribution(RESULT["ttft_s"], "times"),
        by_rank(RESULT["ranks"]["kv_share"], "KV", "decode"),
        what_ifs(RESULT["what_ifs"]),
    ):
        for trace in traces(figure).values():
            told = trace.get("hovertext", [])
            assert len(told) == len(trace["y"]) or "hovertemplate" in trace or "text" in trace
