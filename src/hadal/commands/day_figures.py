"""The charts of a day's report, each from the part of `result.json` it shows; None where there is
nothing to show.

Times run from the first hour of the result, in Beijing time. Nothing is computed here but sums,
means and shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hadal.commands.day_charts import (
    LOG_SPAN,
    Axis,
    Box,
    area,
    around,
    bar,
    below,
    dot,
    from_zero,
    grid,
    hover,
    legend,
    line,
    path,
    stepped,
    svg,
    text,
    thinned,
)
from hadal.commands.day_values import (
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
from hadal.commands.markup import Html, together

Row = Mapping[str, Any]

WIDE, HALF = 1040.0, 506.0
"""Widths of charts: across the page, and half of it, which is also what a phone is shown."""
LABEL_PITCH = 17.0
"""Pixels from the label of one quantile to the label below it."""
NUM_COLUMNS = 96
"""Stretches with a tooltip of their own in a chart by the minute: quarters of an hour."""
NUM_BARS = 200
"""Ranks shown one by one; of more, means of neighbours."""
_MARKS = (("p50", "median"), ("p90", "p90"), ("p99", "p99"))


def load_and_nodes(minutes: Row, first_hour: float, width: float = WIDE) -> Html | None:
    """Demand above, nodes by role below, on one time axis."""
    prefill, decode = (_filled(numbers(minutes, key)) for key in ("prefill_nodes", "decode_nodes"))
    if not prefill and not decode:  # Then at least their sum.
        prefill = _filled(numbers(minutes, "nodes"))
    size = max(len(prefill), len(decode))
    demand = thinned(numbers(minutes, "tokens_in_per_s")[: size or None], 720)
    if not size:
        return None
    prefill, decode = (values + [0.0] * (size - len(values)) for values in (prefill, decode))
    above = Box(width, 372, top=24, bottom=372 - 124)
    under = Box(width, 372, top=168)
    axis_x = Axis(0.0, float(size), under.left, under.right_px)
    both = [a + b for a, b in zip(prefill, decode, strict=True)]
    axis_y = from_zero(under, both)
    axis_d = from_zero(above, present(demand))
    hours = range(0, size // 60 + 1, 1 if size <= 360 else 3 if width > HALF else 6)
    lower = stepped(axis_x, axis_y, decode)
    parts: list[Html] = [grid(under, axis_y, compact)]
    if present(demand):
        each = size / len(demand)
        points = [
            None if value is None else (axis_x.at((index + 0.5) * each), axis_d.at(value))
            for index, value in enumerate(demand)
        ]
        parts += [
            grid(above, axis_d, compact, 3),
            path(points, "demand"),
            text(above.left, above.top - 9, "demand, input tokens per second", "caption"),
        ]
    floor = axis_y.at(0.0)
    parts += [
        area(lower, [(lower[0][0], floor), (lower[-1][0], floor)], "decode"),
        area(stepped(axis_x, axis_y, both), lower, "prefill"),
        text(under.left, under.top - 9, "nodes", "caption"),
        below(under, axis_x, [(60.0 * hour, hour_label(first_hour + hour)) for hour in hours]),
        *_minute_tooltips(axis_x, above.top, under.bottom_px, first_hour, prefill, decode, demand),
    ]
    label = f"Nodes over the day: peak {plain(max(both), 0)}, mean {plain(math.fsum(both) / size)}."
    entries = legend(("decode", "decode"), ("prefill", "prefill"), ("demand", "demand"))
    return together(entries, svg(under, label, *parts))


def _minute_tooltips(
    axis_x: Axis,
    top: float,
    bottom: float,
    first_hour: float,
    prefill: Sequence[float],
    decode: Sequence[float],
    demand: Sequence[float | None],
) -> list[Html]:
    size = len(prefill)
    each = max(1, math.ceil(size / NUM_COLUMNS))
    found = []
    for begin in range(0, size, each):
        end = min(begin + each, size)
        wanted = demand[begin * len(demand) // size] if demand else None
        title = (
            f"{int(first_hour + begin / 60) % 24:02}:{begin % 60:02} "
            f" {plain(prefill[begin] + decode[begin], 0)} nodes: {plain(prefill[begin], 0)}"
            f" prefill, {plain(decode[begin], 0)} decode; demand {compact(wanted)} tokens/s"
        )
        found.append(
            hover(axis_x.at(begin), top, axis_x.at(end) - axis_x.at(begin), bottom - top, title)
        )
    return found


def income_and_cost(hours: Sequence[Row], width: float = WIDE) -> Html | None:
    """Two bars for each hour."""
    series = [("income", "income_usd"), ("cost", "cost_usd")]
    amounts = [
        value for _, key in series for value in present([number(hour, key) for hour in hours])
    ]
    if not amounts:
        return None
    box = Box(width, 280, left=62)
    axis_x, axis_y = _hour_axis(box, hours), from_zero(box, amounts)
    each = min(0.36 * (axis_x.at(1.0) - axis_x.at(0.0)), 60.0)
    parts = [
        grid(box, axis_y, lambda usd: f"${compact(usd)}".replace("$−", "−$")),
        _hour_labels(box, axis_x, hours, every=2 if width > HALF else 6),
    ]
    for place, (name, key) in enumerate(series):
        for index, hour in enumerate(hours):
            usd = number(hour, key)
            if usd is None:
                continue
            x = axis_x.at(index + 0.5) + (place - 1) * each
            title = f"{hour_label(number(hour, 'hour_beijing'))}  {name} {dollars(usd)}"
            y, zero = axis_y.at(usd), axis_y.at(0.0)
            parts.append(bar(x, min(y, zero), each - 1.5, abs(zero - y), name, title))
    label = "Income and cost by hour."
    return together(legend(("income", "income"), ("cost", "cost")), svg(box, label, *parts))


def hit_rate(hours: Sequence[Row], mean_percent: float | None) -> Html | None:
    """Of each hour's input tokens, those from the cache; what a window found as a dot."""
    shares = [ratio(number(hour, "tokens_hit"), number(hour, "tokens_in")) for hour in hours]
    found = [None if share is None else 100.0 * share for share in shares]
    windows = [number(hour, "window", "hit_percent") for hour in hours]
    return _lines(
        hours,
        "Hit rate by hour, percent of input tokens.",
        percent,
        [("cache day", "hit", found, False), ("windows", "window", windows, True)],
        mean_percent,
    )


