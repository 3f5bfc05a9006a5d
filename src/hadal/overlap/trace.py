"""Analyse and draw traced steps: the share of link time hidden under computation, and pictures for
people.

    compute  mb0   aaacccg>......>EEE>.......      lanes of a rank: ops in its compute thread, by micro-batch;
    link     mb0   .......DDDDDDD.....MMMMMMM      exchanges, from being posted to the last byte's arrival;
    wait           ............ww............      compute waits for the link (exposed)

The JSON is the Trace Event Format that Perfetto and chrome://tracing read. Pure: no clock, no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hadal.core.balance import shown
from hadal.core.messages.questions import HostClock, TracedStep
from hadal.core.plans import DRAFT, MASK, ByNode, TraceEvent
from hadal.overlap.plan import (
    ATTN_CORE,
    ATTN_IN,
    COMBINE,
    COMBINE_FINISH,
    COMBINE_START,
    DISPATCH,
    DISPATCH_FINISH,
    DISPATCH_START,
    EXPERTS,
    GATE,
    NEEDS,
    SHARED,
)

COMPUTE, LINK, WAIT = "compute", "link", "wait"
LETTERS = {
    ATTN_IN: "a",
    ATTN_CORE: "c",
    GATE: "g",
    SHARED: "s",
    EXPERTS: "E",
    DISPATCH: "D",
    COMBINE: "M",
    DISPATCH_START: ">",
    DISPATCH_FINISH: ">",
    COMBINE_START: ">",
    COMBINE_FINISH: ">",
    "step": "S",
    "head": "h",
    "draw": "d",
    DRAFT: "t",
    MASK: "k",
    "flip": "f",
}
_WAIT_LETTER = "w"
_NAMES = {
    ">": "start or finish",
    "D": "dispatch",
    "M": "combine",
    "d": "draw",
    "f": "flip of a layer's experts",
    "k": "wait for what grammars allow",
    "S": "all layers as one kernel",
    _WAIT_LETTER: "exposed wait",
}
"""Names of letters that several ops share, or that differ from the op's name."""
_COLOURS = {
    ATTN_IN: "thread_state_running",
    ATTN_CORE: "good",
    EXPERTS: "rail_response",
    SHARED: "rail_animation",
    DISPATCH: "thread_state_iowait",
    COMBINE: "rail_load",
}
"""Names of chrome://tracing's palette; Perfetto chooses its own by the name of an op."""
_THREADS = ("step", COMPUTE, WAIT, "link mb0", "link mb1")
_THREADS_APART = ("step", "compute mb0", "compute mb1", WAIT, "link mb0", "link mb1")

Stretch = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Share:
    """Sums over one rank's lanes, overlaps counted once."""

    rank: int
    compute_s: float
    link_s: float
    covered_s: float
    """Seconds in which link and compute are both busy."""
    exposed_s: float
    """Seconds of the wait lane."""

    @property
    def covered(self) -> float | None:
        """Share of link time under computation; None if the link was not used."""
        return self.covered_s / self.link_s if self.link_s > 0.0 else None


def shares(events: Iterable[TraceEvent]) -> tuple[Share, ...]:
    """Return each rank's shares, in the order of ranks."""
    lanes: dict[tuple[int, str], list[Stretch]] = {}
    ranks: set[int] = set()
    for event in events:
        lanes.setdefault((event.rank, event.lane), []).append((event.start_s, event.end_s))
        ranks.add(event.rank)
    found = []
    for rank in sorted(ranks):
        compute, link, wait = (
            _union(lanes.get((rank, lane), [])) for lane in (COMPUTE, LINK, WAIT)
        )
        found.append(
            Share(rank, _length(compute), _length(link), _common_s(link, compute), _length(wait))
        )
    return tuple(found)


def covered_share(events: Iterable[TraceEvent]) -> float | None:
    """Return the share of all ranks' link time under computation; None if no link was used."""
    by_rank = shares(events)
    link_s = sum(share.link_s for share in by_rank)
    return sum(share.covered_s for share in by_rank) / link_s if link_s > 0.0 else None


def duration_s(events: Sequence[TraceEvent]) -> float:
    """Return the seconds from the first start to the last end on any rank."""
    if not events:
        return 0.0
    return max(event.end_s for event in events) - min(event.start_s for event in events)


