"""A deployment in simulated time in which units start and stop: the real fleet role beside the real
front and leaders.

    clients -> front <-> units          front: Demand -> fleet -> DrainUnit, KeepUnit: front
                                        fleet: StartUnit, StopUnit -> units; UnitUp, UnitDown ->
                                        fleet

Messages between front and fleet are late, lost and doubled; units fail to start, and die while they
drain. After every event the fleet's state is checked. A draining unit gets no requests, except the
last decode unit of its weights: it gets the requests that were in prefill when its drain began.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from hadal.core.balance import AUTO
from hadal.core.config import DECODE, Deployment, FleetConfig, UnitsConfig, units_of
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.fleet import Demand, DrainUnit
from hadal.core.messages.units import Decode, Prefill, UnitDown, UnitUp
from hadal.core.seams import (
    Event,
    FleetEffect,
    OfferNodes,
    Send,
    StartUnit,
    StopUnit,
    Tick,
    WakeAt,
    WithdrawNodes,
)
from hadal.roles.fleet.fleet import make_fleet
from hadal.roles.fleet.units import UnitState
from tests.sim.scenario import deployment, longest_output, random_generation
from tests.sim.world import CALM, Faults, World


@dataclass(frozen=True)
class FleetFaults:
    """Faults of the fleet, until `Faults.until_s`."""

    start_fail_share: float = 0.0
    lost_share: float = 0.0
    """Share of lost messages between front and fleet, except UnitUp and UnitDown."""
    drain_death_share: float = 0.0
    """Share of drains in which the unit dies a little later."""


RESTARTED_OFTEN = Faults(
    crash_every_s=1.0, stuck_share=0.3, duplicate_rate=0.1, front_restarts=2, until_s=9.0
)


class FleetWorld(World):
    """World with a fleet that starts and stops units; a plain World without `fleet.mode`."""

    def __init__(
        self,
        seed: int,
        config: Deployment,
        fleet_faults: FleetFaults,
        faults: Faults,
        *,
        max_context: int = 2000,
        pool_blocks: tuple[int, int] = (20, 20),
        **options: Any,
    ) -> None:
        self.fleet = make_fleet(config, 0.0)
        self.fleet_faults = fleet_faults
        self.num_offered = 0
        self.num_drains = 0
        self.num_forced = 0
        """Number of units stopped while they had requests, because their drain had timed out."""
        self._asked: set[str] = set()
        """Units that the fleet has requested; each must have a process."""
        self._wake_number = 0
        super().__init__(
            seed, config, max_context=max_context, pool_blocks=pool_blocks, faults=faults, **options
        )
        if self.has_fleet:
            self.clock.after(0.05, lambda: self._apply(self.fleet.start(self.clock.now())))

    @property
    def has_fleet(self) -> bool:
        return self.config.fleet.is_on

    # ---- processes: the supervisor's part ----
    def start_unit(self, name: str) -> None:
        unit, _, rank = name.partition(".")
        if not self.has_fleet:
            super().start_unit(name)
        elif rank:
            is_there = name in self.hosts and self.hosts[name].is_alive
            if unit in self.hosts and self.hosts[unit].is_alive and not is_there:
                super().start_unit(name)
        elif name in self._asked and name not in self.hosts:
            super().start_unit(name)
            num_ranks = units_of(self.config, name.partition("-")[0]).ranks
            for number in range(num_ranks if num_ranks > 1 else 0):
                self.clock.after(
                    self.random.uniform(0, 0.1),
                    lambda rank=f"{name}.{number}": self.start_unit(rank),
                )

    def kill_unit(self, name: str) -> None:
        if not self.has_fleet or "." in name:
            super().kill_unit(name)  # The supervisor restarts ranks: the fleet has only units.
        elif name in self.hosts and self.hosts[name].is_alive:
            self.num_deaths += 1
            self._end(name, "the process ended")

    def _end(self, name: str, reason: str) -> None:
        for one in [one for one in self.hosts if one == name or one.startswith(f"{name}.")]:
            self._kill(one)
            del self.hosts[one]
        self._asked.discard(name)
        notice_s = self.random.uniform(0, 0.2)
        self.clock.after(notice_s, lambda: self._tell("front", UnitDown(name, reason)))
        self.clock.after(notice_s, lambda: self.tell_fleet(UnitDown(name, reason)))

    def _sender(self, name: str):  # type: ignore[no-untyped-def]
        send = super()._sender(name)

        def with_fleet(to: str, message: AnyMessage) -> None:
            if to == "supervisor" and isinstance(message, UnitUp):
                self.clock.after(self.random.uniform(0, 0.01), lambda: self.tell_fleet(message))
                return
            if to == "supervisor" and isinstance(message, Demand):
                self._perhaps(lambda: self.tell_fleet(message))
                return
            if name == "front" and isinstance(message, Prefill | Decode):
                units, unit = self.front.units, self.front.units.by_name[to]
                is_last = not units.has_open_decode(unit.fingerprint)
                assert unit.drain_by_s is None or (unit.role == DECODE and is_last), (
                    f"{type(message).__name__} to draining {to}"
                )
                assert not (isinstance(message, Prefill) and is_last), (
                    f"Prefill to {to}, for which no decode unit is open"
                )
            send(to, message)

        return with_fleet

    def _perhaps(self, action) -> None:  # type: ignore[no-untyped-def]
        """Run an action after a delay; it may be lost or run twice."""
        for _ in range(2 if self.random.random() < self.faults.duplicate_rate else 1):
            if (
                self.random.random() >= self.fleet_faults.lost_share
                or self.clock.now() > self.faults.until_s
            ):
                self.clock.after(self.random.uniform(0, 0.01), action)

    # ---- the fleet ----
    def tell_fleet(self, event: Event) -> None:
        """Give an event to the fleet, and check the fleet's state after it."""
        if not self.has_fleet:
            return
        self._apply(self.fleet.handle(self.clock.now(), event))
        problems = self.fleet.check()
        assert not problems, f"the fleet after {event}: {problems}"

    def _apply(self, effects: list[FleetEffect]) -> None:
        for effect in effects:
            match effect:
                case StartUnit(unit):
                    self._start_later(unit)
                case StopUnit(unit):
                    self._stop(unit)
                case Send(to, message):
                    self._drains(message)
                    self._perhaps(lambda to=to, message=message: self._hear(to, message))
                case OfferNodes(num):
                    self.num_offered += num
                case WithdrawNodes(num):
                    self.num_offered -= num
                    assert self.num_offered >= 0
                case WakeAt(time_s):
                    self._wake_number += 1
                    self.clock.at(time_s, lambda number=self._wake_number: self._woken(number))

    def _hear(self, to: str, message: AnyMessage) -> None:
        if to in self.hosts:
            self.hosts[to].handle(message)

    def _woken(self, number: int) -> None:
        if number == self._wake_number:
            self.tell_fleet(Tick())

    def _start_later(self, unit: str) -> None:
        assert unit not in self._asked, f"{unit} runs already"
        self._asked.add(unit)
        takes_s = self.random.uniform(0.0, 2 * self.config.fleet.start_s)
        if (
            self.random.random() < self.fleet_faults.start_fail_share
            and self.clock.now() < self.faults.until_s
        ):
            self.clock.after(takes_s, lambda: self._failed(unit))
        else:
            self.clock.after(takes_s, lambda: self.start_unit(unit))

    def _failed(self, unit: str) -> None:
        if unit in self._asked and unit not in self.hosts:
            self._asked.discard(unit)
            self.tell_fleet(UnitDown(unit, "it did not start"))

    def _stop(self, unit: str) -> None:
        if unit in self.hosts:
            held = self.front.requests.on_unit(unit) if "front" in self.hosts else []
            self.num_forced += bool(held)
            self._end(unit, "stopped")
        elif unit in self._asked:
            self._asked.discard(unit)
            self.clock.after(
                self.random.uniform(0, 0.2), lambda: self.tell_fleet(UnitDown(unit, "never ran"))
            )

    def _drains(self, message: AnyMessage) -> None:
        if not isinstance(message, DrainUnit):
            return
        self.num_drains += 1
        if (
            self.random.random() < self.fleet_faults.drain_death_share
            and self.clock.now() < self.faults.until_s
        ):
            self.clock.after(self.random.uniform(0, 0.3), lambda: self.kill_unit(message.unit))

    def is_at_rest(self) -> bool:
        """Return whether only the smallest fleet is up, and all other nodes are offered to other jobs."""
        rules, counts = self.fleet.rules, self.fleet.counts()
        num_free = rules.num_nodes_max - rules.num_nodes(rules.floor)
        return counts[UnitState.UP] == rules.floor and self.num_offered == num_free


