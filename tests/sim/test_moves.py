"""Random worlds for moves between the ranks of a decode unit. Moves happen during all faults without
effect on clients; no request pauses for long; the load is more even than without moves.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest

from hadal.core.balance import KV, REQUESTS
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.units import UnitReport
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.decode.moving import STALL_STEPS_MAX
from tests.fresh import seeds
from tests.levels import MORE
from tests.sim.scenario import uneven_world
from tests.sim.test_world import run_seed
from tests.sim.world import World

PAIR_SEEDS = range(20) if MORE else (3, 5)
"""Seeds of pairs of worlds, with moves and without; in `make test` the two in which moves gain most."""


class Watch:
    """Recorder of a world's decode leaders and of the balances that they report."""

    def __init__(self, world: World) -> None:
        self.leaders: list[DecodeLeader] = []
        self.balances: dict[str, list[float]] = {KV: [], REQUESTS: []}
        self._inner, self._watch = world._inner, world._watch
        world._inner = self.inner  # type: ignore[method-assign]
        world._watch = self.watch  # type: ignore[method-assign]

    def inner(self, name: str, *args: object) -> object:
        inner = self._inner(name, *args)  # type: ignore[arg-type]
        if isinstance(inner, DecodeLeader):
            self.leaders.append(inner)
        return inner

    def watch(self, life: int, message: AnyMessage) -> None:
        self._watch(life, message)
        if (
            isinstance(message, UnitReport)
            and message.unit.startswith("decode")
            and message.num_requests >= 8
        ):
            for name, values in self.balances.items():
                values += [message.balance[name]] if name in message.balance else []

    @property
    def stalls(self) -> Counter[int]:
        return sum((leader.slots.moving.stalls for leader in self.leaders), Counter())

    @property
    def num_moved(self) -> int:
        return sum(leader.slots.moving.num_moved for leader in self.leaders)


def run_watched(seed: int, request_balance: str = "auto", *, is_calm: bool = False) -> Watch:
    watches = []

    def make(seed: int) -> World:
        world = uneven_world(seed, request_balance, is_calm=is_calm)
        watches.append(Watch(world))
        return world

    run_seed(seed, make)
    return watches[0]


@pytest.mark.promise(
    "The request keeps its blocks at the source until it has arrived, so a failed "
    "copy costs only the steps that it rested: three at most."
)
@pytest.mark.parametrize("seed", seeds(1, 2, 10))
def test_nobody_notices_a_move(seed: int) -> None:
    watch = run_watched(seed)
    print(f"stalls by steps: {dict(watch.stalls)}; moved: {watch.num_moved}")
    assert max(watch.stalls, default=0) <= STALL_STEPS_MAX, watch.stalls


@pytest.mark.campaign("more worlds")
@pytest.mark.slow("a mean over twenty pairs of worlds at `more`")
def test_moves_make_the_unit_evener() -> None:
    # One message more or less changes a world's balance by up to 0.04. Over 80 pairs of worlds moves
    # gain 0.030; the mean gain of twenty pairs has a standard deviation of 0.008.
    kinds = {
        kind: [run_watched(seed, kind, is_calm=True) for seed in PAIR_SEEDS]
        for kind in ("auto", "no_moves")
    }
    kv = {
        kind: fmean(value for watch in watches for value in watch.balances[KV])
        for kind, watches in kinds.items()
    }
    assert kv["auto"] > kv["no_moves"] + 0.02, kv
    assert [sum(watch.num_moved for watch in kinds[kind]) > 0 for kind in kinds] == [True, False]
    # Few moves: no request is sent back and forth.
    assert sum(watch.num_moved for watch in kinds["auto"]) < 0.5 * len(PAIR_SEEDS) * 30
