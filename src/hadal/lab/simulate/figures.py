"""Charts of a day's report as plotly figures, each from a part of `result.json`; None if that part
has no data.

    {"label": "...", "data": [traces], "layout": {...}}      plain values, made without plotly

Computes only sums, means, shares and densities. A colour is the name of a CSS variable of the
template, so the same figures serve light, dark and paper. Names from a result are escaped, because
plotly interprets tags in texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Any

from hadal.results.figures import Figure, axis, figure
from hadal.results.values import (
    as_number,
    compact,
    dollars,
    duration,
    hour_label,
    number,
    numbers,
    percent,
    plain,
    present,
    ratio,
    signed_percent,
)

Row = Mapping[str, Any]
Values = Sequence[float | None]

LOG_SPAN = 30.0
"""Ratio of an axis's ends above which the axis is logarithmic."""
NUM_BARS = 200
"""Maximum number of bars of a chart by rank; with more ranks, a bar is the mean of neighbours."""
MARKS = (("p50", "median"), ("p90", "p90"), ("p99", "p99"))
"""(key of a quantile in the result, its name in a chart)."""
_NAME_CHARS_MAX = 44
_HOUR_MS = 3_600_000
_MIDNIGHT = datetime(2000, 1, 1)
"""Midnight of an arbitrary day, because hours of a result have no date."""


def load_and_nodes(minutes: Row, first_hour: float) -> Figure | None:
    """Return a chart of demand above and nodes by role below, on one time axis in Beijing time."""
    roles = [(role, _filled(numbers(minutes, f"{role}_nodes"))) for role in ("decode", "prefill")]
    size = max(len(values) for _, values in roles)
    roles = [(role, values + [0.0] * (size - len(values))) for role, values in roles if values]
    nodes = [math.fsum(at) for at in zip(*(values for _, values in roles), strict=True)]
    nodes = nodes or _filled(numbers(minutes, "nodes"))  # Only the sum if no role is known.
    if not nodes:
        return None
    demand = numbers(minutes, "tokens_in_per_s")[: len(nodes)]
    minute = int(60 * first_hour) % 1440
    begin = f"{_MIDNIGHT + timedelta(minutes=minute):%Y-%m-%d %H:%M}"

    def line(name: str, values: Values, colour: str, width: float, labels: str) -> Figure:
        steps = {"width": width, "shape": "hv", "color": colour}
        time = {"type": "scatter", "x0": begin, "dx": 60_000}
        return {**time, "name": name, "y": values, "line": steps, "hovertemplate": labels}

    data = [line(role, values, f"--{role}", 0, "%{y:,.0f}") for role, values in roles]
    for trace in data:
        trace |= {"stackgroup": "nodes", "fillcolor": trace["line"]["color"]}
    data.append(line("nodes", nodes, "--ink", 1, "%{y:,.0f}"))
    if has_demand := bool(present(demand)):
        asked = line("demand", demand, "--ink", 1.5, "%{y:,.4s} tokens/s")
        data.append({**asked, "yaxis": "y2"})
    return figure(
        f"Nodes over the day: peak {plain(max(nodes), 0)}, mean {plain(_mean(nodes))}.",
        data,
        height=430,
        xaxis=axis(type="date", tickformat="%H:%M", hoverformat="%H:%M", showgrid=False),
        yaxis=axis(title="nodes", rangemode="tozero", domain=[0.0, 0.6 if has_demand else 1.0]),
        yaxis2=axis(title="input tokens/s", rangemode="tozero", domain=[0.7, 1.0], nticks=4),
        hovermode="x unified",
        hoversubplots="axis",
    )


def income_and_cost(hours: Sequence[Row]) -> Figure | None:
    """Return a chart with two bars per hour: income and cost."""
    series = [
        (name, [number(hour, f"{name}_usd") for hour in hours]) for name in ("income", "cost")
    ]
    if not any(present(values) for _, values in series):
        return None
    return figure(
        "Income and cost by hour.",
        [
            _bars(name, f"--{name}", values, _labels(hours, name, values, dollars), **_times(hours))
            for name, values in series
        ],
        height=300,
        xaxis=_hour_axis(),
        yaxis=axis(tickprefix="$"),
        bargap=0.25,
    )


