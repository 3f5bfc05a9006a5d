"""A small fleet with the live roles: every request ends once, in the time of its steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest

from hadal.core.balance import AUTO, OFF
from hadal.core.config import CacheConfig, Deployment, LimitsConfig, UnitsConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.world.disk import DiskSpeed
from hadal.lab.sim.world.requests import Requests
from hadal.lab.sim.world.units import kv_blocks
from hadal.lab.sim.world.world import FleetWorld
from hadal.perf.shapes import DEEPSEEK_V3, kv_bytes_per_token
from hadal.roles.decode.leader import DecodeLeader
from tests.levels import FULL, MORE

SPAN_S = 10.0 if FULL else 4.0 if MORE else 2.0
"""Duration of arrivals in tests that compare more requests with fewer."""


def deployment(*, drafts: str | int = 0, **limits: int) -> Deployment:
    return Deployment(
        prefill=UnitsConfig(2, ranks=8, max_requests=8, max_waiting=1000),
        decode=UnitsConfig(2, ranks=16, max_requests=16, max_waiting=1000, drafts=drafts),
        limits=LimitsConfig(**{"max_running": 4000, "max_queued": 4000, **limits}),
        cache=CacheConfig(memory=OFF),
        chunk_tokens=4096,
    )


def requests(
    seed: int, size: int, per_s: float, tokens_in: float = 1000, tokens_out: float = 60
) -> Requests:
    rng = np.random.default_rng(seed)
    lengths = (
        np.ceil(rng.exponential(mean, size)).astype(np.int64) for mean in (tokens_in, tokens_out)
    )
    return Requests(np.cumsum(rng.exponential(1 / per_s, size)), *lengths)


def models() -> dict[str, StepModel]:
    return {"prefill": StepModel(8, HARDWARE["h200"]), "decode": StepModel(16, HARDWARE["h200"])}


def world(asked: Requests, config: Deployment | None = None, **options: Any) -> FleetWorld:
    return FleetWorld(config or deployment(), models(), asked, max_context=16_384, **options)


@pytest.mark.parametrize("drafts", [0, 3])
def test_every_request_ends_once_and_has_its_tokens(drafts: int) -> None:
    asked = requests(1, 300, 200.0)
    made = world(asked, deployment(drafts=drafts))
    made.run(300.0)
    assert np.isfinite(made.seen.end_s).all()
    assert not made.seen.is_failed.any()
    assert made.front.totals.tokens_out == asked.tokens_out.sum()
    assert made.front.totals.tokens_in == asked.tokens_in.sum()
    assert made.front.idle
    assert made.check() == []
    assert (made.seen.first_token_s > asked.arrival_s).all()
    assert (made.seen.end_s >= made.seen.first_token_s).all()


def test_it_adds_up_in_the_middle_of_things() -> None:
    made = world(requests(2, 400, 300.0))
    for until_s in np.linspace(0.3, 3.0, 10):
        made.run(float(until_s))
        assert made.check() == []


def test_the_same_requests_make_the_same_run() -> None:
    def run() -> FleetWorld:
        made = world(requests(3, 200, 200.0))
        made.run(100.0)
        return made

    one, other = run(), run()
    assert np.array_equal(one.seen.end_s, other.seen.end_s)
    found = [p.num_events for p in one.processes.values()]
    assert found == [p.num_events for p in other.processes.values()]


def test_alone_a_request_takes_what_its_steps_take() -> None:
    asked = Requests(np.array([1.0]), np.array([2000]), np.array([101]))
    made = world(asked)
    made.run(60.0)
    # The step model spreads the prompt over the ranks; here one rank has all of it, and is slower.
    prefill_s = models()["prefill"].prefill(2000 / 8, 2000).seconds
    assert made.seen.first_token_s[0] - 1.0 > prefill_s
    decode = models()["decode"]
    step_s = decode.decode(1 / 16, 2050, schedule="sequential").seconds
    tpot_s = (made.seen.end_s[0] - made.seen.first_token_s[0]) / 100
    # The request's rank is slower than the mean, and its KV must be pulled first.
    assert step_s < tpot_s < 1.3 * step_s


@pytest.mark.campaign("more requests")
def test_more_load_makes_steps_longer_and_drafts_tokens_faster() -> None:
    def tpot_s(per_s: float, drafts: int = 0) -> float:
        asked = requests(4, int(SPAN_S * per_s), per_s, tokens_out=100)
        made = world(asked, deployment(drafts=drafts))
        made.run(200.0)
        return float(np.mean((made.seen.end_s - made.seen.first_token_s) / asked.tokens_out))

    light, heavy = tpot_s(20.0), tpot_s(120.0)
    assert light < heavy
    assert tpot_s(20.0, drafts=1) < light


def running(size: int, num_done: int = 10) -> Requests:
    """Return `size` requests that run at the start and go on for long."""
    wanted = np.full(size, 10_000)
    return Requests(
        np.full(size, -1.0),
        np.linspace(500, 3000, size).astype(np.int64),
        wanted,
        tokens_done=np.full(size, num_done),
    )


@pytest.mark.parametrize("accept", [0.0, 0.5, 0.8, 0.95])
def test_what_a_world_checks_takes_and_makes_what_the_mean_says(accept: float) -> None:
    """Compare tokens per request and step times with lab/perf/step at mean lengths."""
    made = world(running(300), deployment(drafts=1), mtp_accept=accept)
    made.run(3.0)
    decode = made.read(1.0, 3.0).decode
    ranks = models()["decode"].num_ranks
    assert decode.requests_per_rank == pytest.approx(300 / 2 / ranks)
    found = decode.positions_per_token
    assert found == pytest.approx(np.mean(made.requests.tokens_in) + decode.tokens / 300, rel=0.05)
    priced = models()["decode"].decode(
        decode.requests_per_rank, decode.positions_per_token, 1, mtp_accept=accept
    )
    assert priced.tokens_per_s_user is not None
    assert decode.tokens / (decode.num_steps * 150) == pytest.approx(1.0 + accept, abs=0.01)
    assert 1.0 / decode.token_s == pytest.approx(priced.tokens_per_s_user, rel=0.05)
    assert decode.tokens_imbalance == pytest.approx(10 / (150 / ranks), rel=0.1)
    assert made.check() == []


@pytest.mark.parametrize(
    "accept",
    [0.3, *(pytest.param(at, marks=pytest.mark.more("the extremes")) for at in (0.0, 0.9))],
)
def test_a_unit_that_chooses_its_drafts_makes_as_much_as_with_the_best_number(
    accept: float,
) -> None:
    def tokens(drafts: str | int) -> float:
        config = deployment(drafts=drafts)
        alone = msgspec.structs.replace(config.decode, units=1)
        config = msgspec.structs.replace(config, decode=alone)
        made = world(running(48), config, mtp_accept=accept)
        made.run(20.0)
        return made.read(12.0, 20.0).decode.tokens

    fixed = [tokens(drafts) for drafts in (0, 1, 2)]
    assert fixed.index(max(fixed)) == {0.0: 0, 0.3: 1, 0.9: 2}[accept]
    assert tokens(AUTO) >= 0.99 * max(fixed)


def test_an_overloaded_fleet_refuses_and_the_rest_is_served() -> None:
    made = world(requests(5, 500, 1000.0), deployment(max_queued=20))
    made.run(300.0)
    assert np.isfinite(made.seen.end_s).all()
    assert 0 < made.front.totals.refused == int(made.seen.is_failed.sum()) < 500
    assert made.front.idle
    assert made.check() == []


def test_a_switched_off_balancer_shows() -> None:
    """Switch a balancer off: KV becomes less even over ranks, so the live roles do balance in a
    world.
    """

    def unevenness(balance: str) -> float:
        config = deployment()
        decode = msgspec.structs.replace(config.decode, request_balance=balance)
        made = world(
            requests(6, 600, 200.0, tokens_out=150), msgspec.structs.replace(config, decode=decode)
        )
        seen = []
        for until_s in np.arange(1.0, 3.0, 0.1):
            made.run(float(until_s))
            for process in made.processes.values():
                if isinstance(process.role, DecodeLeader):
                    used = process.role.blocks.num_used_R
                    seen.append(used.max() / used.mean())
        return float(np.mean(seen))

    assert unevenness("auto") < 0.9 * unevenness("off")


def test_a_prefill_balancer_that_is_off_shows_in_the_reading() -> None:
    def unevenness(balance: str) -> float:
        config = deployment()
        prefill = msgspec.structs.replace(config.prefill, request_balance=balance)
        asked = requests(6, 400, 400.0, tokens_in=2000, tokens_out=2)
        made = world(asked, msgspec.structs.replace(config, prefill=prefill))
        made.run(1.5)
        return made.read(0.5, 1.5).prefill.positions_imbalance

    assert unevenness("auto") < 0.9 * unevenness("off")


def test_memory_says_how_much_kv_a_rank_holds() -> None:
    assert kv_blocks(StepModel(144)) > kv_blocks(StepModel(32)) > 1000
    with pytest.raises(ValueError, match="no memory left"):
        kv_blocks(StepModel(1, HARDWARE["h800"]))


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match="equal numbers of arrivals"):
        Requests(np.zeros(2), np.ones(1, np.int64), np.ones(2, np.int64))
    with pytest.raises(ValueError, match="sorted by arrival"):
        Requests(np.array([1.0, 0.5]), np.ones(2, np.int64), np.ones(2, np.int64))
    with pytest.raises(ValueError, match="the decode model has 8 ranks"):
        FleetWorld(
            deployment(), {"prefill": StepModel(8), "decode": StepModel(8)}, requests(1, 1, 1.0)
        )


# ---- blocks on the disk ----
def cached(asked: Requests, share: float) -> Requests:
    return dataclasses.replace(
        asked, tokens_cached=(asked.tokens_in * share).astype(np.int64) // 64 * 64
    )


def test_what_is_on_disk_is_read_and_not_computed() -> None:
    asked = cached(requests(7, 300, 100.0), 0.6)
    made = world(asked, deployment_off())
    made.run(300.0)
    usable = np.minimum(asked.tokens_cached, (asked.tokens_in - 1) // 64 * 64)
    # A prompt's last position is always computed.
    assert np.array_equal(made.seen.tokens_hit, usable)
    seen = made.read(0.0, 300.0)
    assert seen.tokens_hit == seen.disk_tokens == made.front.totals.tokens_hit == usable.sum()
    assert seen.prefill.tokens == pytest.approx((asked.tokens_in - usable).sum())
    assert seen.tokens_in == asked.tokens_in.sum()
    assert seen.decode.tokens + len(seen.ttft_s) == pytest.approx(
        asked.tokens_out.sum(), rel=0.05
    ), "and one more of each, for a stop id is noticed a plan late"
    assert made.check() == []


def deployment_off() -> Deployment:
    """Return a deployment that reads everything on disk at any cost."""
    return msgspec.structs.replace(deployment(), cache=CacheConfig(memory=OFF, recompute=OFF))


def test_a_read_takes_its_bytes_and_what_is_before_it() -> None:
    asked = Requests(np.array([1.0]), np.array([6400]), np.array([2]), np.array([6336]))
    slow = DiskSpeed(read_bytes_per_s=1e8)
    fast, late = (world(asked, deployment_off(), disk=speed) for speed in (DiskSpeed(), slow))
    for made in (fast, late):
        made.run(60.0)
    block_bytes = 64 * 70_272
    assert late.log.reads[0][2] - late.log.reads[0][1] == pytest.approx(99 * block_bytes / 1e8)
    waited_s = late.seen.first_token_s[0] - fast.seen.first_token_s[0]
    assert waited_s == pytest.approx(99 * block_bytes * (1 / 1e8 - 1 / (40 * 2**30)), rel=1e-3)


def test_a_disk_that_is_slower_than_computing_is_left_alone() -> None:
    asked = cached(requests(8, 400, 100.0), 0.6)
    config = deployment()
    made = world(asked, config, disk=DiskSpeed(read_bytes_per_s=2e8, node_ranks=1))
    made.run(300.0)
    assert np.isfinite(made.seen.end_s).all()
    assert not made.seen.is_failed.any()
    assert made.seen.tokens_hit.sum() < 0.5 * asked.tokens_cached.sum()


def test_what_is_computed_and_generated_is_written() -> None:
    asked = cached(requests(9, 50, 50.0, tokens_out=300), 0.5)
    made = world(asked, deployment_off(), stores=True)
    made.run(300.0)
    # The last token of an output has no KV.
    full = (asked.tokens_in + asked.tokens_out - 1) // 64 * 64 - asked.tokens_cached
    assert made.read(0.0, 300.0).disk_tokens_written == full.sum()
    # The disk has the prompts' blocks, so they can be found from now on.
    assert np.array_equal(made.disk.num_blocks, asked.tokens_in // 64)
    assert made.check() == []


def test_how_full_ranks_are_is_sampled() -> None:
    made = world(requests(1, 300, 200.0))
    made.sample_every(0.1)
    made.run(2.0)
    seen = made.read(0.5, 2.0)
    share = seen.kv_share
    mean = np.mean([of_unit.mean() for of_unit in seen.requests.values()])
    # Requests per rank by samples agree with those by steps.
    assert mean == pytest.approx(seen.decode.requests_per_rank, rel=0.1)
    assert sorted(share) == ["decode-0", "decode-1"]
    assert all(of_unit.shape == (16,) and 0.0 < of_unit.mean() < 0.2 for of_unit in share.values())


def test_bytes_are_counted_as_units_count_them_live() -> None:
    """Transfer KV between nodes: prefill's 8 ranks are one node, decode's 16 are two."""
    asked = requests(1, 100, 200.0)
    made = world(asked)
    made.run(300.0)
    reports = made.front.snapshot().unit_to_report
    prefill = [report.link_bytes for unit, report in reports.items() if unit.startswith("prefill")]
    decode = [report.link_bytes for unit, report in reports.items() if unit.startswith("decode")]
    for moved in prefill:
        assert moved.dispatch[0] > 0
        assert (moved.dispatch[1], moved.combine[1], moved.kv) == (0, 0, (0, 0))
    for moved in decode:
        assert moved.dispatch[1] / moved.dispatch[0] == pytest.approx(8 / 7, rel=1e-3)
    num_tokens = sum(moved.kv[1] for moved in decode) / kv_bytes_per_token(DEEPSEEK_V3, 61)
    asked_for = asked.tokens_in.sum()
    assert asked_for < num_tokens < asked_for + BLOCK_TOKENS * len(asked.tokens_in)
