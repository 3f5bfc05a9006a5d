"""Admission: requests that are admitted, queued or rejected, and the time to retry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hadal.policy.admission import (
    NO_SPARE,
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_MIN_S,
    admit,
    admit_batch,
    fits_decode,
    may_prefill,
    refuse_lengths,
    retry_after_s,
    share_of,
    slots_beside,
)
from hadal.policy.views import AdmissionView, DownstreamView, SpareView


def view(
    queued: int, *, draining: bool = False, placeable: bool = False, rate: float = 0.0
) -> AdmissionView:
    return AdmissionView(draining, int(placeable), queued, 10, rate)


def test_the_queue_has_a_limit() -> None:
    assert admit(view(9)) is None
    refusal = admit(view(10, rate=1.0))
    assert refusal is not None
    assert (refusal.status, refusal.retry_after_s) == (429, 5.0)


def test_a_request_that_need_not_wait_passes_a_full_queue() -> None:
    assert admit(AdmissionView(False, 1, 0, 0, 0.0)) is None


@pytest.mark.promise(
    "The tenant that causes the overload gets 429. A tenant that is alone may use all capacity."
)
def test_a_tenant_alone_may_have_all_and_leaves_another_its_share() -> None:
    assert admit(AdmissionView(False, 0, 0, 12, 0.0, num_wanted=12)) is None
    first = AdmissionView(False, 0, 12, 12, 0.0, num_tenants=2)
    assert admit(first) is not None, "it has more than its share while another waits"
    assert admit(AdmissionView(False, 0, 0, 12, 0.0, num_wanted=6, num_tenants=2)) is None
    assert admit(AdmissionView(False, 0, 0, 12, 0.0, num_wanted=7, num_tenants=2)) is not None
    assert [share_of(12, num_tenants) for num_tenants in (1, 2, 5, 100)] == [12, 6, 2, 1]
    assert share_of(0, 1) == 0


@pytest.mark.promise(
    "admits all texts of a request together, or refuses them with 429 or 503 and a time to retry"
)
def test_a_request_is_let_in_whole_or_not_at_all() -> None:
    assert admit(AdmissionView(False, 3, 8, 10, 0.0, num_wanted=5)) is None
    assert admit(AdmissionView(False, 3, 8, 10, 0.0, num_wanted=6)) is not None


def test_draining_refuses_everybody() -> None:
    refusal = admit(view(0, draining=True, placeable=True))
    assert refusal is not None
    assert refusal.status == 503


def test_retry_after_follows_the_measured_rate_within_bounds() -> None:
    assert retry_after_s(100, 10.0) == 5.0
    assert retry_after_s(1, 1000.0) == RETRY_AFTER_MIN_S
    assert retry_after_s(10**6, 0.1) == RETRY_AFTER_MAX_S
    assert RETRY_AFTER_MIN_S <= retry_after_s(5, 0.0) <= RETRY_AFTER_MAX_S


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((0, 0, 5, 100), "empty"),
        ((100, 0, 5, 100), "context"),
        ((5, 3, 3, 100), "is left"),
        ((99, 0, 5, 100), None),
    ],
)
def test_lengths(lengths: tuple[int, int, int, int], said: str | None) -> None:
    error = refuse_lengths(*lengths)
    assert (error is None) if said is None else (error is not None and said in error)


def downstream(
    requests: int = 0, used: int = 0, transferring: int = 0, slots: int = 16
) -> DownstreamView:
    return DownstreamView(slots, 100, requests, used, transferring)


def test_prefill_runs_a_little_ahead_of_the_slots() -> None:
    assert may_prefill(downstream(17), 1)
    assert not may_prefill(downstream(18), 1)


def test_prefill_waits_for_blocks_unless_nothing_runs() -> None:
    assert may_prefill(downstream(1, 90), 10)
    assert not may_prefill(downstream(1, 90), 11)
    assert may_prefill(downstream(0, 0), 1000)


def test_prefill_waits_while_many_transfer() -> None:
    assert may_prefill(downstream(8, 0, 4), 1)
    assert not may_prefill(downstream(8, 0, 5), 1)


def test_nothing_is_kept_for_a_tenant_and_one_with_fewer_waits_for_no_slot() -> None:
    assert may_prefill(downstream(17), 1), "a tenant takes all, whoever else was there"
    full = replace(downstream(18), has_place=True)
    assert may_prefill(full, 1)
    assert may_prefill(replace(full, num_requests=33), 1)
    assert not may_prefill(replace(full, num_requests=34), 1), "as many again as there are slots"
    assert not may_prefill(replace(full, num_blocks_used=100), 1), "blocks are given back first"
    assert may_prefill(replace(full, num_transferring=5), 1)


def test_a_batch_fills_beside_others_as_many_slots_as_steps_compute() -> None:
    assert slots_beside((0.0, 0.0), 1, 2, 64) == 64, "nothing was measured"
    assert slots_beside((0.03, 0.00002), 1, 2, 64) > 64, "a GPU's steps"
    # A step of 2 takes 2.9 ms and may take 3.19 ms; one of 20 takes 11.9 ms and may take 13.09 ms.
    assert [slots_beside((0.0019, 0.0005), 1, num, 64) for num in (2, 20)] == [0, 2]
    assert slots_beside((0.0019, 0.0005), 2, 40, 64) == 4, "each rank steps with its own"


def test_no_decode_unit_no_prefill() -> None:
    assert not may_prefill(downstream(slots=0), 1)


def test_decode_keeps_headroom_for_those_that_run() -> None:
    assert fits_decode(5, 5, 0)
    assert not fits_decode(5, 5, 1)
    assert fits_decode(6, 5, 7)
    assert not fits_decode(6, 5, 8)


SPARE = SpareView(
    is_draining=False,
    num_waiting=0,
    num_placed=3,
    num_of_batches=1,
    num_prefilling=0,
    num_prefill_ranks=1,
    num_slots=8,
    num_slots_beside=8,
    num_blocks_used=40,
    num_blocks=100,
)


@pytest.mark.promise(
    "A line starts if no other request waits, a slot and blocks are free, and prefill has a free rank or"
    " works for batches alone."
)
def test_a_batch_takes_what_others_leave() -> None:
    assert admit_batch(SPARE) is None
    assert admit_batch(replace(SPARE, num_placed=8, num_of_batches=8, num_prefilling=8)) is None
    assert admit_batch(replace(SPARE, num_placed=5, num_of_batches=3)) is None
    assert admit_batch(replace(SPARE, num_placed=2, num_of_batches=0, num_slots_beside=0)) is None
    busier: dict[str, Any]
    for busier in (
        {"num_waiting": 1},
        {"num_placed": 9, "num_of_batches": 9},
        {"num_placed": 6, "num_of_batches": 4},
        {"num_slots_beside": 0},
        {"num_prefilling": 1},
        {"num_placed": 0, "num_of_batches": 0, "num_slots": 0},
        {"num_placed": 0, "num_of_batches": 0, "num_prefill_ranks": 0},
        {"num_blocks_used": 100},
    ):
        refusal = admit_batch(replace(SPARE, **busier))
        assert refusal is not None, busier
        assert (refusal.status, refusal.code, refusal.is_for_room) == (429, NO_SPARE, False)
    refusal = admit_batch(replace(SPARE, is_draining=True))
    assert refusal is not None
    assert refusal.status == 503
