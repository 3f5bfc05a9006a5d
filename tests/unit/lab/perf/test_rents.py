"""Prices of GPU-hours: each has a source, and a price given by the user is used first."""

import pytest

from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.rent import RENTS, rents


@pytest.mark.promise("H20 and B200 are left out until a price is given")
def test_only_what_has_a_source_has_a_price() -> None:
    assert RENTS.keys() == {"h800", "h100", "h200", "gb200"}
    for name, rent in RENTS.items():
        assert 0.5 < rent.usd < 10.0
        assert name in HARDWARE
        assert rent.source
        assert rent.as_of


def test_a_given_price_goes_first() -> None:
    found = rents({"H20": 1.2, "h800": 3.0})
    assert found["h20"].usd == 1.2
    assert found["h800"].usd == 3.0
    assert found["h100"] == RENTS["h100"]


@pytest.mark.parametrize(
    "given", [{"h900": 1.0}, {"h20": 0.0}, {"h20": float("nan")}, {"h20": float("inf")}]
)
def test_no_hardware_and_no_price(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"is unknown|above 0"):
        rents(given)
