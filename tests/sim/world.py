"""A whole deployment in simulated time: the real roles, processes that die, and wires that delay, repeat and lose.

    clients -> front <-> prefill-0.. decode-0..     (every arrow a wire: in order, with a delay)
                 ^------ supervisor: notices deaths, restarts

Everything random comes from one generator, so a seed and a commit are a run. After every event the ledgers of the role
that took it are checked; clients check every token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hadal.core.config import Deployment
from hadal.core.messages import AnyMessage, Cancel, Drain, Generation, Returned, Submit, Tokens, UnitDown
from hadal.core.seams import Deliver
from hadal.roles.decode import DecodeLeader
from hadal.roles.front import Front
from hadal.roles.prefill import PrefillLeader
from hadal.roles.reasons import kind_of
from tests.sim.clock import SimClock
from tests.sim.engine import DecodeEngine, Pool, PrefillEngine, expected_output
from tests.sim.host import Host


@dataclass(frozen=True)
class Faults:
    """What may go wrong, and how often."""

    duplicate_rate: float = 0.0
    """Of messages between processes."""
    engine_rate: float = 0.0
    """Of steps and copies that fail."""
    crash_every_s: float = 0.0
    """Mean time between deaths of units; 0: never."""
    stuck_share: float = 0.0
    """Of those deaths that are silences: the process lives and does nothing."""
    front_restarts: int = 0
    until_s: float = 20.0
    """Nothing goes wrong after this, so that everything can end."""


@dataclass
class Client:
    """One stream, and what it must receive."""

    generation: Generation
    longest: int
    """Tokens that fit in the context and the units."""
    expected: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    final: Deliver | None = None
    is_lost: bool = False
    """The front that held it died; its stream broke."""

    def take(self, effect: Deliver) -> None:
        assert self.final is None, f"{effect.request_id}: something came after the end"
        if not self.expected:
            self.expected = expected_output(self.generation)[: self.longest]
        for token in effect.tokens:
            name = f"{effect.request_id}[{token.index}]"
            assert token.index == len(self.received), f"{name} came, {len(self.received)} was next"
            assert token.token == self.expected[token.index], f"{name} is wrong"
            is_last = token.index + 1 == len(self.expected)
            assert (token.finish is not None) == is_last, f"{name}: finish is {token.finish}"
            stops = token.token in self.generation.stop_ids and token.index >= self.generation.min_tokens
            assert not is_last or token.finish == ("stop" if stops else "length"), f"{name}: finish is {token.finish}"
            wants_logprob = self.generation.sampling.num_logprobs >= 0
            assert (token.logprob is not None) == wants_logprob, f"{name}: logprob is {token.logprob}"
            self.received.append(token.token)
        if effect.final:
            self.final = effect
            assert effect.error is not None or len(self.received) == len(self.expected), f"{effect.request_id} is cut"


class World:
    """One run. `pool_blocks` are blocks of each prefill unit and of each decode unit, scratch included."""

    def __init__(
        self, seed: int, config: Deployment, *, max_context: int, pool_blocks: tuple[int, int], faults: Faults,
        step_s: float = 0.01, pull_s: float = 0.02, wire_s: float = 0.002,
    ) -> None:  # fmt: skip
        self.random = Random(seed)
        self.clock = SimClock()
        self.config = config
        self.faults = faults
        self.max_context = max_context
        self.pool_blocks = {"prefill": pool_blocks[0], "decode": pool_blocks[1]}
        self.clients: dict[str, Client] = {}
        self.hosts: dict[str, Host] = {}
        self.pools: dict[str, Pool] = {}
        self.fronts: list[Front] = []
        self.num_deaths = 0
        self.num_returned: Counter[str] = Counter()
        """Reasons for which units gave attempts back."""
        self.quiet_from_s = max(faults.until_s, 0.2)
        """Nobody comes, and nothing goes wrong, after this."""
        self._step_s = step_s
        self._pull_s = pull_s
        self._wire_s = wire_s
        self._num_lives = 0
        self._last_arrival_s: dict[tuple[int, str], float] = {}
        self._mail: dict[str, list[AnyMessage]] = {}
        """What sockets keep for a process that is dead."""
        self._next_index: dict[tuple[int, str, int], int] = {}
        self._cut_lives: set[int] = set()
        """Lives whose last words were lost with them."""
        for role, units in (("prefill", config.prefill.units), ("decode", config.decode.units)):
            for index in range(units):
                self.clock.after(self.random.uniform(0, 0.1), lambda n=f"{role}-{index}": self.start_unit(n))
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
        """Start the front, or a new one in the old one's place: the streams it held are gone."""
        self._kill("front")
        for name in [name for name, host in self.hosts.items() if host.is_stuck]:
            self.kill_unit(name)  # A new front never heard of it: a unit that does not come up is the supervisor's.
        for client in self.clients.values():
            client.is_lost = client.is_lost or client.final is None
        front = Front(self.config, epoch=self._new_epoch(), max_context=self.max_context)
        self.fronts.append(front)
        self._start("front", Host(
            "front", front, front.check, self.clock, self.random, self._sender("front"), deliver=self._deliver,
        ))  # fmt: skip

    def start_unit(self, name: str) -> None:
        role = name.split("-")[0]
        num_blocks, epoch = self.pool_blocks[role], self._new_epoch()
        pool_name = f"{name}.{epoch}"
        pool = self.pools[pool_name] = Pool(num_blocks)
        config = self.config
        leader: PrefillLeader | DecodeLeader
        engine: PrefillEngine | DecodeEngine
        if role == "prefill":
            leader = PrefillLeader(
                name, epoch, pool_name, num_blocks, chunk_tokens=config.chunk_tokens,
                num_requests_max=config.prefill.max_requests, num_waiting_max=config.prefill.max_waiting,
                lease_s=config.lease_s, heartbeat_s=config.heartbeat_s,
            )  # fmt: skip
            engine = PrefillEngine(pool)
        else:
            leader = DecodeLeader(
                name, epoch, num_blocks, num_slots=config.decode.max_requests,
                num_waiting_max=config.decode.max_waiting, max_context=self.max_context,
                heartbeat_s=config.heartbeat_s,
            )  # fmt: skip
            engine = DecodeEngine(pool)
        self._start(name, Host(
            name, leader, leader.audit, self.clock, self.random, self._sender(name), pools=self.pools,
            pool_name=pool_name, engine=engine, step_s=self._step_s, pull_s=self._pull_s,
            fault_rate=self.faults.engine_rate,
        ))  # fmt: skip

    def _start(self, name: str, host: Host) -> None:
        host.life = self._num_lives
        self.hosts[name] = host
        host.start()
        for message in self._mail.pop(name, []):
            self.clock.after(0.0, lambda m=message: self._arrive(name, m, 0))

    def _new_epoch(self) -> str:
        self._num_lives += 1
        return f"life{self._num_lives}"

    def _kill(self, name: str) -> None:
        host = self.hosts.get(name)
        if host is not None and host.is_alive:
            host.is_alive = False
            if self.random.random() < 0.5:
                self._cut_lives.add(host.life)
            if name != "front" and self.random.random() < 0.5:
                self.pools.pop(next(p for p in reversed(self.pools) if p.startswith(f"{name}.")))

    def kill_unit(self, name: str) -> None:
        """The supervisor notices a little later, says so, and starts the unit again."""
        if name not in self.hosts or not self.hosts[name].is_alive:
            return
        self._kill(name)
        self.num_deaths += 1
        notice_s = self.random.uniform(0, 0.2)
        self.clock.after(notice_s, lambda: self._tell_front(UnitDown(name, "the process ended")))
        self.clock.after(notice_s + self.random.uniform(0, 0.5), lambda: self.start_unit(name))

    def _tell_front(self, message: UnitDown) -> None:
        if "front" in self.hosts:
            self.hosts["front"].handle(message)

    def _strike(self) -> None:
        if self.clock.now() > self.faults.until_s:
            return
        name = self.random.choice([name for name in self.hosts if name != "front"] or ["nobody"])
        if self.random.random() < self.faults.stuck_share and name in self.hosts:
            self.hosts[name].is_stuck = True  # The front will miss its heartbeat and tell the supervisor.
        else:
            self.kill_unit(name)
        self.clock.after(self.random.expovariate(1 / self.faults.crash_every_s), self._strike)

    # ---- wires ----
    def _sender(self, name: str):  # type: ignore[no-untyped-def]
        """What a process of this name sends from now on, in order and a little late."""
        life = self._num_lives

        def send(to: str, message: AnyMessage) -> None:
            if to == "supervisor":
                assert isinstance(message, UnitDown)
                self.clock.after(0.0, lambda: self.kill_unit(message.unit))
                return
            self._watch(life, message)
            copies = 2 if self.random.random() < self.faults.duplicate_rate else 1
            for _ in range(copies):
                wire = (life, to)
                arrival_s = self.clock.now() + self.random.uniform(0, self._wire_s)
                arrival_s = max(arrival_s, self._last_arrival_s.get(wire, 0.0))
                self._last_arrival_s[wire] = arrival_s
                self.clock.at(arrival_s, lambda: self._arrive(to, message, life))

        return send

    def _watch(self, life: int, message: AnyMessage) -> None:
        """Every life sends the tokens of an attempt in order, and none after the last."""
        for token in message.tokens if isinstance(message, Tokens) else ():
            key = (life, token.request_id, token.attempt)
            expected = self._next_index.get(key, token.index)
            assert token.index == expected, f"{key}: sent token {token.index}, {expected} was next"
            self._next_index[key] = token.index + 1 if token.finish is None else -1

    def _arrive(self, to: str, message: AnyMessage, life: int) -> None:
        """Hand over to whoever has the name now: maybe a later life than the one it was sent to."""
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
        self.clients[generation.request_id] = Client(generation, longest)
        self.hosts["front"].handle(Submit(generation))

    def cancel(self, request_id: str) -> None:
        if request_id in self.clients:
            self.hosts["front"].handle(Cancel(request_id, 0))

    def drain(self) -> None:
        self.hosts["front"].handle(Drain())

    def _deliver(self, effect: Deliver) -> None:
        self.clients[effect.request_id].take(effect)

    # ---- the end ----
    def run(self, until_s: float) -> None:
        self.clock.run(until_s)

    def run_to_the_end(self, limit_s: float) -> None:
        """Run until every stream has ended and everything was given back; fail if that takes longer than `limit_s`."""
        self.clock.run(limit_s, self.is_over)
        open_streams = [name for name, client in self.clients.items() if client.final is None and not client.is_lost]
        assert not open_streams, f"never ended: {open_streams}"
        assert self.front.idle, f"the front still holds {list(self.front.requests.by_id)}"
        for name, host in self.hosts.items():
            if isinstance(host.role, PrefillLeader | DecodeLeader):
                used, held = host.role.blocks.num_used, host.role.num_requests
                assert (used, held) == (0, 0), f"{name} leaks {used} blocks of {held} requests"

    def is_over(self) -> bool:
        """Nothing is held anywhere and nothing goes wrong any more."""
        if self.clock.now() < self.quiet_from_s or not self.front.idle:
            return False
        leaders = [host.role for host in self.hosts.values() if isinstance(host.role, PrefillLeader | DecodeLeader)]
        return not any(leader.num_requests or leader.blocks.num_used for leader in leaders)
