"""The stages of a simulated day, run inline by an executor: shared parts are measured once, and a
process that dies gives an error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import hadal.lab.simulate.stages as simulate_stages
from hadal.core.config import DECODE, PREFILL
from hadal.core.errors import ConfigError, HadalError
from hadal.lab.sim.day.curves import points_at
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.day.what_ifs import what_ifs
from hadal.lab.simulate.stages import (
    Simulated,
    SimulationPlan,
    Stages,
    check_promise,
    expert_ranks,
    simulate,
)
from tests.unit.commands.dying import die
from tests.unit.commands.pages import Page, text_of
from tests.unit.lab.sim.studies import WORKLOAD, small

WHOLE = "test_simulate has a day in whole"


class Inline(Executor):
    """Executor that runs each submitted call in this process before `submit` returns."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls[fn.__name__] += 1
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def tiny(**changes: Any) -> Study:
    """Return a study of few requests per second; prefill use is low, so that there are several units."""
    parts = {
        "workload": replace(WORKLOAD, sessions_per_day=1e5),
        "prefill": replace(small().prefill, use=0.005),
        "window": replace(small().window, seconds=0.5, settle_s=0.3, back_s=600.0),
    }
    return small(**{**parts, **changes})


def alternatives() -> tuple[tuple[str, Study], ...]:
    return (
        ("dearer", tiny(gpu_hour_usd=5.0)),
        ("no promise", tiny(tpot_ms=1.0)),
        ("small cache", tiny(cache=replace(tiny().cache, disk_pb=1e-4))),
        ("no drafts", tiny(drafts=0)),
        ("neither", tiny(drafts=0, tpot_ms=1.0)),
    )


@cache
def ran() -> tuple[Simulated, Counter[str], list[tuple[str, float]]]:
    """Run one day with a window and five alternatives. Return the result, the number of calls of
    each function, and the reported progress as (stage, seconds of work).
    """
    pool, told = Inline(), list[tuple[str, float]]()
    plan = SimulationPlan(tiny(), (8,), alternatives(), 1)
    return (
        Stages(plan, pool, lambda what, work_s: told.append((what, work_s))).run(),
        pool.calls,
        told,
    )


def row(name: str) -> dict[str, Any]:
    return next(one for one in ran()[0].json["what_ifs"] if one["name"].startswith(name))


@pytest.mark.slow("a window and the measures of three studies")
@pytest.mark.more(WHOLE)
def test_a_day_is_simulated_and_can_be_shown() -> None:
    made, _, told = ran()
    found = {**made.json, "seconds": 1.0}
    assert json.loads(json.dumps(found, allow_nan=False))["hours"][8]["window"]["problems"] == []
    assert [window is not None for window in made.result.windows] == [
        index == 8 for index in range(24)
    ]
    text = text_of(found)
    assert 10_000 < len(text) < 300_000
    page = Page(text)
    assert "dearer" in page.text
    costs = [row("as asked")["cost_usd"], row("dearer")["cost_usd"]]
    assert page.figures["what-ifs"]["data"][0]["x"][:2] == costs
    assert {what for what, _ in told} >= {"the cache's day", "what units do", "what if: dearer"}
    assert sum(work_s for _, work_s in told) > 0


@pytest.mark.more(WHOLE)
def test_the_window_has_the_liquids_units() -> None:
    made = ran()[0].result
    window = made.windows[8]
    assert window is not None
    middle = made.fluid.middles[8]
    assert window.setting.units == middle.units
    assert window.setting.token_s == pytest.approx(1 / middle.tokens_per_s_user)
    assert made.curves.hit_share == made.load.hit_share


@pytest.mark.more(WHOLE)
def test_what_alternatives_share_is_measured_once() -> None:
    """Compare alternatives: one has another cache, one other units, two only other prices and
    promises. The last, with other units, cannot keep its promise, so nothing is measured for it.
    """
    num_points = len(points_at(32.0))
    assert ran()[1] == {
        "cache_day": 2,
        "prefill_point": 2,
        "decode_point": 2 * num_points,
        "run_hour": 1,
    }


