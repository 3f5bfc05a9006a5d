"""Worlds with faults: every request ends once, ledgers add up, and faults cost the right time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.random import Generator

from hadal.lab.sim.world.faults import DiskLost, RanksDie, RankSlow, UnitDies, UnitLate, WorldFaults
from hadal.lab.sim.world.requests import Requests
from hadal.lab.sim.world.world import FleetWorld
from hadal.roles.decode.leader import DecodeLeader
from tests.fresh import seeds
from tests.unit.lab.sim.world.test_world import (
    cached,
    deployment,
    deployment_off,
    models,
    requests,
    world,
)

NODE_RANKS = 8
UNITS = {"prefill-0": 8, "prefill-1": 8, "decode-0": 16, "decode-1": 16}


@dataclass(frozen=True)
class FaultRates:
    """Mean time between faults of a kind, in the whole world; 0: never."""

    rank_every_s: float = 0.0
    node_every_s: float = 0.0
    slow_every_s: float = 0.0
    disk_every_s: float = 0.0
    unit_every_s: float = 0.0
    lasts_s: float = 10.0
    """Mean duration of slowness and of disk failures, and mean time until ranks and units return."""
    form_s: float = 1.0
    slow_factor: float = 3.0
    """Largest slowdown of a slow rank."""


def draw_faults(
    rates: FaultRates, unit_to_ranks: Mapping[str, int], until_s: float, rng: Generator
) -> WorldFaults:
    """Draw faults at random times before `until_s`, each on any unit."""
    units = sorted(unit_to_ranks)

    def times(every_s: float) -> list[float]:
        count = int(rng.poisson(until_s / every_s)) if every_s else 0
        return sorted(float(at_s) for at_s in rng.uniform(0.0, until_s, count))

    def unit() -> str:
        return units[int(rng.integers(len(units)))]

    def lasts_s() -> float:
        return float(rng.exponential(rates.lasts_s)) + 0.1

    def ranks(at_s: float, size: int) -> RanksDie:
        name = unit()
        num_ranks = unit_to_ranks[name]
        first = int(rng.integers(num_ranks)) // size * size
        some = tuple(range(first, min(first + size, num_ranks)))
        return RanksDie(at_s, name, some, rates.form_s, rates.form_s + lasts_s())

    def slow(at_s: float) -> RankSlow:
        name = unit()
        rank = int(rng.integers(unit_to_ranks[name]))
        return RankSlow(
            at_s, at_s + lasts_s(), name, rank, float(rng.uniform(1.0, rates.slow_factor))
        )

    return WorldFaults(
        ranks=tuple(ranks(at_s, 1) for at_s in times(rates.rank_every_s))
        + tuple(ranks(at_s, NODE_RANKS) for at_s in times(rates.node_every_s)),
        slow=tuple(slow(at_s) for at_s in times(rates.slow_every_s)),
        disks=tuple(DiskLost(at_s, at_s + lasts_s(), unit()) for at_s in times(rates.disk_every_s)),
        units=tuple(
            UnitDies(at_s, unit(), 0.05, 0.05 + lasts_s()) for at_s in times(rates.unit_every_s)
        ),
    )


def played(
    asked: Requests, faults: WorldFaults, look_at_s: list[float], **options: Any
) -> FleetWorld:
    """Run a world, check it after each fault and at its end, and return it."""
    made = world(asked, faults=faults, **options)
    for at_s in look_at_s:
        made.run(at_s)
        assert made.check() == []
    made.run(400.0)
    assert made.check() == []
    assert made.front.idle
    assert np.isfinite(made.seen.end_s).all()
    assert not made.seen.is_failed.any()
    # Each token was delivered once.
    assert made.front.totals.tokens_out == (asked.tokens_out - asked.tokens_done).sum()
    return made


def busy() -> Requests:
    return requests(1, 90, 60.0, tokens_out=50)


@pytest.mark.promise(
    "Ranks, nodes, units and disks fail at given times. Results of any interval can be read"
)
def test_a_rank_dies_and_its_unit_goes_on_without_it() -> None:
    for unit in ("decode-0", "prefill-0"):
        fault = RanksDie(1.0, unit, (3,), form_s=0.5, back_s=3.0)
        made = played(busy(), WorldFaults(ranks=(fault,)), [1.01, 1.4, 1.6, 3.9, 4.1])
        assert made.front.totals.retries > 0, "what the rank held is made elsewhere"
        steps = [
            (at_s, at_s + took_s)
            for role in made.log.steps.values()
            for name, at_s, took_s, _ in role
            if name == unit
        ]
        assert not [at_s for at_s, _ in steps if 1.0 < at_s < 1.5], "no step until it has formed"
        assert [at_s for at_s, _ in steps if 1.5 <= at_s < 4.0]


def test_a_node_dies_and_comes_back_empty() -> None:
    fault = RanksDie(1.0, "decode-1", tuple(range(8)), form_s=0.2, back_s=2.0)
    made = world(requests(1, 250, 70.0), faults=WorldFaults(ranks=(fault,)))
    made.run(1.3)
    leader = made.processes["decode-1"].role
    assert isinstance(leader, DecodeLeader)
    used = leader.blocks.num_used_R
    assert used[:8].tolist() == [0] * 8
    assert used[8:].sum() > 0
    load = made.front.units.by_name["decode-1"].load
    assert load is not None
    assert load.num_ranks == 8
    made.run(3.5)
    assert leader.blocks.num_used_R[:8].sum() > 0
    assert made.check() == []


def test_all_ranks_of_a_unit_die() -> None:
    fault = RanksDie(1.0, "decode-0", tuple(range(16)), form_s=0.2, back_s=2.0)
    played(busy(), WorldFaults(ranks=(fault,)), [1.1, 1.3, 2.9, 3.1])


def test_ranks_die_while_others_are_away() -> None:
    faults = (
        RanksDie(1.0, "decode-0", (0, 1), form_s=0.5, back_s=1.5),
        RanksDie(1.2, "decode-0", (1, 2), form_s=0.5),
        RanksDie(2.4, "decode-0", (0,), form_s=0.3, back_s=1.0),
        RanksDie(1.1, "prefill-1", (7,), form_s=0.1),
        RanksDie(1.15, "prefill-1", (7,), form_s=0.1, back_s=0.5),
    )
    played(busy(), WorldFaults(ranks=faults), [1.05, 1.3, 1.55, 1.75, 2.45, 2.55, 3.5])


def test_a_unit_dies_and_its_requests_go_on_elsewhere() -> None:
    for unit in ("decode-0", "prefill-1"):
        fault = UnitDies(1.0, unit, 0.1, 2.0)
        made = played(busy(), WorldFaults(units=(fault,)), [1.05, 1.2, 2.9, 3.2])
        assert made.front.totals.retries > 0
        assert unit in made.front.units.by_name


def test_a_unit_that_is_late_is_not_missed() -> None:
    made = played(
        busy(),
        WorldFaults(late=(UnitLate("decode-0", 1.5), UnitLate("prefill-0", 1.0))),
        [1.2, 2.0],
    )
    begun = {
        unit: min(
            at_s for role in made.log.steps.values() for name, at_s, _, _ in role if name == unit
        )
        for unit in UNITS
    }
    assert begun["decode-0"] > 1.5
    assert begun["prefill-0"] > 1.0
    assert max(begun["decode-1"], begun["prefill-1"]) < 1.0


def test_a_slow_rank_makes_the_steps_of_its_unit_slower_and_no_other_s() -> None:
    asked = Requests(
        np.full(256, -1.0),
        np.full(256, 1000),
        np.full(256, 90),
        np.zeros(256, int),
        np.full(256, 20),
    )
    fault = RankSlow(0.5, 1.0, "decode-0", 5, 2.0)
    made = played(asked, WorldFaults(slow=(fault,)), [0.7])

    def step_s(unit: str, begin_s: float, end_s: float) -> float:
        return float(
            np.median(
                [
                    took_s
                    for name, at_s, took_s, work in made.log.steps["decode"]
                    if name == unit and begin_s < at_s < end_s
                ]
            )
        )

    found = step_s("decode-0", 0.5, 0.99)
    assert found == pytest.approx(2.0 * step_s("decode-1", 0.5, 0.99), rel=0.02)
    assert step_s("decode-0", 0.1, 0.5) == pytest.approx(step_s("decode-1", 0.1, 0.5), rel=0.02)
    assert step_s("decode-0", 1.05, 1.3) == pytest.approx(step_s("decode-1", 1.05, 1.3), rel=0.02)


@pytest.mark.promise(
    "Ranks, nodes, units and disks fail at given times. Results of any interval can be read"
)
def test_a_lost_disk_costs_what_it_had() -> None:
    asked = cached(requests(7, 200, 100.0), 0.6)
    faults = WorldFaults(disks=tuple(DiskLost(0.5, 1.0, f"prefill-{index}") for index in range(2)))
    made = FleetWorld(deployment_off(), models(), asked, max_context=16_384, faults=faults)
    made.run(100.0)
    assert made.check() == []
    assert np.isfinite(made.seen.end_s).all()
    failed = [one for one in made.log.reads if one[4] < one[3]]
    assert failed
    assert all(0.5 <= one[0] < 1.0 for one in failed)
    usable = np.minimum(asked.tokens_cached, (asked.tokens_in - 1) // 64 * 64)
    assert usable.sum() - made.seen.tokens_hit.sum() == sum(one[3] for one in failed)
    found = made.read(0.0, 100.0).prefill.tokens
    assert found == pytest.approx((asked.tokens_in - made.seen.tokens_hit).sum())


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_many_faults_at_random(seed: int) -> None:
    rates = FaultRates(
        rank_every_s=0.4,
        node_every_s=1.5,
        slow_every_s=1.0,
        disk_every_s=1.0,
        unit_every_s=1.5,
        lasts_s=0.8,
        form_s=0.2,
    )
    faults = draw_faults(rates, UNITS, 3.0, np.random.default_rng(seed))
    assert faults == draw_faults(rates, UNITS, 3.0, np.random.default_rng(seed))
    asked = cached(requests(seed, 80, 40.0, tokens_out=50), 0.5)
    config = deployment()
    config = msgspec.structs.replace(
        config, limits=msgspec.structs.replace(config.limits, max_retries=100)
    )
    played_with = [float(at_s) for at_s in np.arange(0.25, 5.0, 0.25)]
    played(asked, faults, played_with, config=config, stores=seed % 2 == 1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="come back after"):
        WorldFaults(ranks=(RanksDie(1.0, "decode-0", (1,), form_s=2.0, back_s=1.0),))
    with pytest.raises(ValueError, match="factor must be at least 1"):
        WorldFaults(slow=(RankSlow(1.0, 2.0, "decode-0", 1, 0.5),))
    with pytest.raises(ValueError, match="learns of the failure"):
        WorldFaults(units=(UnitDies(1.0, "decode-0", 3.0, 2.0),))
    no_rank, no_unit = RanksDie(1.0, "decode-0", (16,)), UnitLate("decode-7", 1.0)
    for wrong in (WorldFaults(ranks=(no_rank,)), WorldFaults(late=(no_unit,))):
        with pytest.raises(ValueError, match="a fault names decode-"):
            world(busy(), faults=wrong)
