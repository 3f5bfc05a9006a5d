"""Run the front: feed it messages and time, and apply its effects.

The front decides; this file only transports. It runs in the gateway's event loop, so a token
crosses no thread between the socket it arrives on and the stream it leaves by.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from hadal.core.messages.base import FRONT, SUPERVISOR
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.gateways import (
    FrontHeartbeat,
    GatewayHeartbeat,
    Leave,
    Open,
    Query,
    QueryReply,
)
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.messages.questions import Audit, ExpertsAnswer, Trace
from hadal.core.messages.requests import (
    Charged,
    Counted,
    Quota,
    Quotas,
    RejectedEarly,
    Spent,
    Submit,
    Ticket,
)
from hadal.core.messages.snapshot import FrontSnapshot
from hadal.core.messages.units import Cancel, Drain, Refused, Returned, UnitDown, UnitUp
from hadal.core.seams import Effect, Event, Send, Tick, WakeAt
from hadal.gateway.desk.doors import Doors
from hadal.gateway.desk.link import FrontWire, as_error
from hadal.gateway.desk.mailbox import Mailbox, Outbox, mailbox_for
from hadal.gateway.desk.other_gateways import EXPECTED_S, OtherGateways
from hadal.gateway.desk.pages import Pages
from hadal.gateway.desk.unit_questions import UnitQuestions
from hadal.policy.admission import Refusal
from hadal.roles.front.admission import FrontAdmission
from hadal.roles.front.front import refused
from hadal.roles.front.units import FrontUnits
from hadal.roles.reasons import answer_to
from hadal.roles.recording import RecordedRole
from hadal.runtime.process.logs import fields
from hadal.runtime.topology import GATEWAY

log = logging.getLogger("hadal.gateway")


class FrontRole(Protocol):
    """Part of roles/front that a host needs."""

    @property
    def units(self) -> FrontUnits: ...

    @property
    def admission(self) -> FrontAdmission: ...

    def start(self, now_s: float) -> list[Effect]: ...

    def check(self) -> list[str]: ...

    def snapshot(self) -> FrontSnapshot: ...

    def unread(self) -> tuple[str, ...]: ...

    def handle(self, now_s: float, event: Event) -> list[Effect]: ...


class WakeTimer:
    """Single timer of the event loop, for the time that was set last."""

    def __init__(self, now: Callable[[], float], ring: Callable[[], None]) -> None:
        self._now = now
        self._ring = ring
        self._context = contextvars.copy_context()
        """Context without a request id: a timer's log lines belong to no request."""
        self._handle: asyncio.TimerHandle | None = None
        self._time_s = 0.0

    def set(self, time_s: float) -> None:
        """Call `ring` at this time instead of the time set before."""
        if self._handle is not None:
            if time_s == self._time_s:
                return
            self._handle.cancel()
        self._time_s = time_s
        self._handle = asyncio.get_running_loop().call_later(
            max(0.0, time_s - self._now()), self._run, context=self._context
        )

    def _run(self) -> None:
        self._handle = None
        self._ring()


