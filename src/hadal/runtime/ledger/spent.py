"""What tenants were charged today, as it is kept: in the ledger, in the outbox beside it, and where
batches keep what their lines cost.

The others are read before the ledger: a fact goes from there to the ledger and is removed then, so
it is found in one of them, or in several and counted once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from hadal.core.facts import RequestFact, micros
from hadal.core.messages.requests import Spent
from hadal.roles.front.tenants import RECENT_S
from hadal.runtime.ledger.address import outbox_of
from hadal.runtime.ledger.outbox import LedgerOutbox
from hadal.runtime.ledger.store import Store
from hadal.stats.prices import DAY_S


def read_spent(
    url: str, tenants: Collection[str], unix_s: float, of_batches: Iterable[RequestFact] = ()
) -> Spent:
    """Read it for the day of UTC that it is. `of_batches`: what lines cost that may not have been
    charged yet. Raises HadalError, OSError or sqlite3.Error where ledger or outbox cannot be read.
    """
    day = int(unix_s // DAY_S)
    # A front may have heard of a charge half of RECENT_S after it, and knows it so long from then on.
    recent_us = micros(unix_s - 2 * RECENT_S)
    waiting = {
        fact.request_id: fact
        for fact in (*of_batches, *_waiting(outbox_of(url)))
        if fact.tenant in tenants and micros(fact.completed_s) // 1_000_000 // DAY_S == day
    }
    store = Store(url)
    try:
        sums, recent, had = store.read_spent(day, tenants, recent_us, list(waiting))
    finally:
        store.close()
    for fact in waiting.values():
        if fact.request_id not in had:
            sums[fact.tenant] += fact.income_pico_usd
    return Spent(day, sums, tuple(sorted({*recent, *waiting})))


def _waiting(path: Path) -> list[RequestFact]:
    if not path.exists():
        return []
    outbox = LedgerOutbox(path)
    try:
        return [fact for _, facts in outbox.waiting() for fact in facts.requests]
    finally:
        outbox.close()