def chrome_trace(
    unit: str,
    steps: Sequence[TracedStep],
    clocks: Sequence[HostClock] = (),
    *,
    is_apart: bool = False,
) -> dict[str, Any]:
    """Return the steps as one Trace Event Format object: a process per rank, a thread per lane;
    times in us.

    Each balancer objective of a step is a counter in the first rank's process. `clocks`: host
    clocks by which times were aligned; they appear in the file's `otherData` and beside the names
    of ranks. `is_apart`: each micro-batch's computation is drawn as a separate thread, though one
    lane computes both.
    """
    threads = _THREADS_APART if is_apart else _THREADS
    everything = [event for step in steps for event in step.events]
    zero_s = min((event.start_s for event in everything), default=0.0)
    found: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in everything}):
        found.append(
            {
                "ph": "M",
                "pid": rank,
                "name": "process_name",
                "args": {"name": f"{unit} rank {rank}"},
            }
        )
        found.append(
            {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        )
        for tid, name in enumerate(threads):
            found.append(
                {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}}
            )
            found.append(
                {
                    "ph": "M",
                    "pid": rank,
                    "tid": tid,
                    "name": "thread_sort_index",
                    "args": {"sort_index": tid},
                }
            )
    for step in steps:
        found += _counters(step, zero_s)
        for share in shares(step.events):
            mine = [event for event in step.events if event.rank == share.rank]
            args = {
                "step_id": step.step_id,
                "num_micro_batches": step.num_micro_batches,
                "num_tokens": step.num_tokens,
                "covered_share": share.covered,
                "exposed_ms": share.exposed_s * 1e3,
                "balance": shown(step.balance),
                "dispatch_bytes": _by_nodes(step.link_bytes.dispatch),
                "combine_bytes": _by_nodes(step.link_bytes.combine),
            }
            start_s = min(event.start_s for event in mine)
            name = f"step {step.step_id} {step.schedule}"
            found.append(
                _span(name, "step", share.rank, 0, start_s - zero_s, duration_s(mine), args)
            )
            found += [_event(event, zero_s, threads) for event in mine]
    for clock in clocks:
        found += [_label(rank, clock) for rank in clock.ranks]
    trace: dict[str, Any] = {"traceEvents": found, "displayTimeUnit": "ms"}
    if clocks:
        trace["otherData"] = {"clocks": msgspec.to_builtins(clocks)}
    return trace


def _label(rank: int, clock: HostClock) -> dict[str, Any]:
    """Return a label that viewers show beside a process's name."""
    text = f"{clock.host}, aligned to {clock.error_s * 1e3:.3f} ms"
    return {"ph": "M", "pid": rank, "name": "process_labels", "args": {"labels": text}}


def _by_nodes(both: ByNode) -> dict[str, int]:
    return {"within nodes": both[0], "between nodes": both[1]}


def _counters(step: TracedStep, zero_s: float) -> list[dict[str, Any]]:
    """Return objectives as a step function over time; empty for a step without events."""
    if not step.events:
        return []
    pid = min(event.rank for event in step.events)
    ts = round((min(event.start_s for event in step.events) - zero_s) * 1e6, 3)
    return [
        {
            "ph": "C",
            "pid": pid,
            "name": f"balance: {objective}",
            "ts": ts,
            "args": {"mean over maximum": value},
        }
        for objective, value in shown(step.balance).items()
    ]


def _event(event: TraceEvent, zero_s: float, threads: tuple[str, ...]) -> dict[str, Any]:
    # Exchanges of two micro-batches may overlap, and spans of one thread must not.
    own = f"{event.lane} mb{event.micro_batch}"
    tid = threads.index(own if own in threads else event.lane)
    name = f"wait {event.op}" if event.lane == WAIT else event.op
    args = {"layer": event.layer, "micro_batch": event.micro_batch}
    span = _span(
        name, event.lane, event.rank, tid, event.start_s - zero_s, event.end_s - event.start_s, args
    )
    colour = "terrible" if event.lane == WAIT else _COLOURS.get(event.op)
    return span if colour is None else span | {"cname": colour}


def _span(
    name: str,
    category: str,
    pid: int,
    tid: int,
    start_s: float,
    length_s: float,
    args: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": round(start_s * 1e6, 3),
        "dur": round(max(length_s, 0.0) * 1e6, 3),
        "args": args,
    }