def users_speed(hours: Sequence[Row], mean: float | None) -> Html | None:
    """Tokens per second of a user by hour: the fluid day as a line, windows as dots."""
    fluid = [number(hour, "fluid", "tokens_per_s_user") for hour in hours]
    windows = [number(hour, "window", "tokens_per_s_user") for hour in hours]
    return _lines(
        hours,
        "Output tokens per second of a user, by hour.",
        lambda value: f"{plain(value)} tokens/s",
        [("fluid day", "fluid", fluid, False), ("windows", "window", windows, True)],
        mean,
    )


def _lines(
    hours: Sequence[Row],
    label: str,
    shown: Any,
    series: Sequence[tuple[str, str, list[float | None], bool]],
    mean: float | None,
) -> Html | None:
    values = [value for _, _, found, _ in series for value in present(found)]
    if not values:
        return None
    box = Box(HALF, 230)
    axis_x, axis_y = _hour_axis(box, hours), around(box, [*values, *present([mean])])
    parts = [grid(box, axis_y, compact), _hour_labels(box, axis_x, hours, every=6)]
    entries = [(class_, name) for name, class_, found, _ in series if present(found)]
    if mean is not None:
        y = axis_y.at(mean)
        parts.append(line(box.left, y, box.right_px, y, "mean"))
        entries.append(("mean", f"the day: {shown(mean)}"))
    for name, class_, found, is_dots in series:
        points = [
            None if value is None else (axis_x.at(index + 0.5), axis_y.at(value))
            for index, value in enumerate(found)
        ]
        if not is_dots:
            parts.append(path(points, class_))
        for point, value, hour in zip(points, found, hours, strict=True):
            if point is not None:
                title = f"{hour_label(number(hour, 'hour_beijing'))}  {name}: {shown(value)}"
                width = (box.right_px - box.left) / len(hours)
                parts.append(
                    dot(*point, class_, title)
                    if is_dots
                    else hover(point[0] - width / 2, box.top, width, box.bottom_px - box.top, title)
                )
    return together(legend(*entries), svg(box, label, *parts))


