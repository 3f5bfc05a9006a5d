"""A small run like a live one: real roles in simulated time with drawn delays, recorded.

lab/sim/world/process plays the hosts; the recordings have the format of a server's.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hadal.commands.replay import make_role
from hadal.core.config import Deployment, UnitsConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.messages.pools import Pull
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import Cancel
from hadal.core.model_config import read_model_config
from hadal.core.plans import DecodePlan, KvPulled, PrefillPlan, Sampling, StepDone
from hadal.core.seams import Event
from hadal.lab.sim.world.clock import SimClock
from hadal.lab.sim.world.process import Asked, Process
from hadal.roles.recording import (
    VERSION,
    Made,
    MadeFront,
    MadeSoleLeader,
    Opening,
    Recording,
    parse,
)
from hadal.runtime.recorder import Recorded, Tape

MODEL = read_model_config(Path(__file__).resolve().parents[4] / "models" / "hadal-tiny")
UNITS = UnitsConfig(kv_blocks=40, max_requests=6, max_waiting=8)
DEPLOYMENT = Deployment(model="m", prefill=UNITS, decode=UNITS, chunk_tokens=256)
DRAFTING = msgspec.structs.replace(DEPLOYMENT, decode=msgspec.structs.replace(UNITS, drafts="auto"))
"""Deployment with decode units that choose their number of drafts."""


class Runner:
    """Runner of one rank that draws only token 0. A step's duration is drawn: 2 to 20 ms. The
    number of accepted drafts is drawn per request and pass, up to the drafts that its blocks have
    room for.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._room: dict[int, int] = {}
        """Slot -> positions left in its blocks after the computed ones."""
        self._num_drafts = 0
        """Number of drafts of the last plan."""

    def run(self, plans: tuple[Any, ...]) -> StepDone:
        (plan,) = plans
        elapsed_s = self._rng.uniform(0.002, 0.02)
        if isinstance(plan, PrefillPlan):
            chunks = (*plan.chunks, *plan.second)
            keys = tuple(key for key, chunk in enumerate(chunks) if chunk.sampling is not None)
            return StepDone(plan.step_id, keys, (0,) * len(keys), {}, elapsed_s)
        assert isinstance(plan, DecodePlan)
        for slot in plan.leaves:
            del self._room[slot]
        drafted = self._room.keys() - {join.slot for join in plan.joins}
        for join in plan.joins:
            self._room[join.slot] = len(join.block_ids) * BLOCK_TOKENS - join.num_tokens
        for slot, _, _ in plan.grown:
            self._room[slot] += BLOCK_TOKENS
        keys = []
        for slot in sorted(self._room.keys() - set(plan.resting)):
            for number in range(plan.num_passes):
                num_drafts = plan.num_drafts if number else self._num_drafts * (slot in drafted)
                num_checked = min(num_drafts, self._room[slot] - 1)
                num_drawn = 1 + self._rng.randint(0, max(0, num_checked))
                self._room[slot] -= num_drawn
                keys += [slot] * num_drawn
        self._num_drafts = plan.num_drafts
        return StepDone(plan.step_id, tuple(keys), (0,) * len(keys), {}, elapsed_s)


class Wires:
    """Connections of a process. Messages arrive in order after drawn delays, and every KV pull
    succeeds after a drawn delay.
    """

    def __init__(
        self,
        name: str,
        rng: random.Random,
        clock: SimClock,
        processes: dict[str, Process],
        arrived_s: dict[tuple[str, str], float],
    ) -> None:
        self._name = name
        self._rng = rng
        self._clock = clock
        self._processes = processes
        self._arrived_s = arrived_s

    def send(self, to: str, message: AnyMessage) -> None:
        if to in self._processes:
            wire = self._name, to
            at_s = max(
                self._clock.now() + self._rng.uniform(1e-4, 5e-3),
                self._arrived_s.get(wire, 0.0) + 1e-6,
            )
            self._arrived_s[wire] = at_s
            self._clock.at(at_s, lambda: self._processes[to].post(message))

    def deliver(self, effect: Deliver) -> None:
        pass

    def ask(self, name: str, effect: Asked) -> tuple[float, Callable[[], Event]]:
        assert isinstance(effect, Pull), "there is no disk"
        answer = KvPulled(effect.request_id, effect.attempt, None)
        return self._rng.uniform(1e-3, 2e-2), lambda: answer


def record(
    seed: int, num_requests: int = 30, *, look_s: float = 0.0, deployment: Deployment = DEPLOYMENT
) -> list[Recording]:
    """Serve `num_requests` requests with a front and three units, and return the four recordings.
    Every seventh client leaves. `look_s`: messages within this time, seconds, reach a role in one
    call.
    """
    rng, clock = random.Random(seed), SimClock()
    deployment = msgspec.structs.replace(
        deployment, decode=msgspec.structs.replace(deployment.decode, units=2)
    )
    files: dict[str, io.BytesIO] = {}
    processes: dict[str, Process] = {}
    arrived_s: dict[tuple[str, str], float] = {}
    made: dict[str, Made] = {
        "prefill-0": MadeSoleLeader("prefill", "p0", "pool-p0", "", MODEL),
        "decode-0": MadeSoleLeader("decode", "d0", "pool-d0", "", MODEL),
        "decode-1": MadeSoleLeader("decode", "d1", "pool-d1", "", MODEL),
        "front": MadeFront("f", 2048, "fingerprint"),
    }
    for name, of in made.items():
        files[name] = io.BytesIO()
        opening, tape = Opening(VERSION, "run", name, of, deployment), Tape(files[name].write)
        tape.write(opening)
        processes[name] = Process(
            name,
            Recorded(make_role(opening), tape),
            clock,
            Wires(name, rng, clock, processes, arrived_s),
            look_s=look_s,
            runner=Runner(rng),
        )
        processes[name].start()
    at_s = 0.1
    for number in range(num_requests):
        at_s += rng.expovariate(100.0)
        prompt = tuple(rng.randrange(3, 500) for _ in range(rng.randrange(1, 600)))
        generation = Generation(
            str(number), prompt, (), rng.randrange(1, 40), (1,), 0, Sampling(seed=number), 0
        )
        clock.at(at_s, lambda generation=generation: processes["front"].post(Submit(generation)))  # type: ignore[misc]
        if number % 7 == 6:
            leaves = Cancel(str(number), -1)
            clock.at(
                at_s + rng.uniform(0, 0.2), lambda leaves=leaves: processes["front"].post(leaves)
            )  # type: ignore[misc]
    clock.run(20.0)
    return [parse(file.getvalue()) for file in files.values()]