def timeline(
    events: Iterable[TraceEvent], rank: int, layer: int | None = None, width: int = 96
) -> str:
    """Draw one layer of one rank in letters (`legend`), while any micro-batch is in it; empty
    without events of the rank. `layer` None: the middle one, of those with an exchange if there are
    any. Raises ValueError for a layer without events.
    """
    mine = [event for event in events if event.rank == rank]
    if not mine or width < 1:
        return ""
    if layer is None:
        # A dense layer has no exchange: choose among layers with one.
        layers = sorted({e.layer for e in mine if e.lane == LINK} or {e.layer for e in mine})
        layer = layers[len(layers) // 2]
    within = [event for event in mine if event.layer == layer]
    # Events outside of layers are recorded under layer 0; they must not stretch that layer.
    within = [event for event in within if event.op in NEEDS or event.lane == LINK] or within
    if not within:
        raise ValueError(f"rank {rank} has no events of layer {layer}.")
    start_s, end_s = min(e.start_s for e in within), max(e.end_s for e in within)
    cell_s = max((end_s - start_s) / width, 1e-12)
    micro_batches = sorted({event.micro_batch for event in mine})
    rows: list[tuple[str, str, int | None]] = [
        (f"{COMPUTE} mb{i}", COMPUTE, i) for i in micro_batches
    ]
    if any(event.lane == LINK for event in mine):
        rows += [(f"{LINK} mb{i}", LINK, i) for i in micro_batches] + [(WAIT, WAIT, None)]
    lines = [f"layer {layer}, {(end_s - start_s) * 1e3:.2f} ms"]
    for name, lane, micro_batch in rows:
        row = [e for e in mine if e.lane == lane and micro_batch in (None, e.micro_batch)]
        lines.append(f"{name:<12} {_row(row, start_s, cell_s, width)}")
    return "\n".join(lines)


def is_one_kernel(events: Iterable[TraceEvent], rank: int) -> bool:
    """Return whether the rank ran its layers in one call, so that no layer can be drawn."""
    mine = [event for event in events if event.rank == rank]
    return bool(mine) and not any(event.op in NEEDS or event.lane == LINK for event in mine)


def steps_timeline(steps: Sequence[TracedStep], rank: int, width: int = 96) -> str:
    """Draw a rank's compute lane over all steps in letters; dots are time without an op."""
    mine = [
        event
        for step in steps
        for event in step.events
        if event.rank == rank and event.lane == COMPUTE
    ]
    if not mine or width < 1:
        return ""
    start_s, length_s = min(event.start_s for event in mine), duration_s(mine)
    row = _row(mine, start_s, max(length_s / width, 1e-12), width)
    ids = [step.step_id for step in steps]
    return f"steps {ids[0]} to {ids[-1]}, {length_s * 1e3:.2f} ms\n{COMPUTE:<12} {row}"


def legend(events: Iterable[TraceEvent], rank: int) -> str:
    """List the letters of a rank's events with their names and total times."""
    letter_to_s: dict[str, float] = {}
    letter_to_name = {letter: op for op, letter in LETTERS.items()} | _NAMES
    for event in events:
        if event.rank == rank:
            letter = _letter(event)
            letter_to_s[letter] = letter_to_s.get(letter, 0.0) + event.end_s - event.start_s
    known = [letter for letter in letter_to_name if letter in letter_to_s]
    return ", ".join(
        f"{letter} {letter_to_name[letter]} {letter_to_s[letter] * 1e3:.2f} ms" for letter in known
    )


def _letter(event: TraceEvent) -> str:
    return _WAIT_LETTER if event.lane == WAIT else LETTERS.get(event.op, "?")


def _row(events: Sequence[TraceEvent], start_s: float, cell_s: float, width: int) -> str:
    """Draw one lane: each cell has the letter of the event that fills most of it, else a dot."""
    best_s = [cell_s / 2] * width
    cells = ["."] * width
    for event in events:
        first = max(0, int((event.start_s - start_s) / cell_s))
        last = min(width - 1, int((event.end_s - start_s) / cell_s))
        for at in range(first, last + 1):
            left_s = start_s + at * cell_s
            common_s = min(event.end_s, left_s + cell_s) - max(event.start_s, left_s)
            if common_s > best_s[at]:
                best_s[at] = common_s
                cells[at] = _letter(event)
    return "".join(cells)


def _union(stretches: list[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for start_s, end_s in sorted(stretches):
        if end_s <= start_s:
            continue
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def _length(merged: list[Stretch]) -> float:
    return sum(end_s - start_s for start_s, end_s in merged)


def _common_s(a: list[Stretch], b: list[Stretch]) -> float:
    """Return the length of the intersection of two unions."""
    total_s, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total_s += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return total_s
