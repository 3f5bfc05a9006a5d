"""A small deployment with all features: a fleet that starts and drains units of many ranks, caches,
balancers, the gateway's bills, and faults of all of them. A scene (swarm_scene) selects the features
and faults that are on.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from hadal.core.balance import OFF
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.fleet import DrainUnit
from hadal.core.messages.generation import Deliver, Generation, Key
from hadal.core.messages.units import Cancel, Pulled, Returned, Tokens, UnitReport
from hadal.gateway.desk.accounting import Accounting
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.salts import salt_of
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.prefill.leader import PrefillLeader
from hadal.roles.ranks.ranks import RankedLeader
from hadal.roles.reasons import LEASE_EXPIRED, PREEMPTED, kind_of
from hadal.stats.tally import Tally
from tests.columns import rows_of
from tests.sim.client import Client
from tests.sim.disk import DiskFaults
from tests.sim.engine import DecodeEngine, expected_output
from tests.sim.fleet import FleetWorld
from tests.sim.host import Host
from tests.sim.names import FINGERPRINT, OTHER
from tests.sim.ranks import RankHost
from tests.sim.swarm_blocks import BlockWatch
from tests.sim.swarm_calls import LETTERS, MODEL, Call, Sink
from tests.sim.swarm_requests import add_requests
from tests.sim.swarm_scene import OTHER_WEIGHTS, Scene, may_end_with
from tests.sim.world import is_whole, process_names, submitted

UNIX_S = 1_700_000_000.0
NUM_EVENTS_MAX = 2_000_000
"""Maximum number of events of one world: 100x the longest known world. With more, a role loops for ever."""
NEAR = 1e-6
FAULTS_SEEN = (
    "all deaths",
    "freezes",
    "slow ranks",
    "front restarts",
    "late messages",
    "lost messages",
    "lost disks",
)
_GONE = DiskFaults(load_rate=1.0, store_rate=1.0)


class SwarmWorld(FleetWorld):
    """World made of a scene, with its requests."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.calls: dict[str, Call] = {}
        """Request id of each generation -> its call."""
        self.seen: Counter[str] = Counter()
        """Event -> how often it happened."""
        self.digest = 0
        """Checksum of all that clients received, and when."""
        self.sink = Sink()
        self.num_streamed: Counter[int] = Counter()
        """Number of a front -> tokens that it delivered."""
        self._leaders: list[RankedLeader] = []
        self._inner_leaders: list[PrefillLeader | DecodeLeader] = []
        self.watches: dict[PrefillLeader | DecodeLeader, BlockWatch] = {}
        """Leader -> watch of its blocks, for every process of a leader that ran."""
        self._num_events = 0
        self.too_long: set[str] = set()
        """Requests that can never be served."""
        self.submitted_s: dict[str, float] = {}
        """Request -> time of its arrival."""
        self._pulled_s: dict[Key, float] = {}
        """Attempt -> time at which the front first received Pulled: the decode unit has the KV."""
        super().__init__(
            scene.seed,
            scene.config,
            scene.fleet_faults,
            scene.faults,
            max_context=scene.max_context,
            pool_blocks=scene.pool_blocks,
            wire_s=scene.wire_s,
            pull_s=scene.pull_s,
            disk_blocks=scene.disk_blocks,
            disk_faults=scene.disk_faults,
        )
        self.draft_accept, self.pass_s = scene.draft_accept, scene.pass_s
        self.row_share = scene.row_share
        if OTHER_WEIGHTS in scene.on:
            self.fingerprints = (FINGERPRINT, OTHER)
        self._plan_troubles()
        add_requests(self, scene, Random(f"swarm requests {scene.seed}"))

    # ---- requests ----
    def submit_at(self, at_s: float, generation: Generation, longest: int) -> None:
        self.submitted_s[generation.request_id] = at_s
        super().submit_at(at_s, generation, longest)

    def shut_down(self) -> None:
        if "front" in self.hosts:
            self.seen["shutdowns"] += 1
            self.drain()

    def submit(self, generation: Generation, longest: int) -> None:
        """Submit a request of one or more choices, as the gateway does."""
        if "front" not in self.hosts:
            return
        random, on = Random(f"{self.scene.seed} {generation.request_id}"), self.scene.on
        if "priorities" in on:
            generation = msgspec.structs.replace(
                generation, priority=random.choice([-1, 0, 0, 1, 5])
            )
        if "tenants" in on:
            generation = _of_a_tenant(self.scene, generation)
        num_choices = random.choice([1, 2, 3]) if "choices" in on else 1
        versions = [
            msgspec.structs.replace(
                generation,
                request_id=f"{generation.request_id}{'' if index == 0 else f'/{index}'}",
                sampling=msgspec.structs.replace(
                    generation.sampling, seed=generation.sampling.seed + index
                ),
            )
            for index in range(num_choices)
        ]
        call = Call(
            versions,
            [Client(one, longest) for one in versions],
            self._stops(generation, random),
            tenant=Tenant(salt_of(generation.salt)),
            now=self.clock.now,
            tell_front=self._tell_front,
            books=self.books,
            timeout_s=self.config.limits.request_timeout_s,
        )
        for one, client in zip(versions, call.clients, strict=True):
            if self.config.cache.is_on:
                self._name_all(one)
            self.clients[one.request_id] = client
            self.calls[one.request_id] = call
        for one in versions:
            self.seen["requests"] += 1
            self.hosts["front"].handle(submitted(one))

    def _stops(self, generation: Generation, random: Random) -> tuple[str, ...]:
        """Return two stop strings: one from the expected output, and a random one, which rarely occurs.
        Empty without the feature "stop strings", and for 30 % of requests.
        """
        if "stop strings" not in self.scene.on or random.random() < 0.3:
            return ()
        text = "".join(LETTERS[token] for token in expected_output(generation))
        at = random.randrange(len(text))
        return text[at : at + random.choice([1, 2, 3])], "".join(random.sample(LETTERS, 2))

    def _tell_front(self, message: Cancel) -> None:
        self.seen["cancelled generations"] += 1
        self.hosts["front"].handle(message)

    def cancel(self, request_id: str) -> None:
        if self.scene.on & {"cancels", "hasty"} and request_id in self.calls:
            self.seen["clients that left"] += not self.calls[request_id].end
            self.calls[request_id].leave()

    def _deliver(self, effect: Deliver) -> None:
        super()._deliver(effect)
        tokens = [token.token for token in effect.tokens]
        what = self.clock.now(), effect.request_id, tokens, effect.final, effect.error
        self.digest = zlib.crc32(repr(what).encode(), self.digest)
        self.num_streamed[len(self.fronts)] += len(effect.tokens)
        self._verify_end(effect)
        call = self.calls[effect.request_id]
        call.mailbox.put(effect)
        self.clock.after(self.random.choice([0.0, 0.0, self.random.uniform(0, 0.1)]), call.read)

    def _verify_end(self, effect: Deliver) -> None:
        """Check that every end has a reason and a status that this scene allows."""
        if not effect.final:
            return
        self.seen[f"ended {effect.error_status if effect.error else 200}"] += 1
        if effect.error is None:
            return
        name, status = effect.request_id, str(effect.error_status)
        allowed = {"499"} | may_end_with(self.scene)
        if name.partition("/")[0] in self.too_long:
            allowed.add("400")
        assert effect.error.strip(), f"{name} ended with {status} and no reason"
        assert status in allowed, f"{name} ended with {status}: {effect.error}"
        assert status not in ("429", "503") or effect.retry_after_s, (
            f"{name}: {status} without a time to come back"
        )

    # ---- processes ----
    def start_front(self) -> None:
        for call in self.calls.values():
            call.lose()
        self.seen["front restarts"] += bool(self.fronts)
        super().start_front()
        front = self.front
        self.books = Accounting(
            self.config,
            MODEL,
            self.sink,
            lambda: front.units.by_name,
            GatewayClock(self.clock.now, lambda: UNIX_S + self.clock.now()),
        )

    def _inner(self, name: str, role: str, *args: Any) -> PrefillLeader | DecodeLeader:
        inner = super()._inner(name, role, *args)
        self._inner_leaders.append(inner)
        units = self.config.prefill if role == "prefill" else self.config.decode
        keeps_some = self.disk is not None or (
            role == "prefill" and self.config.cache.memory != OFF
        )
        self.watches[inner] = BlockWatch(name, units.max_requests, keeps_some, self.seen)
        self.watches[inner].follow(inner)
        return inner

    def _ranked(self, *args: Any) -> RankedLeader:
        leader = super()._ranked(*args)
        self._leaders.append(leader)
        return leader

    # ---- what goes wrong ----
    def _plan_troubles(self) -> None:
        troubles = self.scene.troubles
        acts: dict[str, Callable[[], None]] = {
            "unit deaths": self._kill_a_unit,
            "rank deaths": self._kill_a_rank,
            "freezes": self._freeze,
            "slow ranks": self._slow,
            "node deaths": self._kill_nodes,
            OTHER_WEIGHTS: self._replace_a_unit,
        }
        for name, every_s in troubles.every_s.items():
            self._again(name, acts[name], every_s)
        self.clock.at(self.faults.until_s, self._calm)
        if troubles.lost_disk_s is not None and self.disk is not None:
            self.clock.at(troubles.lost_disk_s[0], self._lose_disk)
            self.clock.at(troubles.lost_disk_s[1], self._mend_disk)

    def _again(self, name: str, act: Callable[[], None], every_s: float) -> None:
        def strike() -> None:
            if self.clock.now() <= self.faults.until_s:
                act()
                self._again(name, act, every_s)

        self.clock.after(self.random.expovariate(1 / every_s), strike)

    def _calm(self) -> None:
        """End step failures, with which a prompt of a hundred steps might never get through. Give all
        units the same weights; otherwise no decode unit might be able to use another unit's KV.
        """
        self.faults = replace(self.faults, engine_rate=0.0)
        for host in self.hosts.values():
            (host.compute if isinstance(host, RankHost) else host)._fault_rate = 0.0
        if OTHER_WEIGHTS in self.scene.on:
            for name in [name for name in process_names(self.config) if "." not in name]:
                self._replace(name, OTHER)

    def _living(self, *, ranks: bool) -> list[str]:
        return [
            n
            for n, host in self.hosts.items()
            if host.is_alive and n != "front" and ("." in n) == ranks
        ]

    def _kill_a_unit(self) -> None:
        for name in self.random.sample(units := self._living(ranks=False), min(1, len(units))):
            self.seen["unit deaths"] += 1
            self.kill_unit(name)

    def _kill_a_rank(self) -> None:
        for name in self.random.sample(ranks := self._living(ranks=True), min(1, len(ranks))):
            self.seen["rank deaths"] += 1
            self.kill_unit(name)

    def _kill_nodes(self) -> None:
        """Kill processes that share a machine at one instant: units, or ranks of several."""
        names = self._living(ranks=bool(self._living(ranks=True)) and self.random.random() < 0.5)
        self.seen["node deaths"] += len(names) > 1
        for name in self.random.sample(names, min(len(names), self.random.choice([2, 3]))):
            self.kill_unit(name)

    def _replace_a_unit(self) -> None:
        """Restart a unit with other weights, often after a drain (in a fleet, the fleet drains)."""
        if not (units := self._living(ranks=False)):
            return
        name, delay_s = self.random.choice(units), 0.0
        new = FINGERPRINT if self._fingerprint_of(name) == OTHER else OTHER
        if "front" in self.hosts and not self.has_fleet and self.random.random() < 0.7:
            timeout_s, delay_s = self.random.choice([(0.1, 0.5), (0.5, 0.5), (2.0, 1.0)])
            self.seen["units drained for others"] += 1
            self.hosts["front"].handle(DrainUnit(name, timeout_s, self._num_events + 1))
        self.clock.after(delay_s, lambda: self._replace(name, new))

    def _replace(self, name: str, fingerprint: str) -> None:
        """Restart a unit with the weights of `fingerprint`; from `until_s` on with those of OTHER, so
        that all units stay alike.
        """
        new = OTHER if self.clock.now() >= self.faults.until_s else fingerprint
        self.seen["units with other weights"] += self._fingerprint_of(name) != new
        self.unit_to_fingerprint[name] = new
        self.kill_unit(name)
        # If its leader was dead already, ranks may have started again with the old weights.
        for rank in [one for one in self.hosts if one.startswith(f"{name}.")]:
            self.kill_unit(rank)

    def _freeze(self) -> None:
        hosts = [
            host
            for name, host in self.hosts.items()
            if host.is_alive and name != "front" and not host.is_stuck
        ]
        if hosts:
            self.seen["freezes"] += 1
            self._upset(self.random.choice(hosts))

    def _slow(self) -> None:
        """Make a process's steps 5x to 200x as long for a while."""
        hosts = [h for n, h in self.hosts.items() if h.is_alive and n != "front" and h.pool_name]
        if not hosts:
            return
        self.seen["slow ranks"] += 1
        host = self.random.choice(hosts)
        slow = host.compute if isinstance(host, RankHost) else host
        slow._step_s = self._step_s * self.random.choice([5, 30, 200])

        def recover() -> None:
            slow._step_s = self._step_s

        self.clock.after(self.random.choice([0.3, 2.0]), recover)

    def _lose_disk(self) -> None:
        assert self.disk is not None
        self.seen["lost disks"] += 1
        for name in list(self.disk.name_to_location):
            self.disk._drop(name)
        self.disk.faults = _GONE

    def _mend_disk(self) -> None:
        assert self.disk is not None
        self.disk.faults = self.scene.disk_faults

    # ---- wires ----
    def _sender(self, name: str):  # type: ignore[no-untyped-def]
        send, life, troubles = super()._sender(name), self._num_lives, self.scene.troubles

        def late(to: str, message: AnyMessage) -> None:
            if (
                troubles.late_rate
                and self._is_between(name, to)
                and self.random.random() < troubles.late_rate
            ):
                self.seen["late messages"] += 1
                until_s = self.clock.now() + self.random.uniform(0, troubles.late_s)
                self._last_arrival_s[life, to] = max(
                    until_s, self._last_arrival_s.get((life, to), 0.0)
                )
            send(to, message)

        return late

    def _is_between(self, name: str, to: str) -> bool:
        """Return whether this wire is between front and units, while faults occur."""
        return "." not in name and "." not in to and self.clock.now() < self.faults.until_s

    def _arrive(self, to: str, message: AnyMessage, life: int) -> None:
        lost_rate = self.scene.troubles.lost_rate
        # Leader and ranks have one connection, which ends when one of its messages is lost.
        is_losable = (
            bool(lost_rate)
            and self._is_between("", to)
            and not type(message).__name__.startswith("Rank")
        )
        if is_losable and self.random.random() < lost_rate:
            self.seen["lost messages"] += 1
            return
        self.seen[f"message {type(message).__name__}"] += 1
        match message:
            # A message lost with its sender is not received, and nothing is released for it.
            case Pulled(_, request_id, attempt) if life not in self._cut_lives:
                self._pulled_s.setdefault((request_id, attempt), self.clock.now())
            case Returned(_, request_id, attempt, reason) if kind_of(reason) == LEASE_EXPIRED:
                self._verify_lease((request_id, attempt))
        super()._arrive(to, message, life)

    def _verify_lease(self, key: Key) -> None:
        """Check that a lease expired only because nothing pulled its KV: pulled KV is released soon after."""
        is_on_time = not (
            self.scene.on & {"lost messages", "late messages", "front restarts", "freezes"}
        )
        held_s = self.clock.now() - self._pulled_s.get(key, self.clock.now())
        assert not is_on_time or held_s < 4 * self._wire_s + NEAR, (
            f"{key} was pulled {held_s} s ago, and not released"
        )

    def _watch(self, life: int, message: AnyMessage) -> None:
        if self.scene.faults.duplicate_rate and isinstance(message, Tokens):
            for attempt_id, index, *_ in rows_of(message):
                # A duplicated Decode of an ended attempt gets a slot again; its tokens are unused.
                if not 0 <= self._next_index.get((life, attempt_id), 0) <= index:
                    del self._next_index[life, attempt_id]
                    self.seen["attempts seated twice"] += 1
        super()._watch(life, message)
        if isinstance(message, UnitReport):
            assert 0 <= message.num_blocks_used <= message.num_blocks, f"{message}"
            assert message.num_requests >= 0, f"{message}"
            assert all(0 < value <= 1 + NEAR for value in message.balance.values()), (
                f"mean above maximum: {message}"
            )

    # ---- the end ----
    def is_over(self) -> bool:
        self._num_events += 1
        assert self._num_events < NUM_EVENTS_MAX, f"{NUM_EVENTS_MAX} events, and no end"
        return super().is_over() and all(call.end for call in self.calls.values())

    def verify_end(self) -> None:
        """Check that every process has released everything, and that bills equal what clients received."""
        for name, call in self.calls.items():
            assert call.end, f"{name}: its client never heard the end"
            call.check(self.sink)
        for number, front in enumerate(self.fronts, 1):
            totals = front.totals
            assert totals.tokens_out == self.num_streamed[number], (
                f"{totals}, {self.num_streamed[number]} streamed"
            )
            ended = totals.finished + totals.cancelled + totals.failed + totals.refused
            assert ended + len(front.requests.by_id) == totals.submitted, f"{totals}"
        assert not self.front.check()
        for name, host in self.hosts.items():
            self._verify_idle(name, host)
        self._verify_ledger()

    def _verify_idle(self, name: str, host: Host) -> None:
        """Check that a unit without requests holds nothing."""
        role = host.role
        inner = role.inner if isinstance(role, RankedLeader) else role
        if isinstance(role, RankedLeader):
            assert is_whole(role), f"{name} is not whole"
            assert not role._requests._asked, f"{name} waits for {role._requests._asked}"
        if isinstance(inner, PrefillLeader | DecodeLeader):
            assert not inner.audit(), inner.audit()
            watch = self.watches[inner]
            assert watch.keeps_some or not watch.left, f"{name} never freed {watch.left}"
        if isinstance(inner, PrefillLeader):
            held = [*inner._waiting, *inner._started, *inner.leases._leases]
            assert not held, f"{name} holds {held}"
        if isinstance(inner, DecodeLeader):
            held = [*inner.slots.key_to_slot, *inner.slots.moving.arriving]
            assert not held, f"{name} holds {held}"
            assert not inner.table.state.any(), f"{name}: slots are in use"

    def _verify_ledger(self) -> None:
        """Check that the day's sums equal the facts, and the facts the usage that was shown."""
        tally = Tally()
        tally.add_facts(self.sink.requests.values())
        calls = {id(call): call for call in self.calls.values() if call.end != "lost"}.values()
        usages = [call.reply.usage for call in calls]
        sums = [counts for _, counts in tally]
        found = sum(one.tokens_out for one in sums)
        assert found == sum(usage.num_output_tokens for usage in usages)
        assert sum(one.num_requests for one in sums) == sum(len(call.versions) for call in calls)
        found = sum(one.income_pico_usd for one in sums)
        assert found == sum(f.income_pico_usd for f in self.sink.requests.values())

    def count(self) -> Counter[str]:
        """Return what the run saw, for the table of the swarm."""
        seen = self.seen + Counter(
            {f"returned {kind_of(why)}": num for why, num in self.num_returned.items()}
        )
        seen["all deaths"] += self.num_deaths
        seen["drains"] += self.num_drains
        seen["forced drains"] += self.num_forced
        for front in self.fronts:
            seen["retries"] += front.totals.retries
            seen["tokens streamed"] += front.totals.tokens_out
            seen["tokens hit"] += front.totals.tokens_hit
        for inner in self._inner_leaders:
            if isinstance(inner, DecodeLeader):
                seen["moves"] += inner.slots.moving.num_moved
                seen["moves called off"] += inner.slots.moving.num_called_off
            else:
                seen.update(
                    {
                        name.replace("_", " "): num
                        for name, num in inner.cache.totals().items()
                        if num
                    }
                )
        for engine in self.engines:
            if isinstance(engine, DecodeEngine):
                seen["drafts checked"] += engine.num_tried
                seen["drafts right"] += engine.num_right
                seen["rows that rested"] += engine.num_rested
        seen["preemptions"] = self.num_returned[PREEMPTED]
        seen["faults"] = sum(seen[what] for what in FAULTS_SEEN)
        for leader in self._leaders:
            seen["generations of units"] += leader.membership.formation
            seen["experts: layers flipped"] += leader.experts.moves.num_layers_flipped
            seen["experts: replicas moved"] += leader.experts.moves.num_replicas_moved
            seen["experts: given up"] += leader.experts.moves.num_abandoned
        return +seen


def _of_a_tenant(scene: Scene, generation: Generation) -> Generation:
    """Return the generation with a drawn tenant: one with many requests, one with few, or a batch."""
    random = Random(f"{scene.seed} tenant {generation.request_id}")
    # Once the front drains, a waiting request of a batch is never started.
    batch = "c" if "shutdown" in scene.on else "c/batch"
    tenant = random.choice(["a", "b", "b", "b", "c", batch])
    weight = 2.0 if tenant == "b" and scene.seed % 3 == 0 else 1.0
    return msgspec.structs.replace(generation, tenant=tenant, weight=weight)
