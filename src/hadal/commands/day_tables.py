"""The tables of a day's report: beside what was published, by hour, fluid beside windows, what-ifs,
the study.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hadal.commands.day_values import (
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
    signed_percent,
)
from hadal.commands.markup import Html, element, together

Row = Mapping[str, Any]
Shown = Callable[[float | None], str]

HEADLINE: tuple[tuple[str, str, Shown], ...] = (
    ("nodes_mean", "Nodes, mean", lambda value: plain(value, 2)),
    ("nodes_peak", "Nodes, peak", lambda value: plain(value, 0)),
    ("prefill_nodes_mean", "Prefill nodes, mean", lambda value: plain(value, 2)),
    ("decode_nodes_mean", "Decode nodes, mean", lambda value: plain(value, 2)),
    ("requests", "Requests", lambda value: compact(value, 4)),
    ("tokens_in", "Input tokens", lambda value: compact(value, 4)),
    ("tokens_hit", "of these from the cache", lambda value: compact(value, 4)),
    ("hit_percent", "Hit rate", percent),
    ("tokens_out", "Output tokens", lambda value: compact(value, 4)),
    ("tokens_per_s_user", "Output tokens/s of a user", plain),
    ("kv_length_mean", "KV length, mean over output tokens", lambda value: plain(value, 0)),
    (
        "prefill_tokens_per_s_node",
        "Prefill: input tokens/s per node",
        lambda value: plain(value, 0),
    ),
    ("decode_tokens_per_s_node", "Decode: output tokens/s per node", lambda value: plain(value, 0)),
    ("cost_usd", "Cost", dollars),
    ("income_usd", "Income", dollars),
    ("margin_percent", "Margin, income less cost over cost", lambda value: percent(value, 0)),
)
"""Key, words, how it is written."""
_IN_POINTS = {"hit_percent"}
_STUDY_ROWS_MAX, _VALUE_CHARS_MAX = 400, 240
_RANK_ROWS_MAX = 400
_QUANTILES = ("p50", "p90", "p99")
_IMBALANCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("KV", ("kv_imbalance",)),
    ("requests", ("request_imbalance",)),
    ("prefill work", ("prefill_imbalance",)),
    ("experts, prefill", ("expert_imbalance", "prefill")),
    ("experts, decode", ("expert_imbalance", "decode")),
)


def table(
    heads: Sequence[object],
    body: Sequence[Sequence[object]],
    caption: str | None = None,
    **more: Any,
) -> Html:
    """Names in the first column, figures right-aligned in the others. `above`: a row of heads over
    the heads.
    """
    above: Html | None = more.get("above")
    first_class = more.get("first_class")
    head = element(
        "tr",
        *(
            element("th", name, scope="col", class_="n" if i else None)
            for i, name in enumerate(heads)
        ),
    )
    rows = [
        element(
            "tr",
            *(
                element("td", cell, class_="n") if i else element("th", cell, scope="row")
                for i, cell in enumerate(cells)
            ),
            class_=first_class if at == 0 else None,
        )
        for at, cells in enumerate(body)
    ]
    return element(
        "div",
        element(
            "table",
            element("caption", caption) if caption else None,
            element("thead", above, head),
            element("tbody", *rows),
        ),
        class_="scroll",
    )


def headline(result: Row) -> Html:
    """Every figure of the day; beside it what was published, where something was."""
    published = mapping(result, "published")
    body = []
    for key, words, shown in HEADLINE:
        value = number(result, key)
        if value is None and published.get(key) is None:
            continue
        cells: list[object] = [words, shown(value)]
        if published:
            cells += [_published(published, key, shown), _difference(key, value, published)]
        body.append(cells)
    heads = ["", "simulated", "published", "difference"] if published else ["", "simulated"]
    return table(heads, body)


def _bounds(published: Row, key: str) -> tuple[float, float] | None:
    """A figure that was published, or the ends of a range."""
    ends = numbers(published, key)
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        return min(ends[0], ends[1]), max(ends[0], ends[1])
    value = number(published, key)
    return None if value is None else (value, value)


def _published(published: Row, key: str, shown: Shown) -> str:
    bounds = _bounds(published, key)
    if bounds is None:
        return NOTHING
    return (
        shown(bounds[0]) if bounds[0] == bounds[1] else f"{shown(bounds[0])} to {shown(bounds[1])}"
    )


def _difference(key: str, value: float | None, published: Row) -> str:
    bounds = _bounds(published, key)
    if value is None or bounds is None:
        return NOTHING
    low, high = bounds
    if low < high and low <= value <= high:
        return "within"
    nearest = min(bounds, key=lambda bound: abs(value - bound))
    if key in _IN_POINTS:
        change = value - nearest
        return f"{'+' if change >= 0 else '−'}{abs(change):.2f} points"
    of = ratio(value, nearest)
    return signed_percent(None if of is None else of - 1.0, 2)


def by_hour(hours: Sequence[Row]) -> Html:
    """All that is counted of each hour."""
    heads = (
        "hour",
        "nodes",
        "prefill",
        "decode",
        "requests",
        "input tokens",
        "hit rate",
        "output tokens",
        "cost",
        "income",
    )
    body = [
        (
            hour_label(number(hour, "hour_beijing")),
            plain(number(hour, "nodes_mean")),
            plain(number(hour, "prefill_nodes_mean")),
            plain(number(hour, "decode_nodes_mean")),
            compact(number(hour, "requests")),
            compact(number(hour, "tokens_in")),
            percent(_hundred(ratio(number(hour, "tokens_hit"), number(hour, "tokens_in")))),
            compact(number(hour, "tokens_out")),
            dollars(number(hour, "cost_usd")),
            dollars(number(hour, "income_usd")),
        )
        for hour in hours
    ]
    return table(heads, body)


def _hundred(share: float | None) -> float | None:
    return None if share is None else 100.0 * share


def fluid_and_windows(hours: Sequence[Row]) -> Html:
    """The same figures by both ways, with the window's difference from the fluid day."""
    pairs: tuple[tuple[str, str, Shown], ...] = (
        ("tokens_per_s_user", "output tokens/s of a user", plain),
        ("requests_per_rank", "requests per decode rank", plain),
        ("prefill_use", "use of prefill", lambda value: percent(_hundred(value))),
    )
    above = element(
        "tr",
        element("td"),
        element("td"),
        *(element("th", name, scope="colgroup", colspan=3, class_="group") for _, name, _ in pairs),
    )
    heads = ["hour", "units", *["fluid", "window", "differs"] * len(pairs)]
    body = []
    for hour in hours:
        cells: list[object] = [hour_label(number(hour, "hour_beijing")), _units(hour)]
        for key, _, shown in pairs:
            fluid, window = number(hour, "fluid", key), number(hour, "window", key)
            of = ratio(window, fluid)
            cells += [shown(fluid), shown(window), signed_percent(None if of is None else of - 1.0)]
        body.append(cells)
    return table(heads, body, "Units are prefill + decode.", above=above)