@pytest.mark.more(WHOLE)
def test_alternatives_are_compared_with_the_same_without_windows() -> None:
    asked, dearer, smaller, slower = (
        row(name) for name in ("as asked", "dearer", "small cache", "no drafts")
    )
    for key in ("nodes_mean", "tokens_in", "tokens_hit", "income_usd", "tokens_per_s_user"):
        assert dearer[key] == asked[key]
    assert dearer["cost_usd"] == pytest.approx(2 * asked["cost_usd"], abs=1e-5)
    assert smaller["hit_percent"] < asked["hit_percent"] - 1
    assert smaller["tokens_in"] == asked["tokens_in"]
    assert smaller["prefill_nodes_mean"] > 1.1 * asked["prefill_nodes_mean"], (
        "what is not found is computed"
    )
    assert slower["tokens_per_s_user"] < asked["tokens_per_s_user"]


@pytest.mark.more(WHOLE)
def test_an_alternative_that_cannot_be_says_why_and_ends_nothing() -> None:
    lost = row("no promise")
    assert "no batch reaches a TPOT of 1 ms" in lost["name"]
    assert lost.keys() == {"name"}
    assert "with one request per rank, a decode unit of 16 H200 takes" in row("neither")["name"]
    assert row("neither").keys() == {"name"}


def test_what_was_asked_and_cannot_be_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no batch reaches a TPOT"):
        Stages(
            SimulationPlan(tiny(tpot_ms=1.0, cache=replace(tiny().cache, disk_pb=0.0)), (), (), 1),
            Inline(),
            _tell,
        ).run()


@pytest.mark.promise(
    "A TPOT below the priced time of a step with one request per rank is refused "
    "before the simulation."
)
def test_a_promise_that_no_unit_keeps_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(
        ConfigError, match=r"with one request per rank, a decode unit of 16 H200 takes 1\d\.\d ms"
    ):
        check_promise(tiny(tpot_ms=1.0))
    check_promise(tiny())
    with pytest.raises(ConfigError, match="144 H20 takes"):
        check_promise(Study(hardware="h20", tpot_ms=12.0))
    for hardware in ("h800", "h20", "h200"):
        check_promise(Study(hardware=hardware))


@pytest.mark.more(WHOLE)
def test_without_a_cache_none_is_simulated() -> None:
    pool = Inline()
    made = Stages(
        SimulationPlan(tiny(cache=replace(tiny().cache, disk_pb=0.0)), (), (), 1), pool, _tell
    ).run()
    assert "cache_day" not in pool.calls
    assert "run_hour" not in pool.calls
    assert made.json["tokens_hit"] == 0
    assert made.json["hit_percent"] == 0.0
    assert made.json["ranks"] is None


def test_experts_are_loaded_alike_whatever_the_policy() -> None:
    auto, off = (
        expert_ranks(
            replace(
                Study(),
                **{
                    role: replace(Study().units_of(role), expert_balance=balance)
                    for role in (PREFILL, DECODE)
                },
            )
        )
        for balance in ("auto", "off")
    )
    for role in (PREFILL, DECODE):
        assert 1.0 <= auto[role].imbalance < 0.7 * off[role].imbalance
    again = expert_ranks(Study())
    assert [again[role].imbalance for role in again] == [auto[role].imbalance for role in again]


def test_the_work_there_is_grows_with_what_is_asked() -> None:
    def work_s(*hours: int, others: tuple[tuple[str, Study], ...] = ()) -> float:
        return SimulationPlan(tiny(), hours, others, 1).work_s

    assert work_s() < work_s(1) < work_s(1, 2)
    prices, cache_, drafts = (alternatives()[index] for index in (0, 2, 3))
    assert work_s(others=(prices,)) == work_s()
    assert work_s(others=(cache_,)) > work_s()
    assert work_s(others=(drafts,)) > work_s()
    assert len(what_ifs(Study())) == 6


def test_a_process_that_dies_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_stages, "cache_day", die)
    with pytest.raises(HadalError, match="memory ran out: use --jobs 1, or a shorter --window"):
        simulate(SimulationPlan(tiny(), (), (), 1), _tell)


def _tell(what: str, work_s: float) -> None:
    """Ignore progress."""
