"""Schedules: legal ones, errors of illegal ones, and the order in which ops run."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hadal.overlap.plan import (
    COMBINE_FINISH,
    DECODE_FIVE,
    DISPATCH_FINISH,
    NEEDS,
    PREFILL_DUAL,
    SCHEDULES,
    SEQUENTIAL,
    Schedule,
    order,
    parse,
)
from tests.fresh import fresh
from tests.unit.overlap.variants import variants

FRONT = "attn_in attn_core gate"
CHAIN = f"{FRONT} dispatch> >dispatch experts combine> >combine"


def check(walk: Sequence[tuple[int, int, str]], num_layers: int, num_micro_batches: int) -> None:
    """Check a walk: each op runs once, after its needs and after the layer before; all that is
    started is finished.
    """
    done: set[tuple[int, int, str]] = set()
    for micro_batch, layer, op in walk:
        assert (micro_batch, layer, op) not in done
        assert all((micro_batch, layer, need) in done for need in NEEDS[op])
        assert layer == 0 or (micro_batch, layer - 1, COMBINE_FINISH) in done
        # A prompt cut in two: the second micro-batch reads the first one's KV of this layer.
        if micro_batch == 1 and op == "attn_core":
            assert (0, layer, op) in done
        done.add((micro_batch, layer, op))
    assert len(done) == num_layers * num_micro_batches * len(NEEDS)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=str)
@pytest.mark.parametrize("num_layers", [1, 2, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_the_order_is_legal(schedule: Schedule, num_layers: int, num_micro_batches: int) -> None:
    check(list(order(schedule, num_layers, num_micro_batches)), num_layers, num_micro_batches)


def test_every_variant_is_legal_and_distinct() -> None:
    found = list(variants())
    assert len(found) == 15_348
    assert len({(v.stages, v.offset, v.runs_on) for v in found}) == len(found)
    seed = fresh().randrange(2**32)
    print(f"seed {seed}")
    for variant in random.Random(seed).sample(found, 300):
        check(list(order(variant, 3, 2)), 3, 2)


def test_the_named_schedules_are_among_the_variants() -> None:
    shapes = {(v.stages, v.offset, v.runs_on) for v in variants()}
    for schedule in (PREFILL_DUAL, DECODE_FIVE):
        assert (schedule.stages, schedule.offset, schedule.runs_on) in shapes


def test_two_exchanges_at_most_are_open() -> None:
    """Check that two exchanges at most are open: comm/ has one handle per micro-batch."""
    for schedule in SCHEDULES.values():
        open_of: dict[int, int] = {0: 0, 1: 0}
        for micro_batch, _, op in order(schedule, 4, 2):
            open_of[micro_batch] += op.endswith(">")
            open_of[micro_batch] -= op.startswith(">")
            assert 0 <= open_of[micro_batch] <= 1


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=str)
def test_text_round_trip(schedule: Schedule) -> None:
    text = str(schedule).removeprefix(schedule.name).strip()
    if schedule.offset is not None:
        text = text.removeprefix(f"+{schedule.offset}").strip()
    assert parse(schedule.name, text, schedule.offset) == schedule


def test_prefill_dual_turns() -> None:
    """Check that the next layer's attention runs under the other micro-batch's combine, as in the
    figure of DeepSeek's overview.
    """
    walk = [(micro_batch, layer, op) for micro_batch, layer, op in order(PREFILL_DUAL, 2, 2)]
    at = {step: index for index, step in enumerate(walk)}
    assert at[0, 0, "dispatch>"] < at[1, 0, "attn_in"] < at[0, 0, DISPATCH_FINISH]
    assert (
        at[0, 0, "combine>"] < at[1, 0, "experts"] < at[0, 0, COMBINE_FINISH] < at[0, 1, "attn_in"]
    )
    assert at[1, 0, "combine>"] < at[0, 1, "attn_core"] < at[1, 0, COMBINE_FINISH]


def test_decode_five_trails_by_two_stages() -> None:
    walk = list(order(DECODE_FIVE, 2, 2))
    at = {step: index for index, step in enumerate(walk)}
    assert at[0, 0, "dispatch>"] < at[1, 0, "attn_in"] < at[0, 0, DISPATCH_FINISH]
    assert at[0, 0, "combine>"] < at[1, 0, "attn_core"] < at[0, 0, COMBINE_FINISH]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"{CHAIN} shared", "s: >combine comes before shared."),
        (
            f"{FRONT} dispatch> experts >dispatch shared combine> >combine",
            "experts comes before >dispatch",
        ),
        (
            f"{FRONT} dispatch> shared >dispatch experts >combine combine>",
            ">combine comes before combine>",
        ),
        (
            f"{FRONT} >dispatch dispatch> experts shared combine> >combine",
            ">dispatch comes before dispatch>",
        ),
        (
            "attn_core attn_in gate dispatch> shared >dispatch experts",
            "attn_core comes before attn_in",
        ),
        ("attn_in attn_in", "attn_in occurs twice"),
        (
            "attn_in attn_core gate dispatch> shared",
            ">combine, >dispatch, combine>, experts never runs",
        ),
        (f"attention {CHAIN}", "'attention' is not an op. Known: attn_in,"),
        ("", "never runs"),
    ],
)
def test_an_illegal_schedule_says_why(text: str, error: str) -> None:
    with pytest.raises(ValueError, match="s: ") as raised:
        parse("s", text)
    assert error in str(raised.value)


@pytest.mark.parametrize("offset", [-1, 3])
def test_the_offset_is_within_the_layer(offset: int) -> None:
    with pytest.raises(ValueError, match=f"offset {offset} is outside the layer's 3 stages"):
        parse(
            "s",
            "attn_in attn_core gate dispatch> | >dispatch experts combine> | shared >combine",
            offset,
        )


def test_one_micro_batch_runs_in_the_order_of_the_ops() -> None:
    for schedule in SCHEDULES.values():
        assert [op for _, _, op in order(schedule, 2, 1)] == [*schedule.ops, *schedule.ops]


def test_sequential_runs_one_micro_batch_after_the_other() -> None:
    assert [micro_batch for micro_batch, _, _ in order(SEQUENTIAL, 2, 2)] == [0] * 18 + [1] * 18
