"""A whole deployment in simulated time: the real roles, processes that die, and wires that delay,
repeat and lose messages.

    clients -> front <-> prefill-0.. decode-0..     (every arrow a wire: in order, with a delay)
                 ^------ supervisor: notices deaths, restarts

All randomness comes from one generator, so a seed and a commit determine a run. After every event
the ledgers of the role that handled it are checked; clients check every token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import msgspec

from hadal.core.balance import AUTO
from hadal.core.cache import split
from hadal.core.config import Deployment, UnitsConfig, units_of
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.messages.ranks import RankUp
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import (
    Cached,
    Cancel,
    Drain,
    LeaderDown,
    Prefill,
    Returned,
    Sighting,
    Suspect,
    Tokens,
    UnitDown,
)
from hadal.core.placement import spread
from hadal.lab.sim.world.clock import SimClock
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.policy.fairness import is_batch
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.experts.experts import ExpertBalancer
from hadal.roles.front.front import Front
from hadal.roles.leaders import make_leader
from hadal.roles.prefill.leader import PrefillLeader
from hadal.roles.ranks.membership import UnitMembership
from hadal.roles.ranks.rank import RankRole
from hadal.roles.ranks.ranks import RankedLeader
from hadal.roles.ranks.states import UnitPhase
from hadal.roles.reasons import kind_of
from tests.columns import rows_of
from tests.sim.client import Client
from tests.sim.disk import DiskFaults, SimDisk
from tests.sim.engine import DecodeEngine, Pool, PrefillEngine, engine_for, expected_output
from tests.sim.experts import GROWING_S, NUM_EXPERTS, NUM_LAYERS, PORT, TERMS
from tests.sim.host import Host
from tests.sim.names import FINGERPRINT, FINGERPRINT_TO_WEIGHTS, Names
from tests.sim.ranks import Fabric, RankHost
from tests.sim.starving import Starving


@dataclass(frozen=True)
class Faults:
    """Kinds of faults, and how often they occur."""

    duplicate_rate: float = 0.0
    """Share of duplicated messages between processes."""
    engine_rate: float = 0.0
    """Share of steps and copies that fail."""
    crash_every_s: float = 0.0
    """Mean time between faults of units or ranks (deaths, or see `stuck_share`), seconds; 0: never."""
    stuck_share: float = 0.0
    """Share of these faults that freeze a process or cut its links instead of killing it."""
    succession_share: float = 0.7
    """Share of leaders' deaths after which the ranks wait for a successor."""
    stage_rate: float = 0.0
    """Share of stagings of a layer's experts that fail."""
    front_restarts: int = 0
    until_s: float = 20.0
    """Time after which no process is killed or frozen, seconds, so that everything can end. Failed
    steps, failed stagings and duplicates continue.
    """


CALM = Faults(until_s=0.0)
RESTARTED = Faults(
    crash_every_s=1.5, stuck_share=0.2, duplicate_rate=0.05, front_restarts=2, until_s=6.0
)


