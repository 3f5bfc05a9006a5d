"""The fleet on six hosts for a compressed day. Units start and stop as in the simulator, and the
off-peak job uses the hosts that they leave.

Every request of the day has a due time, drawn beforehand by the shape of DeepSeek's published day.
`[fleet]` sets a unit's speed, so that the policy's thresholds decide and not this machine. The
simulator is the real fleet role with the real front and leaders (tests/sim/fleet). It gets the same
requests and the measured start-up, stop and step times. The results of both are printed side by
side, not compared: on a busy machine one second more or less changes a step.

    HADAL_LEVEL=all HADAL_HOUR_S=10 pytest tests/dist/test_fleet_hosts.py -s
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import numpy as np
import pytest

from hadal.core.config import ROLES, CacheConfig, Deployment, FleetConfig, LimitsConfig, UnitsConfig
from hadal.core.messages.fleet import DrainUnit, KeepUnit
from hadal.core.messages.generation import Generation
from hadal.core.plans import Sampling
from hadal.core.seams import FleetEffect, Send, StartUnit, StopUnit
from hadal.lab.sim.day.clock import DemandClock, hour_beijing
from hadal.lab.sim.day.published import HOUR_S as REAL_HOUR_S
from hadal.roles.fleet.demand import NUM_SAMPLES
from tests.dist.hosts import NEEDS_HOSTS, PORT, ROOT, Hosts
from tests.dist.test_hosts import SMALL, Deployed, is_gone, serve
from tests.sim.engine import VOCAB
from tests.sim.fleet import FleetFaults, FleetWorld
from tests.sim.scenario import longest_output
from tests.sim.world import Faults
from tests.waiting import DEADLINE_S, PATIENCE_S, unix_now, wait_until

HOUR_S = float(os.environ.get("HADAL_HOUR_S", "60"))
"""Real duration of an hour of the day, seconds."""
DAY_S = 24 * HOUR_S
SEED = 17
RATE_PER_S = 0.9
"""Mean requests per second of the day. Two cores bear the peak, which is a third higher."""
LENGTHS = [(num_in, num_out) for num_in in (48, 96, 144) for num_out in (12, 20, 28, 36)]
"""(prompt tokens, answer tokens) of each kind; 96 and 24 on average."""
SHARE_2_PREFILL, SHARE_2_DECODE = 0.0285, 0.01775
"""Share of the day's load in one hour above which a second unit is needed; a third at twice the share."""
FLEET: dict[str, Any] = {
    "mode": "auto",
    "prefill_max": 2,
    "decode_max": 3,
    "prefill_tokens_per_s": 96 * 24 * RATE_PER_S * SHARE_2_PREFILL,
    "decode_tokens_per_s": 24 * 24 * RATE_PER_S * SHARE_2_DECODE,
    "prefill_use": 1.0,
    "decode_use": 1.0,
    "start_s": 15.0,
    "period_s": HOUR_S / 12,
    "hold_s": HOUR_S / 2,
}
FLOOR, PEAK = {"prefill": 1, "decode": 1}, {"prefill": 2, "decode": 3}
QUIET_S = (NUM_SAMPLES + 1) * FLEET["period_s"] + FLEET["hold_s"]
"""Seconds after which the fleet has forgotten earlier demand."""
PIECE_S = 3.0
PIECE_SIZE = 20_000
LIMIT = 10**8
PATIENCE: dict[str, Any] = {"unit_timeout_s": 8.0}
"""Patient timeouts, because all hosts share this machine's cores."""
UNITS = {**SMALL, "max_requests": 16}
_EVENT = re.compile(
    r"^(\S+) supervisor .*?(?:(starting|draining|keeping|stopping) ((?:prefill|decode)-\d+)\b"
    r"|((?:prefill|decode)-\d+) (is ready|ended))",
    re.M,
)

pytestmark = [NEEDS_HOSTS, pytest.mark.full, pytest.mark.timeout(24 * HOUR_S + 1200)]


# ---- the day's requests ----
@dataclass(frozen=True)
class Asked:
    """A request of the day."""

    at_s: float
    kind: int
    """Index of its prompt and lengths."""


def requests_of_the_day() -> list[Asked]:
    """Return the day's requests: a Poisson process under the load clock of the published day."""
    rng = np.random.default_rng(SEED)
    scale = REAL_HOUR_S / HOUR_S
    gaps = rng.exponential(scale / RATE_PER_S, int(2 * DAY_S * RATE_PER_S) + 50)
    loads = np.cumsum(gaps)
    times = DemandClock().at_s(loads[loads < 24 * REAL_HOUR_S]) / scale
    return [Asked(float(at_s), int(rng.integers(len(LENGTHS)))) for at_s in times]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED + 1)
    return [rng.integers(10, 130, num_in).tolist() for num_in, _ in LENGTHS]


