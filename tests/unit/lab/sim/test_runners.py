"""Simulated Runners: plans executed in the step model's time."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hadal.core.config import DECODE, PREFILL
from hadal.core.plans import Chunk, DecodePlan, Join, PrefillPlan, Sampling, StepDone
from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.runners import STOP_ID, WORD_ID, DecodeRunner, PrefillRunner
from hadal.overlap.plan import DECODE_FIVE, PREFILL_DUAL, SEQUENTIAL

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
    # As many tokens per rank as above, in prompts of their mean length.
    alone = model.prefill(3000, 1500, schedule=SEQUENTIAL.name)
    assert done.elapsed_s == pytest.approx(alone.seconds, rel=0.03)
    assert {time.op for time in done.op_times} == {time.op for time in alone.op_times()}


def test_a_request_of_one_token_ends_in_prefill() -> None:
    plans = [
        PrefillPlan(0, (chunk(10), Chunk("b", (1,), 0, (), Sampling(seed=4), 2))) for _ in range(8)
    ]
    found = PrefillRunner(StepModel(8), {0: 1, 4: 4}.__getitem__).run(plans).tokens
    assert found == (STOP_ID, WORD_ID) * 8


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
    # The slot keeps drawing tokens until the leader removes the request.
    assert list(done.tokens) == [STOP_ID, WORD_ID]
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


def drafting(
    num_drafts: int, joins: tuple[Join, ...] = (), step_id: int = 0, num_ranks: int = 1
) -> list[DecodePlan]:
    """Return plans with the same joins on each rank."""
    return [DecodePlan(step_id, (), joins, (), num_drafts=num_drafts)] * num_ranks


def roomy(slot: int, num_tokens: int, number: int, room: int = 1000) -> Join:
    return msgspec.structs.replace(join(slot, num_tokens, number), block_ids=(1,) * room)


def made_of(done: StepDone, num_slots: int) -> list[list[int]]:
    """Return the tokens of each slot, in order."""
    tokens: list[list[int]] = [[] for _ in range(num_slots)]
    for key, token in zip(done.keys, done.tokens, strict=True):
        tokens[key].append(int(token))
    return tokens


def test_a_step_costs_what_it_checks_and_what_it_drafts() -> None:
    model = StepModel(16)
    runner = DecodeRunner(model, 8, long, num_drafts_max=3, mtp_accept=0.0)
    joins = tuple(roomy(slot, 3999, 0) for slot in range(8))
    plain, checked = (
        model.decode(8, at, mtp_tokens=num, schedule=SEQUENTIAL.name).seconds
        for at, num in ((4000, 0), (4001, 1))
    )
    first = runner.run(drafting(1, joins, num_ranks=16)).elapsed_s
    assert plain < first < checked, "nobody who joins has anything to check"
    assert runner.run(drafting(1, (), 1, 16)).elapsed_s == pytest.approx(checked, rel=1e-6)
    last = runner.run(drafting(0, (), 2, 16)).elapsed_s
    assert plain < last < checked, "two tokens of each are checked, and none is drafted"
    after = runner.run(drafting(0, (), 3, 16)).elapsed_s
    assert after == pytest.approx(
        model.decode(8, 4003, schedule=SEQUENTIAL.name).seconds, rel=1e-6
    ), "no draft was right"


def test_drafts_are_right_as_often_as_they_are_said_to_be() -> None:
    runner = DecodeRunner(
        StepModel(1, HARDWARE["b200"]), 500, long, num_drafts_max=3, mtp_accept=0.8
    )
    runner.run(drafting(3, tuple(roomy(slot, 10, slot) for slot in range(500))))
    counts = np.zeros(5)
    for step in range(1, 41):
        done = runner.run(drafting(3, (), step))
        each = np.bincount(np.asarray(done.keys), minlength=500)
        counts += np.bincount(each, minlength=5)
        assert runner.work[:4] == (len(done.keys), runner.work.context_tokens, 500, 500)
    assert counts[0] == 0
    reached = counts[::-1].cumsum()[::-1]
    assert reached[2:] / reached[1:-1] == pytest.approx(0.8, abs=0.01), "each after those before it"
    for accept, num in ((0.0, 1), (1.0, 4)):
        runner = DecodeRunner(StepModel(8), SLOTS, long, num_drafts_max=3, mtp_accept=accept)
        runner.run(drafting(3, (roomy(0, 10, 0),), num_ranks=8))
        assert len(runner.run(drafting(3, (), 1, 8)).keys) == num * 8
    with pytest.raises(ValueError, match=r"mtp_accept is 1\.1"):
        DecodeRunner(StepModel(8), SLOTS, long, num_drafts_max=3, mtp_accept=1.1)


def test_a_request_s_drafts_are_right_whoever_else_runs_and_however_many_there_are() -> None:
    def ends(num_drafts: int, *joins: Join, slot: int) -> list[int]:
        """Return how many output tokens there are after each step."""
        runner = DecodeRunner(StepModel(8), SLOTS, long, num_drafts_max=3, mtp_accept=0.7)
        runner.run(drafting(num_drafts, joins, num_ranks=8))
        made = [1]
        for step in range(1, 100):
            made.append(
                made[-1] + len(made_of(runner.run(drafting(num_drafts, (), step, 8)), 32)[slot])
            )
        return made

    alone = ends(1, roomy(0, 50, 7), slot=0)
    assert ends(1, roomy(0, 9, 3), roomy(2, 50, 7), roomy(1, 99, 8), slot=2) == alone
    assert ends(1, roomy(0, 50, 8), slot=0) != alone
    three = ends(3, roomy(0, 50, 7), slot=0)
    assert three[-1] > alone[-1]


def test_a_stop_id_comes_where_the_output_ends_and_nothing_behind_it_is_one() -> None:
    for wanted in range(2, 12):
        runner = DecodeRunner(
            StepModel(8), SLOTS, lambda number, n=wanted: n, num_drafts_max=3, mtp_accept=1.0
        )  # type: ignore[misc]
        made = made_of(runner.run(drafting(3, (roomy(0, 50, 1),), num_ranks=8)), 32)[0]
        for step in range(1, 4):
            made += made_of(runner.run(drafting(3, (), step, 8)), 32)[0]
        assert made.index(STOP_ID) == wanted - 2, "the first token was prefill's"
        before = wanted - 1 + -(wanted - 2) % 4  # End of the step that has the stop id.
        assert made[wanted - 1 : before] == [WORD_ID] * (before - wanted + 1)


def test_no_draft_is_checked_beyond_a_request_s_blocks() -> None:
    runner = DecodeRunner(StepModel(8), SLOTS, long, num_drafts_max=3, mtp_accept=1.0)
    runner.run(drafting(3, (roomy(0, 60, 1, room=1),), num_ranks=8))
    nums = [len(runner.run(drafting(3, (), step, 8)).keys) // 8 for step in range(1, 3)]
    # Positions 61 to 63, and one for which the leader would have granted a block.
    assert nums == [3, 1]
    grown = [DecodePlan(3, (), (), ((0, 1, 5),), num_drafts=3)] * 8
    assert len(runner.run(grown).keys) == 8 * 4


def test_nobody_has_drafts_who_left_or_came_again_or_whose_unit_formed_anew() -> None:
    runner = DecodeRunner(StepModel(8), SLOTS, long, num_drafts_max=3, mtp_accept=1.0)
    runner.run(drafting(2, (roomy(0, 60, 1), roomy(1, 60, 1)), num_ranks=8))
    again = [DecodePlan(1, (0,), (roomy(0, 60, 1),), (), num_drafts=2)] * 8
    assert len(runner.run(again).keys) == 8 * (1 + 3)
    runner.formed(8)
    assert len(runner.run(drafting(2, (roomy(1, 60, 1),), 2, 8)).keys) == 8
    assert len(runner.run(drafting(0, (), 3, 8)).keys) == 8 * 3
    assert len(runner.run(drafting(0, (), 4, 8)).keys) == 8


@pytest.mark.parametrize(
    ("phase", "schedule"), [(DECODE, DECODE_FIVE), (PREFILL, PREFILL_DUAL), (DECODE, SEQUENTIAL)]
)
def test_op_times_are_the_walk_s_sums(phase: str, schedule: object) -> None:
    """Compare times by op with the sums of the schedule's walk: compute, to which the dense layers
    are added, and link.
    """
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
    found = [time.seconds for time in late.op_times]
    assert found == pytest.approx([2.5 * time.seconds for time in usual.op_times])
    prefill, idle = (PrefillRunner(StepModel(8), long) for _ in range(2))
    idle.slow[7] = 1.05
    plans = [PrefillPlan(0, (chunk(4000 if rank < 7 else 100),)) for rank in range(8)]
    # The slow rank has so little work that no other rank waits for it.
    assert idle.run(plans).elapsed_s == prefill.run(plans).elapsed_s


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
