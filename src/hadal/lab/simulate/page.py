"""Report of a simulated day as one HTML file, made only from the object in `result.json`.

    report_html(result) -> text       includes plotly's script, so it opens from disk, offline

The page's text and style are in results/templates/day.html, its charts in lab/simulate/figures, its
tables here. Every chart has a table beside it; the table of the nodes chart has means by hour.
Missing parts of the result are left out or shown as a dash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from hadal.lab.simulate.figures import (
    Values,
    balance_words,
    by_rank,
    distribution,
    filled_bins,
    hit_percents,
    hit_rate,
    income_and_cost,
    load_and_nodes,
    users_speed,
    what_ifs,
)
from hadal.results.figures import Figure
from hadal.results.page import Table, page_template
from hadal.results.values import (
    NOTHING,
    compact,
    dollars,
    duration,
    hour_label,
    mapping,
    number,
    numbers,
    percent,
    plain,
    ratio,
    rows,
    signed_percent,
)

Row = Mapping[str, Any]
Shown = Callable[[float | None], str]
Column = tuple[str, Callable[[Row], str]]
"""(heading of a column, function that writes its cell of a row)."""

_STUDY_ROWS_MAX, _VALUE_CHARS_MAX, _RANK_ROWS_MAX = 400, 240, 400


def report_html(result: Row) -> str:
    """Return the page. `result`: content of result.json, in which any part may be missing."""
    hours, cases = rows(result, "hours"), rows(result, "what_ifs")
    configuration, notes = mapping(result, "study"), result.get("notes")
    name = configuration.get("name") or configuration.get("preset")
    ranks = list(_by_rank(mapping(result, "ranks")))
    study = list(_flat(configuration, "")) if configuration else []
    figures = {**_figures(result, hours, cases), **{f"rank-{key}": one for key, _, _, one in ranks}}
    return page_template("day.html").render(
        title=f"A simulated day: {name}" if isinstance(name, str) else "A simulated day",
        result=result,
        hours=hours,
        cases=cases,
        figures={key: figure for key, figure in figures.items() if figure is not None},
        headline=headline(result),
        by_hour=columns(HOUR, hours),
        money=columns(MONEY, hours),
        speed=columns(SPEED, hours),
        hits=columns(HITS, hours),
        bins={key: bins(mapping(result, key)) for key in ("ttft_s", "tpot_s")},
        ranks=[(f"rank-{key}", name, words) for key, name, words, _ in ranks],
        units=" and ".join(
            str(mapping(result, "ranks")[key])
            for key in ("decode_unit", "prefill_unit")
            if mapping(result, "ranks").get(key) is not None
        ),
        of_ranks=of_ranks(mapping(result, "ranks")),
        both_ways=fluid_and_windows(hours),
        has_both_ways=any(mapping(one, "window") or mapping(one, "fluid") for one in hours),
        windows=windows(hours),
        what_ifs=what_if_table(cases),
        notes=[str(note) for note in notes] if isinstance(notes, list | tuple) else [],
        study=study[:_STUDY_ROWS_MAX],
        num_left_out=len(study) - len(study[:_STUDY_ROWS_MAX]),
        plotly=Markup(get_plotlyjs()),
    )


def _figures(result: Row, hours: Sequence[Row], cases: Sequence[Row]) -> dict[str, Figure | None]:
    first_hour = number(hours[0], "hour_beijing") if hours else None
    return {
        "load": load_and_nodes(
            mapping(result, "minutes"), 12.0 if first_hour is None else first_hour
        ),
        "money": income_and_cost(hours),
        "speed": users_speed(hours, number(result, "tokens_per_s_user")),
        "hits": hit_rate(hours, number(result, "hit_percent")),
        "ttft_s": distribution(mapping(result, "ttft_s"), "Time to first token"),
        "tpot_s": distribution(mapping(result, "tpot_s"), "Time per output token"),
        "what-ifs": what_ifs(cases),
    }


_RANKS: tuple[tuple[str, str, str, str, float], ...] = (
    ("kv_share", "KV cache used", "decode", " %", 100.0),
    ("requests", "Requests", "decode", "", 1.0),
    ("decode_experts", "Expert rows received, decode", "decode", "", 1.0),
    ("prefill_attention", "Core attention, prefill", "prefill", "", 1.0),
    ("prefill_tokens", "Tokens per second, prefill", "prefill", "", 1.0),
    ("prefill_experts", "Expert rows received, prefill", "prefill", "", 1.0),
)
"""(key in `ranks`, name, role, unit of measure, factor) of each chart by rank."""


def _by_rank(ranks: Row) -> Iterator[tuple[str, str, str, Figure | None]]:
    """Yield (key, name, words, chart) of each series by rank."""
    for key, name, role, unit, factor in _RANKS:
        values = _scaled(numbers(ranks, key), factor)
        figure = by_rank(values, name, role, unit)
        if figure is not None:
            yield key, name, balance_words(values, unit), figure


def _scaled(values: Values, factor: float) -> list[float | None]:
    return [None if value is None else factor * value for value in values]


def columns(described: Sequence[Column], found: Sequence[Row], caption: str = "") -> Table:
    """Return a table with these columns and one row per object in `found`."""
    return Table(
        [head for head, _ in described],
        [[shown(row) for _, shown in described] for row in found],
        caption,
    )


def _of(shown: Shown, *path: str) -> Callable[[Row], str]:
    """Return a function that writes a cell from the number at a path of keys."""
    return lambda row: shown(number(row, *path))


def _share(value: float | None, decimals: int = 1) -> str:
    return percent(None if value is None else 100.0 * value, decimals)


_whole, _thousandths = partial(plain, decimals=0), partial(plain, decimals=3)
_figures4 = partial(compact, digits=4)
_hour: Column = ("hour", _of(hour_label, "hour_beijing"))
_income: Column = ("income", _of(dollars, "income_usd"))
_cost: Column = ("cost", _of(dollars, "cost_usd"))

HOUR: tuple[Column, ...] = (
    _hour,
    ("nodes", _of(plain, "nodes_mean")),
    ("prefill", _of(plain, "prefill_nodes_mean")),
    ("decode", _of(plain, "decode_nodes_mean")),
    ("requests", _of(compact, "requests")),
    ("input tokens", _of(compact, "tokens_in")),
    ("hit rate", lambda hour: percent(hit_percents([hour])[0])),
    ("output tokens", _of(compact, "tokens_out")),
    _cost,
    _income,
)
MONEY: tuple[Column, ...] = (_hour, _income, _cost)
SPEED: tuple[Column, ...] = (
    _hour,
    ("fluid day", _of(plain, "fluid", "tokens_per_s_user")),
    ("windows", _of(plain, "window", "tokens_per_s_user")),
)
HITS: tuple[Column, ...] = (
    _hour,
    ("cache day", lambda hour: percent(hit_percents([hour])[0])),
    ("windows", _of(percent, "window", "hit_percent")),
)
WINDOW: tuple[Column, ...] = (
    _hour,
    ("seconds", _of(plain, "window", "seconds")),
    ("requests", _of(compact, "window", "requests")),
    ("computed", _of(partial(_share, decimals=0), "window", "prefill_computed_share")),
    ("TTFT p50", _of(duration, "window", "ttft_s", "p50")),
    ("p90", _of(duration, "window", "ttft_s", "p90")),
    ("p99", _of(duration, "window", "ttft_s", "p99")),
    ("TPOT p50", _of(duration, "window", "tpot_s", "p50")),
    ("p90", _of(duration, "window", "tpot_s", "p90")),
    ("p99", _of(duration, "window", "tpot_s", "p99")),
    ("hit rate", _of(percent, "window", "hit_percent")),
    ("KV length", _of(_whole, "window", "kv_length_mean")),
    ("KV", _of(_thousandths, "window", "kv_imbalance")),
    ("requests", _of(_thousandths, "window", "request_imbalance")),
    ("prefill work", _of(_thousandths, "window", "prefill_imbalance")),
    ("experts, prefill", _of(_thousandths, "window", "expert_imbalance", "prefill")),
    ("experts, decode", _of(_thousandths, "window", "expert_imbalance", "decode")),
)
HEADLINE: tuple[tuple[str, str, Shown], ...] = (
    ("nodes_mean", "Nodes, mean", partial(plain, decimals=2)),
    ("nodes_peak", "Nodes, peak", _whole),
    ("prefill_nodes_mean", "Prefill nodes, mean", partial(plain, decimals=2)),
    ("decode_nodes_mean", "Decode nodes, mean", partial(plain, decimals=2)),
    ("requests", "Requests", _figures4),
    ("tokens_in", "Input tokens", _figures4),
    ("tokens_hit", "of these from the cache", _figures4),
    ("hit_percent", "Hit rate", percent),
    ("tokens_out", "Output tokens", _figures4),
    ("tokens_per_s_user", "Output tokens/s per user", plain),
    ("kv_length_mean", "KV length, mean over output tokens", _whole),
    ("prefill_tokens_per_s_node", "Prefill: input tokens/s per node", _whole),
    ("decode_tokens_per_s_node", "Decode: output tokens/s per node", _whole),
    ("cost_usd", "Cost", dollars),
    ("income_usd", "Income", dollars),
    ("margin_percent", "Margin, (income - cost) / cost", partial(percent, decimals=0)),
)
"""(key, words, function that formats the value) of each figure of the day."""
_IN_POINTS = {"hit_percent"}


def headline(result: Row) -> Table:
    """Return all figures of the day, beside the published ones if there are any."""
    published = mapping(result, "published")
    found = []
    for key, words, shown in HEADLINE:
        value = number(result, key)
        if value is None and published.get(key) is None:
            continue
        cells = [words, shown(value)]
        if published:
            low, high = bounds = _bounds(published, key)
            cells.append(shown(low) if low == high else f"{shown(low)} to {shown(high)}")
            cells.append(_difference(value, bounds, key in _IN_POINTS))
        found.append(cells)
    return Table(["", "simulated", *(["published", "difference"] if published else [])], found)


def _bounds(published: Row, key: str) -> tuple[float | None, float | None]:
    """Return the ends of a published range; a single figure gives two equal ends."""
    ends = numbers(published, key)
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        return min(ends[0], ends[1]), max(ends[0], ends[1])
    value = number(published, key)
    return value, value


def _difference(
    value: float | None, bounds: tuple[float | None, float | None], is_in_points: bool
) -> str:
    low, high = bounds
    if value is None or low is None or high is None:
        return NOTHING
    if low < high and low <= value <= high:
        return "within"
    nearest = low if abs(value - low) <= abs(value - high) else high
    if is_in_points:
        change = value - nearest
        return f"{'+' if change >= 0 else '−'}{abs(change):.2f} points"
    of = ratio(value, nearest)
    return signed_percent(None if of is None else of - 1.0, 2)


def fluid_and_windows(hours: Sequence[Row]) -> Table:
    """Return figures of the fluid day and of windows, with the window's relative difference."""
    pairs: tuple[tuple[str, str, Shown], ...] = (
        ("tokens_per_s_user", "output tokens/s per user", plain),
        ("requests_per_rank", "requests per decode rank", plain),
        ("prefill_use", "use of prefill", _share),
    )
    found = []
    for hour in hours:
        units = [number(hour, "window", f"{role}_units") for role in ("prefill", "decode")]
        cells = [hour_label(number(hour, "hour_beijing")), _units(*units)]
        for key, _, shown in pairs:
            fluid, window = number(hour, "fluid", key), number(hour, "window", key)
            of = ratio(window, fluid)
            cells += [shown(fluid), shown(window), signed_percent(None if of is None else of - 1.0)]
        found.append(cells)
    heads = ["hour", "units", *["fluid", "window", "differs"] * len(pairs)]
    return Table(heads, found, "Units are prefill + decode.", [name for _, name, _ in pairs])