# ---- what a fleet did ----
@dataclass(frozen=True)
class Move:
    """Action of the fleet or its result: starting, draining, keeping, stopping, ready, ended."""

    at_s: float
    """Seconds since the day began."""
    what: str
    unit: str

    @property
    def role(self) -> str:
        return self.unit.partition("-")[0]


class Moves:
    """All moves of a run, in order of time."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = sorted(moves, key=lambda move: move.at_s)

    def steps(self) -> dict[str, list[int]]:
        """Return role -> number of working or starting units after each change within the day."""
        steps: dict[str, list[int]] = {role: [] for role in ROLES}
        units = {role: set[str]() for role in ROLES}
        for move in self.moves:
            of_role = units[move.role]
            before = len(of_role)
            if move.what in ("starting", "keeping"):
                of_role.add(move.unit)
            elif move.what in ("draining", "stopping", "ended"):
                of_role.discard(move.unit)
            if len(of_role) != before and 0.0 <= move.at_s < DAY_S:
                steps[move.role].append(len(of_role))
        return steps

    def node_s(self, begin_s: float, end_s: float) -> float:
        """Return the seconds that units had nodes between these times, from start to end, summed."""
        since: dict[str, float] = {}
        total = 0.0
        for move in self.moves:
            if move.what == "starting":
                since.setdefault(move.unit, move.at_s)
            elif move.what == "ended" and move.unit in since:
                total += _overlap(since.pop(move.unit), move.at_s, begin_s, end_s)
        return total + sum(_overlap(at_s, end_s, begin_s, end_s) for at_s in since.values())

    def took_s(self, first: str, then: str) -> list[float]:
        """Return seconds from move `first` to `then` of each unit, for first moves within the day."""
        since: dict[str, float] = {}
        found = []
        for move in self.moves:
            if move.what == first and 0.0 <= move.at_s < DAY_S:
                since[move.unit] = move.at_s
            elif move.what == then and move.unit in since:
                found.append(move.at_s - since.pop(move.unit))
            elif move.what == "keeping":
                since.pop(move.unit, None)
        return found


def _overlap(one_s: float, two_s: float, begin_s: float, end_s: float) -> float:
    return max(0.0, min(two_s, end_s) - max(one_s, begin_s))


def moves_in(log: str, began_unix_s: float) -> Moves:
    """Return the moves in a server's log."""
    found = []
    for at, what, unit, other, became in _EVENT.findall(log):
        at_s = datetime.fromisoformat(at).timestamp() - began_unix_s
        found.append(Move(at_s, what or became.removeprefix("is "), unit or other))
    return Moves(found)


# ---- the simulator ----
class SimulatedDay(FleetWorld):
    """Simulation of the same day, with measured times."""

    def __init__(self, asked: Sequence[Asked], start_s: float, stop_s: float, step_s: float):
        self.moves: list[Move] = []
        self._start_s, self._stop_s = start_s, stop_s
        self._begin_s = start_s + QUIET_S
        super().__init__(
            SEED,
            Deployment(
                prefill=UnitsConfig(**UNITS),
                decode=UnitsConfig(**UNITS),
                cache=CacheConfig(memory="off"),
                limits=LimitsConfig(request_timeout_s=4000.0),
                fleet=FleetConfig(**FLEET),
                **PATIENCE,
            ),
            FleetFaults(),
            Faults(until_s=0.0),
            pool_blocks=(96, 96),
            step_s=step_s,
        )
        for number, one in enumerate(asked):
            generation = _generation(number, *LENGTHS[one.kind])
            longest = longest_output(self, len(generation.prompt))
            self.submit_at(self._begin_s + one.at_s, generation, longest)

    def run_day(self) -> Moves:
        self.clock.run(self._begin_s + DAY_S)
        return Moves(self.moves)

    def _apply(self, effects: list[FleetEffect]) -> None:
        for effect in effects:
            match effect:
                case StartUnit(unit):
                    self._note("starting", unit)
                case StopUnit(unit):
                    self._note("stopping", unit)
                case Send(_, DrainUnit(unit)):
                    self._note("draining", unit)
                case Send(_, KeepUnit(unit)):
                    self._note("keeping", unit)
        super()._apply(effects)

    def _note(self, what: str, unit: str) -> None:
        self.moves.append(Move(self.clock.now() - self._begin_s, what, unit))

    def _start_later(self, unit: str) -> None:
        self._asked.add(unit)
        self.clock.after(self._start_s, lambda: self.start_unit(unit))

    def _stop(self, unit: str) -> None:
        self.clock.after(self._stop_s, lambda: self._ended(unit))

    def _ended(self, unit: str) -> None:
        if unit in self._asked:
            self._note("ended", unit)
        super()._stop(unit)


