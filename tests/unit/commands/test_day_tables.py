"""Tables of the report: differences from what was published, fluid beside windows, cases, the
study.
"""

from __future__ import annotations

from hadal.commands.day_tables import (
    bins,
    by_hour,
    fluid_and_windows,
    headline,
    of_ranks,
    study,
    what_if_table,
    windows,
)
from tests.unit.commands.day_result import result
from tests.unit.commands.pages import Page

RESULT = result()


def test_the_day_beside_what_was_published() -> None:
    page = Page(headline(RESULT))
    assert page.row("Nodes, mean") == ["Nodes, mean", "226.10", "226.75", "−0.29 %"]
    assert page.row("Hit rate") == ["Hit rate", "56.2 %", "56.3 %", "−0.06 points"]
    assert page.row("Output tokens/s of a user") == [
        "Output tokens/s of a user",
        "21.1",
        "20.0 to 22.0",
        "within",
    ]
    assert page.row("Prefill nodes, mean")[2:] == ["–", "–"]
    outside = Page(headline({**RESULT, "tokens_per_s_user": 18.0}))
    assert outside.row("Output tokens/s of a user")[3] == "−10.00 %", "of the nearer end"


def test_without_published_figures_there_are_no_columns_for_them() -> None:
    page = Page(headline({**RESULT, "published": {}}))
    assert page.rows[0] == ["", "simulated"]
    assert page.row("Cost") == ["Cost", "$86,822"]


def test_every_hour_has_its_row() -> None:
    assert len(Page(by_hour(RESULT["hours"])).rows) == 25
    hour = {
        "hour_beijing": 3,
        "nodes_mean": 60.0,
        "tokens_in": 200,
        "tokens_hit": 50,
        "cost_usd": 960.0,
    }
    assert Page(by_hour([hour])).row("03:00") == [
        "03:00",
        "60.0",
        "–",
        "–",
        "–",
        "200",
        "25.0 %",
        "–",
        "$960.00",
        "–",
    ]


def test_fluid_and_window_differ_by_what_is_said() -> None:
    hour = {
        "hour_beijing": 12,
        "fluid": {"tokens_per_s_user": 20.0, "requests_per_rank": 80.0, "prefill_use": 0.5},
        "window": {
            "prefill_units": 29,
            "decode_units": 9,
            "tokens_per_s_user": 21.0,
            "requests_per_rank": 78.0,
        },
    }
    row = Page(fluid_and_windows([hour])).row("12:00")
    assert row == [
        "12:00",
        "29 + 9",
        "20.0",
        "21.0",
        "+5.0 %",
        "80.0",
        "78.0",
        "−2.5 %",
        "50.0 %",
        "–",
        "–",
    ]
    assert Page(fluid_and_windows([{**hour, "window": None}])).row("12:00")[1:5] == [
        "–",
        "20.0",
        "–",
        "–",
    ]


def test_windows_show_latency_and_balance() -> None:
    hours = [{"hour_beijing": 11, "window": None}, *RESULT["hours"][:1]]
    page = Page(windows(hours))
    assert len(page.rows) == 2
    row = page.row("12:00")
    assert row[3] == "78 %"
    assert row[4:10] == ["900 ms", "2.1 s", "4.4 s", "46 ms", "50 ms", "55 ms"]
    assert row[-5:] == ["1.040", "1.030", "1.050", "1.200", "1.300"]


def test_cases_say_how_their_cost_changes() -> None:
    page = Page(what_if_table(RESULT["what_ifs"]))
    assert page.row("as asked")[4] == ""
    assert page.row("half the cache")[3:5] == ["$92,813", "+6.9 %"]


def test_a_study_is_one_row_for_each_value() -> None:
    page = Page(study({"a": {"b": 1, "c": {}}, "d": [1, 2], "e": "x" * 500, "f": None}))
    assert [row[0] for row in page.rows] == ["a.b", "a.c", "d", "e", "f"]
    assert [row[1] for row in page.rows[:3]] == ["1", "{}", "[1, 2]"]
    assert page.rows[3][1].endswith("(500 characters)")
    many = Page(study({f"k{index}": index for index in range(1000)}))
    assert len(many.rows) == 400
    assert "600 further values" in many.text


def test_bins_are_shares() -> None:
    page = Page(bins({"edges": [0, 1, 2, 3], "counts": [1, 0, 3]}))
    assert page.rows[1:] == [["0 ms to 1 s", "25.00 %"], ["2 s to 3 s", "75.00 %"]]


def test_ranks_stand_below_each_other() -> None:
    page = Page(of_ranks([("KV", [0.5, None]), ("tokens", [7.0])]))
    assert page.rows == [["rank", "KV", "tokens"], ["0", "0.5", "7"], ["1", "–", "–"]]
    many = Page(of_ranks([("KV", [1.0] * 1500)]))
    assert len(many.rows) == 401
    assert "The first 400 of 1,500" in many.text
