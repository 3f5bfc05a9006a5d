"""Facts that the gateway records in the ledger: one per generation, when its HTTP request or
batch line has ended, and the uptime of each unit.

A generation is billed for the output tokens that its reply's `usage` counts. A prompt is billed
once for all its choices, to the first choice that got a token. A request that never became a
generation (malformed body, unknown key) has no fact; one refused for lack of capacity has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from hadal.core.config import Deployment, units_of
from hadal.core.facts import BATCH_MODEL, Fact, NodesFact, RequestFact, micros, sum_kv_tokens
from hadal.core.messages.generation import Closing
from hadal.core.messages.requests import Charged
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.reply import Meter
from hadal.gateway.desk.service import Work
from hadal.roles.front.unit import Unit
from hadal.runtime.ledger.writer import Kept, LedgerCounts
from hadal.stats.prices import DAY_S, PriceList, micro_usd, price_list

HEARTBEAT_S = 10.0
"""Period of writing units' uptime to the ledger; `kill -9` loses at most this much of it."""
_LOOK_S = 1.0
"""Period of writing uptime while requests are charged, so that uptime never lags far behind."""
_CLOSE_S = 10.0
STANDARD = "standard"
"""Tier of interactive requests."""
BATCH_TIER = "batch"
_NO_CLOSING = Closing("", "", 0)


class Sink(Protocol):
    """Part of runtime/ledger/writer that accounting needs."""

    on_kept: Kept

    def add(self, fact: Fact) -> None: ...

    @property
    def counts(self) -> LedgerCounts: ...

    def close(self, timeout_s: float) -> None: ...