def _units(prefill: float | None, decode: float | None) -> str:
    is_known = prefill is not None or decode is not None
    return f"{_whole(prefill)} + {_whole(decode)}" if is_known else NOTHING


def windows(hours: Sequence[Row]) -> Table:
    """Return the measurements of each hour's window: latencies, and maximum over mean of ranks."""
    return columns(
        WINDOW,
        [hour for hour in hours if mapping(hour, "window")],
        "Computed: share of the arriving prefill work that was computed. The last five"
        " columns: maximum over mean of the ranks.",
    )


def what_if_table(cases: Sequence[Row]) -> Table:
    """Return the figures of each case, with the change of its cost relative to the first case."""
    asked = cases[0] if cases else {}

    def change(case: Row) -> str:
        of = ratio(number(case, "cost_usd"), number(asked, "cost_usd"))
        return "" if case is asked else signed_percent(None if of is None else of - 1.0)

    described: tuple[Column, ...] = (
        ("case", lambda case: str(case.get("name", NOTHING))),
        ("nodes, mean", _of(plain, "nodes_mean")),
        ("peak", _of(_whole, "nodes_peak")),
        _cost,
        ("change", change),
        _income,
        ("margin", _of(partial(percent, decimals=0), "margin_percent")),
        ("tokens/s per user", _of(plain, "tokens_per_s_user")),
        ("hit rate", _of(percent, "hit_percent")),
        ("prefill tokens/s node", _of(_whole, "prefill_tokens_per_s_node")),
        ("decode tokens/s node", _of(_whole, "decode_tokens_per_s_node")),
    )
    return columns(described, cases)


