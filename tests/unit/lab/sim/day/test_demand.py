"""A day's demand: hours that add up, fewer hits in a smaller cache, independent random numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hadal.core.errors import ConfigError
from hadal.lab.sim.day.demand import (
    SAMPLE,
    DayDemand,
    cache_day,
    day_demand,
    generator,
    kv_length_about,
    sample_of,
)
from hadal.lab.sim.day.published import HOUR_S
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.sessions import WorkloadParams
from hadal.policy.demand import DAY_S
from tests.unit.lab.sim import worlds
from tests.unit.lab.sim.studies import WORKLOAD, cached_day, load, small


def test_hours_are_those_of_arrival_and_stand_for_all_sessions() -> None:
    asked = worlds.of(
        worlds.Row(-5.0, 0, 0, 999, 9),
        worlds.Row(10.0, 1, 0, 100, 10),
        worlds.Row(HOUR_S, 2, 0, 300, 30),
        worlds.Row(HOUR_S + 1, 2, 1, 500, 50),
        worlds.Row(DAY_S - 1, 3, 0, 700, 70),
    )
    made = DayDemand(asked, np.array([9.0, 0.0, 64.0, 128.0, 0.0]), 10, np.inf)
    assert made.counts[[0, 1, 23]].tolist() == [10, 20, 10]
    assert made.counts.sum() == 40, "who came before is not of the day"
    assert made.tokens_in[[0, 1, 23]].tolist() == [1000, 8000, 7000]
    assert made.tokens_hit_by_hour[1] == 1920
    assert made.tokens_out.sum() == 1600
    assert made.hit_share == pytest.approx(192 / 1600)


def test_a_quick_sample_knows_the_mean_length() -> None:
    assert kv_length_about(small()) == pytest.approx(load().figures().kv_length, rel=0.05)
    assert kv_length_about(Study()) == pytest.approx(5_000, rel=0.05), "published: 4,989"
    # A day without requests.
    assert kv_length_about(small(workload=replace(WORKLOAD, sessions_per_day=1e-9))) == 1.0


def test_figures_are_means_of_a_request() -> None:
    figures, made = load().figures(), load()
    assert np.sum(figures.requests_per_s) * HOUR_S == pytest.approx(made.counts.sum())
    assert figures.tokens_in * made.counts.sum() == pytest.approx(made.tokens_in.sum())
    assert figures.tokens_out * made.counts.sum() == pytest.approx(made.tokens_out.sum())
    assert figures.hit_share == pytest.approx(made.hit_share)
    # An output token sees its prompt, and longer prompts have more output tokens.
    assert figures.tokens_in < figures.kv_length


def test_as_a_liquid_it_is_as_much_and_comes_at_the_same_hours() -> None:
    made, demand = load(), load().demand()
    assert demand.tokens_in == pytest.approx(made.tokens_in.sum())
    assert demand.tokens_out == pytest.approx(made.tokens_out.sum())
    assert demand.tokens_out_request == pytest.approx(made.figures().tokens_out)
    for index in (0, 5, 12, 17):  # Second 0 is 12:00 in Beijing, by the fluid's clock.
        times_s = (12 + index) * HOUR_S + np.arange(0.5, HOUR_S)
        came = (
            np.mean([demand.requests_per_s(at_s) for at_s in times_s[::60]])
            * demand.tokens_in_request
        )
        assert came == pytest.approx(made.tokens_in[index] / HOUR_S, rel=0.01)


def test_as_many_come_as_were_asked_for() -> None:
    turns = 1.66
    assert load().counts.sum() == pytest.approx(turns * WORKLOAD.sessions_per_day, rel=0.03)


def test_what_hits_is_less_with_less_cache_and_nothing_without() -> None:
    study = small()
    less = cache_day(replace(study, cache=replace(study.cache, disk_pb=study.cache.disk_pb / 20)))
    made, poor, none = (day_demand(study, one, 200) for one in (cached_day(), less, None))
    assert 0 < poor.hit_share < 0.9 * made.hit_share
    assert none.hit_share == 0.0
    # The cache changes no request.
    assert np.array_equal(none.workload.tokens_in, made.workload.tokens_in)
    assert none.eviction_age_s == np.inf
    assert poor.eviction_age_s < made.eviction_age_s
    assert (made.tokens_hit <= made.workload.tokens_findable).all()


@pytest.mark.parametrize(("sessions", "scale"), [(103e6, SAMPLE), (50e6, 50), (1e6, 1), (1e3, 1)])
def test_a_small_day_is_drawn_whole(sessions: float, scale: int) -> None:
    assert sample_of(WorkloadParams(sessions_per_day=sessions)) == scale


def test_a_cache_of_few_sessions_is_looked_at_with_more_of_them() -> None:
    """Sample more of few sessions: the published day's sample, one in 8,000, would be empty."""
    study = small(workload=replace(WORKLOAD, sessions_per_day=2_000.0), cache=Study().cache)
    found = cache_day(study)
    assert found.scale == 2.0
    assert len(found.workload) > 1_000
    assert cached_day().scale == 4_000.0


def test_an_hour_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"raise workload\.sessions_per_day"):
        day_demand(small(workload=replace(WORKLOAD, sessions_per_day=20.0)), None)


def test_each_part_has_randomness_of_its_own() -> None:
    study = small()

    def draw(what: str, *numbers: int, of: Study = study) -> float:
        return float(generator(of, what, *numbers).random())

    drawn = [
        draw("cache"),
        draw("load"),
        draw("window", 1),
        draw("window", 2),
        draw("load", of=small(seed=2)),
    ]
    assert len(set(drawn)) == len(drawn)
    assert draw("window", 1) == drawn[2]
    assert draw("load", of=small(prices="1/1/1")) == drawn[1], "what is not drawn changes no draw"
