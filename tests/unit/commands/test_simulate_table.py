"""The tables of a made-up day in the terminal: figures beside published ones, hours, alternatives,
gaps.
"""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from hadal.lab.simulate.tables import ROWS, alternatives_table, day_table, hours_tables, show
from tests.unit.commands.day_result import result


def shown(found: Any) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    if isinstance(found, dict):
        show(console, found)
    else:
        console.print(found)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(text: str, first: str) -> list[str]:
    """Return the cells of a line; two blanks separate them."""
    found = next(one for one in text.splitlines() if one.startswith(first))
    return [cell.strip() for cell in found.split("  ") if cell.strip()]


def test_the_days_figures_stand_beside_the_published_ones() -> None:
    text = shown(day_table(result()))
    assert "deepseek-day on H800" in text
    assert line(text, "nodes, mean") == ["nodes, mean", "226.75", "226.10", "-0.3%"]
    assert line(text, "tokens in, 10^9") == ["tokens in, 10^9", "608.0", "608.3", "+0.1%"]
    assert line(text, "tokens/s per user") == [
        "tokens/s per user",
        "20 to 22",
        "21.1",
        "within",
    ]
    assert line(text, "cost, $") == ["cost, $", "87,072", "86,822", "-0.3%"]
    assert len(
        [one for one in text.splitlines() if one.startswith(tuple(label for label, *_ in ROWS))]
    ) == len(ROWS)


def test_beyond_a_published_range_is_outside() -> None:
    for speed in (19.9, 22.1):
        text = shown(day_table({**result(), "tokens_per_s_user": speed}))
        assert line(text, "tokens/s per user")[-1] == "outside"


def test_a_day_of_its_own_stands_alone_and_gaps_are_dashes() -> None:
    text = shown(day_table({**result(), "published": {}, "margin_percent": None}))
    assert "published" not in text
    assert line(text, "nodes, mean") == ["nodes, mean", "226.10"]
    assert line(text, "margin on cost, %") == ["margin on cost, %", "-"]


def test_liquid_and_window_stand_side_by_side() -> None:
    found = result()
    hour = found["hours"][8]
    hour["fluid"].update(tokens_per_s_user=21.04, requests_per_rank=87.6, prefill_use=0.604)
    hour["window"].update(tokens_per_s_user=20.96, requests_per_rank=90.2, prefill_use=None)
    found["hours"][9]["window"] = None
    lines = shown(hours_tables(found, None)[0]).splitlines()
    first = next(one for one in lines if one.startswith("20:00"))
    for words in ("21.0 | 21.0", "88 | 90", "60%", "0.9, 4.4 s"):
        assert words in first
    assert "60% |" not in first, "a gap is left out"
    assert "|" not in next(one for one in lines if one.startswith("21:00"))
    assert sum(one[2:5] == ":00" for one in lines) == 24
    assert f"{100 * hour['tokens_hit'] / hour['tokens_in']:.1f} %" in first
    hour.update(tokens_in=0, tokens_hit=0)
    lines = shown(hours_tables(found, None)[0]).splitlines()
    assert "-" in next(one for one in lines if one.startswith("20:00")).split()


def test_alternatives_that_cannot_be_say_why() -> None:
    found = result()
    found["what_ifs"].append({"name": "on sand: it does not compute"})
    text = shown(alternatives_table(found))
    assert line(text, "on sand")[0].startswith("on sand: it does not compute")
    assert line(text, "H20 instead")[1:3] == ["512.0", "629"]


def test_all_of_it_with_notes() -> None:
    text = shown(result())
    for words in ("simulated", "Hour by hour", "What if", "note V3 and R1 share units."):
        assert words in text
    alone = result()
    alone["what_ifs"] = alone["what_ifs"][:1]
    assert "What if" not in shown(alone)