def distribution(histogram: Row, name: str) -> Html | None:
    """Shares of requests by time, with quantiles as marks. Bins of unequal width are shown by their
    density.
    """
    bins = _bins(histogram)
    total = math.fsum(count for _, _, count in bins)
    if not bins or total <= 0.0:
        return None
    box = Box(HALF, 252, top=64)
    is_log = bins[0][0] > 0.0 and bins[-1][1] > LOG_SPAN * bins[0][0]
    axis_x = Axis(bins[0][0], bins[-1][1], box.left, box.right_px, is_log)
    widths = [max(axis_x.at(high) - axis_x.at(low), 1e-9) for low, high, _ in bins]
    mean_width = math.fsum(widths) / len(widths)
    heights = [
        100.0 * count / total * mean_width / width
        for (_, _, count), width in zip(bins, widths, strict=True)
    ]
    axis_y = from_zero(box, heights)
    parts = [
        grid(box, axis_y, lambda value: f"{compact(value)} %", 3),
        below(box, axis_x, [(tick, duration(tick)) for tick in _spaced(axis_x)]),
    ]
    for (low, high, count), width, height in zip(bins, widths, heights, strict=True):
        if count > 0.0:
            title = f"{duration(low)} to {duration(high)}: {percent(100.0 * count / total)}"
            y = axis_y.at(height)
            parts.append(
                bar(axis_x.at(low) + 0.25, y, width - 0.5, axis_y.at(0.0) - y, "histogram", title)
            )
    labels = []
    for level, (key, shown) in enumerate(_MARKS):
        value = number(histogram, key)
        if value is None:
            continue
        x, y = axis_x.at(value), 14.0 + LABEL_PITCH * level
        is_right = x > box.right_px - 110.0
        parts.append(line(x, y - 6, x, box.bottom_px, f"mark {key}"))
        labels.append(
            text(
                x - 5 if is_right else x + 5,
                y,
                f"{shown} {duration(value)}",
                "label",
                "end" if is_right else None,
            )
        )
    parts += labels  # Above all lines: a label hides what would run through it.
    return svg(box, f"{name}: distribution over requests.", *parts)


def _bins(histogram: Row) -> list[tuple[float, float, float]]:
    """(low, high, count), from the first bin with something in it to the last."""
    edges, counts = numbers(histogram, "edges"), numbers(histogram, "counts")
    bins = [
        (low, high, max(count or 0.0, 0.0))
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
        if low is not None and high is not None and high > low
    ]
    filled = [index for index, (_, _, count) in enumerate(bins) if count > 0.0]
    return bins[filled[0] : filled[-1] + 1] if filled else []


def _spaced(axis: Axis) -> list[float]:
    """Ticks far enough from each other for their labels."""
    kept: list[float] = []
    for tick in axis.ticks(5):
        if not kept or axis.at(tick) - axis.at(kept[-1]) >= 46.0:
            kept.append(tick)
    return kept


