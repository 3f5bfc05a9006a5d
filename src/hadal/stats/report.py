"""DeepSeek's published table of a day, computed from counters and node intervals: a pure function
of the ledger's contents.

The code is the same for real and simulated service. The definitions are from DeepSeek's overview of
its inference system (2025-02-27), and reproduce its figures to all digits printed:

    - nodes: ranks over ranks per node, while the unit is up; the mean is over the whole window,
      idle or not.
    - tokens/s per node: tokens of the window over the node-seconds of that role. Prefill includes
      prompt tokens found in the cache, decode counts output.
    - tokens/s per user: output tokens after each generation's first, over the time from first to
      last token, both summed.
    - KV length: the mean over output tokens of the positions each was drawn over.
    - margin: income less cost, over cost.

In addition to that table: quantiles of times, and errors by kind, which are read from single rows
and not summed (`Detail`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from typing import Any

from hadal.core.config import DECODE, PREFILL
from hadal.core.facts import NodesFact, micros
from hadal.stats.prices import BUCKET_S, BUCKET_US, HOUR_S, rent_pico_usd, to_micro_usd
from hadal.stats.tally import Counts, Key, Tally
from hadal.stats.usage import TenantUse, WorkSpan, uses_of

HOUR, MODEL, TENANT, TOTAL = "hour", "model", "tenant", "total"
BY = (HOUR, MODEL, TENANT)
"""Allowed breakdowns of a report."""
QUANTILES = (50, 99)
"""Quantiles of times in a report, in percent."""
SHARED = "(shared)"
"""Label of nodes that serve several models."""
_HOUR_US = HOUR_S * 1_000_000


@dataclass(frozen=True)
class NodeUse:
    """Nodes in use over an interval."""

    window_us: int
    role_to_node_us: dict[str, Fraction] = field(default_factory=dict)
    peak: Fraction = Fraction(0)
    """Maximum number of nodes at any one time, all roles together."""
    cost_pico_usd: Fraction = Fraction(0)

    @property
    def mean(self) -> float:
        return float(sum(self.role_to_node_us.values(), Fraction(0)) / self.window_us)

    def hours(self, role: str) -> float:
        """Return the node-hours of a role."""
        return float(self.role_to_node_us.get(role, Fraction(0)) / _HOUR_US)


def use_of(nodes: Iterable[NodesFact], from_us: int, to_us: int) -> NodeUse:
    """Return the sums of node intervals between two times. A unit that ends at the instant at which
    another begins is not counted together with it in the peak.
    """
    role_to_node_us: dict[str, Fraction] = {}
    cost = Fraction(0)
    changes: list[tuple[int, Fraction]] = []
    for fact in nodes:
        first, last = max(from_us, micros(fact.from_s)), min(to_us, micros(fact.to_s))
        if last <= first:
            continue
        size = Fraction(fact.num_ranks, fact.ranks_per_node)
        role_to_node_us[fact.role] = role_to_node_us.get(fact.role, Fraction(0)) + size * (
            last - first
        )
        cost += rent_pico_usd(fact.num_ranks * (last - first), fact.gpu_hour_micro_usd)
        changes += [(first, size), (last, -size)]
    now = peak = Fraction(0)
    for _, change in sorted(changes):  # At equal times, ends sort before begins.
        now += change
        peak = max(peak, now)
    return NodeUse(to_us - from_us, role_to_node_us, peak, cost)


@dataclass(frozen=True)
class Detail:
    """Values of single generations that sums cannot give. Quantiles are nearest-rank, at QUANTILES;
    empty if there are no values.
    """

    ttft_us: tuple[int, ...] = ()
    """Time from the receipt of a request to its first token, waiting included."""
    tpot_ns: tuple[int, ...] = ()
    """Time from the first token to the last, over the number of tokens after the first; only of
    generations with at least two tokens.
    """
    error_to_num: Mapping[str, int] = field(default_factory=dict)
    """HTTP status -> generations that ended with it, rejected or failed."""

    def as_json(self) -> dict[str, Any]:
        """Return flat fields; quantiles without values are None."""
        found: dict[str, Any] = {}
        for name, values, divisor in (
            ("ttft_ms", self.ttft_us, 1e3),
            ("tpot_ms", self.tpot_ns, 1e6),
        ):
            for index, percent in enumerate(QUANTILES):
                found[f"{name}_p{percent}"] = values[index] / divisor if values else None
        return {**found, "errors": dict(self.error_to_num)}


@dataclass(frozen=True)
class Details:
    """Details of a whole window, and per model, tenant, or hour since 1970 in the report's time zone."""

    total: Detail
    key_to_detail: Mapping[Any, Detail]


