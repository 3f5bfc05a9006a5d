"""Page of `hadal bench`, made from bench.json alone.

Most words are in `results/templates/bench.html`; style and script are those of the daily report.
Tables on the page repeat the main figures of the charts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from hadal.results.figures import Figure, axis, figure
from hadal.results.page import Table, page_template
from hadal.results.values import (
    as_number,
    compact,
    duration,
    mapping,
    number,
    numbers,
    percent,
    plain,
    rows,
)

Row = Mapping[str, Any]
_COLOURS = ("--decode", "--cost", "--income", "--window", "--prefill", "--soft")
_DASHES = ("solid", "dash", "dot")
_MARKS = (("p50", "median", "--prefill"), ("p95", "p95", "--decode"), ("p99", "p99", "--window"))
_SPREADS = (
    ("ttft_s", "Time to first token"),
    ("tpot_s", "Time per output token"),
    ("itl_s", "Time between two pieces of text"),
    ("e2e_s", "Time to the end"),
)


def bench_html(found: Row) -> str:
    """Return the page. `found` is the object in bench.json; any part of it may be missing."""
    levels = rows(found, "levels")
    figures = {
        "ttft": _by_level(levels, "ttft_s", "Time to first token by load"),
        "tpot": _by_level(levels, "tpot_s", "Time per output token by load"),
        "served": _served(levels),
        "ttft-curve": _curves(levels, "ttft_curve_s", "Share of requests by time to first token"),
        "tpot-curve": _curves(levels, "tpot_curve_s", "Share of requests by time per output token"),
    }
    return page_template("bench.html").render(
        title=f"{found.get('model') or 'A server'} under load",
        found=found,
        levels=levels,
        figures={key: each for key, each in figures.items() if each is not None},
        served=_served_table(levels),
        spreads=[(key, name, _spread_table(levels, key)) for key, name in _SPREADS],
        promises=", ".join(
            f"{name.upper()} {duration(as_number(most_s))}"
            for name, most_s in mapping(found, "slo_s").items()
        ),
        errors=[
            (str(level.get("name")), str(kind), count)
            for level in levels
            for kind, count in mapping(level, "errors").items()
        ],
        plotly=Markup(get_plotlyjs()),
    )


def _names(levels: Sequence[Row]) -> list[str]:
    return [str(level.get("name", "")) for level in levels]


def _by_level(levels: Sequence[Row], key: str, label: str) -> Figure | None:
    """Return a line chart of a time's percentiles over the levels; None if no level has it."""
    if not any(mapping(level, key) for level in levels):
        return None
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": _names(levels),
            "y": (values := [number(level, key, mark) for level in levels]),
            "line": {"width": 1.8, "color": colour},
            "hovertext": [f"{name}: {duration(value)}" for value in values],
            "hoverinfo": "x+text",
        }
        for mark, name, colour in _MARKS
    ]
    return figure(
        f"{label}, percentiles.",
        data,
        height=300,
        xaxis=axis("load", type="category", showgrid=False),
        yaxis=axis("seconds", rangemode="tozero"),
    )


def _served(levels: Sequence[Row]) -> Figure | None:
    """Return a bar chart of requests/s: all answered ones, and the ones within every SLO."""
    if not any(number(level, "requests_per_s") for level in levels):
        return None
    series = [("answered", "--prefill", [number(level, "requests_per_s") for level in levels])]
    good = [number(level, "goodput_per_s") for level in levels]
    if any(value is not None for value in good):
        series.append(("within the SLO", "--income", good))
    data = [
        {
            "type": "bar",
            "name": name,
            "x": _names(levels),
            "y": values,
            "marker": {"color": colour},
            "hovertext": [f"{name}: {plain(value, 2)} requests/s" for value in values],
            "hoverinfo": "x+text",
        }
        for name, colour, values in series
    ]
    return figure(
        "Requests per second by load.",
        data,
        height=300,
        barmode="overlay",
        xaxis=axis("load", type="category", showgrid=False),
        yaxis=axis("requests/s", rangemode="tozero"),
        showlegend=True,
    )


def _curves(levels: Sequence[Row], key: str, label: str) -> Figure | None:
    """Return a chart with one line per level, its cumulative distribution; None without values."""
    data = []
    for index, level in enumerate(levels):
        values = numbers(level, key)
        if values:
            colour = _COLOURS[index % len(_COLOURS)]
            dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": str(level.get("name", "")),
                    "x": values,
                    "y": [100.0 * at / (len(values) - 1 or 1) for at in range(len(values))],
                    "line": {"width": 1.8, "color": colour, "dash": dash},
                    "hovertemplate": "%{y:.0f} % within %{x:.3s} s",
                }
            )
    if not data:
        return None
    return figure(
        f"{label}.",
        data,
        height=320,
        xaxis=axis("seconds", rangemode="tozero"),
        yaxis=axis("% of requests", range=[0, 101]),
        showlegend=True,
    )


def _served_table(levels: Sequence[Row]) -> Table:
    heads = [
        "Load",
        "Sent",
        "Failed",
        "Requests/s",
        "Within the SLO/s",
        "Tokens in/s",
        "Tokens out/s",
    ]
    heads += ["Prompt", "Answer", "Cached"]
    cells = []
    for level in levels:
        sent, done = number(level, "num_sent") or 0.0, number(level, "num_done") or 0.0
        share = number(level, "cache_hit_share")
        cells.append(
            [
                str(level.get("name", "")),
                plain(sent, 0),
                plain(sent - done, 0),
                plain(number(level, "requests_per_s"), 2),
                plain(number(level, "goodput_per_s"), 2),
                compact(number(level, "tokens_in_per_s")),
                compact(number(level, "tokens_out_per_s")),
                plain(number(level, "tokens_in_mean"), 0),
                plain(number(level, "tokens_out_mean"), 0),
                percent(None if share is None else 100 * share),
            ]
        )
    return Table(heads, cells)


def _spread_table(levels: Sequence[Row], key: str) -> Table:
    marks = ("mean", "p50", "p90", "p95", "p99", "max")
    return Table(
        ["Load", *marks],
        [
            [str(level.get("name", "")), *(duration(number(level, key, mark)) for mark in marks)]
            for level in levels
        ],
    )
