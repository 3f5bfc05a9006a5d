"""The console's figures: numbers as text, and the grouping of ranks."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hadal.apps.console import figures

NUMBERS = st.one_of(
    st.floats(-1e15, 1e15),
    # Near powers of ten, where rounding adds a digit.
    st.builds(
        lambda power, off: 10.0**power * (1 + off), st.integers(-6, 14), st.floats(-0.006, 0.006)
    ),
)


@given(NUMBERS)
@example(999.6)
@example(99.96)
@example(9999.7)
@example(999_600.0)
@example(999.6e12)
@example(1e-7)
def test_no_figure_has_an_exponent(value: float) -> None:
    for said in (
        figures.number(value),
        figures.milliseconds(value),
        figures.dollars(value),
        figures.percent(value),
    ):
        assert re.fullmatch(r"−?\$?-?[0-9][0-9,]*(\.[0-9]+)? ?[TGMk]?(B|s|ms|%)?", said), said


@given(NUMBERS)
def test_a_number_is_near_what_it_says(value: float) -> None:
    text, _, letter = figures.number(value).partition(" ")
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[letter]
    assert float(text.replace(",", "")) * scale == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (figures.number(999.6), "1,000"),
        (figures.number(9_996), "9,996"),
        (figures.number(12_345), "12.3 k"),
        (figures.number(999_600), "1 M"),
        (figures.number(1.5e9), "1.5 G"),
        (figures.number(float("nan")), figures.NOTHING),
        (figures.milliseconds(999.4), "999 ms"),
        (figures.milliseconds(999.6), "1 s"),
        (figures.milliseconds(float("inf")), figures.NOTHING),
        (figures.dollars(0.00001234), "$0.000012"),
        (figures.dollars(-1234.5), "−$1,234"),
    ],
)
def test_figures_read_well(said: str, wanted: str) -> None:
    assert said == wanted


@pytest.mark.parametrize(("num_ranks", "sizes"), [(144, [8] * 18), (32, [8] * 4), (4, [4])])
def test_ranks_of_a_node_stand_together(num_ranks: int, sizes: list[int]) -> None:
    """Draw a map of ranks: its rows end only between nodes."""
    shown = figures.rank_map(["up"] * num_ranks, ["node <1>"] * num_ranks, 8)
    nodes = re.findall("<b>(.*?)</b>", shown)
    assert [node.count("<i ") for node in nodes] == sizes
    assert re.findall(r"rank (\d+) on node &lt;1&gt;: works", shown) == [
        str(rank) for rank in range(num_ranks)
    ]
