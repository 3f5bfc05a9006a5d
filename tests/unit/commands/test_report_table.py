"""The published day as a table, and amounts as people read them."""

import pytest
from rich.console import Console

from hadal.commands.report_tables import dollars, render
from hadal.core.facts import NodesFact
from hadal.stats.prices import R1, ModelPrices
from hadal.stats.report import report
from hadal.stats.tally import Counts, Key, Tally

START_S = 1_740_628_800
"""2025-02-27 12:00 in Beijing, the beginning of a quarter hour."""


def text_of(width: int) -> str:
    tally = Tally()
    tally.add_counts(
        Key(START_S // 900, "r1", "web"),
        Counts(
            num_requests=155_000_000,
            num_finished=154_000_000,
            num_cancelled=1_000_000,
            tokens_hit=342 * 10**9,
            tokens_miss=266 * 10**9,
            tokens_out=168 * 10**9,
            kv_tokens=168 * 10**9 * 4989,
            tokens_after_first=168 * 10**9,
            stream_us=168 * 10**15 // 21,
        ),
    )
    nodes = [
        NodesFact(role, "e", role, ranks, 8, START_S, START_S + 86_400, "H800", 2_000_000)
        for role, ranks in (("prefill", 764), ("decode", 1050))
    ]
    made = report(
        tally.priced(ModelPrices(R1.flat())),
        nodes,
        START_S * 10**6,
        (START_S + 86_400) * 10**6,
        utc_offset_s=8 * 3600,
    )
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render(made, "A day"))
    return capture.get()


def test_the_published_day() -> None:
    text = text_of(100)
    for words in (
        "A day   2025-02-27 12:00 to 2025-02-28 12:00 UTC+8",
        "226.750",
        "608.0 B",
        "342.0 B",
        "56.2 %",
        "168.0 B",
        "21.0",
        "4,989",
        "73,686",
        "14,815",
        "$87,072",
        "$562,100",
        "546 %",
        "155,000,000",
        "1,000,000 cancelled",
        "02-27 12:00",
        "02-28 11:00",
    ):
        assert words in text, words


def test_it_fits_a_terminal_of_80_columns() -> None:
    text = text_of(80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


@pytest.mark.parametrize(
    ("micro_usd", "text"),
    [
        (0, "$0.00"),
        (276, "$0.000276"),
        (100, "$0.0001"),
        (123_456, "$0.1235"),
        (1_500_000, "$1.50"),
        (-2_000_000, "-$2.00"),
        (999_990_000, "$999.99"),
        (87_072_000_000, "$87,072"),
    ],
)
def test_amounts(micro_usd: int, text: str) -> None:
    assert dollars(micro_usd) == text
