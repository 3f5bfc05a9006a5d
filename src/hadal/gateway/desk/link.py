"""Link from a gateway to the front, in the same process or over the wire.

`Host` (desk/host) has the front in its own process; `FarHost` (desk/far_host) uses the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from hadal.core.messages.every import AnyMessage
from hadal.core.messages.generation import Generation
from hadal.core.messages.requests import Charged, Quota, Spent, Ticket
from hadal.core.messages.snapshot import FrontSnapshot
from hadal.gateway.desk.mailbox import Mailbox
from hadal.gateway.desk.pages import Pages
from hadal.gateway.edge.errors import ApiError, overloaded, sentence
from hadal.policy.admission import Refusal


class FrontWire(Protocol):
    """Part of runtime/wire that a link needs."""

    def send(self, to: str, message: AnyMessage) -> None: ...

    async def receive_async(self) -> list[AnyMessage]: ...


class FrontLink(Protocol):
    """A gateway's calls to the front, and its own drain. Used by the event loop's thread."""

    has_front: bool
    """True in the process that runs the front."""
    pages: Pages

    @property
    def gateways(self) -> tuple[str, ...]:
        """Names of the gateways that are up."""

    @property
    def num_open(self) -> int:
        """Number of generations that have not ended."""

    @property
    def draining(self) -> bool:
        """True once no new request is admitted."""

    async def run(self) -> None:
        """Serve messages until cancelled."""

    def snapshot(self) -> FrontSnapshot:
        """Return the front's state as this gateway last received it."""

    def check_capacity(self, tenant: str) -> None:
        """Raise ApiError, 429 or 503, if one more generation of the tenant would not be admitted.
        Called before the body is read, which saves reading it.
        """

    def reserve(
        self, tenant: str, generations: Sequence[Generation], most_pico_usd: tuple[int, ...] = ()
    ) -> Ticket:
        """Return the ticket with which `open` submits these generations, all of them or none. The
        caller must not await anything before `open`. `most_pico_usd`: highest cost of each, empty
        without a budget. Raises ApiError 400 (a quota never admits it), 429 or 503.
        """

    async def check_counting(self, tenant: str) -> None:
        """Raise ApiError 429 if the tenant's quota has no tokens left for counting a prompt."""

    def counted(self, tenant: str, num_tokens: int) -> None:
        """Draw the tokens of a counted prompt from the tenant's quota."""

    def set_quotas(self, unix_s: float, quotas: tuple[Quota, ...]) -> None:
        """Set the quotas of all tenants. `unix_s`: the current Unix time."""

    def unread(self) -> tuple[str, ...]:
        """Return the tenants with a budget and spending that was not read from the ledger yet."""

    def spent(self, spent: Spent) -> None:
        """Pass the tenants' spending, read from the ledger, to the front."""

    def charged(self, charged: Charged) -> None:
        """Pass the recorded charge of one generation to the front."""

    def open(self, generations: Sequence[Generation], ticket: Ticket) -> Mailbox:
        """Submit the choices of one request; the mailbox receives their deliveries."""

    def cancel(self, mailbox: Mailbox, request_id: str) -> None:
        """Stop one generation, and drop its deliveries from now on."""

    def close(self, mailbox: Mailbox, then: Callable[[], None]) -> None:
        """Stop the generations of an ended request that still run. `then` is called once the front
        has reported their units, or the report is overdue.
        """

    def drain(self) -> None:
        """Admit nothing new; running requests continue."""

    async def wait_draining(self) -> None:
        """Wait until a drain is requested. There is no timeout: callers cancel it as they end."""

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no generation is open. Return False after `timeout_s`."""

    def heartbeat(self, pid: int) -> None:
        """Send a heartbeat to the supervisor and to the gateways on the other side of the link."""

    async def page(self, path: str, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Return status and body of a page of the front's process. Raises HadalError."""

    def end(self) -> None:
        """End the link with its process. A front in another process receives a report."""


def as_error(refusal: Refusal) -> ApiError:
    """Return a refusal of the front as an ApiError."""
    return overloaded(
        refusal.status,
        sentence(refusal.reason),
        refusal.retry_after_s or None,
        refusal.code,
        refusal.limits,
    )
