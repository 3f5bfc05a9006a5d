"""The bench of a simulated prefill unit, on a small study: it prints the measured values."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from bench import prefill_unit
from bench.prefill_unit import placed, settings
from hadal.core.config import DECODE, PREFILL
from hadal.lab.sim.day.curves import prefill_point
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.runners import NO_WORK, StepWork
from hadal.lab.sim.world.seen import WorldLog
from hadal.lab.sim.world.world import FleetWorld
from hadal.perf.shapes import causal_pairs
from tests.unit.lab.sim.studies import cached_day, load, small


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


def test_even_steps_are_priced_as_they_were_as_far_as_they_were_measured() -> None:
    study, new, found, texts = Study(), 1_500, 2_000, 320
    pairs = int(texts * causal_pairs(new, found))
    work = StepWork(texts * new, pairs, texts, 0, 0, 1.0, 2, texts * (new + found))
    begin_s, seconds = study.window.settle_s, study.window.prefill_seconds
    steps = [
        ("u", begin_s - 3.0, 2.0, work._replace(tokens=7)),  # It ends before the measured window.
        ("u", begin_s - 1.0, 4.0, work),
        ("u", begin_s + 5.0, 1.0, NO_WORK),
        ("u", begin_s + seconds - 1.0, 4.0, work),
    ]
    world = SimpleNamespace(log=WorldLog({PREFILL: steps, DECODE: []}))
    priced = study.step_model(PREFILL, 1.0).prefill(texts / 32 * new, new + found, found)
    assert prefill_unit.even_per_s(study, cast("FleetWorld", world)) == pytest.approx(
        32 * priced.tokens_per_s_gpu
    )
    twice = StepWork(2 * work.tokens, 2 * pairs, 2 * texts, 0, 0, 1.0, 2, 2 * work.context_tokens)
    steps[1] = ("u", begin_s - 1.0, 4.0, twice)
    double_s = study.step_model(PREFILL, 1.0).prefill(texts / 16 * new, new + found, found).seconds
    wanted = (0.75 * twice.tokens + 0.25 * work.tokens) / (0.75 * double_s + 0.25 * priced.seconds)
    assert prefill_unit.even_per_s(study, cast("FleetWorld", world)) == pytest.approx(wanted)


@pytest.mark.more("a unit is simulated; its parts are tested in tests/unit/lab/sim/day")
def test_a_measured_prefill_unit_is_less_than_even_and_shown() -> None:
    study, figures = small(), load().figures()
    run = prefill_unit.measured(study, figures, cached_day())
    assert run.computed_per_s == pytest.approx(
        prefill_point(study, placed(study), figures, cached_day())
    )
    assert 0.5 < run.share < 1.0
    half = replace(run, even_per_s=2 * run.even_per_s)
    text = text_of(prefill_unit.table([("balanced", [run]), ("again", [run, half])]))
    assert text.count(f" {run.computed_per_s:,.0f} ") == 6
    assert f"{run.share:.1%}" in text
    assert f"{0.75 * run.share:.1%}" in text
    assert text.count("100.0%") == 2