def bins(histogram: Row) -> Table:
    """Return the distribution as a table of its bins that are not empty."""
    found = [one for one in filled_bins(histogram) if one[2]]
    total = sum(count for _, _, count in found)
    return Table(
        ("time", "share"),
        [
            (f"{duration(low)} to {duration(high)}", _share(ratio(count, total), 2))
            for low, high, count in found
        ],
    )


def of_ranks(ranks: Row) -> Table:
    """Return a row per rank and a column per figure, for the first _RANK_ROWS_MAX ranks."""
    series = [
        (name + (" (%)" if unit else ""), _scaled(numbers(ranks, key), factor))
        for key, name, _, unit, factor in _RANKS
        if numbers(ranks, key)
    ]
    longest = max((len(values) for _, values in series), default=0)
    found = [
        [
            str(rank),
            *(_figures4(values[rank] if rank < len(values) else None) for _, values in series),
        ]
        for rank in range(min(longest, _RANK_ROWS_MAX))
    ]
    caption = f"The first {_RANK_ROWS_MAX} of {longest:,} ranks; result.json has all."
    return Table(
        ["rank", *(name for name, _ in series)], found, caption if longest > len(found) else ""
    )


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path of keys, value as text) of each value of the configuration."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
        return
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > _VALUE_CHARS_MAX:
        shown = f"{shown[:_VALUE_CHARS_MAX]}… ({len(shown):,} characters)"
    yield path, shown
