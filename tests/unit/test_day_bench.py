"""The benches of the simulated day's parts, on a small study: what they print is what was measured."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from bench import prefill_unit, simulated_hour
from bench.day_parts import placed
from bench.prefill_unit import computed_per_s, even_per_s, settings
from bench.simulated_hour import Cost, peak_bytes
from hadal.core.config import DECODE, PREFILL
from hadal.perf.shapes import causal_pairs
from hadal.sim.study import Study
from hadal.sim.unit_curves import prefill_point
from hadal.sim.world_seen import StepReading
from tests.unit.sim.studies import PLACED, cached_day, load, looked, setting, small


def text_of(table: object) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(table)
    return console.export_text()


def test_every_setting_of_a_prefill_unit_changes_one_thing() -> None:
    studies = dict(settings(Study()))
    assert len(set(map(repr, studies.values()))) == len(studies) == 4
    for what, study in studies.items():
        name, _, value = what.partition(" ")
        assert study == Study() if not value else getattr(study.prefill, name) == value
        assert replace(study, prefill=Study().prefill) == Study()


def test_experts_that_are_not_balanced_are_placed_worse() -> None:
    studies = dict(settings(Study()))
    even, uneven = placed(studies["balanced"]), placed(studies["expert_balance off"])
    assert 1.0 <= even[PREFILL] < 1.1 < 1.4 < uneven[PREFILL]
    assert even[DECODE] == uneven[DECODE]


def test_even_ranks_are_priced_with_what_was_measured() -> None:
    study, new, found, texts = Study(), 1_500.0, 2_000.0, 10.0
    tokens = 32 * texts * new
    positions = 32 * texts * causal_pairs(new, found)
    reading = StepReading(
        3.0, 3 * tokens, 3 * positions, 1.0, 0.4, 0.0, texts, 1.0, 1.0, 1.0, 1.0, np.zeros(3), np.zeros(3)
    )
    priced = study.step_model(PREFILL, 1.0).prefill(texts * new, new + found, found)
    assert even_per_s(study, reading) == pytest.approx(32 * priced.tokens_per_s_gpu, rel=1e-9)
    assert computed_per_s(reading) == pytest.approx(tokens / 0.4)


def test_a_measured_prefill_unit_is_near_even_and_shown() -> None:
    study, figures = small(), load().figures()
    reading = prefill_unit.measured(study, figures, cached_day())
    rate, even = computed_per_s(reading), even_per_s(study, reading)
    assert rate == pytest.approx(prefill_point(study, placed(study), figures, cached_day()))
    assert 0.5 < rate / even < 1.02
    text = text_of(prefill_unit.table([("balanced", study, reading), ("again", study, reading)]))
    assert f"{rate:,.0f}" in text
    assert f"{rate / even:.1%}" in text
    assert text.count("100.0%") == 2


def test_an_hour_is_run_and_what_it_cost_is_shown() -> None:
    study = small(window=replace(small().window, seconds=0.5, settle_s=0.5))
    before = peak_bytes()
    cost = simulated_hour.measured(study, PLACED, setting(), cached_day())
    assert cost.cpu_s > 0
    assert cost.memory_bytes >= before > 10e6
    assert cost.window.problems == ()
    text = text_of(simulated_hour.table(small(), Cost(looked(), 2.0, 3_000_000_000)))
    units = setting().units
    assert f"{units.prefill} + {units.decode} units, 2 + 2 s simulated in 2.0 s of a core" in text
    assert f"{looked().num_events / 2.0:,.0f}" in text
    assert f"{looked().num_running:,}, {looked().num_came:,}" in text
    assert "3.00 GB" in text