def fleet_world(seed: int) -> FleetWorld:
    """Return a world in which the fleet grows and shrinks several times, in some seeds with faults."""
    random = Random(f"fleet {seed}")
    bundle = random.choice([(0, 0), (0, 0), (1, 1), (2, 1)])
    config = deployment(
        chunk_tokens=64,
        heartbeat_s=0.05,
        rank_timeout_s=1.0,
        lease_s=random.choice([2.0, 30.0]),
        prefill=UnitsConfig(max_requests=4),
        decode=UnitsConfig(max_requests=random.choice([2, 6])),
        fleet=FleetConfig(
            AUTO,
            prefill_max=random.randint(1, 4),
            decode_max=random.randint(2, 4),
            bundle_prefill=bundle[0],
            bundle_decode=bundle[1],
            prefill_tokens_per_s=random.choice([0.0, 100.0, 1000.0]),
            decode_tokens_per_s=random.choice([0.0, 60.0, 200.0]),
            start_s=random.choice([0.1, 0.5]),
            period_s=0.1,
            hold_s=random.choice([0.0, 0.5]),
            drain_timeout_s=random.choice([0.05, 0.5, 30.0]),
        ),
    )
    faults, fleet_faults = random.choice(
        [
            (CALM, FleetFaults()),
            (CALM, FleetFaults()),
            (Faults(duplicate_rate=0.2, until_s=9.0), FleetFaults(lost_share=0.5)),
            (Faults(until_s=9.0), FleetFaults(start_fail_share=0.4)),
            (Faults(crash_every_s=1.0, until_s=9.0), FleetFaults(0.2, 0.2, 0.5)),
            (RESTARTED_OFTEN, FleetFaults(0.1, 0.3, 0.3)),
        ]
    )
    world = FleetWorld(seed, config, fleet_faults, faults)
    for wave in range(3):
        for number in range(random.randint(0, 12)):
            generation = random_generation(random, f"r{wave}.{number}", 200, 80)
            at_s = 0.2 + 4.0 * wave + random.uniform(0.0, 1.0)
            world.submit_at(at_s, generation, longest_output(world, len(generation.prompt)))
            if random.random() < 0.1:
                world.cancel_at(at_s + random.uniform(0.0, 1.0), generation.request_id)
    return world
