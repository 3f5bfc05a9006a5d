"""Tables, maps of ranks and timelines as HTML and SVG. Text from requests and logs is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from html import escape

from hadal.core.plans import TraceEvent
from hadal.overlap.trace import COMPUTE, LINK, WAIT

NOTHING = "–"
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def rounded(value: float, num_figures: int = 3) -> str:
    """Return a number with `num_figures` significant digits, never with an exponent."""
    return f"{Decimal(f'{value:.{num_figures}g}'):,f}"


def number(value: float | None) -> str:
    """Return a number with about three digits; from 10,000 on it is shortened: 12.3 k."""
    if value is None or not math.isfinite(value):
        return NOTHING
    # Round before choosing the scale: 1 M, not 1,000 k.
    size = float(f"{abs(value):.3g}") if abs(value) >= 9999.5 else abs(value)
    for limit, letter in _SCALES:
        if size >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{rounded(value / scale)} {letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else rounded(value)


def milliseconds(value: float | None) -> str:
    """Return a duration, given in milliseconds, as milliseconds or seconds."""
    if value is None or not math.isfinite(value):
        return NOTHING
    is_long = float(f"{value:.3g}") >= 1000
    return f"{rounded(value / 1e3)} s" if is_long else f"{rounded(value)} ms"


def dollars(value: float | None) -> str:
    """Return dollars; small amounts have more decimals."""
    if value is None or not math.isfinite(value):
        return NOTHING
    sign, size = ("−" if value < 0 else ""), abs(value)
    if size >= 1000:
        return f"{sign}${size:,.0f}"
    return f"{sign}${size:.2f}" if size >= 1 or not size else f"{sign}${rounded(size, 2)}"


def percent(value: float | None) -> str:
    """Return a percentage (100 is the whole) as text."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f} %" if abs(value) >= 10 else f"{value:.1f} %"


def facts(items: Iterable[tuple[str, str, str]]) -> str:
    """Return a row of large figures, each given as (name, value, note)."""
    cells = "".join(
        f'<div class="h-fact"><div class="h-fact-name">{escape(name)}</div>'
        f'<div class="h-fact-value">{escape(value)}</div>'
        f'<div class="h-fact-more">{escape(more)}</div></div>'
        for name, value, more in items
    )
    return f'<div class="h-facts">{cells}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], num_text: int = 1) -> str:
    """Return a table. The first `num_text` columns are words, the others right-aligned numbers."""
    kinds = ["h-words" if index < num_text else "h-number" for index in range(len(heads))]
    head = "".join(
        f'<th class="{kind}">{escape(name)}</th>' for kind, name in zip(kinds, heads, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="h-table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def empty(title: str, text: str) -> str:
    """Return a note for an empty view: `text` says what to do."""
    return f'<div class="h-nothing"><b>{escape(title)}</b><span>{escape(text)}</span></div>'


def unit_head(name: str, note: str, state: str) -> str:
    """Return the heading of a unit or process: its name and a note. `state`: "up", "down",
    "starting", "rests".
    """
    return (
        f'<div class="h-unit-head"><i class="h-dot h-{state}"></i>'
        f'<span class="h-unit-name">{escape(name)}</span>'
        f'<span class="h-unit-note">{escape(note)}</span></div>'
    )


def rank_map(states: Sequence[str], hosts: Sequence[str], ranks_per_node: int) -> str:
    """Return a map with one square per rank of a unit. Ranks of a node stay together at line
    breaks. `hosts`: each rank's host, empty if obvious.
    """
    squares = [
        f'<i class="h-{state}" title="rank {rank}{escape(f" on {host}" if host else "")}:'
        f' {_STATE_WORDS[state]}"></i>'
        for rank, (state, host) in enumerate(zip(states, hosts, strict=True))
    ]
    nodes = (
        f"<b>{''.join(squares[first : first + ranks_per_node])}</b>"
        for first in range(0, len(squares), ranks_per_node)
    )
    return f'<div class="h-ranks">{"".join(nodes)}</div>'


_STATE_WORDS = {
    "up": "works",
    "down": "down",
    "starting": "starts",
    "rests": "stopped until needed",
}
_LANES = ((COMPUTE, "computes"), (LINK, "sends"), (WAIT, "waits"))
_LANE_HEIGHT = 30


def timeline(events: Sequence[TraceEvent], rank: int, begin_s: float, end_s: float) -> str:
    """Return one rank's lanes between two times, as SVG of the available width. Each micro-batch
    has its own colour, and waiting another.
    """
    span_s = max(end_s - begin_s, 1e-9)
    parts = []
    for index, (lane, word) in enumerate(_LANES):
        top = index * _LANE_HEIGHT
        rows = "".join(
            _stretch(event, top, begin_s, span_s)
            for event in events
            if event.rank == rank
            and event.lane == lane
            and event.end_s > begin_s
            and event.start_s < end_s
        )
        parts.append(
            f'<div class="h-lane"><span>{word}</span><svg viewBox="0 {top} 1000 {_LANE_HEIGHT}"'
            f' preserveAspectRatio="none">{rows}</svg></div>'
        )
    return (
        f'<div class="h-timeline">{"".join(parts)}<div class="h-scale"><span>0</span>'
        f"<span>{milliseconds(span_s * 1e3)}</span></div></div>"
    )


def _stretch(event: TraceEvent, top: int, begin_s: float, span_s: float) -> str:
    left = 1000 * max(0.0, event.start_s - begin_s) / span_s
    width = 1000 * (event.end_s - max(event.start_s, begin_s)) / span_s
    kind = "wait" if event.lane == WAIT else f"mb{event.micro_batch % 2}"
    took = milliseconds((event.end_s - event.start_s) * 1e3)
    words = f"{event.op}, layer {event.layer}, half {event.micro_batch + 1}, {took}"
    return (
        f'<rect class="h-{kind}" x="{left:.2f}" y="{top + 3}" width="{max(width, 0.3):.2f}"'
        f' height="{_LANE_HEIGHT - 6}"><title>{escape(words)}</title></rect>'
    )


def placement(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> str:
    """Return a table of the experts that each rank lost and gained, without unchanged ranks."""
    rows = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        came = sorted(set(new) - set(old) - {-1})
        left = sorted(set(old) - set(new) - {-1})
        if came or left:
            words = [", ".join(map(str, some)) or NOTHING for some in (left, came)]
            rows.append((f"rank {rank}", *words))
    if not rows:
        return empty("No expert moved", "Only the load shares of existing replicas changed.")
    return table(("", "left", "came"), rows, num_text=3)


def spread(name_to_number: Mapping[str, int]) -> str:
    """Return counts in words: 2 up, 1 starting."""
    return ", ".join(f"{count} {name}" for name, count in name_to_number.items() if count)
