"""The bench of the fleet's day: each what-if changes one thing, and the tables hold the run's values."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from bench.fleet_day import Setting, capacity, hours_table, run, what_ifs


def test_a_unit_does_what_the_published_points_say() -> None:
    # A batch of b requests per GPU takes 0.0313 + 0.000185 b s: 0.05 s for b = 101.08.
    assert capacity() / 144 == pytest.approx(101.08 / 0.05, rel=1e-3)


def test_every_what_if_changes_one_thing() -> None:
    base = Setting()
    settings = [base, *(setting for _, setting in what_ifs(base))]
    assert len(set(map(repr, settings))) == len(settings)
    assert len({name for name, _ in what_ifs(base)}) == len(settings) - 1


def test_the_table_shows_the_day() -> None:
    console = Console(width=200, record=True, file=StringIO())
    day = run(replace(Setting(), faults=replace(Setting().faults, noise=0.0)), seed=1)
    console.print(hours_table(day))
    text = console.export_text()
    assert f"mean {day.nodes_mean:.2f} nodes" in text
    assert "23:00" in text
    assert 215.0 < day.nodes_mean < 240.0
