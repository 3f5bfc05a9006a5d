"""Fleet in simulated time: one front and units of many ranks. The roles are the server's own; their
steps are priced.

    requests -> front <-> prefill-0 .. decode-0 ..      <->: wire with a delay; KV over ranks' NICs
                             |  ^
                             v  |  disk (lab/sim/world/disk): the cached part of each prompt is an input

Equal arguments give equal runs. Everything that costs time is simulated: steps (lab/sim/runners),
messages, KV transfers, disk reads and writes. Text is not: a prompt is a range of its length, a
block's name is its request and position (lab/sim/world/requests), and of an output only the times
of its first token and its end are recorded. Requests that ran before the start are placed at the
start, so a few seconds of an hour can be simulated without the hour before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from hadal.core.config import DECODE, PREFILL, ROLES, Deployment, units_of
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Deliver
from hadal.core.messages.pools import Pull, StoreBlocks
from hadal.core.messages.units import UnitDown
from hadal.core.seams import Event
from hadal.lab.perf.explain import StepPrice
from hadal.lab.perf.step import MTP_ACCEPT, StepModel
from hadal.lab.sim.runners import DecodeRunner
from hadal.lab.sim.world.arrivals import Arrivals
from hadal.lab.sim.world.clock import SimClock
from hadal.lab.sim.world.disk import DiskSpeed, WorldDisk
from hadal.lab.sim.world.faults import RanksDie, RankSlow, UnitDies, WorldFaults
from hadal.lab.sim.world.kv_links import KvLinks
from hadal.lab.sim.world.process import WIRE_S, Asked, Process, Role
from hadal.lab.sim.world.requests import FINGERPRINT, Requests
from hadal.lab.sim.world.seen import Reading, WorldLog, nothing_seen, read
from hadal.lab.sim.world.units import LoggedRunner, SimUnit, UnitDesign, token_bytes
from hadal.lab.sim.world.warm import WARM, WarmUnit
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.front.front import Front
from hadal.roles.prefill.leader import PrefillLeader


class FleetWorld:
    """One run of a fleet. `models`: role -> step model with as many ranks as the deployment's
    units. `max_context`: longest prompt and output together, tokens.

    `mtp_accept`: probability that a draft is accepted; the deployment sets their number
    (lab/sim/runners). `disk`: speed of the disk cache with `Requests.tokens_cached`. `stores`: True
    if computed and generated blocks are written to it. `faults`: faults to inject; a unit that dies
    is started again, as by a supervisor.
    """

    def __init__(
        self,
        config: Deployment,
        models: Mapping[str, StepModel],
        requests: Requests,
        *,
        max_context: int = 65_536,
        mtp_accept: float = MTP_ACCEPT,
        disk: DiskSpeed | None = None,
        stores: bool = False,
        faults: WorldFaults | None = None,
    ) -> None:
        design = self._design = UnitDesign(config, models, max_context, mtp_accept, stores)
        faults = self._faults = faults or WorldFaults()
        faults.check(design.unit_to_ranks)
        self.clock = SimClock()
        self.requests = requests
        self.processes: dict[str, Process] = {}
        self.seen = nothing_seen(len(requests))
        self.log = WorldLog()
        self._units: dict[str, SimUnit] = {}
        self._num_lives = 0
        kv_bytes = token_bytes(models[DECODE], design.num_drafts)
        self._kv = KvLinks(self.clock, models[DECODE].hardware, kv_bytes)
        self.disk = WorldDisk(
            requests.blocks_cached,
            BLOCK_TOKENS * kv_bytes,
            disk or DiskSpeed(),
            faults.num_loaded,
        )
        self.front = Front(
            config,
            epoch="front-0",
            max_context=max_context,
            fingerprint=FINGERPRINT,
            keeps_text=False,
        )
        front = self._start("front", self.front)
        self._arrivals = Arrivals(
            self.clock, requests, self.disk.num_blocks, front.handle, max_context, stores=stores
        )
        self._start_units(DECODE)
        if requests.is_running.any():
            self._start(WARM, WarmUnit(requests.output_tokens))
            # A batch fills at most half of the decode units' queues.
            most = max(1, config.decode.max_waiting * config.decode.units // 2)
            self.clock.at(self._arrivals.submit_running(most), self._begin)
        else:
            self._begin()
        self._set_faults()

    def run(self, until_s: float) -> None:
        """Run the simulation up to `until_s`."""
        self.clock.run(until_s)

    def read(self, begin_s: float, end_s: float) -> Reading:
        """Return what has happened so far in [begin_s, end_s)."""
        config = self._design.config
        return read(
            begin_s,
            end_s,
            self.log,
            self.seen,
            self.requests,
            {role: units_of(config, role).units for role in ROLES},
            {role: units_of(config, role).ranks for role in ROLES},
        )

    def check(self) -> list[str]:
        """Return the problems that the checks of the front and all leaders find; empty if none."""
        problems = self.front.check()
        for name, process in self.processes.items():
            if isinstance(process.role, PrefillLeader | DecodeLeader):
                problems += [f"{name}: {problem}" for problem in process.role.audit()]
        return problems

    def last_steps(self) -> dict[str, tuple[str, StepPrice]]:
        """Return role -> (first unit by name with a step, price of the step it began last)."""
        found: dict[str, tuple[str, StepPrice]] = {}
        for name, unit in sorted(self._units.items()):
            if unit.runner.price is not None:
                found.setdefault(name.split("-")[0], (name, unit.runner.price))
        return found

    def sample_every(self, period_s: float) -> None:
        """Log KV use and requests of all decode ranks every `period_s`, first after one period."""
        self.clock.after(period_s, partial(self._sample, period_s))

    def _sample(self, period_s: float) -> None:
        for name, unit in self._units.items():
            leader, runner = unit.process.role, unit.runner
            if isinstance(leader, DecodeLeader) and isinstance(runner, DecodeRunner):
                share_R = leader.blocks.num_used_R / leader.blocks.num_blocks_rank
                self.log.ranks.append(
                    (self.clock.now(), name, share_R, runner.requests_R.astype(np.float64))
                )
        self.sample_every(period_s)

    # ---- processes ----
    def _start(self, name: str, role: Role, runner: LoggedRunner | None = None) -> Process:
        process = self.processes[name] = Process(name, role, self.clock, self, runner=runner)
        process.start()
        return process

    def _begin(self) -> None:
        """Start the prefill units and the arrivals, and remove the warm unit."""
        if WARM in self.processes:
            del self.processes[WARM]
            # Not sent as a message: before its arrival the front would still use the warm unit.
            self.processes["front"].handle(UnitDown(WARM, "the warm-up has ended"))
        self._start_units(PREFILL)
        self._arrivals.begin()

    def _start_units(self, role: str) -> None:
        for name in self._design.unit_to_ranks:
            if name.partition("-")[0] != role:
                continue
            if (start_s := self._faults.start_s(name)) > self.clock.now():
                self.clock.at(start_s, partial(self._start_unit, name))
            else:
                self._start_unit(name)

    def _start_unit(self, name: str) -> None:
        role, design = name.partition("-")[0], self._design
        self._num_lives += 1
        leader = design.leader(name, f"{name}-{self._num_lives}", self.disk.view())
        runner = design.runner(role, self.requests.output_tokens)
        process = self._start(name, leader, LoggedRunner(name, role, runner, self.clock, self.log))
        num_ranks = design.unit_to_ranks[name]
        unit = SimUnit(name, self._num_lives, process, runner, num_ranks, self._kv.pools)
        self._units[name] = unit
        unit.begin()

    # ---- faults ----
    def _set_faults(self) -> None:
        at, faults = self.clock.at, self._faults
        for ranks in faults.ranks:
            at(ranks.at_s, partial(self._ranks_die, ranks))
        for dies in faults.units:
            at(dies.at_s, partial(self._unit_dies, dies))
        for slow in faults.slow:
            at(slow.begin_s, partial(self._set_slow, slow, slow.factor))
            at(slow.end_s, partial(self._set_slow, slow, None))

    def _ranks_die(self, fault: RanksDie) -> None:
        unit = self._units.get(fault.unit)
        if unit is not None and unit.lose(fault.ranks):
            self.clock.after(fault.form_s, unit.form)
            self.clock.after(fault.back_s, partial(unit.come, fault.ranks))

    def _unit_dies(self, fault: UnitDies) -> None:
        unit = self._units.pop(fault.unit, None)
        if unit is None:
            return  # It is down already, or has not started yet.
        unit.end()
        del self.processes[fault.unit]
        down = UnitDown(fault.unit, "its process ended")
        self.clock.after(fault.notice_s, lambda: self.processes["front"].handle(down))
        self.clock.after(fault.start_s, partial(self._start_unit, fault.unit))

    def _set_slow(self, fault: RankSlow, factor: float | None) -> None:
        unit = self._units.get(fault.unit)
        if unit is not None and factor is not None:
            unit.runner.slow[fault.rank] = factor
        elif unit is not None:
            unit.runner.slow.pop(fault.rank, None)

    # ---- effects of the processes ----
    def send(self, to: str, message: AnyMessage) -> None:
        """Send a message. Messages to a process that is down, or to the supervisor, are lost."""
        process = self.processes.get(to)
        if process is not None:
            self.clock.after(WIRE_S, lambda: process.post(message))

    def deliver(self, effect: Deliver) -> None:
        """Record the times of a request's first token and of its end."""
        number, now_s = int(effect.request_id), self.clock.now()
        if effect.tokens and np.isnan(self.seen.first_token_s[number]):
            self.seen.first_token_s[number] = now_s
            self.seen.tokens_hit[number] = effect.num_cached
        if effect.final:
            self.seen.end_s[number] = now_s
            self.seen.is_failed[number] = effect.error is not None

    def ask(self, name: str, effect: Asked) -> tuple[float, Callable[[], Event]]:
        """Begin a KV copy, a disk read or a disk write for a rank of unit `name`."""
        if isinstance(effect, Pull):
            return self._kv.pull(name, effect)
        now_s = self.clock.now()
        if isinstance(effect, StoreBlocks):
            end_s, stored = self.disk.store(now_s, name, effect)
            self.log.writes.append((now_s, end_s, len(effect.block_ids) * BLOCK_TOKENS))
            return end_s - now_s, lambda: stored
        begin_s, end_s, loaded = self.disk.load(now_s, name, effect)
        num_tokens = len(effect.into) * BLOCK_TOKENS
        self.log.reads.append((now_s, begin_s, end_s, num_tokens, loaded.num_loaded * BLOCK_TOKENS))
        return end_s - now_s, lambda: loaded
