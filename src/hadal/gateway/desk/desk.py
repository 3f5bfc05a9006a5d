"""Begin the replies of admitted requests, end them, and charge their cost."""

from __future__ import annotations

from collections.abc import Callable

from hadal import __version__
from hadal.core.facts import RequestFact
from hadal.core.messages.requests import Ticket
from hadal.gateway.api.reply import Head, ReplyFormat
from hadal.gateway.desk.accounting import Accounting
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.link import FrontLink
from hadal.gateway.desk.metrics import Metrics
from hadal.gateway.desk.reply import Reply, Times
from hadal.gateway.desk.service import Service, Work
from hadal.gateway.edge.intake import Patience
from hadal.gateway.text.vocabulary import Vocabulary

FINGERPRINT = f"hadal-{__version__}"
Formatter = Callable[[Head, Vocabulary], ReplyFormat]
"""Function that makes one reply's format."""


class Desk:
    """Replies of one gateway, from admission by the front to the ledger."""

    def __init__(
        self,
        service: Service,
        link: FrontLink,
        metrics: Metrics,
        accounting: Accounting | None,
        clock: GatewayClock,
        patience: Patience,
    ) -> None:
        """`accounting`: None without a ledger."""
        self.accounting = accounting
        self._service = service
        self._link = link
        self._metrics = metrics
        self._clock = clock
        self._patience = patience

    def reserve(self, work: Work, tenant: Tenant, *, is_batch: bool = False) -> Ticket:
        """Return the ticket that `begin` needs, if the request is admitted. The caller must not
        await anything before `begin`. Raises ApiError 400 (a quota never admits it), 429 or 503.
        """
        generations = [choice.generation for choice in work.choices]
        costs = self._most_pico_usd(work, tenant, is_batch=is_batch)
        return self._link.reserve(work.choices[0].generation.tenant, generations, costs)

    def _most_pico_usd(self, work: Work, tenant: Tenant, *, is_batch: bool) -> tuple[int, ...]:
        """Return the highest cost of each generation; empty if the tenant has no budget. Without
        max_tokens, a generation counts with at most limits.likely_output_tokens.
        """
        if self.accounting is None or tenant.quota is None or not tenant.quota.day_pico_usd:
            return ()
        # A prompt is charged once, to a choice that is not known yet; here to its first choice.
        n, most = work.ask.n, self.accounting.most
        likely = self._service.limits.likely_output_tokens
        is_limited = work.ask.max_tokens is not None
        return tuple(
            most(
                0 if at % n else len(one.prompt),
                one.max_tokens if is_limited else min(one.max_tokens, likely),
                is_batch=is_batch,
            )
            for at, one in enumerate(choice.generation for choice in work.choices)
        )

    def begin(
        self,
        work: Work,
        formatter: Formatter,
        ticket: Ticket,
        request_id: str,
        times: Times,
        *,
        is_batch: bool = False,
    ) -> Reply:
        """Submit a request's generations and return its reply. The caller ends it with `end`."""
        model = self._service.model
        head = Head(
            request_id,
            int(self._clock.unix_time()),
            model.name,
            FINGERPRINT,
            work.ask.include_usage,
            work.ask.omits_reasoning,
            work.ask.has_usage_so_far,
        )
        times.is_read = True
        reply = Reply(
            work,
            self._link.open([choice.generation for choice in work.choices], ticket),
            self._link,
            formatter(head, model.vocabulary),
            times,
            self._clock.now,
            self._service.limits.request_timeout_s,
            self._patience,
        )
        # A batch line may be retried, so it is counted once, when it is charged.
        if not is_batch or self.accounting is None:
            self._metrics.output.begin(reply)
        return reply

    def end(
        self,
        reply: Reply,
        tenant: Tenant,
        end: str,
        take: Callable[[list[RequestFact]], None] | None = None,
    ) -> None:
        """Stop the reply's generations that still run, and charge its cost as soon as the front has
        reported their units. `end`: the value for Accounting.facts. `take`: receives a batch's
        facts in place of the ledger.
        """
        accounting = self.accounting

        def write_down() -> None:
            if accounting is not None:
                facts = accounting.facts(
                    reply.work,
                    reply.meters,
                    reply.mailbox.closings,
                    reply.times.start_s,
                    tenant,
                    end,
                    is_batch=take is not None,
                )
                (take or accounting.charge)(facts)

        self._metrics.output.end(reply)
        self._link.close(reply.mailbox, write_down)
