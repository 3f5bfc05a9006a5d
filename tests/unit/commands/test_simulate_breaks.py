"""Newcomers' first steps with `hadal simulate`: narrow terminals show every figure, and an invalid
file is an error of one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hadal.cli import app
from hadal.lab.simulate.tables import HOURS, hours_tables


def hour(index: int) -> dict[str, Any]:
    return {
        "hour_beijing": index,
        "nodes_mean": 226.75,
        "tokens_in": 25.31e9,
        "tokens_out": 7.04e9,
        "tokens_hit": 14.25e9,
        "income_usd": 23_456.0,
        "fluid": {"tokens_per_s_user": 21.4, "requests_per_rank": 87.6, "prefill_use": 0.84},
        "window": {
            "tokens_per_s_user": 20.9,
            "requests_per_rank": 90.1,
            "prefill_use": 0.81,
            "prefill_units": 29,
            "decode_units": 9,
            "ttft_s": {"p50": 1.4, "p99": 12.3},
        },
    }


RESULT = {"hours": [hour(index) for index in range(24)]}


@pytest.mark.parametrize(("width", "num_tables"), [(60, 3), (80, 2), (132, 1)])
def test_no_figure_of_an_hour_is_cut(width: int, num_tables: int) -> None:
    console = Console(width=width)
    tables = hours_tables(RESULT, width)
    assert len(tables) == num_tables
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    said = captured.get()
    assert "\u2026" not in said
    assert all(name in said for name in HOURS)
    assert said.count("17:00") == num_tables
    for figure in (
        "227",
        "25.31",
        "7.04",
        "56.3 %",
        "23,456",
        "21.4 | 20.9",
        "88 | 90",
        "84% | 81%",
        "1.4, 12.3 s",
        "29 + 9",
    ):
        assert said.count(figure) == 24


def test_the_whole_table_is_one() -> None:
    assert [column.header for column in hours_tables(RESULT, None)[0].columns] == list(HOURS)


def test_a_config_that_is_no_text_or_no_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_bytes(b"\xff\xfe\x00")
    for given, why in ((path, "not UTF-8 text"), (tmp_path, "not a file")):
        result = CliRunner().invoke(app, ["simulate", "--config", str(given)])
        assert result.exit_code == 2
        assert why in result.stderr
        assert len(result.stderr.splitlines()) == 1
