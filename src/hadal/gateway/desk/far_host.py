"""Link of a gateway without the front: sends generations and receives tokens over the wire.

    Open ──► Delivered, Delivered ... the last one is final
    Open ──► Delivered ... (the front dies)
             a FrontHeartbeat with another epoch: Open, with the tokens so far ──► Delivered ...

So a crash of the front costs a stream of this gateway only time. One table has every open
generation with all its tokens. A silent front is waited for until the request's deadline. All
methods are called from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from hadal.core.config import GATEWAY_HEARTBEAT_S, ROLES
from hadal.core.messages.base import FRONT, SUPERVISOR
from hadal.core.messages.gateways import (
    Delivered,
    FrontHeartbeat,
    GatewayHeartbeat,
    Leave,
    Open,
    Query,
    QueryReply,
)
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.messages.requests import Charged, Counted, Quota, Spent, Ticket
from hadal.core.messages.snapshot import FrontSnapshot, Totals
from hadal.core.messages.units import Drain, UnitDown
from hadal.gateway.desk.doors import Doors
from hadal.gateway.desk.link import FrontWire, as_error
from hadal.gateway.desk.mailbox import Mailbox, mailbox_for
from hadal.gateway.desk.pages import COUNTING, Pages
from hadal.gateway.desk.trace import MAX_WAIT_S
from hadal.gateway.edge.errors import overloaded
from hadal.policy.admission import Refusal
from hadal.roles.front.names import FrontNames
from hadal.roles.front.tenants import RECENT_S

log = logging.getLogger("hadal.gateway")

_SILENT_S = 8 * GATEWAY_HEARTBEAT_S
"""Heartbeat timeout of the front; after it, the front's last snapshot is not used."""
_CLOSING_S = 2.0
"""Maximum wait for the front to report the units of an abandoned generation."""
_PAGE_S = MAX_WAIT_S + 10.0
"""Maximum wait for a page. The slowest, /trace, waits for a unit's steps. If the front crashes, the
wait ends sooner.
"""
_REPEAT_S = RECENT_S / 2
"""Maximum age of a charge that is sent again to a new front."""
_ADMISSION_S = 1.0
"""A front that sent a heartbeat this long after a generation was sent to it, or later, counts as
having admitted the generation. Also the longest wait of `check_counting` for the front's answer.
"""
_NO_FRONT = FrontSnapshot(False, {}, {}, {role: {} for role in ROLES}, Totals())


@dataclass
class _Sent:
    """Generation that was sent to the front, or waits for a new front."""

    mailbox: Mailbox
    generation: Generation
    sent_s: float
    most_pico_usd: int
    """Highest cost, in pico-dollars; 0 without a budget."""
    is_admitted: bool = False
    """True if an earlier front admitted the generation, or is assumed to have."""
    output: list[int] = field(default_factory=list)
    """Tokens of the generation so far."""
    is_resumed: bool = False
    """True if the generation had output when it was sent to a new front. Its prompt's cached tokens
    have been counted before.
    """

    def again(self, front_spoke_s: float) -> Generation:
        """Return the generation as a new attempt that continues after its tokens so far.
        `front_spoke_s`: last heartbeat of the previous front. If that front may never have received
        the generation, the next front decides on admission.
        """
        self.is_admitted |= bool(self.output) or front_spoke_s >= self.sent_s + _ADMISSION_S
        self.is_resumed = bool(self.output)
        self.generation = msgspec.structs.replace(
            self.generation,
            output=tuple(self.output),
            attempt=self.generation.attempt + ATTEMPTS_OF_A_FRONT,
        )
        return self.generation


def _ticket_of(choices: Sequence[_Sent]) -> Ticket:
    """Return the ticket for the choices of one request: a front admitted all of them or none."""
    return Ticket(
        any(sent.is_admitted for sent in choices), tuple(sent.most_pico_usd for sent in choices)
    )


ATTEMPTS_OF_A_FRONT = 1 << 20
"""Offset between the attempt numbers of two fronts. One front makes fewer attempts than this, so
units never confuse an attempt of the new front with one of the old.
"""


