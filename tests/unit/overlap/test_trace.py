"""Numbers of traces: covered shares, exposed waits, spans of the JSON and the letters of a timeline."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from hadal.core.messages.questions import TracedStep
from hadal.core.plans import DRAFT, LinkBytes, TraceEvent
from hadal.overlap.plan import (
    COMBINE_START,
    DISPATCH_START,
    PREFILL_DUAL,
    SEQUENTIAL,
    Schedule,
    order,
)
from hadal.overlap.trace import (
    chrome_trace,
    covered_share,
    duration_s,
    is_one_kernel,
    legend,
    shares,
    steps_timeline,
    timeline,
)

ZERO_S = 1000.0
COMPUTE_S = {"attn_in": 0.004, "attn_core": 0.005, "gate": 0.001, "shared": 0.002, "experts": 0.008}
LINK_S = 0.009


def played(
    schedule: Schedule, num_micro_batches: int, *, rank: int = 0, num_layers: int = 8
) -> list[TraceEvent]:
    """Return the events of a step on one compute lane and one link, as the executor records them."""
    now_s = link_free_s = ZERO_S
    posted: dict[tuple[int, str], tuple[float, float]] = {}
    events = []
    scale = 2 // num_micro_batches
    for micro_batch, layer, op in order(schedule, num_layers, num_micro_batches):
        if op in (DISPATCH_START, COMBINE_START):
            start_s = max(now_s, link_free_s)
            link_free_s = start_s + LINK_S * scale
            posted[micro_batch, op.strip(">")] = (start_s, link_free_s)
        elif op.startswith(">"):
            name = op.strip(">")
            start_s, end_s = posted.pop((micro_batch, name))
            events.append(TraceEvent(rank, "link", name, micro_batch, layer, start_s, end_s))
            if end_s > now_s:
                events.append(TraceEvent(rank, "wait", op, micro_batch, layer, now_s, end_s))
                now_s = end_s
        else:
            end_s = now_s + COMPUTE_S[op] * scale
            events.append(TraceEvent(rank, "compute", op, micro_batch, layer, now_s, end_s))
            now_s = end_s
    return events


def event(
    lane: str,
    start_s: float,
    end_s: float,
    *,
    rank: int = 0,
    op: str = "gate",
    micro_batch: int = 0,
) -> TraceEvent:
    return TraceEvent(rank, lane, op, micro_batch, 0, start_s, end_s)


def test_shares_count_overlaps_once() -> None:
    events = [
        event("compute", 0, 4),
        event("compute", 6, 10),
        event("link", 2, 7),
        event("link", 5, 9, micro_batch=1),
        event("link", 20, 21),
        event("wait", 4, 6),
        event("compute", 0, 1, rank=3),
        event("link", 0.5, 2.5, rank=3),
    ]
    first, other = shares(events)
    assert (first.rank, other.rank) == (0, 3)
    assert (first.compute_s, first.link_s, first.covered_s, first.exposed_s) == (8, 8, 5, 2)
    assert first.covered == 5 / 8
    assert (other.link_s, other.covered_s, other.exposed_s) == (2, 0.5, 0)
    assert covered_share(events) == 5.5 / 10
    assert duration_s(events) == 21


def test_without_a_link_there_is_no_share() -> None:
    events = [event("compute", 0, 1)]
    assert covered_share(events) is None
    assert shares(events)[0].covered is None
    assert covered_share([]) is None
    assert shares([]) == ()
    assert duration_s([]) == 0.0


def test_schedules_differ_by_number() -> None:
    """Compare covered shares: overlapped 94-98 % as in the prototype, sequential 0."""
    dual, serial = played(PREFILL_DUAL, 2), played(SEQUENTIAL, 1)
    covered = covered_share(dual)
    assert covered is not None
    assert covered > 0.94
    assert covered_share(serial) == pytest.approx(0.0, abs=1e-9)
    assert shares(serial)[0].exposed_s == pytest.approx(8 * 4 * LINK_S)
    assert shares(dual)[0].exposed_s < 0.1 * shares(serial)[0].exposed_s
    assert duration_s(serial) / duration_s(dual) > 1.8


def test_chrome_trace() -> None:
    steps = [
        TracedStep(
            7,
            "prefill_dual",
            2,
            512,
            (*played(PREFILL_DUAL, 2), *played(PREFILL_DUAL, 2, rank=1)),
            link_bytes=LinkBytes((1, 2), (3, 4)),
        ),
        TracedStep(8, "sequential", 1, 3, ()),
    ]
    trace = json.loads(json.dumps(chrome_trace("decode-0", steps)))
    entries = trace["traceEvents"]
    names = {e["args"]["name"] for e in entries if e["name"] in ("process_name", "thread_name")}
    assert names == {
        "decode-0 rank 0",
        "decode-0 rank 1",
        "step",
        "compute",
        "wait",
        "link mb0",
        "link mb1",
    }
    spans = [e for e in entries if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) == 0.0
    assert {e["pid"] for e in spans} == {0, 1}
    head = next(e for e in spans if e["cat"] == "step")
    assert head["name"] == "step 7 prefill_dual"
    assert head["args"]["num_tokens"] == 512
    assert head["args"]["dispatch_bytes"] == {"within nodes": 1, "between nodes": 2}
    assert head["args"]["combine_bytes"] == {"within nodes": 3, "between nodes": 4}
    assert head["dur"] == pytest.approx(duration_s(played(PREFILL_DUAL, 2)) * 1e6, abs=1)
    assert len(spans) == len(steps[0].events) + 2
    # In one thread, a viewer nests spans that overlap; these must follow each other.
    for pid in (0, 1):
        for tid in (1, 2, 3, 4):
            lane = sorted(
                (e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (pid, tid)
            )
            assert all(end <= start + 0.01 for (_, end), (start, _) in pairwise(lane))
    assert any(e["name"] == "wait >dispatch" and e["tid"] == 2 for e in spans)


def test_chrome_trace_draws_balance_over_time() -> None:
    first, second = played(SEQUENTIAL, 1), played(SEQUENTIAL, 1)
    second = [
        TraceEvent(2, e.lane, e.op, e.micro_batch, e.layer, e.start_s + 1, e.end_s + 1)
        for e in second
    ]
    steps = [
        TracedStep(7, "sequential", 1, 9, tuple(first), {"experts": 0.5, "kv": 0.75, "luck": 1.0}),
        TracedStep(8, "sequential", 1, 9, tuple(second), {"kv": 1.0, "experts": math.nan}),
        TracedStep(9, "sequential", 1, 9, (), {"kv": 0.1}),
    ]
    entries = json.loads(json.dumps(chrome_trace("decode-0", steps), allow_nan=False))[
        "traceEvents"
    ]
    counters = [
        (e["name"], e["pid"], e["ts"], list(e["args"].values())) for e in entries if e["ph"] == "C"
    ]
    assert counters == [
        ("balance: kv", 0, 0.0, [0.75]),
        ("balance: experts", 0, 0.0, [0.5]),
        ("balance: kv", 2, 1e6, [1.0]),
    ]
    heads = [e["args"]["balance"] for e in entries if e.get("cat") == "step"]
    assert heads == [{"kv": 0.75, "experts": 0.5}, {"kv": 1.0}]


def test_micro_batches_may_have_tracks_of_their_own() -> None:
    step = TracedStep(0, "prefill_dual", 2, 9, tuple(played(PREFILL_DUAL, 2)))
    for is_apart, threads in ((False, {"compute"}), (True, {"compute mb0", "compute mb1"})):
        entries = chrome_trace("prefill-0", [step], is_apart=is_apart)["traceEvents"]
        names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
        assert {name for name in names.values() if name.startswith("compute")} == threads
        for e in entries:
            if e["ph"] == "X":
                expected = {
                    "compute": (
                        f"compute mb{e['args'].get('micro_batch')}" if is_apart else "compute"
                    ),
                    "link": f"link mb{e['args'].get('micro_batch')}",
                }.get(e["cat"], e["cat"])
                assert names[e["tid"]] == expected


def test_an_empty_trace_is_a_valid_one() -> None:
    assert chrome_trace("decode-0", []) == {"traceEvents": [], "displayTimeUnit": "ms"}


def test_timeline_letters() -> None:
    events = [
        event("compute", 0, 2, op="attn_in"),
        event("compute", 2, 4, op="attn_core"),
        event("link", 4, 8, op="dispatch"),
        event("wait", 6, 8, op=">dispatch"),
        event("compute", 4, 6, op="attn_in", micro_batch=1),
        event("compute", 8, 10, op="experts"),
    ]
    assert timeline(events, 0, width=10).splitlines() == [
        "layer 0, 10000.00 ms",
        "compute mb0  aacc....EE",
        "compute mb1  ....aa....",
        "link mb0     ....DDDD..",
        "link mb1     ..........",
        "wait         ......ww..",
    ]


def test_timeline_takes_a_middle_layer_with_exchanges() -> None:
    events = [*played(PREFILL_DUAL, 2), event("compute", 0, 0.5)]
    assert timeline(events, 0).startswith("layer 4, ")
    rows = timeline(events, 0, 2, 50).splitlines()
    assert all(len(row) == 13 + 50 for row in rows[1:])
    assert {"D", "M"} <= set(rows[3])
    with pytest.raises(ValueError, match="rank 0 has no events of layer 99"):
        timeline(events, 0, 99)
    assert timeline(events, 5) == ""


def test_head_and_draw_do_not_stretch_layer_0() -> None:
    events = [event("compute", 0, 2, op="experts"), event("compute", 8, 10, op="draw")]
    assert timeline(events, 0, width=4).splitlines() == ["layer 0, 2000.00 ms", "compute mb0  EEEE"]
    assert timeline(events[1:], 0, width=4).endswith("dddd")


def test_timeline_without_a_link_has_compute_only() -> None:
    rows = timeline([event("compute", 0, 2, op="experts")], 0, width=4).splitlines()
    assert rows[1:] == ["compute mb0  EEEE"]


def test_steps_that_are_one_kernel_are_drawn_one_after_the_other() -> None:
    """Draw whole steps: on one rank a decode step is one kernel, so a picture of a layer is one bar."""
    steps = [
        TracedStep(
            7 + i,
            "sequential",
            1,
            1,
            (
                event("compute", i, i + 0.5, op="step"),
                event("compute", i + 0.5, i + 0.75, op="draw"),
            ),
        )
        for i in range(2)
    ]
    assert all(is_one_kernel(step.events, 0) for step in steps)
    assert steps_timeline(steps, 0, 7) == "steps 7 to 8, 1750.00 ms\ncompute      SSd.SSd"
    assert steps_timeline(steps, 5) == ""
    assert not is_one_kernel(steps[0].events, 5), "no events, nothing known"
    assert not is_one_kernel([*steps[0].events, event("compute", 0, 1, op="experts")], 0)


def test_the_legend_has_the_letters_that_occur_and_their_times() -> None:
    events = [
        event("compute", 0, 1, op="dispatch>"),
        event("compute", 1, 1.5, op=">combine"),
        event("wait", 1, 1.25, op=">dispatch"),
        event("compute", 2, 3, op="step"),
    ]
    assert (
        legend(events, 0)
        == "> start or finish 1500.00 ms, S all layers as one kernel 1000.00 ms, w exposed wait"
        " 250.00 ms"
    )
    assert legend(events, 1) == ""


def test_drafts_are_drawn_and_named() -> None:
    events = [event("compute", 0, 1, op="step"), event("compute", 1, 3, op=DRAFT)]
    drawn = timeline(events, 0, width=6).splitlines()[1]
    assert drawn.split()[-1] == "SStttt"
    assert legend(events, 0).endswith("t draft 2000.00 ms")
