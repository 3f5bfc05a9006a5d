"""What the gateway with the front asks units: audits of their ledgers, traces of steps, places of experts.

Knows the wire's messages, and no page.
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
    """Open questions to units. The event loop's thread alone uses it."""

    def __init__(self, wire: FrontWire) -> None:
        self._wire = wire
        self._audits = Questions[Audit]()
        self._traces = Questions[Trace]()
        self._experts = Questions[ExpertsAnswer]()

    async def audit(self, units: Iterable[str], timeout_s: float) -> dict[str, Audit]:
        """Have units check their ledgers. Return the answers that came in time."""

        def send(unit: str, reply_id: int) -> None:
            self._wire.send(unit, AuditRequest(reply_id))

        return await self._audits.ask(units, send, timeout_s)

    async def trace(self, unit: str, num_steps: int, timeout_s: float) -> Trace | None:
        """Have a unit trace its next steps. None if it did not answer in time: most likely it had
        nothing to do.
        """

        def send(unit: str, reply_id: int) -> None:
            self._wire.send(unit, TraceRequest(reply_id, num_steps, timeout_s))

        return (await self._traces.ask([unit], send, timeout_s)).get(unit)

    async def experts(self, units: Iterable[str], timeout_s: float) -> dict[str, bytes]:
        """Return where the experts of units of many ranks lie, as JSON; of those that answer in time."""

        def send(unit: str, reply_id: int) -> None:
            self._wire.send(unit, ExpertsRequest(reply_id))

        answers = await self._experts.ask(units, send, timeout_s)
        return {unit: answer.body for unit, answer in answers.items()}

    def take(self, answer: Audit | Trace | ExpertsAnswer) -> None:
        """Take a unit's answer."""
        match answer:
            case Audit(unit, reply_id):
                self._audits.take(unit, reply_id, answer)
            case Trace(unit, reply_id):
                self._traces.take(unit, reply_id, answer)
            case ExpertsAnswer(unit, reply_id):
                self._experts.take(unit, reply_id, answer)