class FarHost(Doors):
    """Link of a gateway without the front (desk/link.FrontLink), and its open generations."""

    has_front = False

    def __init__(
        self, name: str, wire: FrontWire, now: Callable[[], float], names: FrontNames
    ) -> None:
        """`name`: this gateway's name on the wire and at the supervisor. `names`: computes block
        names of prompts, as the front would.
        """
        super().__init__()
        self.pages = Pages(name, wire.send)
        self._name = name
        self._wire = wire
        self._now = now
        self._names = names
        self._epoch = ""
        self._snapshot = _NO_FRONT
        self._gateways: tuple[str, ...] = ()
        self._heard_s = 0.0
        self._sent: dict[str, _Sent] = {}
        self._leaving: dict[str, Mailbox] = {}
        """Abandoned generations, until the front has closed them or _CLOSING_S has passed."""
        self._then: dict[Mailbox, Callable[[], None]] = {}
        self._charged: deque[tuple[float, Charged]] = deque()

    @property
    def gateways(self) -> tuple[str, ...]:
        """Names of the gateways that are up; only this one while the front is silent."""
        return self._gateways if self._is_heard() else (self._name,)

    @property
    def num_open(self) -> int:
        """Number of generations that have not ended."""
        return len(self._sent) + len(self._leaving)

    def snapshot(self) -> FrontSnapshot:
        """Return the last known state of the front; without units if the front is silent."""
        return self._snapshot if self._is_heard() else _NO_FRONT

    def _is_heard(self) -> bool:
        return self._now() - self._heard_s < _SILENT_S

    async def run(self) -> None:
        """Serve messages until cancelled."""
        while True:
            for message in await self._wire.receive_async():
                match message:
                    case Delivered(delivers):
                        self._delivered(delivers)
                    case FrontHeartbeat():
                        self._front_spoke(message)
                    case Query() | QueryReply():
                        self.pages.take(message)
                    case Drain():
                        self._draining.set()
                    case _:
                        log.warning(
                            "dropped %s: only the gateway with the front handles it",
                            type(message).__name__,
                        )

    def check_capacity(self, tenant: str) -> None:
        """Refuse nothing: the front decides once generations are opened."""

    def reserve(
        self, tenant: str, generations: Sequence[Generation], most_pico_usd: tuple[int, ...] = ()
    ) -> Ticket:
        """Return a ticket without admission: the front decides once it gets the generations."""
        return Ticket(False, most_pico_usd)

    async def check_counting(self, tenant: str) -> None:
        """Raise ApiError 429 if the tenant's quota has no tokens left for counting a prompt.
        Nothing is refused while the front is being restarted.
        """
        answer = await self.pages.ask(FRONT, COUNTING, {"tenant": tenant}, _ADMISSION_S)
        if answer is not None and answer.status == 200:
            refusal = msgspec.json.decode(answer.body, type=Refusal | None)
            if refusal is not None:
                raise as_error(refusal)

    def counted(self, tenant: str, num_tokens: int) -> None:
        """Send the front the number of counted tokens, which it draws from the tenant's quota."""
        self._wire.send(FRONT, Counted(tenant, num_tokens))

    def set_quotas(self, unix_s: float, quotas: tuple[Quota, ...]) -> None:
        """Do nothing: the gateway with the front reads the keys, and so the quotas."""

    def unread(self) -> tuple[str, ...]:
        """Return (): the gateway with the front reads the ledger."""
        return ()

    def spent(self, spent: Spent) -> None:
        """Do nothing: the gateway with the front reads the ledger."""

    def charged(self, charged: Charged) -> None:
        """Send the recorded charge of a generation to the front. A new front gets it again if it is
        recent (_REPEAT_S): that front may have read the ledger before the charge was in it.
        """
        now_s = self._now()
        self._charged.append((now_s, charged))
        while self._charged[0][0] < now_s - _REPEAT_S:
            self._charged.popleft()
        self._wire.send(FRONT, charged)

    def open(self, generations: Sequence[Generation], ticket: Ticket) -> Mailbox:
        """Submit the choices of one request; the mailbox receives their deliveries."""
        mailbox, begun = mailbox_for(generations, self.close)
        if begun:
            now_s = self._now()
            sent = [
                _Sent(mailbox, generation, now_s, ticket.cost(index))
                for index, generation in enumerate(generations)
                if generation.max_tokens
            ]
            self._sent |= {one.generation.request_id: one for one in sent}
            self._idle.clear()
            self._wire.send(FRONT, Open(self._name, begun, _ticket_of(sent), mailbox.log_id))
        return mailbox

    def cancel(self, mailbox: Mailbox, request_id: str) -> None:
        """Stop one generation on any unit. Its deliveries are dropped from now on."""
        self._leave(mailbox, [request_id])

    def close(self, mailbox: Mailbox, then: Callable[[], None]) -> None:
        """End a request: stop its generations that still run. `then` is called once the front has
        reported the units of all of them, or the report is overdue.
        """
        self._leave(mailbox, list(mailbox.open_ids))
        if any(left is mailbox for left in self._leaving.values()):
            self._then[mailbox] = then
        else:
            then()

    def drain(self) -> None:
        """Admit nothing new; running generations continue."""
        self._draining.set()

    def heartbeat(self, pid: int) -> None:
        """Send a heartbeat to the supervisor and to the gateway with the front."""
        for whom in (SUPERVISOR, FRONT):
            self._wire.send(whom, GatewayHeartbeat(self._name, pid))

    def end(self) -> None:
        """End this link: report to the front that this gateway is gone, and treat abandoned
        generations as closed without waiting for the front.
        """
        for request_id in list(self._leaving):
            self._left(request_id)
        self._wire.send(FRONT, UnitDown(self._name, "it has ended"))

    async def page(self, path: str, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Return status and body of a page of the front's gateway. Raises ApiError 503 if down."""
        answer = await self.pages.ask(FRONT, path, query, _PAGE_S)
        if answer is None:
            raise overloaded(503, "The front is being restarted; try again.", 1.0, "no_front")
        return answer.status, answer.body

    def _front_spoke(self, heartbeat: FrontHeartbeat) -> None:
        spoke_s, self._heard_s = self._heard_s, self._now()
        self._snapshot, self._gateways = heartbeat.snapshot, heartbeat.gateways
        self._names.fingerprint = heartbeat.snapshot.fingerprint
        if heartbeat.epoch == self._epoch:
            return
        is_first, self._epoch = not self._epoch, heartbeat.epoch
        if not is_first:
            log.warning(
                "the gateway with the front was restarted; %d generations continue there",
                len(self._sent),
            )
        self.pages.give_up()
        for at_s, charged in self._charged:
            if at_s >= self._now() - _REPEAT_S:
                self._wire.send(FRONT, charged)
        for request_id in list(self._leaving):  # The new front never had them.
            self._left(request_id)
        # Also generations sent before the first heartbeat: the front may not have run yet. A front
        # that already has a generation does not begin it twice.
        for _, group in groupby(list(self._sent.values()), key=lambda sent: id(sent.mailbox)):
            choices = list(group)
            again = tuple(sent.generation if is_first else sent.again(spoke_s) for sent in choices)
            ticket, log_id = _ticket_of(choices), choices[0].mailbox.log_id
            self._wire.send(FRONT, Open(self._name, again, ticket, log_id))

    def _delivered(self, delivers: Iterable[Deliver]) -> None:
        unknown = []
        for deliver in delivers:
            request_id, mailbox = deliver.request_id, self._leaving.get(deliver.request_id)
            if (sent := self._sent.get(request_id)) is not None:
                self._pass_on(sent, deliver)
            elif mailbox is not None and deliver.final:
                mailbox.put(deliver)  # A final delivery names the generation's units.
                self._left(request_id)
            elif mailbox is None and not deliver.final:
                unknown.append(
                    request_id
                )  # Abandoned, or opened by the process that this gateway replaced.
        if unknown:
            self._wire.send(FRONT, Leave(self._name, tuple(unknown)))

    def _pass_on(self, sent: _Sent, deliver: Deliver) -> None:
        if [token.index for token in deliver.tokens] != [
            len(sent.output) + i for i in range(len(deliver.tokens))
        ]:
            log.error(
                "tokens of %s were lost between the front and this gateway", deliver.request_id
            )
            self._wire.send(FRONT, Leave(self._name, (deliver.request_id,)))
            deliver = Deliver(deliver.request_id, (), True, "tokens were lost between processes")
        sent.output += [token.token for token in deliver.tokens]
        if sent.is_resumed:
            deliver = msgspec.structs.replace(deliver, num_cached=0, sources=None)
        if deliver.final:
            self._forget(deliver.request_id)
        sent.mailbox.put(deliver)

    def _leave(self, mailbox: Mailbox, request_ids: Iterable[str]) -> None:
        left = [
            rid
            for rid in request_ids
            if mailbox.open_ids.pop(rid, None) is not None and rid in self._sent
        ]
        for request_id in left:
            self._leaving[request_id] = mailbox
            del self._sent[request_id]
            asyncio.get_running_loop().call_later(_CLOSING_S, self._left, request_id)
        if left:
            self._wire.send(FRONT, Leave(self._name, tuple(left)))

    def _left(self, request_id: str) -> None:
        """Forget a generation that the front has closed, or did not close in time."""
        mailbox = self._leaving.pop(request_id, None)
        if mailbox is None:
            return
        if mailbox in self._then and not any(left is mailbox for left in self._leaving.values()):
            try:
                self._then.pop(mailbox)()
            except Exception:
                log.exception("the end of %s was not recorded", request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._sent.pop(request_id, None)
        if not self.num_open:
            self._idle.set()
