"""KV moves while its prompt is still being prefilled: seeds against every way to go wrong.

Long prompts in small chunks, few blocks and slots, deaths, doubled messages, failed copies.
Every token is checked, and nothing may stay held. HADAL_SEEDS=N runs N fresh seeds.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from hadal.core.config import UnitsConfig
from hadal.core.messages import AnyMessage, Cancel, Decode, Generation, PrefilledEarly, PullEarly
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.decode.table import SlotState
from tests.fresh import seeds
from tests.sim.engine import VOCAB
from tests.sim.scenario import RANK_TIMEOUT_S, deployment, longest_output, random_sampling, words
from tests.sim.test_world import run_seed
from tests.sim.world import CALM, RESTARTED, Faults, World, inner_of

NUM_SEEN = 12
"""Seeds that see hints go every way."""


class EarlyWorld(World):
    """Counts what becomes of hints."""

    counts: Counter[str]

    def _arrive(self, to: str, message: AnyMessage, life: int) -> None:
        counts = self.counts = getattr(self, "counts", Counter())
        host = self.hosts.get(to)
        inner = inner_of(host) if host is not None and host.is_alive else None
        if not isinstance(inner, DecodeLeader):
            counts["hints"] += isinstance(message, PrefilledEarly)
            super()._arrive(to, message, life)
            return
        before = state_of(inner, message)
        super()._arrive(to, message, life)
        after = state_of(inner, message)
        match message:
            case PullEarly():
                counts["seated"] += before is None and after == SlotState.EARLY
                counts["ignored"] += after is None
            case Decode() if before == SlotState.EARLY:
                counts["went on"] += after == SlotState.PULLING
            case Decode():
                counts["had no seat"] += 1
            case Cancel() if before == SlotState.EARLY:
                counts["cancelled"] += 1


def state_of(inner: DecodeLeader, message: AnyMessage) -> int | None:
    match message:
        case PullEarly(generation) | Decode(generation):
            key = (generation.request_id, generation.attempt)
        case Cancel(request_id, attempt):
            key = (request_id, attempt)
        case _:
            return None
    slot = inner.slots.key_to_slot.get(key)
    return None if slot is None else int(inner.table.state[slot])


def early_world(seed: int, *, num_ranks: int = 1, early_pull: str = "auto") -> EarlyWorld:
    random = Random(f"early {seed}")

    def units(num_slots: int, num_ranks: int = 1) -> UnitsConfig:
        return UnitsConfig(
            units=random.choice([1, 1, 2]), ranks=num_ranks, max_requests=num_slots, max_waiting=64
        )

    config = deployment(
        chunk_tokens=random.choice([64, 100, 200]),
        lease_s=random.choice([0.3, 2.0, 30.0]),
        unit_timeout_s=1.0 + (1 + (num_ranks > 1)) * RANK_TIMEOUT_S,
        prefill=units(random.randint(2, 8), random.choice([1, min(2, num_ranks)])),
        decode=units(random.randint(2, 6), num_ranks),
        early_pull=early_pull,
    )
    faults = random.choice(
        [
            CALM,
            Faults(duplicate_rate=0.1, until_s=0.0),
            Faults(engine_rate=0.05, until_s=0.0),
            Faults(crash_every_s=0.7, until_s=6.0),
            Faults(
                crash_every_s=0.5,
                stuck_share=0.3,
                duplicate_rate=0.05,
                engine_rate=0.02,
                until_s=6.0,
            ),
            RESTARTED,
        ]
    )
    world = EarlyWorld(
        seed,
        config,
        max_context=2000,
        pool_blocks=(random.choice([20, 60]), random.randint(14, 40)),
        faults=faults,
        wire_s=random.choice([0.0005, 0.002, 0.02]),
        pull_s=random.choice([0.005, 0.02, 0.2]),
    )
    for number in range(random.randint(5, 20)):
        num_prompt = random.choice([random.randint(1, 60), random.randint(100, 800), 640])
        prompt = words(random, num_prompt)
        most = random.choice([1, 5, random.randint(1, 150), 150])
        stop_ids = tuple(random.sample(range(VOCAB), random.choice([0, 1])))
        sampling = random_sampling(random)
        generation = Generation(f"r{number}", prompt, (), most, stop_ids, 0, sampling, 0)
        at_s = random.uniform(0.1, 3.0)
        world.submit_at(at_s, generation, longest_output(world, num_prompt))
        if random.random() < 0.2:
            world.cancel_at(at_s + random.expovariate(3.0), f"r{number}")
    return world


def ranked_early_world(seed: int) -> EarlyWorld:
    return early_world(seed, num_ranks=3)


@pytest.mark.parametrize("seed", seeds(1, 1, 24))
def test_early_pulls_come_to_the_same_tokens(seed: int) -> None:
    run_seed(seed, early_world)


@pytest.mark.slow("a world of units of three ranks")
@pytest.mark.parametrize("seed", seeds(1, 3, 10))
def test_early_pulls_into_units_of_many_ranks(seed: int) -> None:
    run_seed(seed, ranked_early_world)


@pytest.mark.slow("worlds of every fixed seed")
def test_the_seeds_see_hints_go_every_way() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEN):
        counts += run_seed(seed, early_world).counts  # type: ignore[attr-defined]
    print(counts)
    for what in ("hints", "seated", "ignored", "went on", "had no seat", "cancelled"):
        assert counts[what] > 0, f"never seen: {what}"
    assert counts["went on"] > counts["seated"] / 3