def hit_rate(hours: Sequence[Row], mean_percent: float | None) -> Figure | None:
    """Return a chart of each hour's hit rate: the cache day as a line, windows as dots."""
    return _lines(
        hours,
        "Hit rate by hour, percent of input tokens.",
        percent,
        ("cache day", hit_percents(hours)),
        [number(hour, "window", "hit_percent") for hour in hours],
        mean_percent,
    )


def hit_percents(hours: Sequence[Row]) -> list[float | None]:
    """Return the percent of each hour's input tokens that came from the cache."""
    shares = [ratio(number(hour, "tokens_hit"), number(hour, "tokens_in")) for hour in hours]
    return [None if share is None else as_number(100.0 * share) for share in shares]


def users_speed(hours: Sequence[Row], mean: float | None) -> Figure | None:
    """Return a chart of a user's tokens/s by hour: the fluid day as a line, windows as dots."""
    return _lines(
        hours,
        "Output tokens per second and user, by hour.",
        lambda value: f"{plain(value)} tokens/s",
        ("fluid day", [number(hour, "fluid", "tokens_per_s_user") for hour in hours]),
        [number(hour, "window", "tokens_per_s_user") for hour in hours],
        mean,
    )


def _lines(
    hours: Sequence[Row],
    label: str,
    shown: Callable[[float | None], str],
    line: tuple[str, list[float | None]],
    windows: list[float | None],
    mean: float | None,
) -> Figure | None:
    name, values = line
    found = present([*values, *windows])
    if not found:
        return None
    # The line has markers, because without them a point between two gaps would be invisible.
    looks = (
        (name, values, {"mode": "lines+markers", "marker": {"size": 3, "color": "--ink"}}),
        ("windows", windows, {"mode": "markers", "marker": {"size": 8, "color": "--window"}}),
    )
    data = [
        {
            **{"type": "scatter", "name": name, "y": values, **look, **_times(hours)},
            **{"hovertext": _labels(hours, name, values, shown), "hoverinfo": "text"},
            "line": {"width": 1.8, "color": "--ink"},
        }
        for name, values, look in looks
        if present(values)
    ]
    if mean is not None:
        found.append(mean)
    # The axis spans at least a fifth of the highest value, so that noise does not look large.
    low, high = min(found), max(found)
    spare = max(0.2 * max(abs(low), abs(high)) - (high - low), 0.1 * (high - low)) / 2 or 0.5
    return figure(
        label,
        data,
        height=270,
        xaxis=_hour_axis(),
        yaxis=axis(range=[low - spare, high + spare]),
        shapes=[] if mean is None else [_level("y", mean, f"the day: {shown(mean)}")],
        showlegend=True,
    )


def distribution(histogram: Row, name: str) -> Figure | None:
    """Return a chart of a histogram of times, with quantiles as marks. A bar's height is its
    density: a bin of mean width has its share as its height.
    """
    bins = filled_bins(histogram)
    total = math.fsum(count for _, _, count in bins)
    if not bins or total <= 0.0:
        return None
    is_log = min(low for low, _, _ in bins) > 0.0 and bins[-1][1] / LOG_SPAN > bins[0][0]
    scale = math.log if is_log else float
    widths = [scale(high) - scale(low) for low, high, _ in bins]
    least = 1e-6 * math.fsum(widths)
    heights = [
        100.0 * count / total * _mean(widths) / max(width, least)
        for (_, _, count), width in zip(bins, widths, strict=True)
    ]
    labels = [
        f"{duration(low)} to {duration(high)}: {percent(100.0 * count / total)}"
        for low, high, count in bins
    ]
    edges = {"x": [low for low, _, _ in bins], "width": [high - low for low, high, _ in bins]}
    bars = _bars("requests", "--bar", heights, labels, **edges, offset=0)
    bars["marker"]["line"] = {"width": 0.5, "color": "--card"}
    return figure(
        f"{name}: distribution.",
        [bars, *_quantile_marks(histogram, bins[0][0], bins[-1][1], max(heights), scale)],
        height=270,
        xaxis=axis(
            type="log" if is_log else "linear",
            # Plotly expects the ends of a logarithmic range as exponents of ten.
            range=[math.log10(at) if is_log else at for at in (bins[0][0], bins[-1][1])],
            tickformat="~s",
            ticksuffix="s",
            showgrid=False,
            **(_log_ticks(bins[0][0], bins[-1][1]) if is_log else {}),
        ),
        yaxis=axis(ticksuffix=" %", rangemode="tozero"),
        showlegend=False,
    )


