"""Tables of a report on served or simulated requests, for a terminal. Independent of the ledger."""

from __future__ import annotations

from http import HTTPStatus

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hadal.results.values import duration
from hadal.stats.prices import HOUR_S
from hadal.stats.report import HOUR, QUANTILES, SHARED, TENANT, Detail, Line, Report, iso
from hadal.stats.usage import TenantUse

NOTHING = "-"


def render(report: Report, title: str) -> Group:
    """Return the report as rich renderables: total, lines and notes."""
    start, end = (
        iso(time_us, report.utc_offset_s)[:16].replace("T", " ")
        for time_us in (report.from_us, report.to_us)
    )
    heading = Text(title, style="bold") + Text(
        f"   {start} to {end} {_zone(report.utc_offset_s)}", style="dim"
    )
    lines = [line for line in report.lines if _has_news(line)]
    parts: list[Text | Table] = [heading, _total(report.total)]
    if lines:
        parts.append(_lines(report, lines))
    if report.total.use is not None:
        parts.append(_uses(report, lines))
    if any(line.detail is not None for line in lines):
        parts.append(_details(report, lines))
    parts += [Text(note, style="dim") for note in _notes(report, lines)]
    return Group(*parts)


def _notes(report: Report, lines: list[Line]) -> list[str]:
    """Return notes that explain omitted lines, columns and dashes."""
    notes = []
    num_left_out = len(report.lines) - len(lines)
    if num_left_out:
        notes.append(f"{num_left_out} hours without nodes and requests are left out.")
    if report.by == TENANT and report.total.use is not None:
        notes.append(
            "Used: GPU time during a tenant's requests; concurrent requests share it in"
            " proportion to their tokens/s. Idle: the tenant's share of unused GPU time. Cost: of used"
            " and idle time together."
        )
    elif report.by == TENANT:
        notes.append(
            "Nodes and cost are in the total only, because a node serves several tenants"
            " at once; --tenant divides its time among them."
        )
    elif any(not line.nodes.role_to_node_us for line in lines):
        notes.append(
            f"{NOTHING} under nodes: the row had no nodes of its own in this period; nodes for"
            f" several models are under {SHARED}."
        )
    requests = [line for line in (report.total, *lines) if line.counts.num_requests]
    if any(None in (line.hit_percent, line.tokens_per_s_user) for line in requests):
        notes.append(
            f"{NOTHING} in other columns: no prompt was answered, or no answer had a second token."
        )
    return notes


def _total(line: Line) -> Table:
    counts, nodes = line.counts, line.nodes
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    ends = [
        f"{number:,} {end}"
        for end, number in (
            ("cancelled", counts.num_cancelled),
            ("refused", counts.num_refused),
            ("failed", counts.num_failed),
        )
        if number
    ]
    detail = line.detail or Detail()
    retries = [f"{counts.num_retries:,} retries"] if counts.num_retries else []
    prefill, decode = nodes.hours("prefill"), nodes.hours("decode")
    for name, value, note in (
        (
            "nodes, mean",
            _number(nodes.mean, 3),
            f"{prefill:,.4g} node-hours of prefill, {decode:,.4g} of decode",
        ),
        ("nodes, peak", _number(float(nodes.peak), 3), ""),
        ("requests", f"{counts.num_requests:,}", ", ".join([*ends, *retries])),
        *(
            [("errors", f"{sum(detail.error_to_num.values()):,}", _errors(detail))]
            if detail.error_to_num
            else []
        ),
        ("tokens in", _tokens(counts.tokens_in), ""),
        ("  from the cache", _tokens(counts.tokens_hit), _percent(line.hit_percent)),
        ("tokens out", _tokens(counts.tokens_out), ""),
        ("tokens/s per user", _number(line.tokens_per_s_user), "after the first token"),
        *([] if line.detail is None else _times(line.detail)),
        ("KV length", _number(line.kv_length_mean), "mean over output tokens"),
        (
            "prefill tokens/s per node",
            _number(line.prefill_tokens_per_s_node),
            "cached tokens included",
        ),
        ("decode tokens/s per node", _number(line.decode_tokens_per_s_node), ""),
        ("cost", dollars(line.cost_micro_usd), ""),
        ("income", dollars(line.income_micro_usd), ""),
        ("margin", _percent(line.margin_percent, 0), "(income - cost) / cost"),
    ):
        table.add_row(name, value, note)
    return table


def _times(detail: Detail) -> list[tuple[str, str, str]]:
    """Return the latency rows of the totals table: (name, p50, p99 and a note)."""
    return [
        (what, _time(values, 0, unit), f"p99 {_time(values, 1, unit)}; {note}")
        for what, values, unit, note in (
            ("time to first token, p50", detail.ttft_us, 1e6, "waiting included"),
            ("time per token, p50", detail.tpot_ns, 1e9, "after the first"),
        )
    ]


