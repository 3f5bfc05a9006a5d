"""The simulated day as ledger facts: node time exact to the minute, tokens of completed requests exact,
cost proportional to the price per GPU.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import cache

import numpy as np
import pytest

from hadal.core.config import DECODE, PREFILL
from hadal.lab.sim.day.demand import DayDemand
from hadal.lab.sim.day.fluid_day import FluidResult
from hadal.lab.sim.day.published import HOUR_S
from hadal.lab.sim.day.tally import BEGIN_S, BEIJING_S, day_report, day_tally, nodes_facts
from hadal.policy.demand import DAY_S
from hadal.stats.report import MODEL, Report
from hadal.stats.tally import Counts, Tally
from tests.unit.lab.sim import worlds
from tests.unit.lab.sim.studies import fluid, load, small

FIRST_S, TOKEN_S = np.full(24, 0.5), np.full(24, 0.02)


@cache
def tally() -> Tally:
    return day_tally(small(), load(), FIRST_S, TOKEN_S)


def report_of(**changes: object) -> Report:
    study = small(**changes)
    return day_report(day_tally(study, load(), FIRST_S, TOKEN_S), nodes_facts(study, fluid()))


def total(of: Tally) -> Counts:
    sums = Counts()
    for _, counts in of:
        sums.add(counts)
    return sums


def nodes(prefill: list[int], decode: list[int]) -> FluidResult:
    """Return a day with these numbers of nodes in its first minutes, and none later."""
    columns = [
        np.pad(np.array(some, np.int64), (0, 1440 - len(some))) for some in (prefill, decode)
    ]
    return replace(fluid(), prefill_nodes=columns[0], decode_nodes=columns[1])


def test_nodes_add_up_to_the_minute() -> None:
    made = report_of()
    found = made.total.nodes.hours(PREFILL)
    assert found == pytest.approx(fluid().prefill_nodes.sum() / 60, abs=1e-9)
    found = made.total.nodes.hours(DECODE)
    assert found == pytest.approx(fluid().decode_nodes.sum() / 60, abs=1e-9)
    assert float(made.total.nodes.peak) == (fluid().prefill_nodes + fluid().decode_nodes).max()
    by_hour = (fluid().prefill_nodes + fluid().decode_nodes).reshape(24, 60).mean(axis=1)
    assert [line.nodes.mean for line in made.lines] == pytest.approx(by_hour.tolist())


def test_a_unit_is_up_while_there_are_nodes_for_it() -> None:
    facts = nodes_facts(small(), nodes([1, 2, 2, 1, 0, 1], [2, 2, 4, 4, 2]))
    spans = {
        (
            fact.unit,
            round((fact.from_s - BEGIN_S) / 60),
            round((fact.to_s - BEGIN_S) / 60),
        ): fact.num_ranks
        for fact in facts
    }
    assert spans == {
        ("prefill-0", 0, 4): 8,
        ("prefill-0", 5, 6): 8,
        ("prefill-1", 1, 3): 8,
        ("decode-0", 0, 5): 16,
        ("decode-1", 2, 4): 16,
    }
    assert {fact.gpu_hour_micro_usd for fact in facts} == {2_500_000}
    assert {(fact.ranks_per_node, fact.role) for fact in facts} == {(8, PREFILL), (8, DECODE)}
    # Each run of a unit has its own epoch.
    assert len({(fact.unit, fact.epoch) for fact in facts}) == len(facts)


def test_every_token_that_was_completed_is_counted_as_often_as_the_sample_is_smaller() -> None:
    came, hour = load().workload, (load().workload.arrival_s % DAY_S // HOUR_S).astype(int)
    end_s = came.arrival_s + FIRST_S[hour] + (came.tokens_out - 1) * TOKEN_S[hour]
    today = (end_s >= 0) & (end_s < DAY_S)
    sums, scale = total(tally()), load().scale
    assert (~today).any(), "some end on the next day"
    assert sums.num_requests == scale * today.sum()
    assert sums.tokens_in == scale * came.tokens_in[today].sum()
    assert sums.tokens_out == scale * came.tokens_out[today].sum()
    assert sums.tokens_hit == scale * np.rint(load().tokens_hit[today]).sum()
    assert sums.tokens_after_first == sums.tokens_out - sums.num_requests
    assert sums.stream_us == pytest.approx(sums.tokens_after_first * 20_000, rel=1e-6)


def test_a_request_is_in_the_hour_it_is_complete_in() -> None:
    """Count four requests by hand: one began before the day, one runs across an hour's end, one is
    short, and one ends after the day.
    """
    asked = worlds.of(
        worlds.Row(-10.0, 0, 0, 100, 501),
        worlds.Row(3590.0, 1, 0, 200, 1001, model=1),
        worlds.Row(7000.0, 2, 0, 300, 2),
        worlds.Row(DAY_S - 1.0, 3, 0, 400, 1000),
    )
    some = DayDemand(asked, np.array([0.0, 64.0, 128.0, 0.0]), 10, np.inf)
    token_s = np.full(24, 0.1)
    token_s[0] = 0.02
    books = day_tally(small(prices="1/2/3"), some, FIRST_S, token_s)
    made = day_report(books, ())
    assert [made.lines[index].counts.num_requests for index in range(3)] == [10, 20, 0]
    # A request from before the day has the pace of the day's last hour.
    assert made.lines[0].counts.tokens_out == 5010
    assert made.lines[0].counts.stream_us == 10 * 500 * 100_000
    later = made.lines[1].counts
    assert (later.tokens_hit, later.tokens_miss, later.tokens_out) == (1920, 3080, 10_030)
    assert later.stream_us == 10 * (1000 * 20_000 + 100_000)
    assert later.income_pico_usd == 1_000_000 * 1920 + 2_000_000 * 3080 + 3_000_000 * 10_030
    # Each output token counts the tokens before it: 200, 201, ... and 300, 301.
    assert later.kv_tokens == 10 * (200 * 1001 + 1000 * 1001 // 2 + 300 + 301)
    models = day_report(books, (), MODEL)
    assert [line.label for line in models.lines] == ["deepseek-chat", "deepseek-reasoner"]
    assert models.lines[1].counts.tokens_out == 10_010


def test_the_day_begins_at_noon_in_beijing() -> None:
    assert datetime.fromtimestamp(BEGIN_S, UTC).isoformat() == "2025-02-27T04:00:00+00:00"
    lines = report_of().lines
    assert len(lines) == 24
    assert lines[0].label == "2025-02-27T12:00:00+08:00"
    assert BEIJING_S == 8 * 3600


def test_what_a_gpu_costs_scales_the_cost_exactly() -> None:
    one, three = report_of(gpu_hour_usd=1.0).total, report_of(gpu_hour_usd=3.0).total
    assert three.nodes.cost_pico_usd == 3 * one.nodes.cost_pico_usd
    gpus = 8 * (fluid().prefill_nodes + fluid().decode_nodes).sum() / 60
    assert one.cost_micro_usd == pytest.approx(gpus * 1e6, abs=1)
    assert three.income_micro_usd == one.income_micro_usd
    free = report_of(gpu_hour_usd=0.0).total
    assert (free.cost_micro_usd, free.margin_percent) == (0, None)


def test_prices_that_are_lower_at_night_bring_less() -> None:
    """Lower prices at night: R1's off-peak hours are 00:30 to 08:30 in Beijing; by day all is equal."""
    flat, tiered = (
        report_of(prices=name) for name in ("deepseek-reasoner-flat", "deepseek-reasoner")
    )
    assert tiered.total.income_micro_usd < flat.total.income_micro_usd
    pairs = list(zip(tiered.lines, flat.lines, strict=True))
    assert all(one.income_micro_usd == other.income_micro_usd for one, other in pairs[:12])
    assert all(one.income_micro_usd < 0.5 * other.income_micro_usd for one, other in pairs[13:20])


def test_speed_is_that_of_the_hours() -> None:
    slow = TOKEN_S.copy()
    slow[8] = 0.1
    made = day_report(day_tally(small(), load(), FIRST_S, slow), ())
    assert made.lines[3].tokens_per_s_user == pytest.approx(50.0, rel=1e-3)
    speed = made.lines[8].tokens_per_s_user
    assert speed is not None
    assert 10.0 <= speed < 11.0
