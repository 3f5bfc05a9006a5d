"""Test that a tenant's spending of today counts once, in the ledger, in its outbox, or in both."""

from __future__ import annotations

from pathlib import Path

import pytest

from hadal.core.errors import HadalError
from hadal.core.facts import PackedFacts, RequestFact
from hadal.roles.front.tenants import RECENT_S
from hadal.runtime.ledger.address import ledger_url, outbox_of
from hadal.runtime.ledger.outbox import LedgerOutbox
from hadal.runtime.ledger.spent import read_spent
from hadal.runtime.ledger.store import Store
from hadal.stats.prices import DAY_S

DAY = 20_000
NOW_S = (DAY + 0.5) * DAY_S


def fact(name: str, tenant: str, pico_usd: int, ago_s: float = 10.0) -> RequestFact:
    end_s = NOW_S - ago_s
    return RequestFact(
        name,
        tenant,
        "m",
        0,
        5,
        2,
        12,
        "stop",
        end_s - 1.0,
        end_s,
        end_s - 0.5,
        end_s,
        income_pico_usd=pico_usd,
    )


def test_all_of_a_day_is_found_once(tmp_path: Path) -> None:
    url = ledger_url(str(tmp_path / "l.sqlite"))
    store = Store(url)
    store.prepare()
    both = fact("both", "a", 100)
    # The front may have received this charge a minute late, and so may still have its id.
    late = fact("heard late", "a", 20, 1.4 * RECENT_S)
    kept = (fact("old", "a", 1, DAY_S / 4), fact("new", "a", 10), both, late, fact("x", "z", 7))
    store.write(PackedFacts((*kept, fact("yesterday", "a", 5, DAY_S))))
    store.close()
    outbox = LedgerOutbox(outbox_of(url))
    outbox.append(PackedFacts((both, fact("waits", "b", 1000), fact("y", "b", 3, DAY_S))))
    outbox.close()
    of_batches = [fact("old", "a", 1, DAY_S / 4), fact("line", "c", 9, DAY_S / 4)]
    spent = read_spent(url, ("a", "b", "c"), NOW_S, of_batches)
    assert spent.day == DAY
    assert spent.tenant_to_pico_usd == {"a": 131, "b": 1000, "c": 9}
    assert set(spent.request_ids) == {"new", "both", "waits", "old", "line", "heard late"}
    assert list(LedgerOutbox(outbox_of(url)).waiting()), "what waits is only looked at"


def test_a_ledger_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HadalError):
        read_spent(ledger_url(str(tmp_path / "l.sqlite")), ("a",), NOW_S)