@dataclass(frozen=True)
class Line:
    """One row: counters, nodes and values derived from them. None if a value is undefined."""

    label: str
    counts: Counts
    nodes: NodeUse
    start_s: int | None = None
    """Start of the hour in unix seconds; None: the row is not an hour."""
    detail: Detail | None = None
    """Quantiles and errors; None if there are sums only, as for a simulated day."""
    use: TenantUse | None = None
    """GPU time of the row's tenant, or of all tenants in the total, if requested."""

    @property
    def hit_percent(self) -> float | None:
        return _ratio(100 * self.counts.tokens_hit, self.counts.tokens_in)

    @property
    def tokens_per_s_user(self) -> float | None:
        return _ratio(self.counts.tokens_after_first * 1_000_000, self.counts.stream_us)

    @property
    def kv_length_mean(self) -> float | None:
        return _ratio(self.counts.kv_tokens, self.counts.tokens_out)

    @property
    def prefill_tokens_per_s_node(self) -> float | None:
        return self._per_node(PREFILL, self.counts.tokens_in)

    @property
    def decode_tokens_per_s_node(self) -> float | None:
        return self._per_node(DECODE, self.counts.tokens_out)

    @property
    def cost_micro_usd(self) -> int:
        return to_micro_usd(self.nodes.cost_pico_usd)

    @property
    def income_micro_usd(self) -> int:
        return to_micro_usd(self.counts.income_pico_usd)

    @property
    def margin_percent(self) -> float | None:
        cost = self.nodes.cost_pico_usd
        return None if not cost else float(100 * (self.counts.income_pico_usd - cost) / cost)

    def _per_node(self, role: str, num_tokens: int) -> float | None:
        node_us = self.nodes.role_to_node_us.get(role, Fraction(0))
        return float(num_tokens * 1_000_000 / node_us) if node_us else None

    def as_json(self) -> dict[str, Any]:
        """Return flat fields, named with their units; money in micro-dollars and in dollars."""
        counts = self.counts
        return {
            "nodes_mean": self.nodes.mean,
            "nodes_peak": float(self.nodes.peak),
            "prefill_node_hours": self.nodes.hours(PREFILL),
            "decode_node_hours": self.nodes.hours(DECODE),
            "requests": counts.num_requests,
            "requests_finished": counts.num_finished,
            "requests_cancelled": counts.num_cancelled,
            "requests_refused": counts.num_refused,
            "requests_failed": counts.num_failed,
            "retries": counts.num_retries,
            "tokens_in": counts.tokens_in,
            "tokens_hit": counts.tokens_hit,
            "tokens_miss": counts.tokens_miss,
            "hit_percent": self.hit_percent,
            "tokens_out": counts.tokens_out,
            "tokens_per_s_user": self.tokens_per_s_user,
            "kv_length_mean": self.kv_length_mean,
            "prefill_tokens_per_s_node": self.prefill_tokens_per_s_node,
            "decode_tokens_per_s_node": self.decode_tokens_per_s_node,
            "cost_usd": self.cost_micro_usd / 1e6,
            "cost_micro_usd": self.cost_micro_usd,
            "income_usd": self.income_micro_usd / 1e6,
            "income_micro_usd": self.income_micro_usd,
            "margin_percent": self.margin_percent,
            **({} if self.detail is None else self.detail.as_json()),
            **({} if self.use is None else self.use.as_json()),
        }


@dataclass(frozen=True)
class Report:
    """A window's total, and its lines by hour, model or tenant."""

    from_us: int
    to_us: int
    by: str
    total: Line
    lines: tuple[Line, ...]
    utc_offset_s: int = 0
    """UTC offset of the hours and times shown, seconds."""

    def as_json(self) -> dict[str, Any]:
        """Return the total's fields, the window, and a list "hours", "models" or "tenants"."""
        return {
            **self.total.as_json(),
            "from": iso(self.from_us, self.utc_offset_s),
            "to": iso(self.to_us, self.utc_offset_s),
            f"{self.by}s": [{self.by: line.label, **line.as_json()} for line in self.lines],
        }


def check_by(by: str) -> None:
    """Raise ValueError for an unknown breakdown."""
    if by not in BY:
        raise ValueError(f"a report can be by {', '.join(BY)}, not by {by!r}.")


