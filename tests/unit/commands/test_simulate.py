"""`hadal simulate`: one small day in processes of its own, and one line for a mistake."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hadal.cli import app
from hadal.lab.simulate.files import study_toml
from tests.unit.commands.pages import PLOTLY, Page
from tests.unit.lab.sim.studies import WORKLOAD, small


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments])


@pytest.mark.promise(
    "result.json has every figure, report.html shows them, step.trace.json is one step "
    "for ui.perfetto.dev."
)
@pytest.mark.slow("a day, its cache and a window, each in a new process")
def test_a_day_in_two_processes(tmp_path: Path) -> None:
    """Print only JSON; the folder has the same JSON, with a page and a trace."""
    config, out = tmp_path / "day.toml", tmp_path / "new" / "day"
    short = replace(small().window, settle_s=0.3, back_s=600.0)
    study = small(workload=replace(WORKLOAD, sessions_per_day=1e5), window=short)
    config.write_text(study_toml(study), encoding="utf-8")
    result = run(
        "--config",
        str(config),
        "--hours",
        "20",
        "--window",
        "1",
        "--no-what-ifs",
        "--jobs",
        "2",
        "--json",
        "--out",
        str(out),
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == json.loads((out / "result.json").read_text())
    assert found["study"]["window"]["seconds"] == 1.0
    assert [hour["hour_beijing"] for hour in found["hours"] if hour["window"]] == [20]
    assert [one["name"] for one in found["what_ifs"]] == ["as asked"]
    assert found["seconds"] > 0
    page = Page((out / "report.html").read_text().replace(PLOTLY, ""))
    said = ("small", "Tokens per second, prefill", "Core attention, prefill")
    assert all(words in page.text for words in said)
    income = page.figures["money"]["data"][0]
    assert income["y"] == [hour["income_usd"] for hour in found["hours"]]
    assert "Simulated in" in page.text
    trace = json.loads((out / "step.trace.json").read_text())
    assert trace["traceEvents"]
    assert sorted(path.name for path in out.iterdir()) == [
        "report.html",
        "result.json",
        "step.trace.json",
    ]


@pytest.mark.promise("hadal simulate --print-config prints all settings.")
def test_all_that_can_be_set_is_printed() -> None:
    result = run(
        "--print-config",
        "--hardware",
        "h20",
        "--gpu-hour-usd",
        "1.5",
        "--cache-pb",
        "2",
        "--seed",
        "9",
        "--prices",
        "1/2/3",
        "--window",
        "7",
    )
    assert result.exit_code == 0
    said = tomllib.loads(result.stdout)
    assert (said["hardware"], said["gpu_hour_usd"], said["seed"], said["prices"]) == (
        "h20",
        1.5,
        9,
        "1/2/3",
    )
    assert (said["cache"]["disk_pb"], said["window"]["seconds"]) == (2.0, 7.0)


def test_help_says_what_it_does() -> None:
    result = run("--help")
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    for said in ("Simulate a day", "--hours", "--print-config", "--no-what-ifs", "Examples"):
        assert said in words


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--hours", "25"), "use hours from 0 to 23"),
        (("--hours", ","), "names no hour"),
        (("--preset", "monday"), "use one of deepseek-day"),
        (("--config", "nowhere.toml"), "nowhere.toml: no such study file"),
        (("--hardware", "h900"), "use one of h800"),
        (("--prices", "1/2"), "HIT/MISS/OUT"),
        (("--gpu-hour-usd", "0.00000001"), "at most 6 decimals"),
    ],
)
def test_a_mistake_is_one_line_and_makes_no_folder(
    arguments: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = run(*arguments, "--out", str(out))
    assert result.exit_code == 2
    assert why in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("hadal simulate: ")
    assert not result.stdout
    assert not out.exists()


@pytest.mark.promise(
    "A TPOT below the priced time of a step with one request per rank is refused "
    "before the simulation."
)
def test_a_promise_that_no_unit_keeps_is_one_line(tmp_path: Path) -> None:
    """Ask for an impossible TPOT on the published day: no simulation runs, and no folder is made."""
    config = tmp_path / "fast.toml"
    config.write_text("tpot_ms = 1.0", encoding="utf-8")
    result = run("--config", str(config), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "no batch reaches a TPOT of 1 ms" in result.stderr
    assert "144 H800 takes 1" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("", encoding="utf-8")
    for out in (taken, taken / "day"):
        result = run("--out", str(out))
        assert result.exit_code == 2
        assert f"--out {out} cannot be created: " in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [("--window", "0"), ("--cache-pb", "-1"), ("--seed", "-1"), ("--jobs", "-1")]
)
def test_numbers_below_their_least_are_refused(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
