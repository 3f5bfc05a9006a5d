"""Charges of tenants today, from three places: the ledger, the outbox beside it, and the costs of
lines that batches keep.

The ledger is read last. A fact goes from the other places to the ledger, and is removed from them
only afterwards, so it is found in at least one place; if it is in several, it is counted once.
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
    """Read the tenants' charges of the present day (UTC). `of_batches`: costs of lines that may not
    be charged yet. Raises HadalError, OSError or sqlite3.Error if ledger or outbox cannot be read.
    """
    day = int(unix_s // DAY_S)
    # A front may receive a charge RECENT_S / 2 late, and keeps its id for RECENT_S from then on.
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
