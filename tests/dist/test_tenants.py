"""Attacks of one tenant on a live server: another tenant's requests are all answered, and none
waits for long.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.attacks import ATTACKER, ATTACKS, OTHER, watch, watch_attacked
from tests.dist.conftest import Server, starting
from tests.levels import FULL
from tests.waiting import wait_until

SPAN_S = 4.0 if FULL else 1.5
NUM_ALONE = 3
"""Requests before an attack: what is slow once is not its doing."""
MOST_S = 5.0
"""Of one request of 32 tokens on a machine that does other things as well; some of them took 30 s
and had no answer.
"""
NUMBERS = itertools.count()
"""Of the requests: no two are the same."""


@pytest.fixture(scope="module")
def tenants() -> Iterator[Server]:
    unit: dict[str, Any] = {"kv_memory_mb": 256}
    keys = {"HADAL_API_KEYS": f"{ATTACKER},{OTHER}"}
    with starting() as start:
        yield start(environment=keys, prefill=unit, decode=unit)


def is_at_rest(server: Server) -> bool:
    """Whether nothing is left of what anybody asked."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return not any(
        float(line.split()[-1]) for line in lines if line.startswith("hadal_generations_now{")
    )


@pytest.mark.parametrize("name", ["flood", "flood_first", "dribble", "unread", "cancel", "big_ids"])
def test_an_attack_costs_another_tenant_no_answer(tenants: Server, name: str) -> None:
    """The server is the same for all attacks: each finds it at rest."""
    wait_until(lambda: is_at_rest(tenants), "the attack before this one is over")
    url = httpx.URL(tenants.url)
    alone = watch((url.host, url.port or 80), SPAN_S, NUM_ALONE, NUMBERS)
    attacked = watch_attacked((url.host, url.port or 80), ATTACKS[name], SPAN_S, NUMBERS)
    print(name, "alone", alone, "attacked", attacked)
    assert attacked.refusals == ()
    assert attacked.median_s < MOST_S