class Accounting:
    """Maker of facts about ended requests and units. Used by the event loop's thread."""

    def __init__(
        self,
        deployment: Deployment,
        model: str,
        sink: Sink,
        units: Callable[[], Mapping[str, Unit]],
        clock: GatewayClock,
        on_charged: Callable[[Charged], None] | None = None,
    ) -> None:
        """`units` returns the units that the front has up. `on_charged` is called with the charge
        of each generation; None: no tenant can have a budget. Raises ValueError for invalid prices.
        """
        self._deployment = deployment
        self._model = model
        self._sink = sink
        self._units = units
        self._now = clock.now
        self._unix_time = clock.unix_time
        ledger = deployment.ledger
        self._prices: PriceList = price_list(ledger.prices)
        self._batch_prices = (
            price_list(ledger.batch_prices) if ledger.batch_prices else self._prices.halved()
        )
        self._gpu_hour_micro_usd = micro_usd(deployment.ledger.gpu_hour_usd)
        self._up: dict[tuple[str, str], tuple[str, float]] = {}
        """(unit, epoch) -> (role, Unix time when it was first seen up)."""
        self._looked_s = 0.0
        self.tier_to_pico_usd: Counter[str] = Counter({STANDARD: 0, BATCH_TIER: 0})
        """Tier -> pico-dollars charged since the process started."""
        self._on_charged = on_charged

    def most(self, num_prompt: int, num_output: int, *, is_batch: bool = False) -> int:
        """Return the highest cost of a generation, in pico-dollars."""
        prices = self._batch_prices if is_batch else self._prices
        return prices.most(num_prompt, num_output)

    @property
    def counts(self) -> LedgerCounts:
        """Return how many facts were written, delayed, lost and so on."""
        return self._sink.counts

    def facts(
        self,
        work: Work,
        meters: list[Meter],
        closings: Mapping[str, Closing],
        start_s: float,
        tenant: Tenant,
        end: str,
        *,
        is_batch: bool = False,
    ) -> list[RequestFact]:
        """Return a fact for each generation of an ended request. `end`: outcome of the
        generations that did not finish. `is_batch`: the request is a batch's line.
        """
        prices = self._batch_prices if is_batch else self._prices
        model = f"{self._model}{BATCH_MODEL}" if is_batch else self._model
        unix_s, now_s = self._unix_time(), self._now()

        def unix(time_s: float | None) -> float | None:
            return None if time_s is None else unix_s - (now_s - time_s)

        facts = []
        answered = [index for index, meter in enumerate(meters) if meter.first_token_s is not None]
        payers = {index // work.ask.n: index for index in reversed(answered)}
        for index, (choice, meter) in enumerate(zip(work.choices, meters, strict=True)):
            num_prompt, num_output = len(choice.generation.prompt), choice.assembler.num_tokens
            is_payer = payers.get(index // work.ask.n) == index
            tokens_hit = meter.num_cached if is_payer else 0
            tokens_miss = num_prompt - tokens_hit if is_payer else 0
            closing = closings.get(choice.generation.request_id, _NO_CLOSING)
            # If a prompt is only scored, the model still generates one token, which is not shown.
            first_s, last_s = (
                (meter.first_token_s, meter.last_token_s) if num_output else (None, None)
            )
            facts.append(
                RequestFact(
                    choice.generation.request_id,
                    tenant.name,
                    model,
                    tokens_hit,
                    tokens_miss,
                    num_output,
                    sum_kv_tokens(num_prompt, num_output),
                    choice.assembler.finish or end,
                    unix_s - (now_s - start_s),
                    unix_s,
                    unix(first_s),
                    unix(last_s),
                    closing.prefill_unit,
                    closing.decode_unit,
                    closing.num_retries,
                    prices.charge(micros(unix_s), tokens_hit, tokens_miss, num_output),
                )
            )
        return facts

    def charge(self, facts: Iterable[RequestFact]) -> None:
        """Write facts to the ledger and count their cost. The ledger keeps a repeated fact once."""
        for fact in facts:
            tier = STANDARD if fact.model == self._model else BATCH_TIER
            self.tier_to_pico_usd[tier] += fact.income_pico_usd
            self._report_charged(fact, fact.income_pico_usd)
            self._sink.add(fact)
        if self._unix_time() - self._looked_s >= _LOOK_S:
            self.look()

    def waive(self, facts: Iterable[RequestFact]) -> None:
        """Charge nothing for these facts, and free the budget reserved for them."""
        for fact in facts:
            self._report_charged(fact, 0)

    def _report_charged(self, fact: RequestFact, pico_usd: int) -> None:
        if self._on_charged is not None:
            day = micros(fact.completed_s) // 1_000_000 // DAY_S
            self._on_charged(Charged(fact.request_id, fact.tenant, day, pico_usd))

    def call_when_kept(self, kept: Kept) -> None:
        """Set the function to call with durable facts; it runs in the ledger's thread."""
        self._sink.on_kept = kept

    def refused(self, request_id: str, start_s: float, tenant: Tenant, status: int) -> None:
        """Record a request that was refused before its generations were submitted."""
        unix_s = self._unix_time()
        received_s = unix_s - (self._now() - start_s)
        self._sink.add(
            RequestFact(
                request_id, tenant.name, self._model, 0, 0, 0, 0, str(status), received_s, unix_s
            )
        )

    def look(self) -> None:
        """Record the uptime of the units. Called when units start or end, and periodically."""
        unix_s = self._looked_s = self._unix_time()
        now_up = {(unit.name, unit.epoch): unit.role for unit in self._units().values()}
        for key, role in now_up.items():
            self._up.setdefault(key, (role, unix_s))
        for (name, epoch), (role, from_s) in list(self._up.items()):
            units = units_of(self._deployment, role)
            self._sink.add(
                NodesFact(
                    name,
                    epoch,
                    role,
                    units.ranks,
                    units.ranks_per_node,
                    from_s,
                    max(from_s, unix_s),
                    self._deployment.ledger.gpu or self._deployment.device,
                    self._gpu_hour_micro_usd,
                    self._model,
                )
            )
            if (name, epoch) not in now_up:
                del self._up[name, epoch]

    def end(self) -> None:
        """Record the last facts and close the ledger, as the process ends."""
        self.look()
        self._sink.close(_CLOSE_S)