class Host(Doors):
    """One front with its wire and timer. All methods are called from the event loop's thread."""

    has_front = True

    def __init__(
        self,
        front: FrontRole,
        wire: FrontWire,
        now: Callable[[], float],
        *,
        epoch: str = "",
        others: Iterable[str] = (),
        calls: RecordedRole | None = None,
    ) -> None:
        """`epoch`: the front's epoch, new at every start. `others`: gateways without a front; this
        front serves their generations. `calls`: recorder through which all events reach the front
        (runtime/recorder); None: nothing is recorded.
        """
        super().__init__()
        self.pages = Pages(FRONT, wire.send)
        self._epoch = epoch
        self._others = OtherGateways(others, wire)
        self.questions = UnitQuestions(wire)
        self.unit_listeners: list[Callable[[], None]] = []
        """Functions to call after units came up or went down."""
        self._front = front
        self._calls: RecordedRole = calls if calls is not None else front
        self._wire = wire
        self._now = now
        self._mailboxes: dict[str, Mailbox | Outbox] = {}
        self._timer = WakeTimer(now, lambda: self._handle([Tick()]))
        self._failed: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self.process_to_refused: dict[str, dict[str, int]] = {}
        """Process -> (kind of connection -> number refused since the process started)."""

    def snapshot(self) -> FrontSnapshot:
        """Return the front's state."""
        return self._front.snapshot()

    @property
    def gateways(self) -> tuple[str, ...]:
        """Names of the present gateways, this one first."""
        return GATEWAY, *self._others.present

    @property
    def num_open(self) -> int:
        """Number of generations that have not ended."""
        return len(self._mailboxes)

    async def run(self) -> None:
        """Start the front, then serve messages until cancelled. Re-raises any error of the front,
        including one from a timer or a request.
        """
        self._task = asyncio.current_task()
        try:
            await self._serve()
        except asyncio.CancelledError:
            if self._failed is not None:
                raise self._failed from None
            raise

    async def _serve(self) -> None:
        # The new epoch makes other gateways send this front their open generations.
        self._tell_others()
        if self._others.is_expected:
            self._idle.clear()
            asyncio.get_running_loop().call_later(EXPECTED_S, self._expect_no_more)
        for effect in self._calls.start(self._now()):
            self._apply(effect)
        while True:
            messages = await self._wire.receive_async()
            events: list[Event] = []
            for message in messages:
                if isinstance(message, Open):
                    self._handle(events)  # Admission depends on all earlier events.
                    events = []
                events += self._events_of(message)
            self._handle(events)
            if any(isinstance(message, UnitUp | UnitDown) for message in messages):
                for listener in self.unit_listeners:
                    listener()
                # Sent without waiting for the heartbeat, so that all gateways report one health.
                self._tell_others()

    def check_capacity(self, tenant: str) -> None:
        """Raise ApiError, 429 or 503, if one more generation of the tenant would not be admitted.
        Called before the body is read, which saves reading it.
        """
        self._check(tenant, 1)

    def reserve(
        self, tenant: str, generations: Sequence[Generation], most_pico_usd: tuple[int, ...] = ()
    ) -> Ticket:
        """Return the ticket with which `open` submits these generations, all of them or none. The
        caller must not await anything before `open`. `most_pico_usd`: highest cost of each, empty
        without a budget. Raises ApiError 400 (a quota never admits it), 429 or 503.
        """
        num_tokens = sum(len(generation.prompt) for generation in generations)
        self._check(tenant, len(generations), num_tokens, sum(most_pico_usd))
        return Ticket(True, most_pico_usd)

    def _check(
        self, tenant: str, num_wanted: int, num_tokens: int = 0, most_pico_usd: int = 0
    ) -> None:
        refusal = self._front.admission.refusal(
            self._now(), tenant, num_wanted, num_tokens, most_pico_usd
        )
        if refusal is not None:
            if refusal.is_for_room:
                self._handle([RejectedEarly(num_wanted, num_tokens)])
            raise as_error(refusal)

    async def check_counting(self, tenant: str) -> None:
        """Raise ApiError 429 if the tenant's quota has no tokens left for counting a prompt."""
        if (refusal := self.counting_refusal(tenant)) is not None:
            raise as_error(refusal)

    def counting_refusal(self, tenant: str) -> Refusal | None:
        """Return the refusal that `check_counting` raises, or None."""
        return self._front.admission.counting_refusal(self._now(), tenant)

    def counted(self, tenant: str, num_tokens: int) -> None:
        """Draw the tokens of a counted prompt from the tenant's quota."""
        self._handle([Counted(tenant, num_tokens)])

    def set_quotas(self, unix_s: float, quotas: tuple[Quota, ...]) -> None:
        """Set the tenants' quotas. `unix_s`: the current Unix time."""
        self._handle([Quotas(unix_s, quotas)])

    def charged(self, charged: Charged) -> None:
        """Pass the recorded charge of one generation to the front."""
        self._handle([charged])

    def unread(self) -> tuple[str, ...]:
        """Return tenants with a budget and spending that was not read from the ledger yet."""
        return self._front.unread()

    def spent(self, spent: Spent) -> None:
        """Pass the tenants' spending, read from the ledger, to the front."""
        self._handle([spent])

    def open(self, generations: Sequence[Generation], ticket: Ticket) -> Mailbox:
        """Submit the choices of one request; the mailbox receives their deliveries."""
        mailbox, begun = mailbox_for(generations, self.close)
        if begun:
            self._mailboxes |= {generation.request_id: mailbox for generation in begun}
            self._idle.clear()
            self._handle(list(_submits(generations, ticket)))
        return mailbox

    def cancel(self, mailbox: Mailbox, request_id: str) -> None:
        """Stop one generation on any unit. Its deliveries are dropped from now on."""
        if mailbox.open_ids.pop(request_id, None) is None:
            return
        self._handle(
            [Cancel(request_id, -1)]
        )  # The generation's last delivery is dropped, but its units are recorded.
        self._forget(request_id)

    def close(self, mailbox: Mailbox, then: Callable[[], None]) -> None:
        """End a request: stop its generations that still run, and call `then`. There is no wait, as
        the front in this process reports their units within the call.
        """
        for request_id in reversed(
            list(mailbox.open_ids)
        ):  # Queued ones first; otherwise cancelling a running one could start them.
            self.cancel(mailbox, request_id)
        then()

    def drain(self) -> None:
        """Admit nothing new; running generations continue."""
        if not self.draining:
            self._draining.set()
            self._handle([Drain()])

    async def audit(self, units: Iterable[str], timeout_s: float) -> tuple[list[str], list[Audit]]:
        """Have the front and all units check their ledgers. Return (problems, units' answers)."""
        units = tuple(units)
        answers = await self.questions.audit(units, timeout_s)
        problems = [f"front: {problem}" for problem in self._front.check()]
        problems += [f"{unit}: no answer" for unit in units if unit not in answers]
        problems += [
            f"{unit}: {problem}" for unit, audit in answers.items() for problem in audit.problems
        ]
        return problems, list(answers.values())

    def heartbeat(self, pid: int) -> None:
        """Send a heartbeat to the supervisor and to the other gateways."""
        units = tuple(self._front.units.by_name)
        self._wire.send(SUPERVISOR, GatewayHeartbeat(GATEWAY, pid, units))
        self._tell_others()

    def end(self) -> None:
        """Do nothing: the supervisor reports the end of this process to the others."""

    async def page(self, path: str, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Return status and body of a page of this process. Raises HadalError."""
        return await self.pages.table[path](query)

    async def ask_others(self, path: str, timeout_s: float) -> dict[str, bytes]:
        """Return gateway -> body of its page, for the present gateways that answer in time."""
        names = self._others.present
        answers = await asyncio.gather(
            *(self.pages.ask(name, path, {}, timeout_s) for name in names)
        )
        return {
            name: answer.body
            for name, answer in zip(names, answers, strict=True)
            if answer is not None
        }

    def _log_returned(self, message: Returned) -> None:
        mailbox = self._mailboxes.get(message.request_id)
        if mailbox is not None:
            # Reasons that use up no retry, such as preemption, are routine: metrics count them.
            level = logging.INFO if answer_to(message.reason, 0).is_counted else logging.DEBUG
            log_id = (
                mailbox.log_id
                if isinstance(mailbox, Mailbox)
                else mailbox.open_ids[message.request_id]
            )
            known = fields(request_id=log_id, unit=message.unit)
            log.log(
                level,
                "%s returned the request (%s); it continues on another unit",
                message.unit,
                message.reason,
                extra=known,
            )

    def _handle(self, events: Sequence[Event]) -> None:
        try:
            for event in events:
                for effect in self._calls.handle(self._now(), event):
                    self._apply(effect)
            self._others.deliver()
        except Exception as error:
            # Failures in a timer or a request end the host as failures in a message do: the front's
            # state cannot be trusted afterwards.
            log.exception("the front failed")
            self._failed = error
            if self._task is not None:
                self._task.cancel()
            raise

    def _apply(self, effect: Effect) -> None:
        if isinstance(effect, Deliver):
            mailbox = self._mailboxes.get(effect.request_id)
            if mailbox is not None:
                if effect.final:
                    self._forget(effect.request_id)
                mailbox.put(effect)
        elif isinstance(effect, Send):
            self._wire.send(effect.to, effect.message)
        elif isinstance(effect, WakeAt):
            self._timer.set(effect.time_s)
        else:
            raise TypeError(f"unknown effect of the front: {type(effect).__name__}")

    def _forget(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)
        self._see_idle()

    def _see_idle(self) -> None:
        if not self._mailboxes and self._others.are_gone:
            self._idle.set()

    def _expect_no_more(self) -> None:
        self._others.expect_no_more()
        self._see_idle()

    def _tell_others(self) -> None:
        """Send the other gateways the front's state."""
        for name in self._others.names:
            self._wire.send(
                name, FrontHeartbeat(self._epoch, self._front.snapshot(), self.gateways)
            )

    def _admit(self, generations: Sequence[Generation], ticket: Ticket) -> Iterator[Event]:
        """Yield the events of another gateway's request: all its generations begin, or none."""
        if not generations:
            return
        refusal = None
        num_tokens = sum(len(generation.prompt) for generation in generations)
        if not ticket.is_admitted:
            tenant, most_pico_usd = generations[0].tenant, sum(ticket.most_pico_usd)
            refusal = self._front.admission.refusal(
                self._now(), tenant, len(generations), num_tokens, most_pico_usd
            )
        if refusal is None:
            yield from _submits(generations, Ticket(True, ticket.most_pico_usd))
            return
        for generation in generations:
            self._apply(refused(generation.request_id, refusal))
        if refusal.is_for_room:
            yield RejectedEarly(len(generations), num_tokens)

    def _events_of(self, message: AnyMessage) -> list[Event]:
        """Turn a message into events for the front. Requests of another gateway give the same
        events as requests of this one.
        """
        match message:
            case Audit() | Trace() | ExpertsAnswer():
                self.questions.take(message)
            case Refused(process, kind_to_num):
                self.process_to_refused[process] = kind_to_num
            case Query() | QueryReply():
                self.pages.take(message)
            case GatewayHeartbeat(gateway, pid) if gateway in self._others:
                if self._others.note_alive(gateway, pid):
                    self._idle.clear()
            case Open(gateway, generations, ticket, log_id) if gateway in self._others:
                new, ticket = _without(self._mailboxes.keys(), generations, ticket)
                outbox = self._others.open(gateway, new, log_id)
                self._mailboxes |= {generation.request_id: outbox for generation in new}
                self._idle.clear()
                return list(self._admit(new, ticket))
            case Leave(gateway, request_ids) if gateway in self._others:
                left = self._others.open_ids(gateway, request_ids)
                return [Cancel(request_id, -1) for request_id in left]
            case UnitDown(gateway) if gateway in self._others:
                left = self._others.ended(gateway)
                self._see_idle()
                return [Cancel(request_id, -1) for request_id in left]
            case GatewayHeartbeat() | Open() | Leave():
                pass  # From a gateway outside this deployment.
            case _:
                if isinstance(message, Drain):
                    self._draining.set()
                elif isinstance(message, Returned):
                    self._log_returned(message)
                return [message]
        return []


def _submits(generations: Sequence[Generation], ticket: Ticket) -> Iterator[Event]:
    """Yield a Submit for each generation that needs a token."""
    for index, generation in enumerate(generations):
        if generation.max_tokens:
            yield Submit(generation, ticket.is_admitted, ticket.cost(index))


def _without(
    open_ids: Collection[str], generations: Sequence[Generation], ticket: Ticket
) -> tuple[list[Generation], Ticket]:
    """Return the generations that are not open yet, and the ticket for them."""
    new = [at for at, one in enumerate(generations) if one.request_id not in open_ids]
    costs = tuple(ticket.most_pico_usd[at] for at in new) if ticket.most_pico_usd else ()
    return [generations[at] for at in new], Ticket(ticket.is_admitted, costs)