def _units(hour: Row) -> str:
    prefill, decode = (
        number(hour, "window", "prefill_units"),
        number(hour, "window", "decode_units"),
    )
    return (
        NOTHING
        if prefill is None and decode is None
        else f"{plain(prefill, 0)} + {plain(decode, 0)}"
    )


def windows(hours: Sequence[Row]) -> Html:
    """What each hour's window measured: latencies, and maximum over mean of the ranks."""
    heads = [
        "hour",
        "seconds",
        "requests",
        "computed",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT p50",
        "p90",
        "p99",
        "hit rate",
        "KV length",
        *(name for name, _ in _IMBALANCES),
    ]
    body = []
    for hour in hours:
        if not mapping(hour, "window"):
            continue
        times = [
            duration(number(hour, "window", key, mark))
            for key in ("ttft_s", "tpot_s")
            for mark in _QUANTILES
        ]
        body.append(
            [
                hour_label(number(hour, "hour_beijing")),
                plain(number(hour, "window", "seconds")),
                compact(number(hour, "window", "requests")),
                percent(_hundred(number(hour, "window", "prefill_computed_share")), 0),
                *times,
                percent(number(hour, "window", "hit_percent")),
                plain(number(hour, "window", "kv_length_mean"), 0),
                *(plain(number(hour, "window", *path), 3) for _, path in _IMBALANCES),
            ]
        )
    caption = (
        "Computed: by prefill, of what came for it. The last five columns: maximum over mean of the"
        " ranks."
    )
    return table(heads, body, caption)


