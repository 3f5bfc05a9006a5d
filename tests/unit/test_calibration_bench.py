"""The calibration page: it equals the command's output, every aim is met, and gaps are named."""

import re

import pytest

from bench.calibration import PAGE, SILICON_HEAD, error, ours, page
from bench.calibration_points import AIM, NOT_PRICED, POINTS, Point
from bench.calibration_silicon import rows, silicon
from bench.shared_data import SILICON
from tests.needs import shared_data

AIMS = [point for point in POINTS if point.role == AIM]


def ids(point: Point) -> str:
    return f"{point.id} {point.what[:40]}"


@pytest.mark.promise("a test compares this page with what the command prints")
def test_the_page_is_what_the_command_prints() -> None:
    written = PAGE.read_text(encoding="utf-8")
    systems, found, table = written.partition(SILICON_HEAD)
    assert systems.rstrip() == page(with_silicon=False).rstrip(), (
        "run `python -m bench.calibration --write`"
    )
    assert found
    assert re.search(r"^\| h200 \| trtllm \| fp8 \| \d+ \|", table, re.MULTILINE)


def test_the_silicon_rows_are_what_the_command_prints() -> None:
    path = shared_data(SILICON)
    assert len(list(rows(path))) > 30
    assert (
        PAGE.read_text(encoding="utf-8").partition(SILICON_HEAD)[2].strip() == silicon(path).strip()
    )


@pytest.mark.promise("aim: a limit is tested.")
@pytest.mark.parametrize("point", AIMS, ids=ids)
def test_an_aim_is_met(point: Point) -> None:
    assert point.within is not None
    assert abs(error(point)) <= point.within, (
        f"ours {ours(point):.1f}, published {point.published:.1f}"
    )


def test_every_point_is_on_the_page() -> None:
    assert {f"C{i}" for i in range(1, 17)} - {"C15"} <= {
        point.id for point in POINTS
    } | NOT_PRICED.keys()
    assert len(AIMS) >= 6
