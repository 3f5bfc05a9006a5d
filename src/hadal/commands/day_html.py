"""The report of a simulated day as one HTML file: from the object that `result.json` holds, and
from nothing else.

    report_html(result) -> text       no script, font, image or address: it opens from disk, offline, and prints

Every chart has its figures in a table beside it. What is missing in the result is left out or shown
as a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from hadal.commands.day_style import STYLE
from hadal.commands.day_tables import (
    bins,
    by_hour,
    fluid_and_windows,
    headline,
    of_ranks,
    quantiles,
    study,
    what_if_table,
    windows,
)
from hadal.commands.day_values import (
    compact,
    dollars,
    duration,
    hour_label,
    mapping,
    number,
    numbers,
    percent,
    plain,
    rows,
)
from hadal.commands.markup import Html, element, together

Row = Mapping[str, Any]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_RANKS: tuple[tuple[str, str, str, str, float], ...] = (
    ("kv_share", "KV cache used", "decode", " %", 100.0),
    ("requests", "Requests", "decode", "", 1.0),
    ("decode_experts", "Expert rows received, decode", "decode", "", 1.0),
    ("prefill_attention", "Core attention, prefill", "prefill", "", 1.0),
    ("prefill_tokens", "Tokens a second, prefill", "prefill", "", 1.0),
    ("prefill_experts", "Expert rows received, prefill", "prefill", "", 1.0),
)
"""Key in `ranks`, name, colour, unit, factor."""


def report_html(result: dict[str, Any]) -> str:
    """The page. `result` is what `hadal simulate` writes as result.json; any part of it may be
    missing.
    """
    hours, configuration = rows(result, "hours"), mapping(result, "study")
    sections = [
        _day(result),
        _load(result, hours),
        _money(hours),
        _users(result, hours),
        _latency(result),
        _ranks(result),
        _both_ways(hours),
        _cases(rows(result, "what_ifs")),
        _study(result, configuration),
    ]
    title = _title(configuration)
    page = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("title", title),
            element("style", Html(STYLE)),
        ),
        element("body", element("main", _header(result, title), *sections, _footer(result))),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def _title(configuration: Row) -> str:
    name = configuration.get("name") or configuration.get("preset")
    return f"A simulated day: {name}" if isinstance(name, str) else "A simulated day"


def _header(result: Row, title: str) -> Html:
    mean, peak = number(result, "nodes_mean"), number(result, "nodes_peak")
    lead = (
        element("b", f"{plain(mean)} nodes"),
        f" on average, {plain(peak, 0)} at the peak, took in ",
        element("b", f"{compact(number(result, 'tokens_in'))} tokens"),
        f" ({percent(number(result, 'hit_percent'))} of them from the cache) and made ",
        element("b", f"{compact(number(result, 'tokens_out'))} tokens"),
        ".",
    )
    tiles = [
        (dollars(number(result, "cost_usd")), "cost of the day"),
        (dollars(number(result, "income_usd")), "income"),
        (percent(number(result, "margin_percent"), 0), "margin over cost"),
        (plain(number(result, "tokens_per_s_user")), "output tokens/s of a user"),
        (percent(number(result, "hit_percent")), "input tokens from the cache"),
    ]
    return element(
        "header",
        element("p", "hadal simulate", class_="eyebrow"),
        element("h1", title),
        element("p", *lead, class_="lead"),
        element(
            "div",
            *(
                element("div", element("b", value), element("span", words), class_="tile")
                for value, words in tiles
            ),
            class_="tiles",
        ),
    )


def _section(name: str, sub: str, *parts: object) -> Html:
    return element("section", element("h2", name), element("p", sub, class_="sub"), *parts)


def _card(
    drawn: object,
    *more: object,
    name: str | None = None,
    sub: str | None = None,
    wide: bool = False,
) -> Html:
    """A chart in its frame, what belongs to it below."""
    return element(
        "div",
        element("h3", name) if name else None,
        element("p", sub, class_="sub") if sub else None,
        element("div", drawn, class_="scroll"),
        *more,
        class_="card wide" if wide else "card",
    )


def _in_both_widths(drawn: Callable[[float], Html | None]) -> Html | None:
    """A wide chart, and the same for a phone, of which the style sheet shows one."""
    wide, narrow = drawn(WIDE), drawn(HALF)
    if wide is None or narrow is None:
        return None
    return together(
        element("div", wide, class_="at-wide"), element("div", narrow, class_="at-narrow")
    )


def _folded(name: str, *parts: object) -> Html:
    return element("details", element("summary", name), element("div", *parts, class_="small"))


def _none(words: str) -> Html:
    return element("p", words, class_="none")


def _day(result: Row) -> Html:
    sub = (
        "Simulated, beside what DeepSeek published of its day."
        if mapping(result, "published")
        else "Nothing is published for this study that it could stand beside."
    )
    return _section("The day", sub, element("div", headline(result), class_="card"))


def _load(result: Row, hours: Sequence[Row]) -> Html:
    first_hour = number(hours[0], "hour_beijing") if hours else None
    minutes, begin_hour = mapping(result, "minutes"), first_hour if first_hour is not None else 12.0
    drawn = _in_both_widths(lambda width: load_and_nodes(minutes, begin_hour, width))
    table = _folded("Every hour in figures", by_hour(hours)) if hours else None
    sub = "By the minute, Beijing time: what came in, and the nodes that the fleet held for it."
    return _section(
        "Load and nodes",
        sub,
        _card(drawn or _none("No minutes are in the result."), table, wide=True),
    )


def _money(hours: Sequence[Row]) -> Html:
    drawn = _in_both_widths(lambda width: income_and_cost(hours, width))
    missing = "No hour of the result has income or cost."
    return _section(
        "Income and cost", "By the hour, Beijing time.", _card(drawn or _none(missing), wide=True)
    )


def _users(result: Row, hours: Sequence[Row]) -> Html:
    speed = users_speed(hours, number(result, "tokens_per_s_user")) or _none("No hour has a speed.")
    hits = hit_rate(hours, number(result, "hit_percent")) or _none("No hour has input tokens.")
    return _section(
        "What users get, and what the cache saves",
        "A line is the whole hour, a dot the seconds of it that were "
        "simulated request by request at full fleet size.",
        element(
            "div",
            _card(speed, name="Output tokens per second of a user"),
            _card(hits, name="Input tokens from the cache"),
            class_="pair",
        ),
    )


def _latency(result: Row) -> Html:
    cards = []
    for key, name in (
        ("ttft_s", "Time to first token (TTFT)"),
        ("tpot_s", "Time per output token (TPOT)"),
    ):
        found = mapping(result, key)
        drawn = distribution(found, name)
        table = _folded("In figures", bins(found)) if drawn else None
        cards.append(
            _card(
                drawn or _none("No window ran."),
                table,
                name=name,
                sub=quantiles(found) if drawn else None,
            )
        )
    sub = "Share of requests, all windows weighted to the day."
    return _section("Latency", sub, element("div", *cards, class_="pair"))


def _ranks(result: Row) -> Html:
    ranks = mapping(result, "ranks")
    cards, columns = [], []
    for key, name, colour, unit, factor in _RANKS:
        values = [None if value is None else factor * value for value in numbers(ranks, key)]
        drawn = by_rank(values, name, colour, unit)
        if drawn is not None:
            cards.append(_card(drawn, name=name, sub=balance_words(values, unit)))
            columns.append((name + (" (%)" if unit else ""), values))
    if not cards:
        return _section(
            "Balance over ranks", "Of one unit.", _none("No window ran, so no rank was seen.")
        )
    units = " and ".join(
        str(ranks[key]) for key in ("decode_unit", "prefill_unit") if ranks.get(key) is not None
    )
    sub = (
        f"Ranks of {units or 'a unit'} at {hour_label(number(ranks, 'hour_beijing'))}, sorted; the"
        " dashed line is their mean. A bar is a mean over the window, of expert rows a"
        " micro-batch; a step waits for its own highest."
    )
    table = _folded("Every rank in figures", of_ranks(columns))
    return _section("Balance over ranks", sub, element("div", *cards, class_="pair"), table)


def _both_ways(hours: Sequence[Row]) -> Html:
    sub = (
        "The fluid day covers every minute from measured curves of one unit; windows run the same"
        " roles request by request. They should agree, as far as some seconds' requests can tell."
        " Use of prefill is what came over what the units can compute. A window computes less than"
        " that, because prompts that had long been under way are not there at its start; so its"
        " times to the first token are short ones, too."
    )
    if not any(mapping(hour, "window") or mapping(hour, "fluid") for hour in hours):
        return _section("Fluid beside windows", sub, _none("Neither has figures by hour."))
    seen = any(mapping(hour, "window") for hour in hours)
    details = (
        _folded("Latency and balance of every window", windows(hours))
        if seen
        else _none("No window ran.")
    )
    return _section(
        "Fluid beside windows",
        sub,
        element("div", fluid_and_windows(hours), details, class_="card small"),
    )


def _cases(cases: Sequence[Row]) -> Html:
    sub = "The same day with one thing changed; everything else follows from it."
    if not cases:
        return _section("What if", sub, _none("No other case was asked for."))
    drawn = _in_both_widths(lambda width: what_ifs(cases, width))
    chart = element("div", drawn, class_="scroll") if drawn else None
    return _section(
        "What if", sub, element("div", chart, what_if_table(cases), class_="card wide small")
    )


def _study(result: Row, configuration: Row) -> Html:
    found = result.get("notes")
    notes = [str(note) for note in found] if isinstance(found, list | tuple) else []
    listed = (
        element("ul", *(element("li", note) for note in notes), class_="notes") if notes else None
    )
    folded = _folded("The whole configuration", study(configuration)) if configuration else None
    return _section(
        "Assumptions",
        "What was assumed, and what lies outside of what the model was fitted to.",
        listed or _none("Nothing is noted."),
        folded,
    )


def _footer(result: Row) -> Html:
    seconds = number(result, "seconds")
    took = f" Simulated in {duration(seconds)}." if seconds is not None else ""
    return element("footer", together(f"Made by hadal simulate from result.json.{took}"))
