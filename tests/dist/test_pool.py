"""Pool of servers: equal configurations share one server, audited at its return. Also tests the
gate that holds a stream in progress.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.dist import gate
from tests.dist.answers import asked, events_of
from tests.dist.pool import OUTPUT_TOKENS, Pool
from tests.dist.serving import Server, metric
from tests.waiting import join, wait_until

FIELDS = {"limits": {"max_queued": 7}}
"""A configuration that no other test uses."""


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


def pieces(server: Server, num_tokens: int) -> Iterator[str]:
    """Yield the tokens of a completion as they arrive."""
    for event in events_of(server, "/v1/completions", asked(server, num_tokens, "held")):
        yield event["choices"][0]["text"]


def test_a_server_is_borrowed_again_unless_it_is_dirty(own_pool: Pool) -> None:
    first = own_pool.borrow((), FIELDS)
    process = first.server.process
    free = "".join(pieces(first.server, 40))
    own_pool.give_back(first)
    again = own_pool.borrow((), FIELDS)
    assert again.server.process is process
    # A held stream stays in place with its tokens so far, and continues from there.
    held: list[str] = []
    counted = metric(again.server, OUTPUT_TOKENS)
    again.server.gate.hold(gate.DECODE, after=10)
    reader = threading.Thread(target=lambda: held.extend(pieces(again.server, 40)), daemon=True)
    reader.start()
    wait_until(
        lambda: metric(again.server, OUTPUT_TOKENS) == counted + 11, "ten steps were let through"
    )
    assert metric(again.server, "hadal_generations_now", 'state="decoding"') == 1
    assert len("".join(held)) < len(free)
    again.pids["decode-0"] += 1  # Imitates a replaced unit.
    with pytest.raises(AssertionError, match="dirty"):  # The audit opens the gate.
        own_pool.give_back(again)
    join(reader)
    assert "".join(held) == free
    assert process.poll() is not None