def _generation(number: int, num_in: int, num_out: int) -> Generation:
    prompt = np.random.default_rng(number).integers(VOCAB, size=num_in)
    sampling = Sampling(seed=number)
    return Generation(f"r{number}", tuple(prompt.tolist()), (), num_out, (), 0, sampling, 0)


# ---- live ----
class LiveDay:
    """The day's requests to a deployment, and their results."""

    def __init__(self, deployed: Deployed) -> None:
        self.began_unix_s = 0.0
        self.differing: list[str] = []
        self.token_s: list[float] = []
        """Seconds per token of each answer."""
        self._url = deployed.server.url
        self._prompts = prompts()

    async def ask(self, client: httpx.AsyncClient, kind: int) -> list[int]:
        body = {
            "model": "hadal-tiny",
            "prompt": self._prompts[kind],
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": LENGTHS[kind][1],
            "return_token_ids": True,
        }
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        tokens: list[int] = reply.json()["choices"][0]["token_ids"]
        assert len(tokens) == LENGTHS[kind][1]
        return tokens

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits)

    async def quiet(self) -> list[list[int]]:
        """Return the answers of an otherwise idle deployment."""
        async with self.client() as client:
            return [await self.ask(client, kind) for kind in range(len(LENGTHS))]

    async def day(self, asked: Sequence[Asked], expected: list[list[int]]) -> None:
        """Send each request when it is due."""
        self.began_unix_s = unix_now()
        async with self.client() as client:

            async def one(number: int, request: Asked) -> None:
                await asyncio.sleep(request.at_s)
                sent_s = unix_now()
                tokens = await self.ask(client, request.kind)
                self.token_s.append((unix_now() - sent_s) / len(tokens))
                if tokens != expected[request.kind]:
                    self.differing.append(f"request {number}: {tokens}")

            await asyncio.gather(asyncio.sleep(DAY_S), *(one(*each) for each in enumerate(asked)))


class ValleyJob:
    """The off-peak example job, on the first host."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        limits = ("--limit", str(LIMIT), "--piece-size", str(PIECE_SIZE))
        address = f"{hosts[0].address}:{PORT}"
        command = [sys.executable, str(ROOT / "examples" / "valley.py"), "--address", address]
        self._process = hosts[0].start("valley", [*command, *limits, "--piece-s", str(PIECE_S)])

    def end(self) -> dict[str, Any]:
        """Stop the job and return its last report."""
        self._hosts[0].signal("valley", signal.SIGTERM)
        assert self._process.wait(DEADLINE_S) == 0, self._hosts[0].log("valley")
        return self._told()[-1]

    def node_s(self, begin_s: float, end_s: float) -> float:
        """Return the node seconds of the job between two Unix times."""
        told = [one for one in self._told() if "nodes" in one]
        ends = [one["unix_s"] for one in told[1:]] + [end_s]
        return sum(
            one["nodes"] * _overlap(one["unix_s"], until_s, begin_s, end_s)
            for one, until_s in zip(told, ends, strict=True)
        )

    def _told(self) -> list[dict[str, Any]]:
        lines = self._hosts[0].log("valley").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def num_primes(limit: int) -> int:
    is_prime = np.ones(limit, bool)
    is_prime[:2] = False
    for divisor in range(2, int(limit**0.5) + 1):
        is_prime[divisor * divisor :: divisor] = False
    return int(is_prime.sum())


_LEFT = """
import json, ray
from ray.util.placement_group import placement_group_table
ray.init(address="ADDRESS", log_to_driver=False, logging_level="ERROR")
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.experimental.internal_kv import _internal_kv_get, internal_kv_get_gcs_client
groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
floor = json.loads(_internal_kv_get("autoscaler_resource_request") or "[]")
state = get_cluster_resource_state(internal_kv_get_gcs_client())
for each in state.cluster_resource_constraints:
    floor += [str(request) for request in each.resource_requests]
