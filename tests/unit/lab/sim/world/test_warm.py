"""Requests running at the start: they begin in decode and draw their remaining tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hadal.core.config import UnitsConfig
from hadal.core.errors import InvariantError
from hadal.core.messages.generation import Generation
from hadal.core.messages.units import FrontUp, Prefill, PrefillDone, UnitDown
from hadal.core.plans import Sampling
from hadal.core.seams import Send
from hadal.lab.sim.runners import STOP_ID
from hadal.lab.sim.world.requests import Requests
from hadal.lab.sim.world.warm import WARM, WarmUnit
from hadal.roles.decode.leader import DecodeLeader
from tests.unit.lab.sim.world.test_world import deployment, requests, world


def running(
    size: int, tokens_in: int, tokens_done: int, tokens_out: int, *, later: Requests | None = None
) -> Requests:
    """Return `size` equal requests that run at the start, and `later` ones."""
    columns = [np.full(size, n) for n in (tokens_in, tokens_out, 0, tokens_done)]
    if later is None:
        return Requests(np.full(size, -1.0), *columns)
    rest = (later.tokens_in, later.tokens_out, later.tokens_cached, later.tokens_done)
    return Requests(
        np.concatenate([np.full(size, -1.0), later.arrival_s]),
        *(np.concatenate(pair) for pair in zip(columns, rest, strict=True)),
    )


def test_they_are_all_in_the_first_step_and_take_what_was_left() -> None:
    made = world(running(96, 1000, 50, 81))
    made.run(0.1)
    assert made.front.check() == []
    first = [work for _, _, _, work in made.log.steps["decode"][:2]]
    assert [work.tokens for work in first] == [48, 48], "two units, the same of both"
    assert [work.most_tokens for work in first] == [3, 3], "and of each of 16 ranks"
    made.run(60.0)
    assert np.isfinite(made.seen.end_s).all()
    assert made.front.totals.tokens_out == 96 * 31
    seen = made.read(0.0, 60.0)
    # Each request has one of its 31 missing tokens at the start, and draws 30 at lengths 1051 to
    # 1080. One more step draws the stop id.
    assert seen.decode.tokens == 96 * 31
    assert seen.decode.positions_per_token == pytest.approx(np.mean([*range(1051, 1082)]))
    assert (seen.num_arrived, len(seen.ttft_s), seen.tokens_in, seen.disk_tokens) == (0, 0, 0, 0)
    assert seen.prefill.tokens == 0
    assert made.front.idle
    assert made.check() == []


def test_who_comes_later_is_prefilled_by_those_who_serve() -> None:
    asked = running(64, 500, 100, 300, later=requests(3, 100, 100.0))
    made = world(asked)
    made.run(0.2)
    assert made.check() == []
    assert WARM not in made.front.units.by_name
    made.run(100.0)
    assert np.isfinite(made.seen.end_s).all()
    assert not made.seen.is_failed.any()
    seen = made.read(0.0, 100.0)
    assert (seen.num_arrived, len(seen.ttft_s)) == (100, 100)
    assert seen.tokens_in == asked.tokens_in[64:].sum() == seen.prefill.tokens
    assert made.front.totals.retries == 0
    assert made.check() == []


def test_what_does_not_fit_is_prefilled_again_out_of_the_disk() -> None:
    """Start more requests than decode has slots. No window does that, but no request may be lost."""
    made = world(running(700, 640, 10, 20))
    made.run(200.0)
    assert np.isfinite(made.seen.end_s).all()
    assert made.front.totals.tokens_out == 700 * 10
    assert made.disk.num_blocks.tolist() == [650 // 64] * 700
    assert made.check() == []


def test_one_that_has_a_token_to_go_ends_with_it() -> None:
    made = world(running(5, 100, 7, 8))
    made.run(1.0)
    assert np.isfinite(made.seen.end_s).all()
    assert made.front.totals.tokens_out == 5
    assert not made.log.steps["decode"]
    units = [
        process.role
        for process in made.processes.values()
        if isinstance(process.role, DecodeLeader)
    ]
    assert [unit.num_requests for unit in units] == [0, 0]


def test_it_answers_a_prompt_with_its_next_token() -> None:
    unit = WarmUnit(lambda number: 12)
    generation = Generation("3", (1,) * 70, (2,) * 10, 100, (STOP_ID,), 0, Sampling(seed=3), 1)
    (sent,) = unit.handle(0.0, Prefill(generation))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, PrefillDone)
    assert (sent.message.token.index, sent.message.token.finish) == (10, None)
    assert sent.message.lease is not None
    assert (sent.message.lease.num_tokens, len(sent.message.lease.block_ids)) == (80, 2)
    assert unit.handle(0.0, FrontUp("x")) == unit.start(0.0)
    with pytest.raises(InvariantError, match="cannot handle UnitDown"):
        unit.handle(0.0, UnitDown("decode-0", "gone"))


@pytest.mark.parametrize("num_running", [0, 64])
def test_those_that_wait_at_the_start_are_shared_out(num_running: int) -> None:
    """Queue requests at the start: prefill units report one after the other, yet the first gets only about
    half.
    """
    rest = Requests(np.zeros(200), *(np.full(200, n) for n in (900, 20)))
    roomy = msgspec.structs.replace(
        deployment(), prefill=UnitsConfig(2, ranks=8, max_requests=256, max_waiting=1000)
    )
    made = world(running(num_running, 500, 100, 300, later=rest) if num_running else rest, roomy)
    made.run(60.0)
    tokens = dict.fromkeys(("prefill-0", "prefill-1"), 0.0)
    for unit, _, _, work in made.log.steps["prefill"]:
        tokens[unit] += work.tokens
    assert sum(tokens.values()) == 200 * 900
    assert max(tokens.values()) <= 0.55 * 200 * 900