def _lines(report: Report, lines: list[Line]) -> Table:
    has_nodes = report.by != TENANT
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column(report.by, no_wrap=True)
    for name in ("nodes", "requests", "in", "hit", "out", "tok/s", "cost", "income"):
        if has_nodes or name not in ("nodes", "cost"):
            table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        counts = line.counts
        is_up = bool(line.nodes.role_to_node_us)
        nodes = [_number(line.nodes.mean, 2) if is_up else NOTHING] if has_nodes else []
        cost = [dollars(line.cost_micro_usd) if is_up else NOTHING] if has_nodes else []
        table.add_row(
            _label(report, line),
            *nodes,
            _tokens(counts.num_requests),
            _tokens(counts.tokens_in),
            _percent(line.hit_percent),
            _tokens(counts.tokens_out),
            _number(line.tokens_per_s_user),
            *cost,
            dollars(line.income_micro_usd),
        )
    return table


def _uses(report: Report, lines: list[Line]) -> Table:
    """Return the table of GPU time per tenant."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column(report.by, no_wrap=True)
    for name in ("GPU-hours used", "share used", "GPU-hours idle", "cost", "income"):
        table.add_column(name, justify="right", no_wrap=True)
    used_us = report.total.use.used_rank_us if report.total.use is not None else 0.0
    for line in (*lines, report.total):
        use = line.use or TenantUse()
        hours = use.as_json()
        table.add_row(
            Text(line.label),
            f"{hours['gpu_hours_used']:,.4g}",
            _percent(100 * use.used_rank_us / used_us if used_us else None),
            f"{hours['gpu_hours_idle']:,.4g}",
            dollars(round(use.used_micro_usd + use.idle_micro_usd)),
            dollars(line.income_micro_usd),
        )
    return table


def _details(report: Report, lines: list[Line]) -> Table:
    """Return the table of token times and errors, for lines with requests."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column(report.by, no_wrap=True)
    for name in ("first token p50", "p99", "per token p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("errors")
    for line in lines:
        if line.counts.num_requests:
            detail = line.detail or Detail()
            times = [
                _time(values, at, unit)
                for values, unit in ((detail.ttft_us, 1e6), (detail.tpot_ns, 1e9))
                for at in range(len(QUANTILES))
            ]
            table.add_row(_label(report, line), *times, _errors(detail))
    return table


def _label(report: Report, line: Line) -> Text:
    return Text(f"{line.label[5:10]} {line.label[11:16]}" if report.by == HOUR else line.label)


def _errors(detail: Detail) -> str:
    return ", ".join(
        f"{number:,} x {_kind(end)}" for end, number in sorted(detail.error_to_num.items())
    )


def _kind(end: str) -> str:
    """Return a status with its HTTP phrase ("429 Too Many Requests"); other ends unchanged."""
    try:
        return f"{end} {HTTPStatus(int(end)).phrase}"
    except ValueError:
        return end


def _time(values: tuple[int, ...], at: int, unit: float) -> str:
    """Return values[at] as a duration; a dash without values. `unit`: value of one second."""
    return duration(values[at] / unit) if values else NOTHING


def _has_news(line: Line) -> bool:
    has_used = line.use is not None and line.use.used_rank_us > 0.0
    return bool(line.counts.num_requests or line.nodes.role_to_node_us or has_used)


def dollars(micro_usd: int) -> str:
    """Return dollars as text: whole from $1,000 on, cents from $1 on, else up to six decimals."""
    sign, amount = "-" * (micro_usd < 0), abs(micro_usd)
    if 0 < amount < 10**6:
        return (
            f"{sign}${amount / 1e6:.6f}".rstrip("0")
            if amount < 10**4
            else f"{sign}${amount / 1e6:.4f}"
        )
    return f"{sign}${amount / 1e6:,.{0 if amount >= 10**9 else 2}f}"


def _tokens(number: int) -> str:
    """Return a count as text: exact below a million, then as M, B or T with one decimal, or three
    below ten.
    """
    for limit, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= limit:
            return f"{number / limit:,.{3 if number < 10 * limit else 1}f} {unit}"
    return f"{number:,}"


def _number(value: float | None, decimals: int = 1) -> str:
    return (
        NOTHING if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.{decimals}f}"
    )


def _percent(value: float | None, decimals: int = 1) -> str:
    return NOTHING if value is None else f"{value:,.{decimals}f} %"


def _zone(utc_offset_s: int) -> str:
    sign, (hours, rest) = "-" if utc_offset_s < 0 else "+", divmod(abs(utc_offset_s), HOUR_S)
    return f"UTC{sign}{hours}" + (f":{rest // 60:02}" if rest else "") if utc_offset_s else "UTC"