print(json.dumps([len(groups), len(floor)]))
"""


def in_ray(hosts: Hosts, name: str) -> tuple[int, int]:
    """Return the number of placement groups in Ray, and of bundles requested from its autoscaler."""
    script = _LEFT.replace("ADDRESS", f"{hosts[0].address}:{PORT}")
    process = hosts[0].start(name, [sys.executable, "-c", script])
    assert process.wait(DEADLINE_S) == 0, hosts[0].log(name)
    groups, floor = json.loads(hosts[0].log(name).splitlines()[-1])
    return groups, floor


def table(
    asked: Sequence[Asked], live: Moves, simulated: Moves, job: ValleyJob, began_unix_s: float
) -> str:
    """Return a table by hour, for the log of experiments."""
    rows = [
        "| hour | requests | tokens/s out | nodes live | simulated | of the job |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for hour in range(24):
        begin_s, end_s = hour * HOUR_S, (hour + 1) * HOUR_S
        kinds = [one.kind for one in asked if begin_s <= one.at_s < end_s]
        tokens_per_s = sum(LENGTHS[kind][1] for kind in kinds) / HOUR_S
        of_job = job.node_s(began_unix_s + begin_s, began_unix_s + end_s) / HOUR_S
        nodes = [each.node_s(begin_s, end_s) / HOUR_S for each in (live, simulated)]
        rows.append(
            f"| {hour_beijing(hour):02}:00 | {len(kinds)} | {tokens_per_s:.1f} | {nodes[0]:.2f}"
            f" | {nodes[1]:.2f} | {of_job:.2f} |"
        )
    return "\n".join(rows)


def owned(deployed: Deployed) -> dict[str, int]:
    """Return role -> number of units that have nodes."""
    units = deployed.server.status().processes
    return {
        role: sum(name.startswith(role) and units[name].phase != "resting" for name in units)
        for role in ROLES
    }


@pytest.mark.promise("examples/ has a job for the nodes that a fleet leaves free")
@pytest.mark.promise(
    "the nodes of a stopped unit go back to Ray, and are acquired again before it starts"
)
def test_a_day_of_units_that_come_and_go_and_a_job_that_has_what_they_leave() -> None:
    asked = requests_of_the_day()
    with Hosts(6) as hosts, tempfile.TemporaryDirectory(prefix="hadal-v-") as folder:
        hosts.start_ray(0, *[1] * 5)
        deployed = serve(
            hosts,
            Path(folder),
            prefill=UNITS,
            decode=UNITS,
            fleet=FLEET,
            cache={"memory": "off"},
            cluster={**hosts.cluster, "node_timeout_s": 15.0},
            **PATIENCE,
        )
        hosts[0].call(deployed.server.wait_ready)
        deployed.wait_whole()
        live = LiveDay(deployed)
        expected = hosts[0].call(lambda: asyncio.run(live.quiet()))
        job = ValleyJob(hosts)
        wait_until(lambda: owned(deployed) == FLOOR, "only the floor is there")
        time.sleep(QUIET_S)
        told = (2 + 3, 2)  # Groups of the floor and of the job, and bundles requested from Ray.
        wait_until(lambda: in_ray(hosts, "before") == told, "Ray has them")
        hosts[0].call(lambda: asyncio.run(live.day(asked, expected)))
        log = deployed.server.log()
        done = job.end()
        hosts[0].signal("serve", signal.SIGTERM)
        assert deployed.server.process.wait(DEADLINE_S) == 0
        print(log[-5000:])

        wait_until(lambda: is_gone(hosts), "nothing of it is left on any host")
        wait_until(lambda: in_ray(hosts, "after") == (0, 0), "Ray has nothing of it")
        moves = moves_in(log, live.began_unix_s)
        starts, stops = moves.took_s("starting", "ready"), moves.took_s("stopping", "ended")
        assert starts, "no unit that came was ever ready"
        world = SimulatedDay(asked, mean(starts), mean(stops), median(live.token_s))
        simulated = world.run_day()
        print(table(asked, moves, simulated, job, live.began_unix_s))
        minutes = [each.node_s(0.0, DAY_S) / 60.0 for each in (moves, simulated)]
        drains = [each.took_s("draining", "stopping") for each in (moves, simulated)]
        print(f"{len(asked)} requests")
        print(f"node-minutes {minutes[0]:.2f} live, {minutes[1]:.2f} simulated,")
        print(f"{done['node_minutes']} of the job, which did {len(done['pieces'])} pieces")
        print("starts", _seconds(starts), "stops", _seconds(stops))
        print("drains", _seconds(drains[0]), "simulated", _seconds(drains[1]))
        print("steps", moves.steps(), "simulated", simulated.steps())
    assert not live.differing
    for each in (moves, simulated):
        assert {role: max(steps) for role, steps in each.steps().items()} == PEAK
    num_done = len(done["pieces"])
    assert done["pieces"] == [[n * PIECE_SIZE, (n + 1) * PIECE_SIZE] for n in range(num_done)]
    assert done["primes"] == num_primes(num_done * PIECE_SIZE)
    assert job.node_s(live.began_unix_s, live.began_unix_s + DAY_S) > 0.0


def _seconds(took_s: Sequence[float]) -> str:
    return " ".join(f"{each:.1f}" for each in took_s)
