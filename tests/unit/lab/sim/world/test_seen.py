"""Readings of a world, compared with sums by hand."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from hadal.core.config import DECODE, PREFILL
from hadal.lab.sim.runners import StepWork
from hadal.lab.sim.world.requests import Requests
from hadal.lab.sim.world.seen import Reading, WorldLog, nothing_seen, read


def reading(log: WorldLog, begin_s: float = 0.0, end_s: float = 10.0) -> Reading:
    none = np.zeros(0, np.int64)
    nobody = Requests(np.zeros(0), none, none)
    return read(
        begin_s,
        end_s,
        log,
        nothing_seen(0),
        nobody,
        {PREFILL: 1, DECODE: 2},
        {PREFILL: 4, DECODE: 8},
    )


@pytest.mark.promise(
    "Ranks, nodes, units and disks fail at given times. Results of any interval can be read"
)
def test_steps_count_for_the_part_that_lies_inside() -> None:
    log = WorldLog()
    log.steps[DECODE] += [
        ("decode-0", 1.0, 1.0, StepWork(16, 1600, 16, 4, 400, 1.2, 1, 1600)),
        ("decode-1", 9.0, 2.0, StepWork(8, 4000, 8, 1, 500, 1.4, 2, 4000)),
        ("decode-0", 20.0, 1.0, StepWork(99, 99, 99, 99, 99, 9.9, 1, 99)),
    ]
    decode = reading(log).decode
    assert (decode.num_steps, decode.tokens, decode.positions) == (1.5, 20.0, 3600.0)
    assert decode.positions_per_token == 180.0
    assert decode.busy_share == pytest.approx((1.0 + 1.0) / (2 * 10.0))
    assert decode.token_s == pytest.approx((16 * 1.0 + 4 * 2.0) / 20)
    assert decode.step_s == pytest.approx(2.0 / 1.5)
    assert decode.requests_per_rank == pytest.approx((16 + 8) / 2 / 8)
    assert decode.tokens_imbalance == pytest.approx((4 * 8 / 16 + 1 * 8 / 8) / 2)
    assert decode.positions_imbalance == pytest.approx((400 * 8 / 1600 + 500 * 8 / 4000) / 2)
    assert decode.expert_imbalance == pytest.approx(1.3)
    assert decode.two_micro_batches_share == 0.5
    assert decode.tokens_K.tolist() == [16.0, 4.0]


def test_a_step_of_several_tokens_a_request_is_as_long_as_it_is_to_each_of_them() -> None:
    log = WorldLog()
    log.steps[DECODE] += [
        ("decode-0", 1.0, 1.0, StepWork(24, 1600, 16, 4, 400, 1.2, 1, 1600)),
        ("decode-1", 9.0, 2.0, StepWork(16, 4000, 8, 2, 500, 1.4, 2, 4000)),
    ]
    decode = reading(log).decode
    assert (decode.num_steps, decode.tokens) == (1.5, 24 + 8)
    assert decode.positions == pytest.approx(100 * 24 + 500 * 8), "lengths, once a token"
    assert decode.step_s == pytest.approx(2.0 / 1.5)
    assert decode.token_s == pytest.approx((16 * 1.0 + 4 * 2.0) / 32)
    assert decode.seconds_K.tolist() == pytest.approx([16 / 24, 1.0])
    assert decode.tokens_K.tolist() == [24.0, 8.0]
    assert decode.requests_per_rank == pytest.approx((16 + 8) / 2 / 8)
    assert decode.tokens_imbalance == pytest.approx((4 * 8 / 16 + 2 * 8 / 8) / 2), "of requests"
    assert decode.positions_imbalance == pytest.approx((400 * 8 / 1600 + 500 * 8 / 4000) / 2)


def test_ranks_of_prefill_are_summed_by_unit_for_the_part_inside() -> None:
    log = WorldLog()
    for unit, at_s, ranks in (
        ("prefill-1", 1.0, ([8, 0, 4, 4], [80, 0, 10, 16])),
        ("prefill-0", 9.0, ([2, 2, 2, 2], [4, 4, 4, 8])),
        ("prefill-1", -1.5, ([4, 4, 4, 0], [8, 8, 8, 0])),
        ("prefill-0", 10.0, ([99] * 4, [99] * 4)),
    ):
        log.steps[PREFILL].append(
            (unit, at_s, 2.0, StepWork(sum(ranks[0]), sum(ranks[1]), 4, 8, 80, 1.0, 1, 0))
        )
        log.prefill_ranks.append(ranks)
    seen = reading(log)
    assert list(seen.prefill_tokens) == list(seen.prefill_pairs) == ["prefill-0", "prefill-1"]
    # A quarter of the step that began earlier.
    assert seen.prefill_tokens["prefill-1"].tolist() == [9.0, 1.0, 5.0, 4.0]
    assert seen.prefill_pairs["prefill-1"].tolist() == [82.0, 2.0, 12.0, 16.0]
    assert seen.prefill_tokens["prefill-0"].tolist() == [1.0] * 4
    assert seen.prefill_pairs["prefill-0"].tolist() == [2.0, 2.0, 2.0, 4.0]
    assert sum(float(of.sum()) for of in seen.prefill_tokens.values()) == seen.prefill.tokens
    assert sum(float(of.sum()) for of in seen.prefill_pairs.values()) == seen.prefill.positions


def test_nothing_happened_is_said_and_an_empty_interval_refused() -> None:
    nothing = reading(WorldLog())
    found = (nothing.decode.tokens, nothing.decode.positions_per_token, nothing.prefill.busy_share)
    assert found == (0.0, 0.0, 0.0)
    assert nothing.num_arrived == nothing.disk_tokens == 0
    assert nothing.prefill_tokens == nothing.prefill_pairs == {}
    with pytest.raises(ValueError, match="is empty"):
        reading(WorldLog(), 3.0, 3.0)


def test_requests_count_when_they_come_begin_and_end() -> None:
    seen = nothing_seen(4)
    seen.first_token_s[:] = [1.0, 2.5, 3.5, np.nan]
    seen.end_s[:] = [2.1, 2.6, np.nan, 2.9]
    seen.is_failed[3] = True
    seen.tokens_hit[:] = [0, 64, 128, 0]
    asked = Requests(
        np.array([-5.0, 2.0, 2.2, 2.4]),
        np.array([500, 100, 300, 9]),
        np.array([52, 10, 9, 9]),
        tokens_done=np.array([30, 0, 0, 0]),
    )

    def at(begin_s: float, end_s: float) -> Reading:
        one = {PREFILL: 1, DECODE: 1}
        return read(begin_s, end_s, WorldLog(), seen, asked, one, one)

    both = at(2.0, 3.0)
    assert (both.num_arrived, both.tokens_arrived) == (3, 409)
    assert (both.num_ended, both.num_failed) == (3, 1)
    assert both.ttft_s.tolist() == [0.5]
    assert (both.tokens_in, both.tokens_hit, len(both.ttft_s)) == (100, 64, 1)
    # 22 tokens here; the other request had only 10.
    assert both.tpot_s.tolist() == pytest.approx([1.1 / 21])
    assert len(at(0.0, 2.0).ttft_s) == 0, "that one ran at the start"


def test_reads_writes_and_samples_are_of_their_interval() -> None:
    log = WorldLog()
    log.reads += [(0.5, 1.0, 1.5, 640, 640), (1.0, 1.0, 3.0, 128, 64), (1.0, 1.0, 12.0, 64, 64)]
    log.writes += [(0.0, 1.0, 192), (9.0, 11.0, 64)]
    log.ranks += [
        (1.0, "decode-0", np.array([0.2, 0.4]), np.array([3.0, 4.0])),
        (2.0, "decode-0", np.array([0.4, 0.8]), np.array([5.0, 4.0])),
        (11.0, "decode-0", np.array([1.0, 1.0]), np.array([9.0, 9.0])),
    ]
    seen = reading(log)
    assert (seen.disk_tokens, seen.disk_tokens_written) == (704, 192)
    assert (seen.disk_wait_s, seen.disk_read_s) == (pytest.approx(0.25), pytest.approx(1.5))
    assert seen.kv_share["decode-0"].tolist() == pytest.approx([0.3, 0.6])
    assert seen.requests["decode-0"].tolist() == [4.0, 4.0]
    assert pickle.loads(pickle.dumps(seen)).disk_tokens == 704
