"""The front role at work: feeds it messages and time, and applies what it asks for.

The front decides; this file only moves. It runs in the gateway's event loop, so a token crosses no thread between the
socket it arrives on and the stream it leaves by.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from hadal.core.messages import (
    Audit,
    AuditRequest,
    Cancel,
    Drain,
    Generation,
    Submit,
    Trace,
    TraceRequest,
    UnitDown,
    UnitUp,
)
from hadal.core.seams import Deliver, Effect, Event, Send, Tick, WakeAt
from hadal.core.wire import AnyMessage
from hadal.gateway.mailbox import Mailbox

log = logging.getLogger("hadal.gateway")

M = TypeVar("M")


class FrontRole(Protocol):
    """The part of roles/front that a host needs."""

    def start(self, now_s: float) -> list[Effect]: ...

    def check(self) -> list[str]: ...

    def handle(self, now_s: float, event: Event) -> list[Effect]: ...


class FrontWire(Protocol):
    """The part of runtime/wire that a host needs."""

    def send(self, to: str, message: AnyMessage) -> None: ...

    async def receive_async(self) -> list[AnyMessage]: ...


class Host:
    """One front, its wire and its timer. All methods are called from the event loop's thread."""

    def __init__(
        self, front: FrontRole, wire: FrontWire, now: Callable[[], float], on_units: Callable[[], None] = lambda: None
    ) -> None:
        """`on_units` is called after units came or went."""
        self._on_units = on_units
        self._front = front
        self._wire = wire
        self._now = now
        self._mailboxes: dict[str, Mailbox] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._num_asked = 0
        self._audits: dict[tuple[int, str], asyncio.Future[Audit]] = {}
        self._traces: dict[tuple[int, str], asyncio.Future[Trace]] = {}

    @property
    def draining(self) -> bool:
        """Nothing new is taken."""
        return self._draining.is_set()

    @property
    def num_open(self) -> int:
        """Generations that have not ended."""
        return len(self._mailboxes)

    async def run(self) -> None:
        """Start the front, then serve messages until cancelled. Raises what the front raised, wherever it did."""
        self._task = asyncio.current_task()
        try:
            await self._serve()
        except asyncio.CancelledError:
            if self._failed is not None:
                raise self._failed from None
            raise

    async def _serve(self) -> None:
        for effect in self._front.start(self._now()):
            self._apply(effect)
        while True:
            messages = await self._wire.receive_async()
            for message in messages:
                if isinstance(message, Drain):
                    self._draining.set()
                elif isinstance(message, Audit):
                    _answer(self._audits.get((message.reply_id, message.unit)), message)
                elif isinstance(message, Trace):
                    _answer(self._traces.get((message.reply_id, message.unit)), message)
            self._handle(messages)
            if any(isinstance(message, UnitUp | UnitDown) for message in messages):
                self._on_units()

    def open(self, generations: Iterable[Generation]) -> Mailbox:
        """Submit the choices of one request; their deliveries come to the mailbox that is returned."""
        mailbox = Mailbox(asyncio.get_running_loop())
        generations = list(generations)
        for index, generation in enumerate(generations):
            mailbox.open_ids[generation.request_id] = index
            self._mailboxes[generation.request_id] = mailbox
        self._idle.clear()
        self._handle([Submit(generation) for generation in generations])
        return mailbox

    def cancel(self, mailbox: Mailbox, request_id: str) -> None:
        """Stop one generation, wherever it is. Its deliveries are dropped from now on."""
        if mailbox.open_ids.pop(request_id, None) is None:
            return
        self._handle([Cancel(request_id, -1)])  # Its last delivery is dropped, but says where it was worked on.
        self._forget(request_id)

    def close(self, mailbox: Mailbox) -> None:
        """The request ended, one way or another: stop what still runs of it."""
        for request_id in list(mailbox.open_ids):
            self.cancel(mailbox, request_id)

    def drain(self) -> None:
        """Take nothing new; what runs goes on."""
        if not self.draining:
            self._draining.set()
            self._handle([Drain()])

    async def audit(self, units: Iterable[str], timeout_s: float) -> tuple[list[str], list[Audit]]:
        """Have the front and every unit check their ledgers. Returns (problems, the units' answers)."""
        self._num_asked += 1
        loop = asyncio.get_running_loop()
        waiting = {(self._num_asked, unit): loop.create_future() for unit in units}
        self._audits |= waiting
        for reply_id, unit in waiting:
            self._wire.send(unit, AuditRequest(reply_id))
        try:
            if waiting:
                await asyncio.wait(waiting.values(), timeout=timeout_s)
        finally:
            for key in waiting:
                del self._audits[key]
        problems = [f"front: {problem}" for problem in self._front.check()]
        problems += [f"{unit}: no answer" for (_, unit), future in waiting.items() if not future.done()]
        audits = [future.result() for future in waiting.values() if future.done()]
        problems += [f"{audit.unit}: {problem}" for audit in audits for problem in audit.problems]
        return problems, audits

    async def trace(self, unit: str, num_steps: int, timeout_s: float) -> Trace | None:
        """Have a unit trace its next steps. None if it did not answer in time: most likely it had nothing to do."""
        self._num_asked += 1
        key = (self._num_asked, unit)
        future: asyncio.Future[Trace] = asyncio.get_running_loop().create_future()
        self._traces[key] = future
        self._wire.send(unit, TraceRequest(key[0], num_steps))
        try:
            await asyncio.wait([future], timeout=timeout_s)
        finally:
            del self._traces[key]
        return future.result() if future.done() else None

    async def wait_draining(self) -> None:
        """Wait until a drain is asked for; the caller bounds it by the life of the process."""
        await self._draining.wait()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no generation is open. False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _handle(self, events: Sequence[Event]) -> None:
        try:
            for event in events:
                for effect in self._front.handle(self._now(), event):
                    self._apply(effect)
        except Exception as error:
            # A timer's or a request's failure ends the host as a message's would: the front cannot be trusted now.
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
            self._wake_at(effect.time_s)
        else:
            raise TypeError(f"a front does not ask for {type(effect).__name__}")

    def _wake_at(self, time_s: float) -> None:
        if self._timer is not None:
            if time_s == self._timer_s:
                return
            self._timer.cancel()
        self._timer_s = time_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, time_s - self._now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle([Tick()])

    def _forget(self, request_id: str) -> None:
        self._mailboxes.pop(request_id, None)
        if not self._mailboxes:
            self._idle.set()


def _answer(waiting: asyncio.Future[M] | None, message: M) -> None:
    """One that nobody waits for any more is dropped."""
    if waiting is not None and not waiting.done():
        waiting.set_result(message)
