"""Simulated Runners: what they do with plans, and that a step takes what the step model says of
these very plans.
"""

from __future__ import annotations

import numpy as np
import pytest

from hadal.core.config import DECODE, PREFILL
from hadal.core.plans import Chunk, DecodePlan, Join, PrefillPlan, Sampling
from hadal.overlap.plan import DECODE_FIVE, PREFILL_DUAL, SEQUENTIAL
from hadal.perf.step import StepModel
from hadal.sim.runners import STOP_ID, WORD_ID, DecodeRunner, PrefillRunner

SLOTS = 4


def long(number: int) -> int:
    return 1000


def chunk(tokens: int, start: int = 0, *, is_last: bool = True) -> Chunk:
    return Chunk("a", tuple(range(tokens)), start, (), Sampling() if is_last else None, 0)


def join(slot: int, num_tokens: int, number: int, output_index: int = 1) -> Join:
    return Join(slot, (), num_tokens, 0, output_index, Sampling(seed=number))


def decode_plans(
    num_ranks: int, step_id: int = 0, **joins_of: tuple[Join, ...]
) -> list[DecodePlan]:
    return [DecodePlan(step_id, (), joins_of.get(f"r{rank}", ()), ()) for rank in range(num_ranks)]


def test_a_prefill_step_draws_after_last_chunks_and_takes_what_they_cost() -> None:
    model = StepModel(8)
    plans = [PrefillPlan(3, (chunk(1000, is_last=False), chunk(2000))) for _ in range(8)]
    done = PrefillRunner(model, long).run(plans)
    assert (done.step_id, done.keys, done.tokens) == (3, tuple(range(1, 16, 2)), (WORD_ID,) * 8)
    alone = model.prefill(3000, 1500, schedule=SEQUENTIAL.name)
    assert done.elapsed_s == pytest.approx(alone.seconds, rel=0.03), (
        "the same tokens, in prompts of the mean length"
    )
    assert {time.op for time in done.op_times} == {time.op for time in alone.op_times()}


def test_a_request_of_one_token_ends_in_prefill() -> None:
    plans = [
        PrefillPlan(0, (chunk(10), Chunk("b", (1,), 0, (), Sampling(seed=4), 2))) for _ in range(8)
    ]
    assert (
        PrefillRunner(StepModel(8), {0: 1, 4: 4}.__getitem__).run(plans).tokens
        == (STOP_ID, WORD_ID) * 8
    )


def test_the_slowest_rank_sets_the_pace() -> None:
    runner = PrefillRunner(StepModel(8), long)
    even = runner.run([PrefillPlan(0, (chunk(2000),)) for _ in range(8)]).elapsed_s
    uneven = [PrefillPlan(0, (chunk(4000 if rank == 5 else 1714),)) for rank in range(8)]
    assert runner.run(uneven).elapsed_s > 1.3 * even
    dense = [PrefillPlan(0, (chunk(2000, 60_000 if rank == 5 else 0),)) for rank in range(8)]
    assert runner.run(dense).elapsed_s > 1.3 * even


def test_two_micro_batches_are_priced_under_their_schedule() -> None:
    model = StepModel(32)
    whole = PrefillRunner(model, long).run(
        [PrefillPlan(0, (chunk(8192), chunk(8192))) for _ in range(32)]
    )
    halves = [
        PrefillPlan(0, (chunk(8192),), PREFILL_DUAL.name, (chunk(8192),), 2) for _ in range(32)
    ]
    assert PrefillRunner(model, long).run(halves).elapsed_s < 0.9 * whole.elapsed_s


def test_a_decode_step_goes_by_the_tables_and_ends_requests_at_their_length() -> None:
    lengths = {7: 3, 8: 100}
    runner = DecodeRunner(StepModel(8), SLOTS, lengths.__getitem__)
    done = runner.run(decode_plans(8, r0=(join(1, 50, 7),), r2=(join(0, 70, 8),)))
    assert (list(done.keys), list(done.tokens)) == ([1, 8], [WORD_ID, WORD_ID])
    done = runner.run(decode_plans(8, 1))
    assert (list(done.keys), list(done.tokens)) == ([1, 8], [STOP_ID, WORD_ID])
    done = runner.run(decode_plans(8, 2))
    assert list(done.tokens) == [STOP_ID, WORD_ID], (
        "as long as the leader does not say that it leaves"
    )
    leaving = decode_plans(8, 3)
    leaving[0] = DecodePlan(3, (1,), (join(1, 10, 8, 40),), ())
    assert list(runner.run(leaving).keys) == [1, 8], "another one in its slot"
    assert np.flatnonzero(runner.is_taken).tolist() == [1, 8]


def test_a_decode_step_takes_what_the_step_model_says() -> None:
    model = StepModel(16, placed=1.15)
    runner = DecodeRunner(model, 64, lambda number: 1000)
    full = {f"r{rank}": tuple(join(slot, 4000, 0) for slot in range(64)) for rank in range(16)}
    done = runner.run(decode_plans(16, **full))
    assert done.elapsed_s == pytest.approx(
        model.decode(64, 4001, schedule=SEQUENTIAL.name).seconds, rel=1e-6
    )
    second = tuple(range(32))
    halves = [DecodePlan(1, (), (), (), DECODE_FIVE.name, second, 2) for _ in range(16)]
    assert runner.run(halves).elapsed_s == pytest.approx(
        model.decode(64, 4002, schedule=DECODE_FIVE.name).seconds, rel=1e-6
    )


