"""A fleet at work in simulated time: one front, units of many ranks, all of them the roles that
serve, priced steps.

    requests -> front <-> prefill-0 .. decode-0 ..      every arrow a wire with a delay; KV over the ranks' NICs
                             |  ^
                             v  |  disk (lab/sim/world/disk): what it has of each prompt is known beforehand

The same requests, deployment and models make the same run. What is simulated is what costs time:
steps (lab/sim/runners), messages, KV on its way, reads and writes of the disk. Text is not: a prompt is
a range of its length, a block is named by its place (lab/sim/world/requests), and tokens are counted
where they would be delivered. Requests that ran before are placed at the start, so that seconds of
an hour can be looked at without the hour before.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from hadal.core.config import DECODE, PREFILL, ROLES, Deployment, num_drafts_max, units_of
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Deliver
from hadal.core.messages.pools import Pull, ReadBlocks, StoreBlocks
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import UnitDown
from hadal.core.plans import BlocksRead, BlocksStored, ByNode
from hadal.lab.perf.explain import StepPrice
from hadal.lab.perf.step import MTP_ACCEPT, StepModel
from hadal.lab.sim.runners import DecodeRunner
from hadal.lab.sim.world.clock import SimClock
from hadal.lab.sim.world.disk import DiskSpeed, WorldDisk
from hadal.lab.sim.world.faults import RanksDie, RankSlow, UnitDies, WorldFaults
from hadal.lab.sim.world.process import Process, Role
from hadal.lab.sim.world.requests import FINGERPRINT, Requests
from hadal.lab.sim.world.seen import Reading, WorldLog, nothing_seen, read
from hadal.lab.sim.world.units import (
    LoggedRunner,
    SimUnit,
    runner_of,
    simulated_leader,
    token_bytes,
)
from hadal.lab.sim.world.warm import PLACED_HOPS, SUBMIT_HOPS, WARM, WarmUnit
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.front.front import Front
from hadal.roles.prefill.leader import PrefillLeader


class FleetWorld:
    """One run. `models`: by role, whose ranks must be the deployment's. `max_context`: longest
    prompt and output.

    `wire_s`: a message's way. `look_s`: how long a process collects what arrives. `mtp_accept`: how
    often drafts are right, as many as the deployment makes (lab/sim/runners). `disk`: of the cache that
    `Requests.tokens_cached` tells of; `stores`: what is computed and generated is written to it,
    else it is not. `sample_s`: how often KV use is looked at; 0: never. `faults`: what goes wrong;
    a unit that dies is started again, as by a supervisor.
    """

    def __init__(
        self,
        config: Deployment,
        models: Mapping[str, StepModel],
        requests: Requests,
        *,
        max_context: int = 65_536,
        wire_s: float = 0.0005,
        look_s: float = 0.005,
        mtp_accept: float = MTP_ACCEPT,
        disk: DiskSpeed | None = None,
        stores: bool = False,
        sample_s: float = 0.0,
        faults: WorldFaults | None = None,
    ) -> None:
        for role in ROLES:
            if models[role].num_ranks != units_of(config, role).ranks:
                raise ValueError(
                    f"the {role} model has {models[role].num_ranks} ranks, the deployment another"
                    " number."
                )
        self.clock = SimClock()
        self.requests = requests
        self.processes: dict[str, Process] = {}
        self.seen = nothing_seen(len(requests))
        self.log = WorldLog()
        self._config = config
        self._models = models
        self._max_context = max_context
        self._wire_s = wire_s
        self._look_s = look_s
        self._mtp_accept = mtp_accept
        self._stores = stores
        self._sample_s = sample_s
        self._faults = faults or WorldFaults()
        self._faults.check(self._unit_to_ranks)
        self._node_ranks = (disk or DiskSpeed()).node_ranks
        self._units: dict[str, SimUnit] = {}
        self._pools = {WARM}
        """Names of all that KV can be pulled from."""
        self._num_lives = 0
        num_drafts = num_drafts_max(config, models[DECODE].model)
        self._token_bytes = token_bytes(models[DECODE], num_drafts)
        self.disk = WorldDisk(
            requests.blocks_cached,
            BLOCK_TOKENS * self._token_bytes,
            disk or DiskSpeed(),
            self._num_loaded,
        )
        self._nic_free_s: dict[tuple[str, int], float] = {}
        """When a rank's NIC is done with what it pulls."""
        self._is_running = requests.is_running
        self._arriving = np.flatnonzero(~self._is_running)
        """Requests that come, in their order."""
        self._next = 0
        """Which of those is next."""
        self.front = Front(
            config,
            epoch="front-0",
            max_context=max_context,
            fingerprint=FINGERPRINT,
            keeps_text=False,
        )
        self._start("front", self.front)
        self._start_units(DECODE)
        if self._is_running.any():
            self._start(WARM, WarmUnit(self._output_tokens))
            self._submit_running()
        else:
            self._begin()
        if sample_s:
            self.clock.after(sample_s, self._sample)
        self._set_faults()

    def run(self, until_s: float) -> None:
        """Let time pass."""
        self.clock.run(until_s)

    def read(self, begin_s: float, end_s: float) -> Reading:
        """What happened in [begin_s, end_s), of what has happened so far."""
        config = self._config
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
        """Problems of all ledgers; empty when everything adds up."""
        problems = self.front.check()
        for name, process in self.processes.items():
            if isinstance(process.role, PrefillLeader | DecodeLeader):
                problems += [f"{name}: {problem}" for problem in process.role.audit()]
        return problems

    def last_steps(self) -> dict[str, tuple[str, StepPrice]]:
        """Return the first unit of each role that has worked, and what its last step cost."""
        found: dict[str, tuple[str, StepPrice]] = {}
        for name, unit in sorted(self._units.items()):
            if unit.runner.price is not None:
                found.setdefault(name.split("-")[0], (name, unit.runner.price))
        return found

    # ---- processes ----
    def _start(self, name: str, role: Role, runner: LoggedRunner | None = None) -> Process:
        process = self.processes[name] = Process(
            name,
            role,
            self.clock,
            self._send,
            look_s=self._look_s,
            runner=runner,
            deliver=self._deliver,
            pull_s=lambda effect: self._pull_s(name, effect),
            disk=lambda effect: self._disk(name, effect),
            pull_error=self._pull_error,
            kv_bytes=lambda effect: self._kv_bytes(name, effect),
        )
        process.start()
        return process

    def _begin(self) -> None:
        """Let requests come, and prefill's units take them, from now on."""
        if WARM in self.processes:
            del self.processes[WARM]
            # At once, or who comes meanwhile is sent there.
            self.processes["front"].handle(UnitDown(WARM, "it was only there to begin with"))
        self._start_units(PREFILL)
        if self._arriving.size:
            # Or all that wait would go to the unit whose word that it is up comes first.
            up_s = self.clock.now() + SUBMIT_HOPS * (self._wire_s + self._look_s)
            self.clock.at(
                max(up_s, float(self.requests.arrival_s[self._arriving[0]])), self._submit
            )

    def _start_units(self, role: str) -> None:
        for index in range(units_of(self._config, role).units):
            name = f"{role}-{index}"
            if (start_s := self._faults.start_s(name)) > self.clock.now():
                self.clock.at(start_s, lambda name=name: self._start_unit(name))  # type: ignore[misc]
            else:
                self._start_unit(name)

    def _start_unit(self, name: str) -> None:
        role = name.partition("-")[0]
        self._num_lives += 1
        epoch = f"{name}-{self._num_lives}"
        config, model = self._config, self._models[role]
        leader = simulated_leader(
            name,
            epoch,
            config,
            model,
            self._max_context,
            self.disk.view(),
            stores=self._stores,
        )
        runner = runner_of(role, model, config, self._output_tokens, self._mtp_accept)
        process = self._start(name, leader, LoggedRunner(name, role, runner, self.clock, self.log))
        unit = SimUnit(
            name, self._num_lives, process, runner, self._unit_to_ranks[name], self._pools
        )
        self._units[name] = unit
        unit.begin()

    @property
    def _unit_to_ranks(self) -> dict[str, int]:
        return {
            f"{role}-{index}": units.ranks
            for role in ROLES
            for units in (units_of(self._config, role),)
            for index in range(units.units)
        }

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
            return  # It is down already.
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

    def _num_loaded(self, now_s: float, unit: str, effect: ReadBlocks) -> int:
        """How many of the blocks of a read come."""
        is_lost = self._faults.is_disk_lost(now_s, unit, effect.rank // self._node_ranks)
        return 0 if is_lost else len(effect.into)

    def _pull_error(self, effect: Pull) -> str | None:
        return None if effect.lease.source in self._pools else "its source is gone"

    def _sample(self) -> None:
        """Note what the ranks of decode units hold."""
        for name, unit in self._units.items():
            leader, runner = unit.process.role, unit.runner
            if isinstance(leader, DecodeLeader) and isinstance(runner, DecodeRunner):
                share_R = leader.blocks.num_used_R / leader.blocks.num_blocks_rank
                self.log.ranks.append(
                    (self.clock.now(), name, share_R, runner.requests_R.astype(np.float64))
                )
        self.clock.after(self._sample_s, self._sample)

    # ---- wires ----
    def _send(self, to: str, message: AnyMessage) -> None:
        process = self.processes.get(to)
        if process is not None:  # There is no supervisor.
            self.clock.after(self._wire_s, lambda: process.post(message))

    def _pull_s(self, name: str, effect: Pull) -> float:
        """Return the time until a copy has arrived: one goes behind the other over the NIC of the
        rank that pulls.
        """
        num_bytes = effect.lease.num_tokens * self._token_bytes
        now_s, key = self.clock.now(), (name, effect.rank)
        if effect.lease.source == WARM:
            return self._wire_s  # It was there before.
        free_s = (
            max(self._nic_free_s.get(key, 0.0), now_s)
            + num_bytes / self._models[DECODE].hardware.nic_bytes_per_s
        )
        self._nic_free_s[key] = free_s
        return free_s - now_s + self._wire_s

    def _kv_bytes(self, name: str, effect: Pull) -> ByNode:
        """Return what a copy moved. Units share no node."""
        num_bytes = round(len(effect.into) * BLOCK_TOKENS * self._token_bytes)
        node_ranks = self._models[DECODE].hardware.nvlink_domain
        unit, *rest = effect.lease.source.split(".")
        is_near = unit == name and int(rest[0]) // node_ranks == effect.rank // node_ranks
        return (num_bytes, 0) if is_near else (0, num_bytes)

    def _disk(
        self, unit: str, effect: ReadBlocks | StoreBlocks
    ) -> tuple[float, BlocksRead | BlocksStored]:
        """Return the time until a read or write of a unit's rank is done, and what comes of it."""
        now_s = self.clock.now()
        if isinstance(effect, StoreBlocks):
            end_s, stored = self.disk.store(now_s, unit, effect)
            self.log.writes.append((now_s, end_s, len(effect.block_ids) * BLOCK_TOKENS))
            return end_s - now_s, stored
        begin_s, end_s, loaded = self.disk.load(now_s, unit, effect)
        num_tokens = len(effect.into) * BLOCK_TOKENS
        self.log.reads.append((now_s, begin_s, end_s, num_tokens, loaded.num_loaded * BLOCK_TOKENS))
        return end_s - now_s, loaded

    # ---- requests ----
    def _output_tokens(self, number: int) -> int:
        return int(self.requests.tokens_out[number])

    def _submitted(self, number: int) -> Submit:
        requests = self.requests
        num_blocks = int(self.disk.num_blocks[number])
        if self._stores:  # Names of what can be written, too.
            num_blocks = max(num_blocks, int(requests.tokens_in[number]) // BLOCK_TOKENS)
        return Submit(requests.generation(number, self._max_context, num_blocks))

    def _submit(self) -> None:
        number = int(self._arriving[self._next])
        self._next += 1
        self.processes["front"].handle(self._submitted(number))
        if self._next < self._arriving.size:
            self.clock.at(float(self.requests.arrival_s[self._arriving[self._next]]), self._submit)

    def _submit_running(self) -> None:
        """Those that run at the start: together, for the queue behind each is then looked at once
        and not for each, but no more at once than decode lets wait.
        """
        numbers = np.flatnonzero(self._is_running).tolist()
        most = max(1, self._config.decode.max_waiting * self._config.decode.units // 2)
        hop_s, at_s = self._wire_s + self._look_s, 0.0
        for batch, first in enumerate(range(0, len(numbers), most)):
            at_s = (SUBMIT_HOPS + batch) * hop_s
            self.clock.at(
                at_s,
                lambda some=numbers[first : first + most]: self.processes["front"].handle(  # type: ignore[misc]
                    *(self._submitted(number) for number in some)
                ),
            )
        self.clock.at(at_s + PLACED_HOPS * hop_s, self._begin)

    def _deliver(self, deliver: Deliver) -> None:
        number, now_s = int(deliver.request_id), self.clock.now()
        if deliver.tokens and np.isnan(self.seen.first_token_s[number]):
            self.seen.first_token_s[number] = now_s
            self.seen.tokens_hit[number] = deliver.num_cached
        if deliver.final:
            self.seen.end_s[number] = now_s
            self.seen.is_failed[number] = deliver.error is not None
