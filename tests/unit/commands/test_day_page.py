"""The report as a page: complete, self-contained, in every theme, valid if results lack parts."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hadal.lab.simulate.page import (
    HOUR,
    bins,
    columns,
    fluid_and_windows,
    headline,
    of_ranks,
    report_html,
    what_if_table,
    windows,
)
from hadal.results.page import Table
from tests.unit.commands.day_result import result
from tests.unit.commands.pages import PLOTLY, Page, text_of
from tests.waiting import DEADLINE_S

SECTIONS = (
    "The day",
    "Load and nodes",
    "Income and cost",
    "Speed for users, and cache hits",
    "Latency",
    "Balance over ranks",
    "Fluid model and windows",
    "What if",
    "Assumptions",
)
RANKS = (
    "rank-kv_share",
    "rank-requests",
    "rank-decode_experts",
    "rank-prefill_attention",
    "rank-prefill_tokens",
    "rank-prefill_experts",
)
NUMBERS = (-1e300, 1e300, 5e-324, -1e-300, 10**400, math.nan, math.inf, 0, True)
DAMAGE = (None, "<b>", *NUMBERS, [], {}, [None], {"p50": 1.0})
BAD = "<script>alert('&\"')</script>"
RESULT = result()


def damaged(value: Any, rng: np.random.Generator, share: float) -> Any:
    """Return the value with a share of its parts replaced or removed, at any depth."""
    if rng.random() < share:
        return DAMAGE[int(rng.integers(len(DAMAGE)))]
    if isinstance(value, dict):
        return {
            key: damaged(inner, rng, share)
            for key, inner in value.items()
            if rng.random() > share / 4
        }
    return [damaged(inner, rng, share) for inner in value] if isinstance(value, list) else value


def shortened(value: Any) -> Any:
    """Return the value with at most 2 elements of each list."""
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    return [shortened(inner) for inner in value[:2]] if isinstance(value, list) else value


SHORT = shortened(RESULT)


def row(table: Table, first: str) -> list[str]:
    """Return the row with this first cell."""
    return next(list(cells) for cells in table.rows if cells[0] == first)


def colours(part: Any, key: str = "") -> set[str]:
    """Return all colours in a figure."""
    if isinstance(part, dict):
        return set().union(*(colours(inner, name) for name, inner in part.items()))
    if isinstance(part, list):
        return set().union(*(colours(inner, key) for inner in part))
    return {part} if key.endswith("color") else set()


@pytest.mark.promise("Every chart has its figures in a table")
def test_every_section_and_every_chart_with_its_table_is_there() -> None:
    page = Page(text_of(RESULT))
    assert all(section in page.words for section in SECTIONS)
    of_load = ["table", "load", "table", "money", "table", "speed", "table", "hits", "table"]
    of_latency = ["ttft_s", "table", "tpot_s", "table"]
    of_windows = ["table", "table", "what-ifs", "table", "table"]
    assert page.shown == [*of_load, *of_latency, *RANKS, "table", *of_windows]
    assert page.figures.keys() == set(page.shown) - {"table"}
    charts = [attrs for _, attrs in page.tags if attrs.get("class") == "chart"]
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in charts)
    assert "Decode with 1 draft token is outside" in page.text
    assert page.row("fleet.bundle") == ["fleet.bundle", "[3, 1]"]


@pytest.mark.promise("Every chart has its figures in a table")
def test_what_is_drawn_and_tabled_is_what_the_result_says() -> None:
    page = Page(text_of(RESULT))
    drawn = page.figures
    hours = RESULT["hours"]
    assert drawn["money"]["data"][0]["y"] == [hour["income_usd"] for hour in hours]
    assert drawn["load"]["data"][0]["y"] == RESULT["minutes"]["decode_nodes"]
    kv = [100 * share for share in sorted(RESULT["ranks"]["kv_share"], reverse=True)]
    assert drawn["rank-kv_share"]["data"][0]["y"] == pytest.approx(kv)
    for key in ("ttft_s", "tpot_s"):
        counts = np.trim_zeros(np.array(RESULT[key]["counts"]))
        heights = np.array(drawn[key]["data"][0]["y"])
        assert heights.shape == counts.shape
        assert heights[counts == 0].sum() == 0
    first = hours[0]
    assert page.row("12:00")[:4] == ["12:00", "240.0", "96.0", "144.0"], "nodes"
    assert ["12:00", "$26,840", "$3,840"] in page.rows, "income and cost"
    median, slow = (f"{1000 * RESULT['tpot_s'][key]:.1f} ms" for key in ("p50", "p99"))
    assert f"p50 {median}," in page.text
    assert f"p99 {slow}" in page.text
    for fluid, window in (
        [f"{first[by]['tokens_per_s_user']:.1f}" for by in ("fluid", "window")],
        [
            f"{100 * first['tokens_hit'] / first['tokens_in']:.1f} %",
            f"{first['window']['hit_percent']:.1f} %",
        ],
    ):
        assert ["12:00", fluid, window] in page.rows


@pytest.mark.promise("it opens from disk and loads nothing else")
def test_it_loads_nothing_and_runs_only_what_is_in_it() -> None:
    text = text_of(RESULT)
    assert not re.search(r"://|url\(|@import|\bsrc=|\bhref=|<link|<iframe| on\w+=", text)
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.split("; ") == [
        "default-src 'none'",
        "script-src 'unsafe-inline'",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
    ]
    assert Page(text).num("script") == 3
    assert not re.search(r"</?script|<!--", PLOTLY, re.IGNORECASE), "it would end its element"
    assert "modeBarButtons: [[" in text, "plotly's own choice has a button that uploads a chart"


def test_a_page_is_small_beside_what_draws_it() -> None:
    assert len(text_of(RESULT).encode()) < 300_000


def test_the_result_is_left_as_it_was_and_makes_the_same_page_again() -> None:
    before = copy.deepcopy(RESULT)
    assert report_html(RESULT) == report_html(RESULT)
    assert before == RESULT


def test_it_is_light_dark_and_on_paper_with_every_colour_in_each() -> None:
    page = Page(text_of(RESULT))
    light, dark, paper = (
        dict(re.findall(r"(--\w+):(#\w+)", page.style[page.style.index(begin) :].split("}")[0]))
        for begin in (
            ":root{",
            "@media screen and (prefers-color-scheme:dark){:root:not(.paper){",
            "@media print{:root{",
        )
    )
    used = colours(page.figures)
    assert {name for name in used if name.startswith("--")} <= light.keys()
    assert {name for name in used if not name.startswith("--")} == {"rgba(0,0,0,0)"}
    assert light.keys() == dark.keys()
    assert all(light[name] != dark[name] for name in light)
    assert paper["--ink"] == "#000"
    assert "details::details-content{content-visibility:visible" in page.style, "tables are printed"


def test_what_it_is_told_stays_text() -> None:
    bad = copy.deepcopy(RESULT)
    bad["study"] = {"name": BAD, BAD: BAD}
    bad["notes"] = [BAD]
    bad["what_ifs"][1]["name"] = BAD
    bad["ranks"]["decode_unit"] = BAD
    text = text_of(bad)
    page = Page(text)
    assert page.num("script") == 3
    assert page.words.count(BAD) >= 5
    assert "<" not in page.scripts[1]
    names = page.figures["what-ifs"]["layout"]["yaxis"]["ticktext"]
    assert names[1].startswith("&lt;script&gt;alert('&amp;\"')&lt;/script&gt;: $")


@pytest.mark.parametrize("seed", range(40))
def test_it_stands_whatever_is_in_its_places(seed: int) -> None:
    rng = np.random.default_rng(seed)
    share = (0.02, 0.1, 0.3)[seed % 3]
    whole = RESULT if seed % 2 else SHORT
    page = Page(text_of({key: damaged(value, rng, share) for key, value in whole.items()}))
    assert all(section in page.words for section in SECTIONS)
    assert page.num("b", None) < 12, "text does not become markup"
    assert page.figures.keys() == set(page.shown) - {"table"}


def test_an_empty_result_and_one_hour_are_pages() -> None:
    page = Page(text_of({}))
    assert all(section in page.words for section in SECTIONS)
    assert page.figures == {}
    minutes = {key: values[:60] for key, values in RESULT["minutes"].items()}
    page = Page(text_of({**RESULT, "hours": RESULT["hours"][:1], "minutes": minutes}))
    assert len(page.figures) == 13
    assert "12:00" in page.text


def test_without_windows_the_rest_is_there() -> None:
    hours = [{**hour, "window": None} for hour in RESULT["hours"]]
    nothing = {"ttft_s": None, "tpot_s": {}, "ranks": None, "what_ifs": []}
    page = Page(text_of({**RESULT, "hours": hours, **nothing}))
    assert page.figures.keys() == {"load", "money", "speed", "hits"}
    assert page.text.count("No window ran") == 4
    assert "No other case was simulated." in page.text


def test_a_page_of_a_huge_unit_stays_readable() -> None:
    ranks = {
        key: value * 20 if isinstance(value, list) else value
        for key, value in RESULT["ranks"].items()
    }
    cases = [
        {**RESULT["what_ifs"][1], "name": f"case {index} " + "long " * 40} for index in range(20)
    ]
    assert len(text_of({**RESULT, "ranks": ranks, "what_ifs": cases}).encode()) < 400_000


def test_nothing_but_the_report_loads_what_draws_it() -> None:
    """Check that servers and simulating processes import nothing that draws, as it would slow them."""
    code = (
        "import sys, hadal.cli, hadal.runtime.launch, hadal.lab.simulate.run\n"
        "assert not {'plotly', 'narwhals', 'hadal.lab.simulate.page'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


STUB = """
const [script, figures] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const listeners = {}, drawn = [];
let classes = new Set(), scheme = "light";
const listen = (name, heard) => { listeners[name] = heard; };
const charts = Object.keys(JSON.parse(figures)).map((id) => ({id, clientWidth: 500}));
const known = {
  document: {
    getElementById: () => ({textContent: figures}),
    documentElement: {classList: {add: (name) => classes.add(name), remove: (name) => classes.delete(name)}},
    querySelectorAll: (selector) => (selector === ".chart" ? charts : []),
  },
  getComputedStyle: () => ({getPropertyValue: (name) => ` ${[...classes][0] || scheme}${name} `}),
  Plotly: {react: (chart, data, layout, config) => drawn.push([chart.id, data, layout, config])},
  matchMedia: (query) => ({addEventListener: (name, heard) => listen(query, heard)}),
  addEventListener: listen,
  setTimeout: (later) => later(), clearTimeout: () => 0,
};
require("vm").runInNewContext(script, known);
const rounds = [drawn.splice(0)];
for (const event of ["resize", "(prefers-color-scheme: dark)", "beforeprint", "afterprint"]) {
  scheme = event.includes("dark") ? "dark" : scheme;
  listeners[event]();
  rounds.push(drawn.splice(0));
}
console.log(JSON.stringify(rounds));
"""
"""Script with a stub of a browser's document. It runs the page's script and its listeners, and
prints the drawn charts. Colours are named after their theme.
"""


@pytest.mark.needs("node")
def test_its_script_draws_every_chart_in_the_colours_of_the_theme() -> None:
    page = Page(text_of(RESULT))
    done = subprocess.run(
        ["node", "-e", STUB],
        input=json.dumps([page.scripts[2], page.scripts[1]]),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    for drawn, theme in zip(rounds, ("light", "light", "dark", "paper", "dark"), strict=True):
        assert [id for id, *_ in drawn] == list(page.figures)
        for id, data, layout, _ in drawn:
            assert layout["width"] == 500
            assert layout["font"]["color"] == f"{theme}--ink"
            assert colours(data) <= {f"{theme}{name}" for name in colours(page.figures[id]["data"])}
    money = next(data for id, data, *_ in rounds[0] if id == "money")
    assert money[0]["y"] == page.figures["money"]["data"][0]["y"]
    cases = next(data for id, data, *_ in rounds[0] if id == "what-ifs")
    assert cases[0]["marker"]["color"][:2] == ["light--bar", "light--prefill"]


def test_the_day_beside_what_was_published() -> None:
    table = headline(RESULT)
    assert row(table, "Nodes, mean") == ["Nodes, mean", "226.10", "226.75", "−0.29 %"]
    assert row(table, "Hit rate") == ["Hit rate", "56.2 %", "56.3 %", "−0.06 points"]
    assert row(table, "Output tokens/s per user")[1:] == ["21.1", "20.0 to 22.0", "within"]
    assert row(table, "Prefill nodes, mean")[2:] == ["–", "–"]
    outside = headline({**RESULT, "tokens_per_s_user": 18.0})
    assert row(outside, "Output tokens/s per user")[3] == "−10.00 %", "of the nearer end"


def test_without_published_figures_there_are_no_columns_for_them() -> None:
    table = headline({**RESULT, "published": {}})
    assert table.heads == ["", "simulated"]
    assert row(table, "Cost") == ["Cost", "$86,822"]


def test_every_hour_has_its_row() -> None:
    assert len(columns(HOUR, RESULT["hours"]).rows) == 24
    tokens = {"tokens_in": 200, "tokens_hit": 50}
    hour = {"hour_beijing": 3, "nodes_mean": 60.0, **tokens, "cost_usd": 960.0}
    said = ["03:00", "60.0", "–", "–", "–", "200", "25.0 %", "–", "$960.00", "–"]
    assert columns(HOUR, [hour]).rows == [said]


def test_fluid_and_window_differ_by_what_is_said() -> None:
    fluid = {"tokens_per_s_user": 20.0, "requests_per_rank": 80.0, "prefill_use": 0.5}
    window = {"tokens_per_s_user": 21.0, "requests_per_rank": 78.0}
    units = {"prefill_units": 29, "decode_units": 9}
    hour = {"hour_beijing": 12, "fluid": fluid, "window": window | units}
    speed, requests = ["20.0", "21.0", "+5.0 %"], ["80.0", "78.0", "−2.5 %"]
    use = ["50.0 %", "–", "–"]
    assert fluid_and_windows([hour]).rows == [["12:00", "29 + 9", *speed, *requests, *use]]
    [cells] = fluid_and_windows([{**hour, "window": None}]).rows
    assert cells[1:5] == ["–", "20.0", "–", "–"]


def test_windows_show_latency_and_balance() -> None:
    table = windows([{"hour_beijing": 11, "window": None}, *RESULT["hours"][:1]])
    [cells] = table.rows
    assert len(cells) == len(table.heads)
    assert cells[3] == "78 %"
    assert cells[4:10] == ["900 ms", "2.1 s", "4.4 s", "46 ms", "50 ms", "55 ms"]
    assert cells[-5:] == ["1.040", "1.030", "1.050", "1.200", "1.300"]


def test_cases_say_how_their_cost_changes() -> None:
    table = what_if_table(RESULT["what_ifs"])
    assert row(table, "as asked")[4] == ""
    assert row(table, "half the cache")[3:5] == ["$92,813", "+6.9 %"]


def test_a_study_is_one_row_for_each_value() -> None:
    study = {"a": {"b": 1, "c": {}}, "d": [1, 2], "e": "x" * 500, "f": None}
    page = Page(text_of({"study": study}))
    assert [cells[0] for cells in page.rows[-5:]] == ["a.b", "a.c", "d", "e", "f"]
    assert [cells[1] for cells in page.rows[-5:-2]] == ["1", "{}", "[1, 2]"]
    assert page.rows[-2][1].endswith("(500 characters)")
    many = Page(text_of({"study": {f"k{index}": index for index in range(1000)}}))
    assert sum(cells[0].startswith("k") for cells in many.rows) == 400
    assert "600 further values" in many.text


def test_bins_are_shares() -> None:
    table = bins({"edges": [0, 1, 2, 3], "counts": [1, 0, 3]})
    assert table.rows == [("0 ms to 1 s", "25.00 %"), ("2 s to 3 s", "75.00 %")]


def test_ranks_stand_below_each_other() -> None:
    table = of_ranks({"kv_share": [0.5, None], "requests": [7.0]})
    assert table.heads == ["rank", "KV cache used (%)", "Requests"]
    assert table.rows == [["0", "50", "7"], ["1", "–", "–"]]
    assert table.caption == ""
    many = of_ranks({"requests": [1.0] * 1500})
    assert len(many.rows) == 400
    assert "The first 400 of 1,500" in many.caption