def test_drafts_make_a_step_part_of_a_verified_one() -> None:
    model = StepModel(16)
    runner = DecodeRunner(model, 8, lambda number: 1000, mtp_tokens=1, mtp_accept=0.8)
    full = {f"r{rank}": tuple(join(slot, 3999, 0) for slot in range(8)) for rank in range(16)}
    verified = model.decode(8, 4000, mtp_tokens=1, mtp_accept=0.8, schedule=SEQUENTIAL.name)
    assert runner.run(decode_plans(16, **full)).elapsed_s == pytest.approx(
        verified.seconds / 1.8, rel=1e-6
    )


@pytest.mark.parametrize(
    ("phase", "schedule"), [(DECODE, DECODE_FIVE), (PREFILL, PREFILL_DUAL), (DECODE, SEQUENTIAL)]
)
def test_op_times_are_the_walk_s_sums(phase: str, schedule: object) -> None:
    """Compute and posts as the lane had them, dense layers spread over the ops that run there."""
    model = StepModel(32)
    name = schedule.name  # type: ignore[attr-defined]
    step = (
        model.decode(64, 4000, schedule=name)
        if phase == DECODE
        else model.prefill(8192, 4096, schedule=name)
    )
    times = {time.op: time.seconds for time in step.op_times()}
    link_s = times.pop("dispatch") + times.pop("combine")
    dense_s = next(part.seconds for part in step.parts if part.name == "dense layers")
    assert sum(times.values()) == pytest.approx(step.walked.compute_s + dense_s, rel=1e-6)
    assert link_s == pytest.approx(step.walked.link_s, rel=1e-6)


def test_a_slow_rank_takes_so_many_times_what_its_own_part_takes() -> None:
    model = StepModel(16)
    full = {f"r{rank}": tuple(join(slot, 4000, 0) for slot in range(8)) for rank in range(16)}
    runner, slow = (DecodeRunner(model, 8, long) for _ in range(2))
    slow.slow[3] = 2.5
    usual, late = runner.run(decode_plans(16, **full)), slow.run(decode_plans(16, **full))
    assert late.elapsed_s == pytest.approx(2.5 * usual.elapsed_s)
    assert [time.seconds for time in late.op_times] == pytest.approx(
        [2.5 * time.seconds for time in usual.op_times]
    )
    prefill, idle = (PrefillRunner(StepModel(8), long) for _ in range(2))
    idle.slow[7] = 1.05
    plans = [PrefillPlan(0, (chunk(4000 if rank < 7 else 100),)) for rank in range(8)]
    assert idle.run(plans).elapsed_s == prefill.run(plans).elapsed_s, (
        "it had so little to do that nobody waits for it"
    )


def test_fewer_ranks_share_what_there_is() -> None:
    runner = DecodeRunner(StepModel(16), 8, long)
    runner.run(decode_plans(16, r0=(join(0, 4000, 0),)))
    runner.formed(8)
    assert not runner.is_taken.any(), "nobody has a table after a unit has formed"
    half = {f"r{rank}": tuple(join(slot, 4000, 0) for slot in range(8)) for rank in range(8)}
    eight = runner.run(decode_plans(16, 1, **half)).elapsed_s
    runner.formed(16)
    assert eight > runner.run(decode_plans(16, 2, **half)).elapsed_s


def test_a_step_says_what_it_did() -> None:
    runner = DecodeRunner(StepModel(8), SLOTS, long)
    runner.run(decode_plans(8, r0=(join(1, 50, 7), join(2, 10, 7)), r2=(join(0, 70, 8),)))
    assert runner.work[:5] == (3, 51 + 11 + 71, 3, 2, 71)
    assert runner.work.context_tokens == 51 + 11 + 71
    prefill = PrefillRunner(StepModel(8), long)
    prefill.run(
        [
            PrefillPlan(0, (chunk(10, 5),), PREFILL_DUAL.name, (chunk(4), chunk(2)), 2)
            for _ in range(8)
        ]
    )
    pairs = 5 * 10 + 55 + 10 + 3
    assert prefill.work[:5] == (8 * 16, 8 * pairs, 24, 16, pairs)
    assert (prefill.work.num_micro_batches, prefill.work.context_tokens) == (2, 8 * (15 + 4 + 2))
    assert prefill.ranks == ([16] * 8, [pairs] * 8)
    prefill.run(
        [
            PrefillPlan(1, (chunk(10, 5),) * rank, PREFILL_DUAL.name, (chunk(4),), 2)
            for rank in range(8)
        ]
    )
    assert prefill.ranks == (
        [4 + 10 * rank for rank in range(8)],
        [10 + (50 + 55) * rank for rank in range(8)],
    )
