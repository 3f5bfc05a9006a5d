"""Tables that `hadal simulate` prints: published figures beside ours, the hours, the alternatives.
Made only from the content of result.json.
"""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROWS = (
    ("nodes, mean", "nodes_mean", 1.0, ",.2f"),
    ("nodes, peak", "nodes_peak", 1.0, ",.0f"),
    ("tokens in, 10^9", "tokens_in", 1e9, ",.1f"),
    ("cached tokens in, %", "hit_percent", 1.0, ".1f"),
    ("tokens out, 10^9", "tokens_out", 1e9, ",.1f"),
    ("tokens/s per user", "tokens_per_s_user", 1.0, ".1f"),
    ("KV length, mean", "kv_length_mean", 1.0, ",.0f"),
    ("tokens/s in, per prefill node", "prefill_tokens_per_s_node", 1.0, ",.0f"),
    ("tokens/s out, per decode node", "decode_tokens_per_s_node", 1.0, ",.0f"),
    ("cost, $", "cost_usd", 1.0, ",.0f"),
    ("income, $", "income_usd", 1.0, ",.0f"),
    ("margin on cost, %", "margin_percent", 1.0, ",.0f"),
)
"""(label, key, divisor, format) of each row."""
HOURS = (
    "hour",
    "nodes",
    "in, 10^9",
    "out, 10^9",
    "hit",
    "income, $",
    "tokens/s/user",
    "batch a GPU",
    "prefill use",
    "TTFT p50, p99",
    "units P + D",
)


def show(console: Console, result: dict[str, Any]) -> None:
    """Print all tables and notes."""
    console.print(day_table(result))
    for part in hours_tables(result, console.width):
        console.print(part)
    if len(result.get("what_ifs", ())) > 1:
        console.print(alternatives_table(result))
    for note in result["notes"]:
        console.print(f"[yellow]note[/yellow] {note}")


def day_table(result: dict[str, Any]) -> Table:
    """Return the day's figures, beside the published ones if there are any."""
    published = result["published"]
    table = _table(f"{result['study']['name']} on {result['study']['hardware'].upper()}")
    table.add_column("")
    for name in ("published", "simulated", "difference") if published else ("simulated",):
        table.add_column(name, justify="right")
    for label, key, by, form in ROWS:
        value = result[key]
        ours = "-" if value is None else format(value / by, form)
        if not published:
            table.add_row(label, ours)
            continue
        stated = published[key]
        if isinstance(stated, list):
            shown, within = (
                f"{stated[0]:g} to {stated[1]:g}",
                value is not None and stated[0] <= value <= stated[1],
            )
            table.add_row(label, shown, ours, "within" if within else "outside")
        else:
            difference = "-" if value is None else f"{value / stated - 1:+.1%}"
            table.add_row(label, format(stated / by, form), ours, difference)
    return table


def hours_tables(result: dict[str, Any], width: int | None) -> list[Table]:
    """Return tables of the hours, fluid beside window: columns are split so that each table fits
    `width` and has the hours. None: one table.
    """
    rows = [_hour_cells(hour) for hour in result["hours"]]
    wide = [max(len(name), *(len(row[at]) for row in rows)) + 2 for at, name in enumerate(HOURS)]
    parts: list[list[int]] = [[]]
    for at in range(1, len(HOURS)):
        if (
            parts[-1]
            and width is not None
            and wide[0] + sum(wide[one] for one in [*parts[-1], at]) > width
        ):
            parts.append([])
        parts[-1].append(at)
    tables = []
    for columns in ([0, *part] for part in parts):
        table = _table("Hour by hour (Beijing); fluid | window")
        for at in columns:
            table.add_column(HOURS[at], justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[at] for at in columns))
        tables.append(table)
    return tables


def _hour_cells(hour: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of an hour's row, in the order of HOURS."""
    fluid, window = hour["fluid"], hour["window"]

    def both(key: str, form: str) -> str:
        left = format(fluid[key], form)
        return (
            f"{left} | {format(window[key], form)}" if window and window[key] is not None else left
        )

    ttft, units = "", ""
    if window:
        units = f"{window['prefill_units']} + {window['decode_units']}"
        if window["ttft_s"]["p50"] is not None:
            ttft = f"{window['ttft_s']['p50']:.1f}, {window['ttft_s']['p99']:.1f} s"
    return (
        f"{hour['hour_beijing']:02}:00",
        f"{hour['nodes_mean']:.0f}",
        f"{hour['tokens_in'] / 1e9:.2f}",
        f"{hour['tokens_out'] / 1e9:.2f}",
        _percent(hour),
        f"{hour['income_usd']:,.0f}",
        both("tokens_per_s_user", ".1f"),
        both("requests_per_rank", ".0f"),
        both("prefill_use", ".0%"),
        ttft,
        units,
    )


def alternatives_table(result: dict[str, Any]) -> Table:
    """Return figures of the study as asked, then of alternatives, each with one thing changed."""
    table = _table("What if (fluid model of the fleet)")
    table.add_column("", min_width=14, max_width=44)
    for name in ("nodes,\nmean", "peak", "cost, $", "income, $", "margin", "hit", "tok/s\n/user"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["what_ifs"]:
        if row.get("nodes_mean") is None:
            table.add_row(row["name"])
            continue
        table.add_row(
            row["name"],
            f"{row['nodes_mean']:,.1f}",
            f"{row['nodes_peak']:,.0f}",
            f"{row['cost_usd']:,.0f}",
            f"{row['income_usd']:,.0f}",
            f"{row['margin_percent'] or 0:,.0f} %",
            f"{row['hit_percent'] or 0:.1f} %",
            f"{row['tokens_per_s_user'] or 0:.1f}",
        )
    return table


def _percent(hour: dict[str, Any]) -> str:
    """Return the percent of an hour's prompt tokens found in the cache."""
    return f"{100 * hour['tokens_hit'] / hour['tokens_in']:.1f} %" if hour["tokens_in"] else "-"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        show_edge=False,
    )
