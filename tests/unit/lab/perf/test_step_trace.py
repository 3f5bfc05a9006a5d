"""Traces of simulated steps: complete, nested, with durations that add up, counters, valid JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hadal.core.plans import Chunk, DecodePlan, Join, PrefillPlan, Sampling
from hadal.lab.perf.explain import StepPrice
from hadal.lab.perf.step import StepModel
from hadal.lab.perf.trace import steps_trace
from hadal.lab.sim.runners import DecodeRunner, PrefillRunner
from hadal.overlap.plan import DECODE_FIVE, SEQUENTIAL

MODEL = StepModel(144)
DECODE_PRICE = MODEL.decode(88, 4989, schedule=DECODE_FIVE.name)
DRAFTED = MODEL.decode(88, 4989, mtp_tokens=1)
PREFILL_PRICE = StepModel(32).prefill(16384, 4096)
SMALL = MODEL.decode(4, 1000, schedule=SEQUENTIAL.name)
PRICES = {"decode": DECODE_PRICE, "drafted": DRAFTED, "prefill": PREFILL_PRICE, "sequential": SMALL}


def entries(*steps: tuple[float, StepPrice]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        json.dumps(steps_trace("unit-0", steps), allow_nan=False)
    )["traceEvents"]
    return found


def spans(found: list[dict[str, Any]], thread: str | None = None) -> list[dict[str, Any]]:
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    return [e for e in found if e["ph"] == "X" and thread in (None, names[e["tid"]])]


def seconds(found: list[dict[str, Any]]) -> float:
    return sum(float(e["dur"]) for e in found) / 1e6


@pytest.mark.parametrize("name", PRICES)
def test_a_step_is_as_long_as_its_price_and_its_parts_add_up(name: str) -> None:
    price = PRICES[name]
    found = entries((5.0, price))
    (step,) = [e for e in spans(found) if e["cat"] == "step" and e["name"].startswith("step ")]
    assert step["ts"] == 0.0
    assert step["dur"] / 1e6 == pytest.approx(price.seconds, rel=1e-6)
    parts = [e for e in spans(found, "step") if e is not step]
    assert [e["name"] for e in parts] == [part.name for part in price.parts]
    lanes = [*spans(found, "compute mb0"), *spans(found, "compute mb1"), *spans(found, "wait")]
    # One GPU computes both micro-batches, so spans and waits do not overlap.
    assert seconds(parts) + seconds(lanes) == pytest.approx(price.seconds, rel=1e-4)
    seen = seconds(spans(found, "wait"))
    assert seen == pytest.approx(price.walked.exposed_s, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", PRICES)
def test_stretches_of_a_track_nest_or_are_apart(name: str) -> None:
    found = entries((0.0, PRICES[name]), (PRICES[name].seconds, PRICES[name]))
    assert len([e for e in found if e["ph"] == "X"]) > 500
    for tid in {e["tid"] for e in spans(found)}:
        stack: list[float] = []
        for e in sorted(
            (e for e in spans(found) if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])
        ):
            # Times are rounded to 0.001 us, so a span may seem to end about 0.002 us too late.
            while stack and stack[-1] <= e["ts"] + 0.0021:
                stack.pop()
            assert not stack or e["ts"] + e["dur"] <= stack[-1] + 0.0021
            stack.append(e["ts"] + e["dur"])


def test_every_micro_batch_has_its_track() -> None:
    found = entries((0.0, DECODE_PRICE))
    for lane in ("compute", "link"):
        for micro_batch in (0, 1):
            mine = spans(found, f"{lane} mb{micro_batch}")
            assert len(mine) >= 58 * 2
            assert {e["args"]["micro_batch"] for e in mine} == {micro_batch}


def test_counters_follow_the_steps() -> None:
    later = MODEL.decode(90, 5000, schedule=DECODE_FIVE.name)
    found = entries((10.0, DECODE_PRICE), (11.0, later))
    counted = {
        (e["name"], e["ts"]): next(iter(e["args"].values())) for e in found if e["ph"] == "C"
    }
    assert counted[("requests", 0.0)] == pytest.approx(88)
    assert counted[("requests", 1e6)] == pytest.approx(90)
    assert counted[("KV positions", 0.0)] == pytest.approx(88 * 4989)
    seen = counted[("expert imbalance", 0.0)]
    assert seen == pytest.approx(DECODE_PRICE.micro_batches[0].expert_imbalance, abs=1e-3)
    prefill = {
        e["name"]: next(iter(e["args"].values()))
        for e in entries((0.0, PREFILL_PRICE))
        if e["ph"] == "C"
    }
    assert prefill["tokens"] == pytest.approx(16384)
    drafted = {
        e["name"]: next(iter(e["args"].values())) for e in entries((0.0, DRAFTED)) if e["ph"] == "C"
    }
    # A request with a draft has two computed rows.
    assert drafted["requests"] == pytest.approx(88)


def test_steps_within_a_verified_one_are_counted_and_not_drawn() -> None:
    each_s = DRAFTED.seconds / 1.8
    found = entries(*((number * each_s, DRAFTED) for number in range(4)))
    drawn = [e["name"] for e in spans(found, "step") if e["name"].startswith("step ")]
    assert [name.split()[1] for name in drawn] == ["0", "2"]
    assert sum(e["name"] == "requests" for e in found) == 4


def test_no_steps_are_a_trace_and_times_must_go_on() -> None:
    assert steps_trace("unit-0", []) == {"traceEvents": [], "displayTimeUnit": "ms"}
    for begins in ((1.0, 0.5), (0.0, math.nan), (0.0, math.inf)):
        with pytest.raises(ValueError, match="finite start times in ascending order"):
            steps_trace("unit-0", [(begin_s, SMALL) for begin_s in begins])


def test_what_runners_simulated_becomes_a_trace() -> None:
    runner = DecodeRunner(StepModel(8), 4, lambda number: 1000)
    steps, now_s = [], 0.0
    for number in range(3):
        joins = (Join(number, (), 500, 0, 1, Sampling(seed=number)),)
        elapsed_s = runner.run([DecodePlan(number, (), joins, ()) for _ in range(8)]).elapsed_s
        assert runner.price is not None
        assert runner.price.seconds == elapsed_s
        steps.append((now_s, runner.price))
        now_s += elapsed_s
    found = entries(*steps)
    assert [e["args"]["requests"] for e in found if e["name"] == "requests"] == [1, 2, 3]
    seen = [e["args"]["KV positions"] for e in found if e["name"] == "KV positions"]
    assert seen == [501, 1003, 1506]
    prefill = PrefillRunner(StepModel(8), lambda number: 1000)
    prefill.run([PrefillPlan(0, (Chunk("a", (0,) * 700, 0, (), Sampling(), 0),)) for _ in range(8)])
    assert prefill.price is not None
    shown = [e["args"]["tokens"] for e in entries((0.0, prefill.price)) if e["name"] == "tokens"]
    assert shown == [700]
