"""Scenes of the swarm's seeds. Every feature and every fault is on or off independently, so that
any two of them meet in some seeds and are alone in others. Sizes are small and fault rates high.

The idea is swarm testing (Groce et al., ISSTA 2012): a test with everything on at once hides what
one thing alone does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import msgspec

from hadal.core.balance import AUTO, NO_MOVES, OFF
from hadal.core.config import (
    CacheConfig,
    Deployment,
    FleetConfig,
    LedgerConfig,
    LimitsConfig,
    UnitsConfig,
)
from hadal.core.messages.base import BLOCK_TOKENS
from tests.sim.disk import DiskFaults
from tests.sim.fleet import FleetFaults
from tests.sim.scenario import RANK_TIMEOUT_S
from tests.sim.world import Faults

PRESSURES = ("uneven", "tight", "hasty", "drafts", "tenants")
"""Features that are drawn separately, after the others, so that older seeds keep their scenes.
"uneven", "tight": requests must move between ranks, or outgrow their rank. "hasty": clients leave
during prefill. "drafts": steps check earlier steps' drafts. "tenants": tenants' rows take turns.
"""
OTHER_WEIGHTS = "other weights"
"""Fault that replaces units by units that cannot use their KV. Drawn separately, like PRESSURES."""
FEATURES = (
    "many units",
    "prefill ranks",
    "decode ranks",
    "redundant experts",
    "no expert balance",
    "no prefill balance",
    "no decode balance",
    "sequential",
    "memory cache",
    "disk cache",
    "no recompute",
    "chats",
    "few blocks",
    "few slots",
    "small chunks",
    "short leases",
    "small queues",
    "few running",
    "priorities",
    "stop strings",
    "choices",
    "too long",
    "impatient",
    "fleet",
    "bundles",
    "rush",
    "crowd",
    *PRESSURES,
)
_AWAY_ALWAYS = {
    "few running",
    "no decode balance",
    "few blocks",
    "small chunks",
    "chats",
    "crowd",
    "rush",
}
_AWAY_OFTEN = ("impatient", "small queues", "stop strings", "shutdown", "short leases")
"""Features and faults that prevent moves and preemptions; under pressure each is dropped in 70 % of seeds."""
FAULTS = (
    "cancels",
    "unit deaths",
    "rank deaths",
    "freezes",
    "slow ranks",
    "node deaths",
    "front restarts",
    "failed steps",
    "failed staging",
    "duplicates",
    "late messages",
    "lost messages",
    "disk errors",
    "slow disk",
    "lost disk",
    "failed starts",
    "lost fleet words",
    "deaths in drains",
    "few retries",
    "shutdown",
    OTHER_WEIGHTS,
)


@dataclass(frozen=True)
class Troubles:
    """Faults of swarm worlds, besides those of all worlds."""

    every_s: dict[str, float]
    """Kind of fault -> mean seconds between two."""
    lost_rate: float = 0.0
    """Share of lost messages between front and units."""
    late_rate: float = 0.0
    """Share of messages after which a wire stands still for a while."""
    late_s: float = 0.0
    """Longest time that a wire stands still, seconds."""
    lost_disk_s: tuple[float, float] | None = None
    """Time in which the folder is gone: (from, to), seconds."""
    shutdown_s: float | None = None


@dataclass(frozen=True)
class Scene:
    """Parameters of a world, drawn from a seed."""

    seed: int
    on: frozenset[str]
    config: Deployment
    faults: Faults
    fleet_faults: FleetFaults
    disk_faults: DiskFaults
    troubles: Troubles
    max_context: int
    pool_blocks: tuple[int, int]
    disk_blocks: int
    wire_s: float
    pull_s: float
    draft_accept: float
    """Share of drafts that are right."""
    pass_s: float | None
    """Reported seconds of a pass of a decode plan; if it is short, a plan has several passes."""
    row_share: float = 0.0
    """Extra time per row, as a share of a pass; if large, rows of several tenants take turns."""


def draw(seed: int, without: frozenset[str] = frozenset()) -> Scene:
    """Return the scene of a seed, less the features and faults in `without`."""
    random = Random(f"swarm {seed}")
    share = random.choice([0.1, 0.3, 0.5])
    on = {
        name
        for name in FEATURES
        if name not in PRESSURES and random.random() < random.choice([share, 0.5])
    }
    on |= {
        name
        for name in FAULTS
        if name != OTHER_WEIGHTS and random.random() < random.choice([0.0, share, share])
    }
    pressure = Random(f"swarm pressure {seed}")
    pressures = {name for name in PRESSURES[:3] if pressure.random() < 0.3} - without
    on = (on | pressures) - without
    if pressures & {"uneven", "tight"}:
        on -= _AWAY_ALWAYS | {name for name in _AWAY_OFTEN if pressure.random() < 0.7}
    if random.random() < 0.1:
        on -= set(FAULTS)
    until_s = random.choice([4.0, 7.0]) if on & set(FAULTS) else 0.0

    def rate(name: str, *rates: float) -> float:
        drawn = random.choice(rates)
        return drawn if name in on else 0.0

    faults = Faults(
        # BlockWatch cannot follow what a successor takes over; test_succession covers that.
        succession_share=0.0,
        duplicate_rate=rate("duplicates", 0.02, 0.1, 0.5),
        engine_rate=rate("failed steps", 0.003, 0.02),
        stage_rate=rate("failed staging", 0.2, 0.7),
        front_restarts=int(rate("front restarts", 1, 2, 3)),
        until_s=until_s,
    )
    fleet_faults = FleetFaults(
        rate("failed starts", 0.2, 0.5),
        rate("lost fleet words", 0.2, 0.5),
        rate("deaths in drains", 0.3, 0.7),
    )
    disk_faults = DiskFaults(
        load_rate=rate("disk errors", 0.0, 0.1, 0.5),
        damage_rate=rate("disk errors", 0.0, 0.1),
        store_rate=rate("disk errors", 0.0, 0.1, 0.5),
        drop_rate=rate("disk errors", 0.0, 0.3),
        slow_rate=rate("slow disk", 0.05, 0.3),
        slow_s=random.choice([0.5, 8.0, 12.0]),
    )
    kinds = ("unit deaths", "rank deaths", "freezes", "slow ranks", "node deaths")
    lost_from_s = random.uniform(0.2, 4.0)
    troubles = Troubles(
        {name: random.choice([0.5, 1.0, 2.0]) for name in kinds if name in on},
        lost_rate=rate("lost messages", 0.002, 0.02),
        late_rate=rate("late messages", 0.002, 0.02),
        late_s=random.choice([0.1, 1.0, 4.0]),
        lost_disk_s=(lost_from_s, lost_from_s + random.choice([0.5, 100.0]))
        if "lost disk" in on
        else None,
        shutdown_s=random.uniform(1.0, 6.0) if "shutdown" in on else None,
    )
    drafts = Random(f"swarm drafts {seed}")
    num_drafts, draft_accept = drafts.choice([1, 2, 3, AUTO]), drafts.choice([0.0, 0.3, 0.7, 1.0])
    if drafts.random() < 0.6:
        on |= {"drafts"} - without
    scene = Scene(
        seed,
        frozenset(on),
        _deployment(random, on),
        faults,
        fleet_faults,
        disk_faults,
        troubles,
        max_context=random.choice([200, 400, 700, 1600]),
        pool_blocks=_pool_blocks(random, on),
        disk_blocks=random.choice([6, 40, 1000]),
        wire_s=random.choice([0.0005, 0.002, 0.02]),
        pull_s=random.choice([0.005, 0.02, 0.2]),
        draft_accept=draft_accept,
        pass_s=Random(f"swarm passes {seed}").choice([None, None, 0.0007, 0.0002]),
    )
    scene = _with_other_weights(_pressed(_of_tenants(scene, without), pressure), without)
    decode = msgspec.structs.replace(
        scene.config.decode, drafts=num_drafts if "drafts" in on else 0
    )
    return replace(scene, config=msgspec.structs.replace(scene.config, decode=decode))


def _of_tenants(scene: Scene, without: frozenset[str]) -> Scene:
    """Return the scene, in half of the seeds with several tenants and steps that grow with rows."""
    random = Random(f"swarm tenants {scene.seed}")
    share, promise = random.choice([0.05, 0.3, 1.0]), random.choice([1.0, 1.3, 2.0])
    if random.random() > 0.5 or "tenants" in without:
        return scene
    decode = msgspec.structs.replace(scene.config.decode, tenant_promise=promise)
    config = msgspec.structs.replace(scene.config, decode=decode)
    return replace(scene, on=scene.on | {"tenants"}, config=config, row_share=share)


def _with_other_weights(scene: Scene, without: frozenset[str]) -> Scene:
    """Return the scene, in a quarter of the seeds with units that are replaced."""
    random = Random(f"swarm weights {scene.seed}")
    every_s = random.choice([0.3, 1.0, 2.0])
    if random.random() > 0.25 or OTHER_WEIGHTS in without:
        return scene
    return replace(
        scene,
        on=scene.on | {OTHER_WEIGHTS},
        faults=replace(scene.faults, until_s=scene.faults.until_s or 4.0),
        troubles=replace(scene.troubles, every_s=scene.troubles.every_s | {OTHER_WEIGHTS: every_s}),
    )


def _pressed(scene: Scene, random: Random) -> Scene:
    """Return the scene; "uneven" and "tight" get sizes that cause moves and preemptions."""
    on, config, decode = scene.on, scene.config, scene.config.decode
    if not on & {"uneven", "tight"}:
        return scene
    blocks = (12, 20), (6, 9)
    if "uneven" in on:
        most = random.choice([2, 2, 3] if "few slots" in on else [3, 4, 6])
        decode = msgspec.structs.replace(decode, ranks=random.choice([2, 3, 3]), max_requests=most)
        blocks = (20, 40), (6, 11) if "tight" in on else (20, 40)
    elif decode.ranks > 2:
        decode = msgspec.structs.replace(decode, ranks=2)
    if "tight" in on:
        decode = msgspec.structs.replace(decode, max_requests=random.randint(5, 8))
    prefill = msgspec.structs.replace(config.prefill, max_requests=random.randint(4, 8))
    return replace(
        scene,
        on=on | {"decode ranks"} if decode.ranks > 1 else on,
        max_context=1600,
        config=msgspec.structs.replace(config, decode=decode, prefill=prefill),
        pool_blocks=(random.randint(*blocks[0]), random.randint(*blocks[1])),
    )


def _pool_blocks(random: Random, on: set[str]) -> tuple[int, int]:
    low, high = (4, 11) if "few blocks" in on else (12, 40)
    return random.randint(low, high), random.randint(low, high)


def _deployment(random: Random, on: set[str]) -> Deployment:
    memory = AUTO if "memory cache" in on else OFF
    return Deployment(
        chunk_tokens=random.choice([7, 16, 40])
        if "small chunks" in on
        else random.choice([64, 200, 512]),
        lease_s=random.choice([0.3, 1.0]) if "short leases" in on else random.choice([2.0, 30.0]),
        heartbeat_s=0.1,
        unit_timeout_s=2 * RANK_TIMEOUT_S,
        rank_timeout_s=RANK_TIMEOUT_S,
        prefill=_units(random, on, "prefill"),
        decode=_units(random, on, "decode"),
        limits=_limits(random, on),
        cache=CacheConfig(
            memory,
            "folder" if "disk cache" in on else "",
            recompute=OFF if "no recompute" in on else AUTO,
        ),
        ledger=LedgerConfig(prices=random.choice(["deepseek-reasoner", "0.1/0.2/0.3"])),
        fleet=_fleet(random, on),
    )


def _units(random: Random, on: set[str], role: str) -> UnitsConfig:
    num_units = random.choice([2, 2, 3]) if "many units" in on and "fleet" not in on else 1
    ranks = random.choice([2, 3] if role == "prefill" else [2, 3, 4])
    ranks = ranks if f"{role} ranks" in on else 1
    balance = random.choice([OFF, NO_MOVES]) if role == "decode" else OFF
    return UnitsConfig(
        units=num_units,
        ranks=ranks,
        ranks_per_node=random.choice([1, 8]),
        redundant_experts=12 if "redundant experts" in on and ranks > 1 else 0,
        overlap="sequential"
        if "sequential" in on
        else random.choice(["auto", "prefill_dual", "decode_five"]),
        min_split_tokens=random.choice([2, 32]),
        expert_balance=OFF if "no expert balance" in on else AUTO,
        request_balance=balance if f"no {role} balance" in on else AUTO,
        max_requests=random.randint(1, 3) if "few slots" in on else random.randint(4, 8),
        max_waiting=random.choice([0, 1, 4]) if "small queues" in on else 64,
    )


def _limits(random: Random, on: set[str]) -> LimitsConfig:
    timeout_s = random.choice([2.0, 10.0]) if "impatient" in on else 4000.0
    if "lost messages" in on:  # After a lost message, a request hangs until its timeout.
        timeout_s = min(timeout_s, 40.0)
    return LimitsConfig(
        max_running=random.choice([1, 2, 5]) if "few running" in on else 256,
        max_queued=random.choice([0, 1, 3]) if "small queues" in on else 512,
        max_retries=random.choice([0, 1, 3]) if "few retries" in on else 10_000,
        request_timeout_s=timeout_s,
    )


def _fleet(random: Random, on: set[str]) -> FleetConfig:
    bundle = random.choice([(1, 1), (2, 1)]) if "bundles" in on else (0, 0)
    if "fleet" not in on:
        return FleetConfig()
    return FleetConfig(
        AUTO,
        prefill_max=random.randint(1, 3),
        decode_max=random.randint(1, 3),
        bundle_prefill=bundle[0],
        bundle_decode=bundle[1],
        prefill_tokens_per_s=random.choice([0.0, 100.0, 1000.0]),
        decode_tokens_per_s=random.choice([0.0, 60.0, 200.0]),
        start_s=random.choice([0.1, 0.5]),
        period_s=0.1,
        hold_s=random.choice([0.0, 0.5]),
        drain_timeout_s=random.choice([0.05, 0.5, 30.0]),
    )


def may_end_with(scene: Scene) -> frozenset[str]:
    """Return statuses with which a fitting request may end here, besides 200 and a cancellation."""
    statuses = set()
    if "small queues" in scene.on:
        statuses.add("429")
    if scene.on & {"shutdown", "few retries", "impatient", "lost messages"}:
        statuses.add("503")
    if scene.on & {"impatient", "lost messages"}:
        statuses.add("504")
    return frozenset(statuses)


LONGEST_PROMPT = 16 * BLOCK_TOKENS
"""Longest prompt of single requests; chats grow by themselves."""
