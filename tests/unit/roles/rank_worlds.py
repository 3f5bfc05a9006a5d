"""Simulate ranks that execute a leader's plans on pretended KV: each position of each block records
the (request, position) it was written for.

A token is a function of request and index, so all output can be checked. A plan that reads missing
KV, or writes where another request reads, fails immediately. A seeded generator draws the events and
their order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from hadal.core.messages.units import KvLease, Prefill, PrefillDone, Release, Returned
from hadal.core.plans import OpTime, PrefillPlan, Sampling, StepDone
from hadal.core.seams import Effect, Event, Execute, RankReset, Send, Tick
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.prefill.leader import PrefillLeader
from tests.columns import attempt_id_of

STOP = 7


def token_of(name: str, index: int) -> int:
    """Return the request's token at this index; sometimes it is the stop id."""
    return (sum(map(ord, name)) * 31 + index * 17) % 101


def op_times(random: Random) -> tuple[OpTime, ...]:
    return tuple(
        OpTime(op, 4, random.uniform(1e-4, 1e-3))
        for op in ("attn_in", "experts", "dispatch", "combine")
    )


@dataclass
class Rank:
    """KV by (block, offset), a decode rank's table by slot, and its pool, separate as on a GPU."""

    kv: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    pool: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    table: dict[int, list[Any]] = field(default_factory=dict)
    """Slot -> [name, blocks, num_tokens, output_index, number of drafts]."""

    def write(self, name: str, blocks: Any, position: int) -> None:
        self.kv[blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = (name, position)

    def copy(self, blocks: Any, *, to_pool: bool) -> None:
        """Publish blocks to the pool, or fetch them from it."""
        source, target = (self.kv, self.pool) if to_pool else (self.pool, self.kv)
        for block in blocks:
            for offset in range(BLOCK_TOKENS):
                target.pop((block, offset), None)
                if (block, offset) in source:
                    target[block, offset] = source[block, offset]

    def verify(self, name: str, blocks: Any, num_tokens: int) -> None:
        for position in range(num_tokens):
            found = self.kv.get((blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS))
            assert found == (name, position), f"{name} reads {found} at {position}"


class World:
    """Common parts of worlds: clients, ranks that fail and return, steps that end in order or never."""

    def __init__(
        self, random: Random, leader: DecodeLeader | PrefillLeader, num_ranks: int
    ) -> None:
        self.random = random
        self.leader = leader
        self.now_s = 0.0
        self.ranks = [Rank() for _ in range(num_ranks)]
        self.living: set[int] = set()
        self.formation = 0
        self.pools = [""] * num_ranks
        self.steps: deque[tuple[Any, ...]] = deque()
        self.prompts: dict[str, Generation] = {}
        self.outputs: dict[str, list[int]] = {}
        self.attempts: dict[str, int] = {}
        self.ended: set[str] = set()
        self.reasons: list[str] = []
        self.schedules: set[tuple[str, int]] = set()
        self.lazy: list[str] = []
        """Names of requests that wait to be sent again, the oldest first."""
        self.penalties = Sampling(frequency_penalty=1.0)

    def feed(self, event: Event) -> None:
        self.now_s += self.random.uniform(0.0, 0.01)
        effects = self.leader.handle(self.now_s, event)
        problems = self.leader.audit()
        assert problems == [], problems
        for effect in effects:
            self.apply(effect)

    def apply(self, effect: Effect) -> None:
        match effect:
            case Execute(plans):
                assert len(plans) == len(self.ranks)
                heads = {(p.step_id, p.schedule, p.num_micro_batches) for p in plans}  # type: ignore[union-attr]
                assert len(heads) == 1
                self.schedules |= {(name, number) for _, name, number in heads}
                self.steps.append(plans)
                assert len(self.steps) <= 2
            case Send(_, Returned(_, name, attempt, reason)):
                if attempt == self.attempts[name] and name not in self.ended:
                    self.reasons.append(reason)
                    self.attempts[name] += 1
                    self.retry(name)

    def retry(self, name: str) -> None:
        self.lazy.append(name)

    def send_again(self, chance: float) -> None:
        """Send the longest waiting retry again, with this chance."""
        if self.lazy and self.random.random() < chance:
            name = self.lazy.pop(0)
            if name not in self.ended:
                self.send(name)

    def send(self, name: str) -> None:
        raise NotImplementedError

    def submit(self, name: str) -> None:
        raise NotImplementedError

    def event(self) -> None:
        raise NotImplementedError

    def live(self, num_events: int, num_requests: int, reset_rate: float) -> None:
        """Keep `num_requests` requests alive for `num_events` events, while ranks fail and return."""
        for _ in range(num_events):
            if len(self.prompts) - len(self.ended) < num_requests:
                self.submit(f"r{len(self.prompts)}")
            self.event()
            if self.random.random() < reset_rate:
                self.reset_at_random()

    def end(self) -> None:
        """Bring all ranks up and end the faults; check that all requests finish with the right tokens."""
        self.reset(set(), set(range(len(self.ranks))) - self.living)
        for _ in range(50_000):
            if len(self.ended) == len(self.prompts) and not self.steps:
                break
            self.event()
        for name in self.prompts:
            self.verify(name)

    def run(self, rank: int, plan: Any) -> tuple[dict[int, list[int]], int]:
        """Execute a rank's plan; return (key -> tokens, number of keys of such a plan)."""
        raise NotImplementedError

    def make(self, name: str) -> Generation:
        sampling = self.penalties if self.random.random() < 0.3 else Sampling()
        num_prompt, most = self.random.randint(1, 150), self.random.randint(2, 90)
        return Generation(name, tuple(range(num_prompt)), (), most, (STOP,), 0, sampling, 0)

    def current(self, name: str) -> Generation:
        g = self.prompts[name]
        return Generation(
            name,
            g.prompt,
            tuple(self.outputs[name]),
            g.max_tokens,
            g.stop_ids,
            0,
            g.sampling,
            self.attempts[name],
            attempt_id=attempt_id_of(name, self.attempts[name]),
        )

    def step_done(self) -> None:
        plans = self.steps.popleft()
        keys: dict[int, list[int]] = {}
        offset = 0
        for rank, plan in enumerate(plans):
            drawn, size = self.run(rank, plan)
            assert rank in self.living or not drawn
            keys.update({offset + key: value for key, value in drawn.items()})
            offset += size
        # Keys in any order, but the tokens of one key stay in order.
        order = [key for key, values in keys.items() for _ in values]
        self.random.shuffle(order)
        values = {key: iter(drawn) for key, drawn in keys.items()}
        self.feed(
            StepDone(
                plans[0].step_id,
                tuple(order),
                tuple(next(values[k]) for k in order),
                {},
                0.01,
                op_times=op_times(self.random),
            )
        )

    def reset(self, lost: set[int], fresh: set[int]) -> None:
        """Reset the unit. Survivors may have done part of the work in flight; it is not reported."""
        for rank in self.living - lost:
            for plans in list(self.steps)[: self.random.randint(0, 2)]:
                self.run(rank, plans[rank])
        self.steps.clear()
        for rank in lost | fresh:
            self.ranks[rank] = Rank()
        for rank in self.ranks:
            rank.table.clear()
        self.living = (self.living - lost) | fresh
        self.formation += 1
        for rank in range(len(self.ranks)):
            if rank in fresh:
                self.pools[rank] = f"pool-{rank}-{self.formation}"
            elif rank not in self.living:
                self.pools[rank] = ""
        self.feed(RankReset(tuple(lost), tuple(fresh), tuple(self.pools), self.formation))

    def reset_at_random(self) -> None:
        alive = sorted(self.living)
        lost = set(self.random.sample(alive, self.random.randint(0, min(2, len(alive)))))
        dead = [rank for rank in range(len(self.ranks)) if rank not in self.living or rank in lost]
        self.reset(lost, set(self.random.sample(dead, self.random.randint(0, len(dead)))))

    def verify(self, name: str) -> None:
        """Assert that the request's tokens equal those of an undisturbed run."""
        output = self.outputs[name]
        assert output == [token_of(name, index) for index in range(len(output))]
        assert STOP not in output[:-1]
        assert len(output) == self.prompts[name].max_tokens or output[-1] == STOP


class PrefillWorld(World):
    """World of a prefill unit. Each attempt draws one token; its lease is verified and released, and the
    request is sent again as the next attempt until it ends.
    """

    leader: PrefillLeader

    def __init__(self, random: Random, leader: PrefillLeader, num_ranks: int) -> None:
        super().__init__(random, leader, num_ranks)
        self.leases: list[tuple[str, int, KvLease]] = []

    def submit(self, name: str) -> None:
        self.prompts[name], self.attempts[name], self.outputs[name] = self.make(name), 0, []
        self.send(name)

    def send(self, name: str) -> None:
        self.feed(Prefill(self.current(name)))

    def retry(self, name: str) -> None:
        self.leases = [lease for lease in self.leases if lease[0] != name]
        super().retry(name)

    def apply(self, effect: Effect) -> None:
        super().apply(effect)
        match effect:
            case Send(_, PrefillDone(_, token, lease)) if (
                token.attempt == self.attempts[token.request_id]
            ):
                name = token.request_id
                assert token.index == len(self.outputs[name]), "a token twice"
                self.outputs[name].append(token.token)
                if lease is None:
                    self.ended.add(name)
                else:
                    self.leases.append((name, token.attempt, lease))

    def release(self) -> None:
        name, attempt, lease = self.leases.pop(self.random.randrange(len(self.leases)))
        rank = self.pools.index(lease.source)
        self.ranks[rank].verify(name, lease.block_ids, lease.num_tokens)
        assert self.leader.blocks[rank].versions(lease.block_ids) == lease.versions
        self.feed(Release(name, attempt))
        self.attempts[name] += 1
        self.lazy.append(name)

    def run(self, rank: int, plan: PrefillPlan) -> tuple[dict[int, list[int]], int]:
        at, drawn, chunks = self.ranks[rank], {}, [*plan.chunks, *plan.second]
        assert plan.num_micro_batches == 2 or not plan.second
        assert sum(len(chunk.tokens) for chunk in chunks) <= 96
        for key, chunk in enumerate(chunks):
            at.verify(chunk.request_id, chunk.block_ids, chunk.start)
            for position in range(chunk.start, chunk.start + len(chunk.tokens)):
                at.write(chunk.request_id, chunk.block_ids, position)
            if chunk.sampling is not None:
                drawn[key] = [token_of(chunk.request_id, chunk.output_index)]
        return drawn, len(chunks)

    def event(self) -> None:
        """Let the next random event happen."""
        self.send_again(0.4)
        chance = self.random.random()
        if chance < 0.3 and self.leases:
            self.release()
        elif chance < 0.97 and self.steps:
            self.step_done()
        elif not self.steps:
            self.now_s += 0.5
            self.feed(Tick())