class World:
    """One simulated deployment. `pool_blocks`: blocks per rank of prefill and decode, scratch included."""

    def __init__(
        self,
        seed: int,
        config: Deployment,
        *,
        max_context: int,
        pool_blocks: tuple[int, int],
        faults: Faults = CALM,
        step_s: float = 0.01,
        pull_s: float = 0.02,
        wire_s: float = 0.002,
        disk_blocks: int = 0,
        disk_faults: DiskFaults | None = None,
        check_every: int = 1,
    ) -> None:
        """`disk_blocks`: size of the folder of `config.cache`. `check_every`: events of a process
        from one check of its ledgers to the next, for worlds with many requests.
        """
        self.random = Random(seed)
        self.clock = SimClock()
        self.names = Names()
        self.fingerprints: tuple[str, ...] = (FINGERPRINT,)
        """Fingerprints that units may have."""
        self.unit_to_fingerprint: dict[str, str] = {}
        """Unit -> its fingerprint from its next start on; for others, the first of `fingerprints`."""
        self.disk = (
            SimDisk(
                self.clock, self.random, disk_blocks, disk_faults or DiskFaults(), self.names.verify
            )
            if config.cache.folder
            else None
        )
        self.config = config
        self.faults = faults
        self.max_context = max_context
        self.pool_blocks = {"prefill": pool_blocks[0], "decode": pool_blocks[1]}
        self.clients: dict[str, Client] = {}
        self.hosts: dict[str, Host] = {}
        self.pools: dict[str, Pool] = {}
        self.fronts: list[Front] = []
        self.num_deaths = 0
        self.starving = Starving()
        self.check_every = check_every
        self.num_returned: Counter[str] = Counter()
        """Reason -> number of attempts that units returned."""
        self.quiet_from_s = max(faults.until_s, 0.2)
        """Time after which no request arrives, and no process is killed or frozen."""
        self.draft_accept = 0.7
        """Share of decode's drafts that are right."""
        self.pass_s: float | None = None
        """Reported seconds of a pass of a decode plan; None: the seconds of a step."""
        self.row_share = 0.0
        """Extra time of a pass per row, as a share of the pass."""
        self.engines: list[PrefillEngine | DecodeEngine] = []
        """Engines of all processes that computed, ended ones included."""
        self._step_s = step_s
        self._pull_s = pull_s
        self._wire_s = wire_s
        self._num_lives = 0
        self._last_arrival_s: dict[tuple[int, str], float] = {}
        self._mail: dict[str, list[AnyMessage]] = {}
        """Messages that sockets keep for a dead process."""
        self._next_index: dict[tuple[int, int], int] = {}
        self._cut_lives: set[int] = set()
        """Lives (runs of a process) that ended before their last messages arrived: these are lost."""
        self.fabrics: dict[str, Fabric] = {}
        """Connections between the ranks of each unit with more than one process."""
        for name in process_names(config):
            if "." in name:
                fabric = self.fabrics.setdefault(
                    name.partition(".")[0], Fabric(self.clock, self.random)
                )
                fabric.stage_fault_rate = faults.stage_rate
            self.clock.after(self.random.uniform(0, 0.1), lambda n=name: self.start_unit(n))
        self.clock.after(self.random.uniform(0, 0.1), self.start_front)
        if faults.crash_every_s:
            self.clock.after(self.random.expovariate(1 / faults.crash_every_s), self._strike)
        for _ in range(faults.front_restarts):
            self.clock.at(self.random.uniform(0.2, faults.until_s), self.start_front)

    # ---- processes ----
    @property
    def front(self) -> Front:
        return self.fronts[-1]

    def start_front(self) -> None:
        """Start the front, or replace the old one: the streams that it held are gone."""
        self._kill("front")
        for name in [name for name, host in self.hosts.items() if host.is_stuck]:
            # The new front has no record of a stuck unit, so only the supervisor can replace it.
            self.kill_unit(name)
        for client in self.clients.values():
            client.is_lost = client.is_lost or client.final is None
        front = Front(
            self.config,
            epoch=self._new_epoch(),
            max_context=self.max_context,
            fingerprint=FINGERPRINT,
        )
        self.fronts.append(front)
        self._start(
            "front",
            Host(
                "front",
                front,
                front.check,
                self.clock,
                self.random,
                self._sender("front"),
                deliver=self._deliver,
            ),
        )

    def start_unit(self, name: str) -> None:
        """Start a unit of one process, the leader of a unit of many, or one of its ranks."""
        role = name.split("-")[0]
        units = self.config.prefill if role == "prefill" else self.config.decode
        epoch = self._new_epoch()
        if "." in name:
            self._start(name, self._rank_host(name, role, epoch))
            return
        pool_name = f"{name}.{epoch}"
        inner = self._inner(name, role, epoch, pool_name)
        if units.ranks > 1:
            leader = self._ranked(name, inner, units)
            self._start(
                name,
                Host(
                    name,
                    leader,
                    lambda: [*leader.check(), *inner.audit()],
                    self.clock,
                    self.random,
                    self._sender(name),
                    disk=self.disk,
                ),
            )
            return
        pool = self.pools[pool_name] = self._pool(name, role)
        engine = self._engine(role, pool)
        self._start(
            name,
            Host(
                name,
                inner,
                inner.audit,
                self.clock,
                self.random,
                self._sender(name),
                pools=self.pools,
                pool_name=pool_name,
                engine=engine,
                step_s=self._step_s,
                pull_s=self._pull_s,
                fault_rate=self.faults.engine_rate,
                disk=self.disk,
            ),
        )

    def _inner(
        self, name: str, role: str, epoch: str, pool_name: str
    ) -> PrefillLeader | DecodeLeader:
        config, num_blocks = self.config, self.pool_blocks[role]
        units = msgspec.structs.replace(units_of(config, role), kv_blocks=num_blocks)
        deployment = msgspec.structs.replace(config, **{role: units})
        # Engines report no ops, so steps are not priced: no layers.
        model = replace(
            DEEPSEEK_V3,
            num_hidden_layers=0,
            first_k_dense_replace=0,
            max_position_embeddings=self.max_context,
        )
        fingerprint = self._fingerprint_of(name)
        return make_leader(deployment, model, name, role, epoch, pool_name, fingerprint=fingerprint)

    def _fingerprint_of(self, unit: str) -> str:
        return self.unit_to_fingerprint.get(unit, self.fingerprints[0])

    def _pool(self, unit: str, role: str) -> Pool:
        return Pool(self.pool_blocks[role], FINGERPRINT_TO_WEIGHTS[self._fingerprint_of(unit)])

    def _ranked(
        self, name: str, inner: PrefillLeader | DecodeLeader, units: UnitsConfig
    ) -> RankedLeader:
        placement = spread(NUM_LAYERS, NUM_EXPERTS, units.ranks, units.redundant_experts)
        membership = UnitMembership(
            name,
            units.ranks,
            placement,
            rank_timeout_s=self.config.rank_timeout_s,
            grace_s=2.0,
            slow_host_rest_s=self.config.slow_host_rest_s,
        )
        experts = ExpertBalancer(
            placement, (0,) * units.ranks, terms=TERMS, is_planning=units.expert_balance == AUTO
        )
        return RankedLeader(
            name,
            inner,
            membership,
            num_slots=units.max_requests,
            experts=experts,
            growing_s=lambda: GROWING_S,
        )

    def leader_of(self, unit: str) -> RankedLeader:
        """Return the leader of a unit of many ranks."""
        role = self.hosts[unit].role
        assert isinstance(role, RankedLeader)
        return role

    def _engine(self, role: str, pool: Pool) -> PrefillEngine | DecodeEngine:
        said = self.draft_accept, self.pass_s, self.row_share
        self.engines.append(engine_for(role, pool, self.config, *said))
        return self.engines[-1]

    def _rank_host(self, name: str, role: str, epoch: str) -> RankHost:
        unit, _, rank = name.partition(".")
        pool_name = f"{name}.{epoch}"
        pool = self.pools[pool_name] = self._pool(unit, role)
        engine = self._engine(role, pool)
        host = f"host-{int(rank) // units_of(self.config, role).ranks_per_node}"
        up = RankUp(unit, int(rank), epoch, host, 1, pool_name, PORT + int(rank))
        return RankHost(
            name,
            RankRole(up),
            self.clock,
            self.random,
            self._sender(name),
            self.fabrics[unit],
            engine,
            epoch=epoch,
            pools=self.pools,
            pool_name=pool_name,
            step_s=self._step_s,
            pull_s=self._pull_s,
            fault_rate=self.faults.engine_rate,
            disk=self.disk,
        )

    def _start(self, name: str, host: Host) -> None:
        assert name not in self.hosts or not self.hosts[name].is_alive, f"{name} runs twice"
        host.life = self._num_lives
        host.starving = self.starving
        host.check_every = self.check_every
        self.hosts[name] = host
        host.start()
        if self.disk is not None and inner_of(host) is not None:
            self.disk.watch(host.handle)
        for message in self._mail.pop(name, []):
            self.clock.after(0.0, lambda m=message: self._arrive(name, m, 0))

    def _new_epoch(self) -> str:
        self._num_lives += 1
        return f"life{self._num_lives}"

    def _kill(self, name: str) -> None:
        host = self.hosts.get(name)
        if host is not None and host.is_alive:
            host.is_alive = False
            if isinstance(host, RankHost):
                host.end()
            if self.random.random() < 0.5:
                self._cut_lives.add(host.life)
            if host.pool_name and self.random.random() < 0.5:
                self.pools.pop(host.pool_name)

    def kill_unit(self, name: str) -> None:
        """Kill a process, report and restart it later. A leader's ranks wait or are killed."""
        if name not in self.hosts or not self.hosts[name].is_alive:
            return
        self._kill(name)
        self.num_deaths += 1
        notice_s = self.random.uniform(0, 0.2)
        told = name.partition(".")[0] if "." in name else "front"
        ranks = [other for other in self.hosts if other.startswith(f"{name}.")]
        is_succeeded = bool(ranks) and self.random.random() < self.faults.succession_share
        down = LeaderDown if is_succeeded else UnitDown
        self.clock.after(notice_s, lambda: self._tell(told, down(name, "the process ended")))
        self.clock.after(notice_s + self.random.uniform(0, 0.5), lambda: self.start_unit(name))
        for rank in () if is_succeeded else ranks:
            self.kill_unit(rank)

    def _tell(self, name: str, message: LeaderDown | UnitDown) -> None:
        if name in self.hosts:
            self.hosts[name].handle(message)

    def _strike(self) -> None:
        if self.clock.now() > self.faults.until_s:
            return
        names = [name for name in self.hosts if name != "front"]
        ranks = [name for name in names if "." in name]
        if ranks and self.random.random() < 0.8:
            names = ranks
        name = self.random.choice(names or ["nobody"])
        host = self.hosts.get(name)
        if host is not None and self.random.random() < self.faults.stuck_share:
            self._upset(host)
        else:
            self.kill_unit(name)
        self.clock.after(self.random.expovariate(1 / self.faults.crash_every_s), self._strike)

    def _upset(self, host: Host) -> None:
        """Freeze a process or cut its links: missing heartbeats are reported to the supervisor."""
        if not isinstance(host, RankHost):
            unit = self.front.units.by_name.get(host.name) if self.fronts else None
            if unit is None or unit.orphan_s is not None:
                # The front expects no heartbeat of this process, so only the supervisor replaces it.
                self.kill_unit(host.name)
                return
            host.is_stuck = True
            return
        what = self.random.choice(["stop", "hang", "cut"])
        if what == "stop":
            host.stop()
        elif what == "hang":
            host.compute.is_hung = True
        else:
            host.fabric.cut()

    # ---- wires ----
    def _sender(self, name: str):  # type: ignore[no-untyped-def]
        """Return a function that sends a process's messages, in order and a little late."""
        life = self._num_lives

        def send(to: str, message: AnyMessage) -> None:
            if to == "supervisor":
                if isinstance(message, Suspect):
                    self.clock.after(
                        self.random.uniform(0, self._wire_s), lambda: self._see(message.process)
                    )
                if not isinstance(message, UnitDown):
                    return
                self.clock.after(0.0, lambda: self.kill_unit(message.unit))
                return
            self._watch(life, message)
            if isinstance(message, Prefill):
                chain = self.names.add(message.generation) if self.config.cache.is_on else b""
                assert message.generation.chain == chain, "the front names it otherwise"
            if isinstance(message, Cached):
                self._verify_named(name, message)
            is_within_unit = "." in name or "." in to
            copies = (
                2 if not is_within_unit and self.random.random() < self.faults.duplicate_rate else 1
            )
            for _ in range(copies):
                wire = (life, to)
                arrival_s = self.clock.now() + self.random.uniform(0, self._wire_s)
                arrival_s = max(arrival_s, self._last_arrival_s.get(wire, 0.0))
                self._last_arrival_s[wire] = arrival_s
                self.clock.at(arrival_s, lambda: self._arrive(to, message, life))

        return send

    def _see(self, name: str) -> None:
        """Report on a process as the supervisor does: a rank to its leader, a unit to the front."""
        host = self.hosts.get(name)
        judge = self.hosts.get(name.partition(".")[0] if "." in name else "front")
        # A fleet stops units for good, so the process may be gone.
        if host is not None and host.is_alive and judge is not None:
            judge.handle(Sighting(name, self.starving.waited_s(self.clock.now()), host.is_stuck))

    def _watch(self, life: int, message: AnyMessage) -> None:
        """Check that one run of a process sends an attempt's tokens in order, and none after the last."""
        for attempt_id, index, _, finish in rows_of(message) if isinstance(message, Tokens) else ():
            key = (life, attempt_id)
            expected = self._next_index.get(key, index)
            assert index == expected, f"{key}: sent token {index}, {expected} was next"
            self._next_index[key] = index + 1 if finish is None else -1

    def _verify_named(self, name: str, message: Cached) -> None:
        """Check that the blocks that a unit reports as cached are what its ranks' memory holds."""
        inner = inner_of(self.hosts[name])
        assert inner is not None
        for rank in inner.blocks.living:
            pool = self.pools.get(inner.blocks.names[rank])
            for block_name in split(message.added) if pool is not None else ():
                for block in inner.blocks[rank].lookup(block_name):
                    self.names.verify(block_name, pool.cells[block])  # type: ignore[union-attr]

    def _arrive(self, to: str, message: AnyMessage, life: int) -> None:
        """Deliver to the process that has the name now, maybe a later run than the sender meant."""
        host = self.hosts.get(to)
        if life in self._cut_lives:
            return
        if host is not None and host.is_alive:
            if isinstance(message, Returned):
                self.num_returned[kind_of(message.reason)] += 1
            host.handle(message)
        elif self.random.random() < 0.5:
            self._mail.setdefault(to, []).append(message)

    # ---- clients ----
    def submit_at(self, at_s: float, generation: Generation, longest: int) -> None:
        self.quiet_from_s = max(self.quiet_from_s, at_s)
        self.clock.at(at_s, lambda: self.submit(generation, longest))

    def submit(self, generation: Generation, longest: int) -> None:
        if "front" not in self.hosts:
            return
        if self.config.cache.is_on:  # Its future output gets names, too.
            self._name_all(generation)
        self.clients[generation.request_id] = Client(generation, longest)
        self.hosts["front"].handle(submitted(generation))

    def _name_all(self, generation: Generation) -> None:
        """Name the blocks of a generation's whole text, for any unit that may work on it."""
        whole = tuple(expected_output(generation))
        for fingerprint in self.fingerprints:
            self.names.add(
                msgspec.structs.replace(generation, output=whole, fingerprint=fingerprint)
            )

    def cancel(self, request_id: str) -> None:
        if request_id in self.clients:
            self.hosts["front"].handle(Cancel(request_id, 0))

    def cancel_at(self, at_s: float, request_id: str) -> None:
        self.clock.at(at_s, lambda: self.cancel(request_id))

    def drain(self) -> None:
        self.hosts["front"].handle(Drain())

    def _deliver(self, effect: Deliver) -> None:
        self.clients[effect.request_id].take(effect)

    # ---- the end ----
    def run(self, until_s: float) -> None:
        self.clock.run(until_s)

    def run_to_the_end(self, limit_s: float) -> None:
        """Run until all streams ended and everything was returned. Raise after `limit_s`."""
        self.clock.run(limit_s, self.is_over)
        open_streams = [
            name
            for name, client in self.clients.items()
            if client.final is None and not client.is_lost
        ]
        assert not open_streams, f"never ended: {open_streams}"
        assert self.front.idle, f"the front still holds {list(self.front.requests.by_id)}"
        for name, host in self.hosts.items():
            inner = inner_of(host)
            if inner is not None:
                used, held = inner.blocks.num_used, inner.num_requests
                assert (used, held) == (0, 0), f"{name} leaks {used} blocks of {held} requests"

    def is_over(self) -> bool:
        """Return whether all processes have released everything, after `quiet_from_s`."""
        if self.clock.now() < self.quiet_from_s or not self.front.idle:
            return False
        if any(
            isinstance(host.role, RankedLeader) and not is_whole(host.role)
            for host in self.hosts.values()
        ):
            return False
        cores = [inner for host in self.hosts.values() if (inner := inner_of(host)) is not None]
        return not any(inner.num_requests or inner.blocks.num_used for inner in cores)


def submitted(generation: Generation) -> Submit:
    """Return a request as its gateway submits it; requests of batches are admitted already."""
    return Submit(generation, is_admitted=is_batch(generation.tenant))


def inner_of(host: Host) -> PrefillLeader | DecodeLeader | None:
    """Return the leader of prefill or decode in a process, which decides about requests."""
    role = host.role.inner if isinstance(host.role, RankedLeader) else host.role
    return role if isinstance(role, PrefillLeader | DecodeLeader) else None


def is_whole(leader: RankedLeader) -> bool:
    """Return whether every rank is a member of the unit's formation, and the unit runs."""
    return (
        leader.membership.phase is UnitPhase.RUNNING
        and len(leader.membership.members) == leader.membership.num_ranks
    )


def process_names(config: Deployment) -> list[str]:
    """Return the names of all processes of a deployment at its largest size, except the front."""
    names = []
    for role, units in (("prefill", config.prefill), ("decode", config.decode)):
        for index in range(config.num_units_max(role)):
            names.append(f"{role}-{index}")
            if units.ranks > 1:
                names += [f"{role}-{index}.{rank}" for rank in range(units.ranks)]
    return names
