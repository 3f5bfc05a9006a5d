"""Requests of a simulated world: invalid ones are refused, and block names identify the request."""

from __future__ import annotations

import numpy as np
import pytest

from hadal.core.cache import slice_of, split
from hadal.kv.names import extend, root_of
from hadal.lab.sim.world.requests import Requests, block_of, chain_of


def columns(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_name_says_which_block_of_which_request_it_is() -> None:
    names = list(split(chain_of(123_456_789, 300)))
    assert [block_of(name) for name in names] == [(123_456_789, index) for index in range(300)]
    assert len({name[:8] for name in names}) == 300, "half of a name is all that a front keeps"
    assert chain_of(7, 5) == slice_of(chain_of(7, 9), 0, 5)
    assert chain_of(7, 0) == b""


def test_a_hash_of_text_is_nobody_s_name() -> None:
    chain = extend(root_of(b"any"), b"", range(64 * 20), b"salt")
    assert [block_of(name) for name in split(chain)] == [None] * 20


def test_a_generation_has_its_names_and_what_was_made_before() -> None:
    asked = Requests(
        np.zeros(2), columns(200, 100), columns(50, 50), columns(128, 64), columns(0, 20)
    )
    assert asked.is_running.tolist() == [False, True]
    new, running = (asked.generation(number, 1000, 1) for number in (0, 1))
    assert (len(new.prompt), len(new.output), new.max_tokens) == (200, 0, 800)
    assert (len(running.prompt), len(running.output), running.chain) == (100, 20, chain_of(1, 1))


@pytest.mark.parametrize(
    ("cached", "done", "reason"),
    [
        (65, 0, "full blocks"),
        (256, 0, "full blocks"),
        (-64, 0, "full blocks"),
        (0, 10, "at least one"),
        (0, -1, "at least one"),
    ],
)
def test_what_cannot_be_is_refused(cached: int, done: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Requests(np.zeros(1), columns(200), columns(10), columns(cached), columns(done))


def test_left_out_columns_are_nothing() -> None:
    asked = Requests(np.zeros(3), columns(1, 1, 1), columns(1, 1, 1))
    assert asked.tokens_cached.tolist() == asked.tokens_done.tolist() == [0, 0, 0]
