"""Questions of the front's gateway to units: ledger audits, step traces, locations of experts.

Depends on the wire's messages, not on pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from hadal.core.messages.questions import (
    Audit,
    AuditRequest,
    ExpertsAnswer,
    ExpertsRequest,
    Trace,
    TraceRequest,
)
from hadal.gateway.desk.link import FrontWire
from hadal.gateway.desk.questions import Questions


class UnitQuestions:
    """Open questions to units. Used only by the event loop's thread."""

    def __init__(self, wire: FrontWire) -> None:
        self._wire = wire
        self._audits = Questions[Audit]()
        self._traces = Questions[Trace]()
        self._experts = Questions[ExpertsAnswer]()

    async def audit(self, units: Iterable[str], timeout_s: float) -> dict[str, Audit]:
        """Have units check their ledgers. Return unit -> answer, if it arrived in time."""

        def send(unit: str, reply_id: int) -> None:
            self._wire.send(unit, AuditRequest(reply_id))

        return await self._audits.ask(units, send, timeout_s)

    async def trace(self, unit: str, num_steps: int, timeout_s: float) -> Trace | None:
        """Have a unit trace its next steps. None: no answer in time, probably for lack of work."""

        def send(unit: str, reply_id: int) -> None:
            self._wire.send(unit, TraceRequest(reply_id, num_steps, timeout_s))

        return (await self._traces.ask([unit], send, timeout_s)).get(unit)

    async def experts(self, units: Iterable[str], timeout_s: float) -> dict[str, bytes]:
        """Return unit -> locations of its experts as JSON, if it answers in time."""

        def send(unit: str, reply_id: int) -> None:
            self._wire.send(unit, ExpertsRequest(reply_id))

        answers = await self._experts.ask(units, send, timeout_s)
        return {unit: answer.body for unit, answer in answers.items()}

    def take(self, answer: Audit | Trace | ExpertsAnswer) -> None:
        """Accept a unit's answer."""
        match answer:
            case Audit(unit, reply_id):
                self._audits.take(unit, reply_id, answer)
            case Trace(unit, reply_id):
                self._traces.take(unit, reply_id, answer)
            case ExpertsAnswer(unit, reply_id):
                self._experts.take(unit, reply_id, answer)
