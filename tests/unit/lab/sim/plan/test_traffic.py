"""Traffic from a table and from a trace: rates, lengths, shapes; and errors in a trace."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from hadal.lab.sim.day.published import SHAPE, TOKENS_IN, TOKENS_OUT
from hadal.lab.sim.plan.traffic import EXAMPLE, Traffic, traffic_from, traffic_of
from hadal.policy.demand import FLAT
from tests.unit.lab.sim.worlds import Row, of


def test_nothing_said_is_the_published_day() -> None:
    day = traffic_of({})
    assert day.requests_per_s * day.tokens_in * 86_400 == pytest.approx(TOKENS_IN)
    assert day.requests_per_s * day.tokens_out * 86_400 == pytest.approx(TOKENS_OUT)
    assert day.cached_share == pytest.approx(0.5625)
    assert day.shape is SHAPE
    found = day.curve().requests_per_s(3600.0)
    assert found == pytest.approx(day.requests_per_s * float(SHAPE.at(3600.0)))


def test_the_example_has_every_field_and_is_that_day() -> None:
    example = traffic_of(tomllib.loads(EXAMPLE))
    assert example.requests_per_s == pytest.approx(Traffic().requests_per_s, rel=1e-3)
    assert example.tokens_out == pytest.approx(Traffic().tokens_out, rel=1e-3)
    assert example.kv_length_mean == 4989


def test_tokens_of_a_day_are_a_rate() -> None:
    found = traffic_of({"tokens_in_day": 86_400_000, "tokens_in": 500}).requests_per_s
    assert found == pytest.approx(2.0)


def test_lengths_have_their_mean_and_spread() -> None:
    traffic = Traffic(tokens_in=1000.0, tokens_out=300.0, variation_in=1.5, variation_out=0.5)
    tokens_in, tokens_out = traffic.draw(200_000, np.random.default_rng(1))
    assert tokens_in.mean() == pytest.approx(1000.0, rel=0.02)
    assert tokens_in.std() / tokens_in.mean() == pytest.approx(1.5, rel=0.06)
    assert tokens_out.mean() == pytest.approx(300.0, rel=0.02)
    weights = tokens_out / tokens_out.sum()
    assert weights @ (tokens_in + tokens_out / 2) == pytest.approx(traffic.kv_length_mean, rel=0.02)
    new = traffic.new_quantiles()
    found = np.quantile(tokens_in, 0.9) * (1 - traffic.cached_share)
    assert found == pytest.approx(np.quantile(new, 0.9), rel=0.03)


@pytest.mark.promise("Traffic is a table (TOML) or a trace (Mooncake's JSON lines, Azure's CSV).")
def test_a_trace_says_its_rate_lengths_and_hits() -> None:
    rows = [
        Row(10.0 * i, i // 2, i % 2, 1000 + 64 * i, 100, tokens_seen=640 * (i % 2))
        for i in range(101)
    ]
    traffic = traffic_from(of(*rows), "a trace")
    assert traffic.requests_per_s == pytest.approx(0.1)
    assert traffic.tokens_in == pytest.approx(1000 + 64 * 50)
    assert traffic.cached_share == pytest.approx(50 * 640 / sum(row.tokens_in for row in rows))
    assert traffic.shape is FLAT, "1,000 s are no day"
    drawn, _ = traffic.draw(50, np.random.default_rng(1))
    assert set(drawn) <= {row.tokens_in for row in rows}


def test_a_trace_of_a_day_says_when_people_ask() -> None:
    busy = [
        Row(at, i, 0, 100, 10)
        for i, at in enumerate(
            np.concatenate([np.arange(0.0, 43_200.0, 60.0), np.arange(43_200.0, 86_400.0, 30.0)])
        )
    ]
    traffic = traffic_from(of(*busy), "a day")
    assert traffic.shape.at(64_800.0) == pytest.approx(2 * traffic.shape.at(21_600.0), rel=0.02)
    assert traffic.peak > 1.3


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"rate": 1}, "unknown field 'rate'"),
        ({"tokens_in": 0}, "tokens_in is 0"),
        ({"tokens_in": "a"}, "must be a number"),
        ({"cached_share": 1.0}, "below 1"),
        ({"variation_in": -1}, "from 0 to"),
        ({"variation_out": 1e200}, "from 0 to"),
        ({"shape": "round"}, "24 numbers"),
        ({"shape": [1, 2]}, "24 numbers"),
        ({"shape": [-1.0] * 24}, "0 or more"),
        ({"shape": [0.0] * 24}, "counted"),
        ({"requests_per_s": 1, "tokens_in_day": 1}, "not both"),
        ({"tokens_in_day": 1, "tokens_in": 0}, "above 0"),
        ({"requests_per_s": float("inf")}, "finite"),
        ({"requests_per_s": 1e9}, "must be at most 1,000,000"),
        ({"tokens_in_day": 1e30}, "must be at most 1,000,000"),
    ],
)
def test_what_nobody_could_ask(table: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        traffic_of(table)


def test_one_request_shows_no_rate() -> None:
    with pytest.raises(ValueError, match="are too few to measure a rate"):
        traffic_from(of(Row(0.0, 0, 0, 10, 10)), "a trace")