def report(
    tally: Tally,
    nodes: Sequence[NodesFact],
    from_us: int,
    to_us: int,
    *,
    by: str = HOUR,
    utc_offset_s: int = 0,
    details: Details | None = None,
    spans: Sequence[WorkSpan] | None = None,
) -> Report:
    """Compute the report of the time from `from_us` up to `to_us` (unix microseconds).

    `tally` has the generations that completed in that time. `utc_offset_s` sets the time zone of
    the hours (Beijing: 28,800). `details` have the same window, `by` and offset; None if there are
    sums only. With `spans`, lines by tenant have their share of GPU time (stats/usage). Raises
    ValueError for an empty window, an unknown `by`, or an offset that is not a multiple of a
    quarter hour.
    """
    if to_us <= from_us:
        raise ValueError("the window of a report must end after it begins.")
    check_by(by)
    if utc_offset_s % BUCKET_S:
        raise ValueError(
            f"the UTC offset is {utc_offset_s} s; it must be a multiple of a quarter hour."
        )
    total = Line(
        TOTAL, _sum(tally, lambda key: TOTAL).get(TOTAL, Counts()), use_of(nodes, from_us, to_us)
    )
    if by == HOUR:
        lines = _by_hour(tally, nodes, from_us, to_us, utc_offset_s)
    elif by == MODEL:
        lines = _by_model(tally, nodes, from_us, to_us)
    else:
        # A node serves several tenants at once, so nodes are not assigned to tenants.
        none = NodeUse(to_us - from_us)
        tenants = _sum(tally, lambda key: key.tenant)
        lines = [Line(tenant, counts, none) for tenant, counts in sorted(tenants.items())]
        if spans is not None:
            total, lines = _with_uses(total, lines, uses_of(nodes, spans, from_us, to_us))
    if details is not None:
        total = replace(total, detail=details.total)
        lines = [_with_detail(line, details, utc_offset_s) for line in lines]
    return Report(from_us, to_us, by, total, tuple(lines), utc_offset_s)


def _with_uses(
    total: Line, lines: list[Line], uses: tuple[Mapping[str, TenantUse], TenantUse]
) -> tuple[Line, list[Line]]:
    """Add GPU use to the lines. A tenant that used something but completed nothing gets a line too."""
    tenant_to_use, of_all = uses
    absent = tenant_to_use.keys() - {line.label for line in lines}
    lines = [*lines, *(Line(tenant, Counts(), NodeUse(total.nodes.window_us)) for tenant in absent)]
    return replace(total, use=of_all), [
        replace(line, use=tenant_to_use.get(line.label, TenantUse()))
        for line in sorted(lines, key=lambda line: line.label)
    ]


def _with_detail(line: Line, details: Details, utc_offset_s: int) -> Line:
    key = line.label if line.start_s is None else (line.start_s + utc_offset_s) // HOUR_S
    return replace(line, detail=details.key_to_detail.get(key, Detail()))


def _by_hour(
    tally: Tally, nodes: Sequence[NodesFact], from_us: int, to_us: int, utc_offset_s: int
) -> list[Line]:
    """Return a line per hour of the window, even if empty; the first and last are cut to it."""
    offset_us = utc_offset_s * 1_000_000
    hours = _sum(tally, lambda key: (key.bucket * BUCKET_US + offset_us) // _HOUR_US)
    # Each hour iterates over its own units only, not over those of a whole year.
    hour_to_nodes: dict[int, list[NodesFact]] = {}
    for fact in nodes:
        first, last = max(from_us, micros(fact.from_s)), min(to_us, micros(fact.to_s))
        for hour in range((first + offset_us) // _HOUR_US, -((-last - offset_us) // _HOUR_US)):
            hour_to_nodes.setdefault(hour, []).append(fact)
    lines = []
    for hour in range((from_us + offset_us) // _HOUR_US, -((-to_us - offset_us) // _HOUR_US)):
        start_us = hour * _HOUR_US - offset_us
        use = use_of(
            hour_to_nodes.get(hour, ()), max(from_us, start_us), min(to_us, start_us + _HOUR_US)
        )
        lines.append(
            Line(iso(start_us, utc_offset_s), hours.get(hour, Counts()), use, start_us // 1_000_000)
        )
    return lines


def _by_model(tally: Tally, nodes: Sequence[NodesFact], from_us: int, to_us: int) -> list[Line]:
    """Return a line per model; nodes that serve several models have a line of their own."""
    counts = _sum(tally, lambda key: key.model)
    model_to_nodes: dict[str, list[NodesFact]] = {}
    for fact in nodes:
        model_to_nodes.setdefault(fact.model, []).append(fact)
    lines = []
    for model in sorted(counts.keys() | model_to_nodes.keys()):
        use = use_of(model_to_nodes.get(model, ()), from_us, to_us)
        if model in counts or use.role_to_node_us:
            lines.append(Line(model or SHARED, counts.get(model, Counts()), use))
    return lines


def _sum(tally: Tally, group: Callable[[Key], Any]) -> dict[Any, Counts]:
    sums: dict[Any, Counts] = {}
    for key, counts in tally:
        sums.setdefault(group(key), Counts()).add(counts)
    return sums


def iso(time_us: int, utc_offset_s: int) -> str:
    """Return a time in ISO 8601, to the second."""
    zone = timezone(timedelta(seconds=utc_offset_s))
    return datetime.fromtimestamp(time_us // 1_000_000, zone).isoformat()


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
