"""A day joined into a result: all keys of the report, windows if there are any, no invented number."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from hadal.core.config import ROLES
from hadal.lab.sim.day.hour_window import HourWindow
from hadal.lab.sim.day.result import FLAT, PUBLISHED, DayResult, day_result, result_json
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.expert_loads import ExpertRanks, expert_share
from tests.unit.lab.sim.studies import LOOKED_AT, curves, fluid, load, looked, small

DAY_KEYS = {
    "nodes_mean",
    "nodes_peak",
    "tokens_in",
    "tokens_hit",
    "tokens_out",
    "tokens_per_s_user",
    "kv_length_mean",
    "prefill_tokens_per_s_node",
    "decode_tokens_per_s_node",
    "cost_usd",
    "income_usd",
    "margin_percent",
    "hit_percent",
    "requests",
    "prefill_nodes_mean",
    "decode_nodes_mean",
}
HOUR_KEYS = {
    "hour_beijing",
    "nodes_mean",
    "prefill_nodes_mean",
    "decode_nodes_mean",
    "requests",
    "tokens_in",
    "tokens_hit",
    "tokens_out",
    "income_usd",
    "cost_usd",
    "fluid",
    "window",
}
WINDOW_KEYS = {
    "prefill_units",
    "decode_units",
    "seconds",
    "requests",
    "tokens_per_s_user",
    "requests_per_rank",
    "prefill_use",
    "kv_length_mean",
    "hit_percent",
    "ttft_s",
    "tpot_s",
    "kv_imbalance",
    "request_imbalance",
    "prefill_imbalance",
    "expert_imbalance",
}


@cache
def experts() -> dict[str, ExpertRanks]:
    return {
        role: expert_share("auto", role, small().units_of(role).ranks, 0, np.random.default_rng(1))
        for role in ROLES
    }


def joined(*windows: HourWindow, study: Study | None = None) -> DayResult:
    by_hour: list[HourWindow | None] = [None] * 24 if windows else []
    for one in windows:
        by_hour[one.setting.index] = one
    return day_result(study or small(), load(), experts(), curves(), fluid(), by_hour)


@cache
def result() -> DayResult:
    return joined(looked())


@cache
def written() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(result_json(result()), allow_nan=False))
    return found


def with_reading(**changes: Any) -> HourWindow:
    return replace(looked(), reading=replace(looked().reading, **changes))


def of_decode(**changes: Any) -> HourWindow:
    return with_reading(decode=replace(looked().reading.decode, **changes))


@pytest.mark.promise(
    "result.json has every figure, report.html shows them, step.trace.json is one step "
    "for ui.perfetto.dev."
)
def test_all_keys_are_there() -> None:
    made = written()
    assert written().keys() >= DAY_KEYS | {
        "hours",
        "minutes",
        "ttft_s",
        "tpot_s",
        "ranks",
        "published",
        "study",
        "notes",
    }
    assert result().flat().keys() == DAY_KEYS
    assert all(hour.keys() >= HOUR_KEYS for hour in made["hours"])
    fluid = {"tokens_per_s_user", "requests_per_rank", "prefill_use"}
    assert all(hour["fluid"].keys() >= fluid for hour in made["hours"])
    window = made["hours"][LOOKED_AT]["window"]
    assert window.keys() >= WINDOW_KEYS
    assert window["ttft_s"].keys() == window["tpot_s"].keys() == {"p50", "p90", "p99"}
    found = [hour["window"] is None for hour in made["hours"]]
    assert found == [index != LOOKED_AT for index in range(24)]
    assert made["ranks"].keys() >= {
        "hour_beijing",
        "decode_unit",
        "kv_share",
        "requests",
        "decode_experts",
        "prefill_unit",
        "prefill_tokens",
        "prefill_attention",
        "prefill_experts",
    }
    assert made["minutes"].keys() == {"nodes", "prefill_nodes", "decode_nodes", "tokens_in_per_s"}


def test_parts_are_what_they_are_parts_of() -> None:
    made = written()
    for key in ("tokens_in", "tokens_hit", "tokens_out", "requests"):
        assert sum(hour[key] for hour in made["hours"]) == made[key]
    assert sum(hour["cost_usd"] for hour in made["hours"]) == pytest.approx(made["cost_usd"])
    assert sum(hour["income_usd"] for hour in made["hours"]) == pytest.approx(made["income_usd"])
    for key in ("nodes_mean", "prefill_nodes_mean", "decode_nodes_mean"):
        assert np.mean([hour[key] for hour in made["hours"]]) == pytest.approx(made[key])
    minutes = made["minutes"]
    assert {len(column) for column in minutes.values()} == {1440}
    assert np.array_equal(
        np.add(minutes["prefill_nodes"], minutes["decode_nodes"]), minutes["nodes"]
    )
    assert max(minutes["nodes"]) == made["nodes_peak"]
    assert np.mean(minutes["nodes"]) == pytest.approx(made["nodes_mean"])
    found = np.sum(minutes["tokens_in_per_s"]) * 60
    assert found == pytest.approx(load().tokens_in.sum(), rel=1e-4)
    assert sum(model["tokens_out"] for model in made["models"]) == made["tokens_out"]
    assert [hour["hour_beijing"] for hour in made["hours"]] == [*range(12, 24), *range(12)]


def test_the_flat_figures_follow_from_each_other() -> None:
    made = written()
    assert made["hit_percent"] == pytest.approx(100 * made["tokens_hit"] / made["tokens_in"])
    assert made["cost_usd"] == pytest.approx(made["nodes_mean"] * 8 * 24 * 2.5)
    found = made["margin_percent"]
    assert found == pytest.approx(100 * (made["income_usd"] / made["cost_usd"] - 1))
    per_s = made["tokens_in"] / 86_400
    assert made["prefill_tokens_per_s_node"] == pytest.approx(per_s / made["prefill_nodes_mean"])
    found = made["decode_tokens_per_s_node"]
    assert found == pytest.approx(made["tokens_out"] / 86_400 / made["decode_nodes_mean"])


def test_a_window_is_shown_as_it_was_seen() -> None:
    window, reading = written()["hours"][LOOKED_AT]["window"], looked().reading
    assert window["tokens_per_s_user"] == pytest.approx(1 / reading.decode.token_s)
    could = 2.0 * looked().setting.units.prefill * curves().prefill_computed_per_s
    came = reading.tokens_arrived * (1 - looked().hit_share)
    # Arriving work counts as in the fluid, even if it is computed later.
    assert window["prefill_use"] == pytest.approx(came / could)
    assert window["prefill_computed_share"] == pytest.approx(reading.prefill.tokens / came)
    assert window["hit_percent"] == pytest.approx(100 * looked().hit_share)
    assert window["ttft_s"]["p50"] == pytest.approx(np.median(reading.ttft_s), rel=0.05)
    assert (
        window["ttft_s"]["p50"]
        <= window["ttft_s"]["p90"]
        <= window["ttft_s"]["p99"]
        <= reading.ttft_s.max()
    )
    assert window["kv_imbalance"] >= 1.0
    assert window["request_imbalance"] >= 1.0


def test_speeds_are_the_fluids_as_far_as_windows_agree() -> None:
    """Correct speeds by windows: one corrects all hours; between two, hours are interpolated."""
    flows = [hour.tokens_per_s_user for hour in fluid().day.hours]
    setting_s = looked().setting.token_s
    half = of_decode(token_s=2.0 * setting_s)
    slow = of_decode(token_s=4.0 * setting_s)
    slow = replace(slow, setting=replace(slow.setting, index=12))
    assert joined(half).report.lines[20].tokens_per_s_user == pytest.approx(flows[20] / 2, rel=0.01)
    made = joined(half, slow).report.lines
    assert made[4].tokens_per_s_user == pytest.approx(flows[4] / 2, rel=0.02)
    assert made[10].tokens_per_s_user == pytest.approx(flows[10] / 3, rel=0.03)
    assert made[20].tokens_per_s_user == pytest.approx(flows[20] / 4, rel=0.02)
    same = of_decode(token_s=setting_s)
    found = joined(same).flat()["tokens_per_s_user"]
    assert found == pytest.approx(joined().flat()["tokens_per_s_user"])


def test_without_windows_they_are_the_liquids() -> None:
    made = joined()
    speeds = [hour.tokens_per_s_user for hour in fluid().day.hours]
    assert min(speeds) < made.flat()["tokens_per_s_user"] < max(speeds)
    assert made.report.lines[9].tokens_per_s_user == pytest.approx(speeds[9], rel=0.01)
    found = result_json(made)
    assert found["ranks"] is found["ttft_s"] is found["tpot_s"] is None
    assert "No window was simulated" in " ".join(found["notes"])


def test_a_window_in_which_nothing_came_tells_no_time() -> None:
    """Join a window without arrivals: its mean TTFT is NaN, which must not remove requests from the
    day.
    """
    empty = with_reading(ttft_s=np.zeros(0))
    made = joined(empty)
    assert made.flat()["requests"] == pytest.approx(joined().flat()["requests"], rel=1e-3)
    seen = result_json(made)["hours"][LOOKED_AT]["window"]["ttft_s"]
    assert seen == {"p50": None, "p90": None, "p99": None}
    idle = joined(of_decode(token_s=0.0, seconds_K=np.zeros(0), tokens_K=np.zeros(0)))
    shown = idle.flat()["tokens_per_s_user"]
    assert shown == pytest.approx(joined().flat()["tokens_per_s_user"], rel=1e-3)
    found = json.dumps(result_json(idle), allow_nan=False)
    assert json.loads(found)["hours"][LOOKED_AT]["window"]["tokens_per_s_user"] is None


def test_distributions_hold_everybody() -> None:
    made, reading = written(), looked().reading
    assert sum(made["ttft_s"]["counts"]) == len(reading.ttft_s)
    assert sum(made["tpot_s"]["counts"]) == pytest.approx(reading.decode.tokens)
    for key in ("ttft_s", "tpot_s"):
        assert len(made[key]["edges"]) == len(made[key]["counts"]) + 1
    late = result_json(joined(with_reading(ttft_s=np.array([0.001, 1.0, 500.0]))))["ttft_s"]
    # No value is beyond the edges.
    assert (late["counts"][0], late["counts"][-1], sum(late["counts"])) == (1, 1, 3)
    assert (late["p50"], late["p99"]) == (1.0, 500.0)


def test_percentiles_of_steps_are_of_tokens() -> None:
    """Count steps by tokens: a step of a hundred tokens counts a hundred times."""
    made = joined(
        of_decode(seconds_K=np.array([0.05, 0.02, 0.09]), tokens_K=np.array([30.0, 69.0, 1.0]))
    )
    found = result_json(made)
    assert found["tpot_s"]["p50"] == found["hours"][LOOKED_AT]["window"]["tpot_s"]["p50"] == 0.02
    assert found["tpot_s"]["p90"] == 0.05


def test_ranks_are_those_of_the_fullest_window() -> None:
    ranks = written()["ranks"]
    assert ranks["hour_beijing"] == 20
    found = (len(ranks["kv_share"]), len(ranks["requests"]), len(ranks["decode_experts"]))
    assert found == (16, 16, 16)
    assert len(ranks["prefill_experts"]) == 8
    assert np.mean(ranks["decode_experts"]) == pytest.approx(1.0)
    seen = np.mean(ranks["requests"])
    assert seen == pytest.approx(looked().reading.decode.requests_per_rank, rel=0.15)
    full = of_decode(requests_per_rank=99.0)
    full = replace(full, setting=replace(full.setting, index=3))
    assert result_json(joined(looked(), full))["ranks"]["hour_beijing"] == 15


def test_ranks_of_prefill_are_those_of_its_first_unit() -> None:
    ranks, reading = written()["ranks"], looked().reading
    assert ranks["prefill_unit"] == "prefill-0"
    assert (len(ranks["prefill_tokens"]), len(ranks["prefill_attention"])) == (8, 8)
    assert np.mean(ranks["prefill_attention"]) == pytest.approx(1.0)
    assert max(ranks["prefill_attention"]) > 1.0
    seconds = reading.end_s - reading.begin_s
    seen = sum(ranks["prefill_tokens"]) * seconds
    assert seen == pytest.approx(reading.prefill_tokens["prefill-0"].sum())
    for by_unit, amount in (
        (reading.prefill_tokens, reading.prefill.tokens),
        (reading.prefill_pairs, reading.prefill.positions),
    ):
        assert len(by_unit) == looked().setting.units.prefill
        assert sum(float(of.sum()) for of in by_unit.values()) == pytest.approx(amount)
    idle = result_json(joined(with_reading(prefill_tokens={}, prefill_pairs={})))["ranks"]
    found = (idle["prefill_unit"], idle["prefill_tokens"], idle["prefill_attention"])
    assert found == (None, [], [])
    assert idle["kv_share"] == ranks["kv_share"]


@pytest.mark.promise(
    "the published figures are in one table (lab/sim/day/result.PUBLISHED), which is only printed"
)
def test_the_published_day_stands_beside_its_own_preset_only() -> None:
    assert written()["published"] == {}
    # The published day's name with another workload.
    assert result_json(joined(study=small(name=Study().name)))["published"] == {}
    closer = replace(Study(), seed=7, window=replace(Study().window, seconds=9.0))
    assert result_json(replace(result(), study=closer))["published"] == PUBLISHED
    found = result_json(replace(result(), study=replace(Study(), hardware="h200")))["published"]
    assert found == {}
    assert set(PUBLISHED) <= set(FLAT)
    assert PUBLISHED["cost_usd"] == pytest.approx(PUBLISHED["nodes_mean"] * 8 * 24 * 2.0)
    assert PUBLISHED["margin_percent"] == pytest.approx(100 * (562_027 / 87_072 - 1), abs=0.5)


def test_notes_say_what_is_assumed_and_what_went_wrong() -> None:
    assert "Decode verifies 1 speculative token(s)" in " ".join(written()["notes"])
    assert "draft" not in " ".join(result_json(joined(looked(), study=small(drafts=0)))["notes"])
    broken = replace(looked(), problems=("a block is nobody's", "another one"))
    assert "2 problems" in " ".join(result_json(joined(broken))["notes"])
    late = replace(fluid().day.hours[0], wait_s_max=90.0)
    made = replace(
        result(),
        fluid=replace(fluid(), day=replace(fluid().day, hours=(late, *fluid().day.hours[1:]))),
    )
    assert "longest wait in a queue is 90 s" in " ".join(result_json(made)["notes"])


def test_the_study_is_written_down_whole() -> None:
    study = written()["study"]
    assert study["decode"]["ranks"] == 16
    assert study["workload"]["message"] == {"median": 130, "sigma": 1.2, "limit": 8_000}
    assert study["window"]["seconds"] == looked().reading.end_s - looked().reading.begin_s
