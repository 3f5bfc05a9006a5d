"""Options of the charts in ECharts' format, with colours for light and dark backgrounds."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

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
"""Maximum number of points per line: a chart has a few hundred pixels, and more points are slow."""

Options = dict[str, Any]
Values = Sequence[float | None]


def _base() -> Options:
    return {
        "animation": False,
        "useUTC": True,
        "textStyle": {"fontFamily": _FONT, "fontSize": 12, "color": _TEXT},
        "grid": {"left": 46, "right": 14, "top": 34, "bottom": 26},
        "legend": {
            "top": 3,
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
    most: float | None = None,
    colors: Sequence[str] = PALETTE,
) -> Options:
    """Return a line chart over the time of day. `most`: end of the value axis; None: automatic."""
    every = max(1, math.ceil(len(times_s) / _MAX_POINTS))
    chart = _base()
    shown = [round(1000 * time_s) for time_s in times_s][::-1][::every][::-1]
    chart["xAxis"] = _axis("time", splitLine={"show": False}, splitNumber=4)
    chart["yAxis"] = _axis("value", min=0, splitNumber=3)
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
            "emphasis": {"disabled": True},
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


def heat(rows: Sequence[Sequence[float]], most: float) -> tuple[int, str]:
    """Return a map of loads for its canvas: the number of columns, and one byte per cell in base64,
    255 for loads of `most` and above.
    """
    cells = np.asarray(rows, np.float64)
    levels = np.clip(np.round(255.0 / most * cells), 0, 255).astype(np.uint8)
    return (cells.shape[1] if cells.ndim == 2 else 0), base64.b64encode(levels.tobytes()).decode()


def bars(
    labels: Sequence[str], name_to_values: Mapping[str, Values], colors: Sequence[str]
) -> Options:
    """Return a bar chart: a group of bars per label, with one bar per name."""
    chart = _base()
    chart["xAxis"] = _axis("category", data=list(labels), splitLine={"show": False})
    chart["yAxis"] = _axis("value", splitNumber=3)
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
    """Return a chart of a role's demand, its forecast, and the capacity of its units."""
    chart = lines(times_s, {"demand": rates})
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
                "name": "capacity of the wanted units",
                "data": [[round(1000 * at_s), _rounded(capacity)] for at_s in (first, last)],
                "lineStyle": {"width": 1.2},
                "itemStyle": {"color": GREY},
            }
        )
    chart["legend"]["show"] = True
    return chart


def clock(unix_s: float) -> str:
    """Return the time of day in UTC, like logs and charts."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%M:%S")


def moment(unix_s: float, now_s: float) -> str:
    """Return the time of day, with the date if it is not today."""
    when, today = (datetime.fromtimestamp(at_s, UTC) for at_s in (unix_s, now_s))
    return when.strftime("%H:%M:%S" if when.date() == today.date() else "%d %b %H:%M:%S")


def moment_of(iso: str, now_s: float) -> str:
    """Return an ISO time like `moment`; unchanged if it is not a time."""
    try:
        return moment(datetime.fromisoformat(iso).timestamp(), now_s)
    except ValueError:
        return iso
