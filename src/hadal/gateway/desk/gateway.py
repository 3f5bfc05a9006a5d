"""The parts of a gateway that its endpoints share, from a request's permit to its last charge."""

from __future__ import annotations

from collections.abc import (
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request

from hadal import __version__
from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.core.facts import RequestFact
from hadal.core.messages import FrontSnapshot, Generation
from hadal.gateway.desk.accounting import Accounting
from hadal.gateway.desk.auth import OPERATOR, Keys, Tenant, credentials
from hadal.gateway.desk.far_host import FarHost
from hadal.gateway.desk.host import Host
from hadal.gateway.desk.kept import KeptResponses, Responses
from hadal.gateway.desk.metrics import Metrics
from hadal.gateway.desk.pages import Page
from hadal.gateway.desk.reply import Reply, Times
from hadal.gateway.desk.service import Service, Work
from hadal.gateway.edge.bodies import Bodies, read_body
from hadal.gateway.edge.errors import ApiError, overloaded
from hadal.gateway.edge.permits import Permits
from hadal.gateway.edge.streams import Streams
from hadal.gateway.replies import Head, ReplyFormat
from hadal.gateway.text.vocabulary import Vocabulary
from hadal.runtime.topology import GATEWAY, gateway_names

_CLOCK_S = 1.0
"""What the time of day may be off by, where days are told apart for budgets."""


FINGERPRINT = f"hadal-{__version__}"


Formatter = Callable[[Head, Vocabulary], ReplyFormat]
"""Makes one reply's format."""


@dataclass(frozen=True)
class Patience:
    """How long clients are waited for, in seconds."""

    body_s: float = 30.0
    send_s: float = 30.0
    keep_alive_s: float = 10.0
    retry_after_s: float = 2.0


@dataclass
class Gateway:
    """Everything the handlers share."""

    service: Service
    host: Host | FarHost
    snapshot: Callable[[], FrontSnapshot]
    metrics: Metrics
    keys: Keys
    now: Callable[[], float]
    created: int
    """Unix time at start."""
    unix_time: Callable[[], float]
    patience: Patience = Patience()
    accounting: Accounting | None = None
    """None: there is no ledger."""
    deployment: Deployment = field(default_factory=Deployment)
    bound_host: str = ""
    """Where it listens; "": unknown, and then any name is answered to."""
    was_ready: bool = False
    """The server could answer once, under this gateway or the one before: units that are down come
    back, and until then requests wait at the front.
    """
    wrong_nodes: Callable[[], Sequence[str]] = tuple
    """What is wrong with the nodes of a cluster, a sentence each."""
    cores: Callable[[], Mapping[str, Sequence[int]]] = dict
    """See Overview.cores."""
    bodies: Bodies = field(default_factory=Bodies)
    keys_changed: Callable[[], Awaitable[Keys | None]] | None = None
    """Asks for the keys, if they are others now; None: they stay what they are."""
    keys_page: Page | None = None
    """What the other gateways are told of them."""
    ledger_url: str = ""
    name: str = GATEWAY
    """This process's, among the gateways."""

    _ahead_s: float = 0.0
    """What unix time was ahead of `now` when the front heard it last."""

    def __post_init__(self) -> None:
        limits = self.service.limits
        self.permits = Permits(limits.max_running + limits.max_queued, self.patience.retry_after_s)
        settings = self.deployment.gateway
        kept = KeptResponses(settings.keep_responses_mb << 20, settings.keep_responses_s, self.now)
        names = tuple(gateway_names(self.deployment))
        self.streams = Streams(self.now)
        self.responses = Responses(kept, self.host, self.name, names)

    @property
    def num_requests(self) -> int:
        """HTTP requests for a generation that are being worked on."""
        return len(self.permits)

    def check_open(self) -> None:
        """Raise ApiError 503 while there is nobody to do the work."""
        retry_after_s = self.patience.retry_after_s
        if self.host.draining:
            raise overloaded(
                503, "The server is shutting down; try again later.", retry_after_s, "draining"
            )
        if not self.has_begun():
            raise overloaded(503, "The server is starting; try again.", retry_after_s, "no_units")

    def priced(
        self, work: Work, tenant: Tenant, *, is_batch: bool = False
    ) -> tuple[Generation, ...]:
        """What is to be generated, with what it can cost where its tenant has a budget."""
        generations = tuple(choice.generation for choice in work.choices)
        if self.accounting is None or tenant.quota is None or not tenant.quota.day_pico_usd:
            return generations
        # The prompt is charged once, and nobody knows yet to which of its choices.
        n, most = work.ask.n, self.accounting.most
        likely = self.service.limits.likely_output_tokens
        is_limited = work.ask.max_tokens is not None
        return tuple(
            msgspec.structs.replace(
                one,
                most_pico_usd=most(
                    0 if at % n else len(one.prompt),
                    one.max_tokens if is_limited else min(one.max_tokens, likely),
                    is_batch=is_batch,
                ),
            )
            for at, one in enumerate(generations)
        )

    def check_budgets(self, keys: Keys) -> bool:
        """Whether a tenant has a budget. Raises ConfigError if nothing is written down then."""
        has_budgets = any(quota.day_pico_usd for quota in keys.quotas)
        if has_budgets and self.accounting is None:
            raise ConfigError("dollars_per_day needs a ledger: see [ledger] url.")
        return has_budgets

    def take_keys(self, keys: Keys) -> None:
        """Let these keys in from now on, and no others; what runs goes on. Raises ConfigError for
        a budget where nothing is written down.
        """
        self.check_budgets(keys)
        had_quotas, self.keys = bool(self.keys.quotas), keys
        if keys.quotas or had_quotas:
            self._say_quotas()

    def keep_time(self) -> None:
        """Tell the front what time it is, where it has to know and the clock was set."""
        if self.keys.quotas and abs(self.unix_time() - self.now() - self._ahead_s) > _CLOCK_S:
            self._say_quotas()

    def _say_quotas(self) -> None:
        unix_s = self.unix_time()
        self._ahead_s = unix_s - self.now()
        if isinstance(self.host, Host):
            self.host.set_quotas(unix_s, self.keys.quotas)

    def begin(
        self,
        work: Work,
        formatter: Formatter,
        generations: tuple[Generation, ...],
        request_id: str,
        times: Times,
        *,
        is_batch: bool = False,
    ) -> Reply:
        """Have generations done; the reply is of what comes of them. Whoever begins one ends it."""
        model, patience = self.service.model, self.patience
        head = Head(
            request_id,
            int(self.unix_time()),
            model.name,
            FINGERPRINT,
            work.ask.include_usage,
            work.ask.omits_reasoning,
            work.ask.has_usage_so_far,
        )
        times.is_read = True
        reply = Reply(
            work,
            self.host.open(generations),
            self.host,
            formatter(head, model.vocabulary),
            times,
            self.now,
            timeout_s=self.service.limits.request_timeout_s,
            keep_alive_s=patience.keep_alive_s,
            send_timeout_s=patience.send_s,
        )
        # A line of a batch may be tried again: it counts once, when it is charged.
        if not is_batch or self.accounting is None:
            self.metrics.output.begin(reply)
        return reply

    def end(
        self,
        reply: Reply,
        tenant: Tenant,
        end: str,
        take: Callable[[list[RequestFact]], None] | None = None,
    ) -> None:
        """Stop what still runs of a reply, and charge what it cost as soon as the front has said
        where it was worked on. `end`: as Accounting.facts has it. `take`: where a batch's facts go
        instead.
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

        self.metrics.output.end(reply)
        self.host.close(reply.mailbox, write_down)

    def has_begun(self) -> bool:
        """Whether requests could ever be served: until then the server is starting."""
        self.was_ready = self.was_ready or self.snapshot().can_serve
        return self.was_ready

    async def body_of(self, request: Request, tenant: Tenant) -> bytes:
        """The body of a request that costs work. Raises ApiError."""
        self.permits.check(tenant.name)
        async with self.bodies.wait(tenant.name, self.patience.body_s):
            return await read_body(request, self.service.limits.max_body_bytes)

    def tenant_of(self, request: Request) -> Tenant:
        """Whoever asks. Raises ApiError 401, 503."""
        return self.keys.check(credentials(request.headers))

    def check_operator(self, request: Request) -> None:
        """What counts all tenants is for those who may operate the server. Raises ApiError 401,
        403.
        """
        if OPERATOR not in self.tenant_of(request).rights:
            raise ApiError(
                403,
                "This API key has no right to operate the server; in the keys file 'operator'"
                " behind it gives it.",
                code="not_an_operator",
            )