def _log_ticks(low: float, high: float) -> Figure:
    """Return ticks at round times within the axis; plotly labels only powers of ten with a unit."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high) - math.log10(low) < 2.5 else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return {"tickvals": ticks, "ticktext": [duration(tick) for tick in ticks]}


def _quantile_marks(
    histogram: Row, low: float, high: float, top: float, scale: Callable[[float], float]
) -> list[Figure]:
    """Return vertical lines with labels to the right, or to the left near the right edge. Heights
    are chosen so that no line crosses the label of another.
    """
    marks = []
    num_left = 0
    for level, (key, name) in enumerate(MARKS):
        value = number(histogram, key)
        if value is None:
            continue
        x = min(max(value, low), high)
        is_right = scale(x) - scale(low) > 0.7 * (scale(high) - scale(low))
        step, num_left = (num_left + 1, num_left + 1) if is_right else (-level, num_left)
        marks.append(
            {
                "type": "scatter",
                "mode": "lines+text",
                "name": name,
                "x": [x, x],
                "y": [0.0, (1.35 + 0.13 * step) * top],
                "text": ["", f"{name} {duration(value)}"],
                "textposition": "middle left" if is_right else "middle right",
                "line": {"width": 1.3, "color": "--mark", "dash": "dot" if level else "solid"},
                "hoverinfo": "skip",
            }
        )
    return marks


def filled_bins(histogram: Row) -> list[tuple[float, float, float]]:
    """Return (low, high, count) of the bins from the first to the last that is not empty."""
    edges, counts = numbers(histogram, "edges"), numbers(histogram, "counts")
    bins = [
        (low, high, max(count or 0.0, 0.0))
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
        if low is not None and high is not None and high > low
    ]
    filled = [index for index, (_, _, count) in enumerate(bins) if count > 0.0]
    return bins[filled[0] : filled[-1] + 1] if filled else []


def by_rank(values: Values, name: str, role: str, unit: str = "") -> Figure | None:
    """Return a chart of bars, the highest first, with the mean of all ranks as a line. The figure's
    text has the maximum, the mean and their ratio. None if there are no values.
    """
    ranked = sorted(
        ((value, rank) for rank, value in enumerate(values) if value is not None), reverse=True
    )
    if not ranked:
        return None
    bars = [(value, f"rank {rank}") for value, rank in ranked]
    if len(bars) > NUM_BARS:
        size = math.ceil(len(bars) / NUM_BARS)
        runs = [ranked[begin : begin + size] for begin in range(0, len(ranked), size)]
        bars = [(_mean([value for value, _ in run]), f"mean of {len(run)} ranks") for run in runs]
    labels = [f"{who}: {compact(value, 4)}{unit}" for value, who in bars]
    return figure(
        f"{name} by rank, sorted: {balance_words(values, unit)}.",
        [_bars(name, f"--{role}", [value for value, _ in bars], labels)],
        height=170,
        margin={"l": 50, "r": 16, "t": 24, "b": 8},
        xaxis=axis(visible=False),
        yaxis=axis(ticksuffix=unit, nticks=5),
        bargap=0.15,
        shapes=[_level("y", _mean([value for value, _ in ranked]))],
        showlegend=False,
    )


def balance_words(values: Values, unit: str = "") -> str:
    """Return a text with the maximum, the mean, and their ratio."""
    found = present(values)
    if not found:
        return "nothing"
    mean, highest = _mean(found), max(found)
    over = ratio(highest, mean)
    return f"maximum {compact(highest)}{unit}, mean {compact(mean)}{unit}" + (
        f", {over:.3f} times the mean" if over is not None else ""
    )


def what_ifs(cases: Sequence[Row]) -> Figure | None:
    """Return a chart of each case's cost as a bar, and the first case's cost as a vertical line."""
    costs = [(str(case.get("name", "")), number(case, "cost_usd")) for case in cases]
    amounts = present([usd for _, usd in costs])
    if len(cases) < 2 or not amounts or min(amounts) < 0.0:
        return None
    asked, positions = costs[0][1], list(range(len(costs)))
    written = []
    for index, (name, usd) in enumerate(costs):
        of = ratio(usd, asked)
        more = "" if index == 0 or of is None else f" ({signed_percent(of - 1.0)})"
        shown = "not known" if usd is None else dollars(usd) + more
        written.append(f"{_said(name)}: {shown}")
    colours = ["--bar", *["--prefill"] * (len(costs) - 1)]
    amounts_x = {"x": [usd or 0.0 for _, usd in costs], "orientation": "h", "width": 0.4}
    return figure(
        "Cost of the day in each case.",
        [_bars("cost", colours, positions, written, **amounts_x)],
        height=60 + 48 * len(costs),
        margin={"l": 8, "r": 16, "t": 24, "b": 30},
        xaxis=axis(tickprefix="$", rangemode="tozero", nticks=5),
        yaxis=axis(
            range=[len(costs) - 0.5, -0.7],
            tickvals=positions,
            ticktext=written,
            ticklabelposition="inside",
            ticklabelshift=17,
            showgrid=False,
            zeroline=False,
        ),
        shapes=[] if asked is None else [_level("x", asked)],
        showlegend=False,
    )


def _hour_axis() -> Figure:
    return axis(type="date", tickformat="%H:%M", showgrid=False)


def _bars(
    name: str, colour: str | list[str], values: Values, labels: list[str], **more: Any
) -> Figure:
    """Return a trace of bars. `labels`: hover text of each bar."""
    looks = {"type": "bar", "marker": {"color": colour}, "hoverinfo": "text"}
    return {**looks, "name": name, "y": values, "hovertext": labels, **more}


def _labels(
    hours: Sequence[Row], name: str, values: Values, shown: Callable[[float | None], str]
) -> list[str]:
    return [
        f"{hour_label(number(hour, 'hour_beijing'))}  {name}: {shown(value)}"
        for hour, value in zip(hours, values, strict=True)
    ]


def _times(hours: Sequence[Row]) -> Figure:
    """Return the hours as points of a time axis, drawn in the middle of each hour. Hours after
    midnight are on the next day. An hour without `hour_beijing` follows the previous one.
    """
    at, found = 0, []
    for index, hour in enumerate(hours):
        said = number(hour, "hour_beijing")
        if index == 0:
            at = int(said or 0.0) % 24
        else:
            at += 1 if said is None else (int(said) - at - 1) % 24 + 1
        found.append(f"{_MIDNIGHT + timedelta(hours=at):%Y-%m-%d %H:%M}")
    return {"x": found, "xperiod": _HOUR_MS, "xperiodalignment": "middle"}


def _level(axis: str, value: float, name: str = "") -> Figure:
    """Return a dashed reference line across the whole chart."""
    other = "y" if axis == "x" else "x"
    return {
        "type": "line",
        "line": {"width": 1.2, "color": "--ink", "dash": "dash"},
        f"{axis}0": value,
        f"{axis}1": value,
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        "name": name,
        "showlegend": bool(name),
    }


def _said(name: str) -> str:
    """Return a name from a result, shortened and escaped for plotly."""
    short = name if len(name) <= _NAME_CHARS_MAX else f"{name[: _NAME_CHARS_MAX - 1]}…"
    return escape(short, quote=False)


def _filled(values: Values) -> list[float]:
    """Return the values with gaps filled by the previous value, and negative values set to 0."""
    found: list[float] = []
    for value in values:
        found.append(max(value, 0.0) if value is not None else found[-1] if found else 0.0)
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
