"""Attacks of one tenant on a live server: all of another tenant's requests are answered before their
deadline. `python -m bench.attacks` measures by how much they slow down.
"""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from bench import attacks
from bench.attacks import ATTACKER, ATTACKS, OTHER, watch_attacked
from tests.dist.keyed import with_keys
from tests.dist.serving import StartServer
from tests.levels import FULL
from tests.waiting import DEADLINE_S

SPAN_S = 4.0 if FULL else 1.0
NUMBERS = itertools.count()
"""Numbers of the requests, so that no two are equal."""


@pytest.mark.promise(
    "The tenant that causes the overload gets 429. A tenant that is alone may use all capacity."
)
@pytest.mark.parametrize(
    "name",
    [
        "flood",
        *(
            pytest.param(name, marks=pytest.mark.more("one attack stands in `make test`"))
            for name in ATTACKS
            if name != "flood"
        ),
    ],
)
@pytest.mark.slow("a flood of requests is answered")
def test_an_attack_costs_another_tenant_no_answer(
    borrow: StartServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All attacks share the server: each leaves it at rest."""
    monkeypatch.setattr(attacks, "WAIT_S", DEADLINE_S)
    unit: dict[str, Any] = {"kv_memory_mb": 256}
    server = borrow(*with_keys(OTHER, ATTACKER), prefill=unit, decode=unit)
    url = httpx.URL(server.url)
    attacked = watch_attacked((url.host, url.port or 80), ATTACKS[name], SPAN_S, NUMBERS)
    print(name, attacked)
    assert attacked.refusals == ()
    assert attacked.times_s, "some were asked"