def by_rank(values: Sequence[float | None], name: str, class_: str, unit: str = "") -> Html | None:
    """Bars sorted by height, with the mean as a line; how far the highest stands above it is
    said.
    """
    ranked = sorted(
        ((value, rank) for rank, value in enumerate(values) if value is not None), reverse=True
    )
    if not ranked:
        return None
    mean = math.fsum(value for value, _ in ranked) / len(ranked)
    box = Box(HALF, 150, left=44, bottom=14, top=14)
    shown = [(value, f"rank {rank}") for value, rank in ranked]
    if len(ranked) > NUM_BARS:
        means = thinned([value for value, _ in ranked], NUM_BARS)
        size = math.ceil(len(ranked) / NUM_BARS)
        shown = [(value or 0.0, f"mean of {size} ranks") for value in means]
    axis_y = from_zero(box, [value for value, _ in ranked])
    each = (box.right_px - box.left) / len(shown)
    gap = min(1.0, 0.15 * each)
    zero = axis_y.at(0.0)
    parts = [grid(box, axis_y, lambda value: compact(value) + unit, 3)]
    for index, (value, who) in enumerate(shown):
        y = axis_y.at(value)
        title = f"{who}: {compact(value, 4)}{unit}"
        parts.append(
            bar(box.left + index * each, min(y, zero), each - gap, abs(zero - y), class_, title)
        )
    y = axis_y.at(mean)
    parts.append(line(box.left, y, box.right_px, y, "mean"))
    return svg(box, f"{name} by rank, sorted: {balance_words(values, unit)}.", *parts)


def balance_words(values: Sequence[float | None], unit: str = "") -> str:
    """The maximum over the mean, and both."""
    found = present(values)
    if not found:
        return "nothing"
    mean, highest = math.fsum(found) / len(found), max(found)
    over = ratio(highest, mean)
    return f"maximum {compact(highest)}{unit}, mean {compact(mean)}{unit}" + (
        f", {over:.3f} times the mean" if over is not None else ""
    )


def what_ifs(cases: Sequence[Row], width: float = WIDE) -> Html | None:
    """Cost of each case as a bar; the first one's as an upright line through all. Names stand
    before the bars, or above them where there is no room.
    """
    costs = [(str(case.get("name", "")), number(case, "cost_usd")) for case in cases]
    amounts = present([usd for _, usd in costs])
    if len(cases) < 2 or not amounts or min(amounts) < 0.0:
        return None
    is_wide = width > HALF
    pitch, bar_px = (26.0, 3.0) if is_wide else (48.0, 21.0)
    box = Box(
        width, 34 + pitch * len(costs), left=280.0 if is_wide else 4.0, right=150, top=22, bottom=12
    )
    axis = Axis(0.0, max(*amounts, 1e-9), box.left, box.right_px)
    asked = costs[0][1]
    parts: list[Html] = [text(box.left, 12, "cost of the day", "caption")]
    if asked is not None:
        parts.append(line(axis.at(asked), box.top - 2, axis.at(asked), box.bottom_px, "mean"))
    for index, (name, usd) in enumerate(costs):
        y = box.top + pitch * index
        short = name if len(name) <= 44 else name[:43] + "…"
        parts.append(
            text(
                box.left - 12 if is_wide else box.left,
                y + 14,
                short,
                "name",
                "end" if is_wide else None,
            )
        )
        if usd is None:
            parts.append(text(box.left + 6, y + bar_px + 11, "not known", "tick"))
            continue
        of = ratio(usd, asked)
        more = "" if index == 0 or of is None else f" ({signed_percent(of - 1.0)})"
        colour = "asked" if index == 0 else "case"
        parts.append(
            bar(
                box.left, y + bar_px, axis.at(usd) - box.left, 15, colour, f"{name}: {dollars(usd)}"
            )
        )
        parts.append(text(axis.at(usd) + 8, y + bar_px + 11, dollars(usd) + more, "value"))
    return svg(box, "Cost of the day in each case.", *parts)


def _filled(values: Sequence[float | None]) -> list[float]:
    """Gaps keep the value before them; nodes are never fewer than none."""
    found: list[float] = []
    for value in values:
        found.append(max(value, 0.0) if value is not None else found[-1] if found else 0.0)
    return found


def _hour_axis(box: Box, hours: Sequence[Row]) -> Axis:
    return Axis(0.0, float(max(len(hours), 1)), box.left, box.right_px)


def _hour_labels(box: Box, axis: Axis, hours: Sequence[Row], every: int = 2) -> Html:
    named = [
        (index + 0.5, hour_label(as_number(hour.get("hour_beijing"))))
        for index, hour in enumerate(hours)
    ]
    return below(box, axis, named[:: every if len(named) > every else 1])
