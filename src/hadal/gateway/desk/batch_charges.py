"""Costs of a batch's written lines, on their way from the store to the ledger.

    answer and facts, one commit --settle--> ledger --it has them--> facts are dropped

An answer is written down together with the facts of what it cost, and only what was read back is
charged: a line that stands in the output is charged, by this process or by the next, and
the ledger has each fact once. Knows the store's facts, no line.
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
    """Charges of one worker that the store has and the ledger may not have yet."""

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
        """Facts that the ledger was given, by request id, and the store has."""
        self._kept: deque[str] = deque()
        """Facts of `_charged` that the ledger keeps; its thread appends."""

    def listen(self) -> None:
        """Hear from now on which facts the ledger keeps."""
        if self._gateway.desk.accounting is not None:
            self._gateway.desk.accounting.hear(self._hear)

    async def settle(self) -> None:
        """Drop what the ledger has, and give it what else written lines cost. Raises BatchesDown."""
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
        """Charge nothing for a line that was not written down."""
        if self._gateway.desk.accounting is not None:
            self._gateway.desk.accounting.waive(facts)

    def close(self) -> None:
        """Drop what the ledger has, now that it has been closed."""
        with suppress(BatchesDown):  # Then they are charged again, which changes nothing.
            self._store.drop_charges(list(self._kept))

    def _hear(self, facts: Sequence[Fact]) -> None:
        self._kept.extend(
            fact.request_id
            for fact in facts
            if isinstance(fact, RequestFact) and fact.request_id in self._charged
        )