def what_if_table(cases: Sequence[Row]) -> Html:
    """Each case's figures, with the change of its cost and margin against the first."""
    heads = (
        "case",
        "nodes, mean",
        "peak",
        "cost",
        "change",
        "income",
        "margin",
        "tokens/s of a user",
        "hit rate",
        "prefill tokens/s node",
        "decode tokens/s node",
    )
    asked = number(cases[0], "cost_usd") if cases else None
    body = []
    for at, case in enumerate(cases):
        of = ratio(number(case, "cost_usd"), asked)
        body.append(
            (
                str(case.get("name", NOTHING)),
                plain(number(case, "nodes_mean")),
                plain(number(case, "nodes_peak"), 0),
                dollars(number(case, "cost_usd")),
                "" if at == 0 else signed_percent(None if of is None else of - 1.0),
                dollars(number(case, "income_usd")),
                percent(number(case, "margin_percent"), 0),
                plain(number(case, "tokens_per_s_user")),
                percent(number(case, "hit_percent")),
                plain(number(case, "prefill_tokens_per_s_node"), 0),
                plain(number(case, "decode_tokens_per_s_node"), 0),
            )
        )
    return table(heads, body, first_class="first")


def study(configuration: Row) -> Html:
    """The whole configuration, one row for each value."""
    found = list(_flat(configuration, ""))
    body = [
        element(
            "tr", element("th", key, scope="row", class_="key"), element("td", value, class_="key")
        )
        for key, value in found[:_STUDY_ROWS_MAX]
    ]
    more = len(found) - len(body)
    rest = (
        element("p", f"{more:,} further values are in result.json.", class_="dim") if more else None
    )
    return together(element("table", element("tbody", *body)), rest)


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
        return
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    yield (
        path,
        (
            shown
            if len(shown) <= _VALUE_CHARS_MAX
            else f"{shown[:_VALUE_CHARS_MAX]}… ({len(shown):,} characters)"
        ),
    )


def quantiles(histogram: Row) -> str:
    """In a line: p50, p90 and p99."""
    return ", ".join(f"{key} {duration(number(histogram, key))}" for key in _QUANTILES)


def bins(histogram: Row) -> Html:
    """The distribution in figures; only bins with something in them."""
    edges, counts = numbers(histogram, "edges"), numbers(histogram, "counts")
    total = sum(count for count in counts if count is not None)
    body = [
        (f"{duration(low)} to {duration(high)}", percent(_hundred(ratio(count, total)), 2))
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
        if count
    ]
    return table(("time", "share of requests"), body)


def of_ranks(series: Sequence[tuple[str, Sequence[float | None]]]) -> Html:
    """Ranks below each other, one column for each list; of very many the first ones."""
    longest = max((len(values) for _, values in series), default=0)
    is_cut = longest > _RANK_ROWS_MAX
    caption = (
        f"The first {_RANK_ROWS_MAX} of {longest:,}; all are in result.json." if is_cut else None
    )
    body = [
        (
            str(rank),
            *(compact(values[rank] if rank < len(values) else None, 4) for _, values in series),
        )
        for rank in range(min(longest, _RANK_ROWS_MAX))
    ]
    return table(("rank", *(name for name, _ in series)), body, caption)
