"""Costs of a batch's answered lines, on their way from the store to the ledger.

    store --settle--> ledger --facts are durable there--> facts are dropped from the store

The store writes an answer and the facts about its cost in one commit, and only facts read back from
the store are charged. So every line in the output is charged, by this process or the next one, and
the ledger keeps each fact once. Depends on the store's facts, not on lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from hadal.core.facts import Fact, RequestFact
from hadal.gateway.desk.gateway import Gateway
from hadal.runtime.batches import BatchesDown, BatchStore


class BatchCharges:
    """Charges of one worker that are in the store and may not be in the ledger yet."""

    def __init__(
        self,
        gateway: Gateway,
        store: BatchStore,
        call: Callable[..., Awaitable[Any]],
    ) -> None:
        """`call` runs a method of the store off the event loop."""
        self._gateway = gateway
        self._store = store
        self._call = call
        self._charged: set[str] = set()
        """Request ids of facts passed to the ledger and still in the store."""
        self._kept: deque[str] = deque()
        """Request ids of `_charged` that are durable in the ledger; the ledger's thread appends."""

    def listen(self) -> None:
        """Have the ledger report durable facts from now on."""
        if self._gateway.desk.accounting is not None:
            self._gateway.desk.accounting.call_when_kept(self._on_kept)

    async def settle(self) -> None:
        """Drop stored facts that are durable in the ledger; charge new ones. Raises BatchesDown."""
        accounting = self._gateway.desk.accounting
        if accounting is None:
            return
        if kept := list(self._kept):
            await self._call(self._store.drop_charges, kept)
            for request_id in kept:
                self._kept.popleft()
                self._charged.discard(request_id)
        for fact in await self._call(self._store.charges):
            if fact.request_id not in self._charged:
                self._charged.add(fact.request_id)
                accounting.charge([fact])
                self._gateway.metrics.output.add(fact.tokens_out)

    def waive(self, facts: Sequence[RequestFact]) -> None:
        """Charge nothing for a line without a recorded answer."""
        if self._gateway.desk.accounting is not None:
            self._gateway.desk.accounting.waive(facts)

    def close(self) -> None:
        """Drop stored facts that the ledger has. Called after the ledger was closed."""
        with suppress(BatchesDown):  # Facts that stay are charged again, without effect.
            self._store.drop_charges(list(self._kept))

    def _on_kept(self, facts: Sequence[Fact]) -> None:
        self._kept.extend(
            fact.request_id
            for fact in facts
            if isinstance(fact, RequestFact) and fact.request_id in self._charged
        )
