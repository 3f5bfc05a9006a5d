"""Studies read and written, hours in Beijing, and numbers that JSON can hold."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hadal.core.errors import ConfigError
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.sessions import LogNormal, SystemPrompt
from hadal.lab.simulate.files import finite, hours_of, read_study, study_toml
from tests.unit.lab.sim.studies import small

PRESET = "deepseek-day"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "day.toml"


def read(file: Path, text: str, **changes: Any) -> Study:
    file.write_text(text, encoding="utf-8")
    return read_study(PRESET, file, changes)


@pytest.mark.parametrize("study", [Study(), small(), Study(name='a "day"\\', seed=3)])
def test_what_is_printed_reads_back_as_the_same(study: Study, file: Path) -> None:
    assert read(file, study_toml(study)) == study


@pytest.mark.promise("hadal simulate --print-config prints all settings.")
def test_everything_is_printed() -> None:
    tables = tomllib.loads(study_toml(Study()))
    assert tables.keys() == {field.name for field in dataclasses.fields(Study)}
    assert tables["workload"]["think_s"].keys() == {"median", "sigma", "limit"}
    assert tables["workload"]["system_prompts"][1] == {"share": 0.2, "tokens": 200}


def test_a_part_of_a_table_leaves_the_rest(file: Path) -> None:
    made = read(
        file,
        "gpu_hour_usd = 3\n[decode]\nuse = 0.9\n[workload]\nshare_r1 = 0.1\nmessage = { sigma ="
        " 0.5 }\n",
    )
    day = Study()
    assert made == dataclasses.replace(
        day,
        gpu_hour_usd=3.0,
        decode=dataclasses.replace(day.decode, use=0.9),
        workload=dataclasses.replace(
            day.workload, share_r1=0.1, message=LogNormal(130, 0.5, 8_000)
        ),
    )
    whole = read(file, "[workload.message]\nmedian = 99.0\nsigma = 1.0\nlimit = 500.0\n")
    assert whole.workload.message == LogNormal(99.0, 1.0, 500.0)
    listed = read(file, "[workload]\nsystem_prompts = [{ share = 1.0, tokens = 7 }]\n")
    assert listed.workload.system_prompts == (SystemPrompt(1.0, 7),)


def test_options_go_before_the_file_and_both_before_the_preset(file: Path) -> None:
    text = "seed = 5\nhardware = 'h200'\n[cache]\ndisk_pb = 3.0\npolicy = 'lru'\n"
    made = read(
        file, text, **{"seed": 7, "cache.disk_pb": 1.0, "window.seconds": 2.0, "prices": None}
    )
    assert (made.seed, made.hardware, made.cache.disk_pb, made.cache.policy) == (
        7,
        "h200",
        1.0,
        "lru",
    )
    assert made.window == dataclasses.replace(Study().window, seconds=2.0)
    assert made.prices == Study().prices
    assert read_study(PRESET, None, {"seed": None}) == Study()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("= 1", "day.toml: not a TOML file"),
        ("spped = 1", "unknown field 'spped'. Known: name, hardware"),
        ("[decode]\nrank = 1", "day.toml: decode: unknown field 'rank'"),
        ("seed = 'a'", "seed is 'a'; expected `int`, got `str`"),
        ("cache = 5", "cache must be a table"),
        ("[workload]\nmessage = 3", "message must be a table"),
        ("[workload.message]\nmode = 3", "unknown field 'mode'. Known: median, sigma, limit"),
        ("[workload]\nshares = [1.0]", "day.toml: workload.shares has 1 numbers"),
        ("hardware = 'h900'", "day.toml: hardware 'h900' is unknown; use one of"),
        ("[window]\nseconds = 0", "window.seconds is 0.0; it must be above 0"),
        ("[decode]\nranks = 100", "do not divide evenly among 100"),
    ],
)
def test_a_file_that_is_none_is_said(text: str, why: str, file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(file, text)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


def test_an_option_for_what_the_file_has_as_no_table_is_said(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"day\.toml: cache must be a table"):
        read(file, "cache = 5", **{"cache.disk_pb": 1.0})


def test_a_preset_that_is_none_is_said() -> None:
    with pytest.raises(
        ConfigError, match=r"--preset 'monday' is unknown; use one of deepseek-day\."
    ):
        read_study("monday", None, {})
    with pytest.raises(ConfigError, match=r"options: .*HIT/MISS/OUT"):
        read_study(PRESET, None, {"prices": "1/2"})


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("12", (0,)),
        ("11", (23,)),
        ("0-5,14", (2, 12, 13, 14, 15, 16, 17)),
        (" 13 , 12-13,", (0, 1)),
        ("", ()),
        ("0-23", tuple(range(24))),
    ],
)
def test_hours_are_those_of_beijing(text: str, hours: tuple[int, ...]) -> None:
    assert hours_of(text) == hours


@pytest.mark.parametrize("text", ["24", "-1", "22-2", "a", "3-x", "1.5", ",", " "])
def test_hours_that_are_none_are_said(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--hours .* hours from 0 to 23, such as 0-5,14"):
        hours_of(text)


def test_json_has_no_infinite_numbers() -> None:
    given = {
        "a": [1.0, float("inf"), (float("nan"), "x", None, 3)],
        "b": {"c": -float("inf"), "d": True},
    }
    assert finite(given) == {"a": [1.0, None, [None, "x", None, 3]], "b": {"c": None, "d": True}}
