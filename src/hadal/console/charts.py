"""Options of the charts: ECharts' own form, in colours that are read on light and dark ground alike.
Values in, values out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

TEAL, AMBER, VIOLET, GREEN, RED, GREY = (
    "#2a91ad",
    "#d19a3a",
    "#8a7bd1",
    "#46a374",
    "#d9635a",
    "#8a949c",
)
PALETTE = (TEAL, AMBER, VIOLET, GREEN, RED, GREY, "#5c86c9", "#b87333")
_TEXT, _LINE = "#85909a", "rgba(133,144,154,.22)"
_FONT = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
_MAX_POINTS = 150
"""A chart is some hundred pixels wide: more points are not seen, and take time to draw."""

Options = dict[str, Any]
Values = Sequence[float | None]


def _base() -> Options:
    return {
        "animation": False,
        "textStyle": {"fontFamily": _FONT, "fontSize": 12, "color": _TEXT},
        "grid": {"left": 52, "right": 14, "top": 30, "bottom": 26},
        "legend": {
            "top": 0,
            "left": 0,
            "icon": "roundRect",
            "itemWidth": 10,
            "itemHeight": 3,
            "itemGap": 14,
            "padding": 0,
            "textStyle": {"color": _TEXT, "fontSize": 12},
        },
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "transitionDuration": 0,
            "backgroundColor": "rgba(24,32,38,.94)",
            "borderWidth": 0,
            "padding": [6, 10],
            "textStyle": {"color": "#e4e9ec", "fontSize": 12, "fontFamily": _FONT},
        },
    }


def _axis(kind: str, **more: Any) -> Options:
    return {
        "type": kind,
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "axisLabel": {"color": _TEXT, "fontSize": 12, "hideOverlap": True},
        "splitLine": {"lineStyle": {"color": _LINE}},
        **more,
    }


def lines(
    times_s: Sequence[float],
    name_to_values: Mapping[str, Values],
    *,
    stacked: bool = False,
    unit: str = "",
    most: float | None = None,
    colors: Sequence[str] = PALETTE,
) -> Options:
    """Series over the time of day. `most`: the upper end of the axis, where it is known."""
    every = max(1, math.ceil(len(times_s) / _MAX_POINTS))
    chart = _base()
    shown = [round(1000 * time_s) for time_s in times_s][::-1][::every][::-1]
    chart["xAxis"] = _axis("time", splitLine={"show": False}, splitNumber=4)
    chart["yAxis"] = _axis("value", min=0, splitNumber=3, name=unit, nameGap=8)
    chart["yAxis"]["nameTextStyle"] = {"color": _TEXT, "fontSize": 12, "align": "right"}
    if most is not None:
        chart["yAxis"]["max"] = most
    chart["series"] = [
        {
            "type": "line",
            "name": name,
            "data": [
                [time_ms, _rounded(value)]
                for time_ms, value in zip(shown, list(values)[::-1][::every][::-1], strict=False)
            ],
            "showSymbol": False,
            "connectNulls": False,
            "lineStyle": {"width": 1.6},
            "itemStyle": {"color": colors[index % len(colors)]},
            **({"stack": "all", "areaStyle": {"opacity": 0.28}} if stacked else {}),
        }
        for index, (name, values) in enumerate(name_to_values.items())
    ]
    if len(name_to_values) < 2:
        chart["legend"]["show"] = bool(name_to_values)
    return chart


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def heat(
    rows: Sequence[Sequence[float]], row_name: str, column_name: str, most: float = 2.0
) -> Options:
    """A map of loads by their layer's mean: pale below it, strong above."""
    chart = _base()
    chart["grid"] = {"left": 46, "right": 10, "top": 8, "bottom": 56}
    chart["legend"]["show"] = False
    num_columns = len(rows[0]) if rows else 0
    middle = {"splitLine": {"show": False}, "nameLocation": "middle"}
    chart["xAxis"] = _axis("category", data=list(range(num_columns)), name=column_name, nameGap=26)
    chart["yAxis"] = _axis("category", data=list(range(len(rows))), name=row_name, nameGap=32)
    for axis in (chart["xAxis"], chart["yAxis"]):
        axis |= middle
    chart["yAxis"]["inverse"] = True
    chart["tooltip"] |= {"trigger": "item"}
    chart["visualMap"] = {
        "min": 0,
        "max": most,
        "calculable": False,
        "orient": "horizontal",
        "left": "right",
        "bottom": 0,
        "itemWidth": 8,
        "itemHeight": 110,
        "text": [f"{most:g} times the mean", "nothing"],
        "textStyle": {"color": _TEXT, "fontSize": 12},
        "inRange": {"color": ["#1d3b47", "#2a7f99", "#8fc3bd", "#f0d9a0", "#dd9a4e", "#c64f3c"]},
    }
    chart["series"] = [
        {
            "type": "heatmap",
            "data": [
                [column, row, value]
                for row, values in enumerate(rows)
                for column, value in enumerate(values)
            ],
            "progressive": 0,
            "emphasis": {"disabled": True},
        }
    ]
    return chart


def bars(
    labels: Sequence[str], name_to_values: Mapping[str, Values], colors: Sequence[str], unit: str
) -> Options:
    """Groups of bars, with a label each."""
    chart = _base()
    chart["xAxis"] = _axis("category", data=list(labels), splitLine={"show": False})
    chart["yAxis"] = _axis("value", splitNumber=3, name=unit)
    chart["yAxis"]["nameTextStyle"] = {"color": _TEXT, "fontSize": 12, "align": "right"}
    chart["series"] = [
        {
            "type": "bar",
            "name": name,
            "data": [_rounded(value) for value in values],
            "itemStyle": {"color": colors[index], "borderRadius": [2, 2, 0, 0]},
            "barMaxWidth": 14,
            "barGap": "15%",
        }
        for index, (name, values) in enumerate(name_to_values.items())
    ]
    return chart


def demand(
    times_s: Sequence[float],
    rates: Sequence[float],
    now_s: float,
    ahead_s: Sequence[float],
    forecast: Sequence[float],
    capacity: float,
) -> Options:
    """What was asked of a role, what is expected, and what its units can be asked for."""
    chart = lines(times_s, {"asked for": rates}, unit="tokens/s")
    ahead = [
        [round(1000 * (now_s + more_s)), _rounded(rate)]
        for more_s, rate in zip(ahead_s, forecast, strict=True)
    ]
    style = {"type": "line", "showSymbol": False}
    chart["series"].append(
        {
            **style,
            "name": "expected",
            "data": ahead,
            "lineStyle": {"width": 1.6, "type": [4, 4]},
            "itemStyle": {"color": AMBER},
        }
    )
    if capacity > 0:
        first = times_s[0] if times_s else now_s
        last = now_s + (ahead_s[-1] if ahead_s else 0.0)
        chart["series"].append(
            {
                **style,
                "name": "units wanted can take",
                "data": [[round(1000 * at_s), _rounded(capacity)] for at_s in (first, last)],
                "lineStyle": {"width": 1.2},
                "itemStyle": {"color": GREY},
            }
        )
    chart["legend"]["show"] = True
    return chart


def clock(unix_s: float) -> str:
    """The time of day here."""
    return datetime.fromtimestamp(unix_s).strftime("%H:%M:%S")
