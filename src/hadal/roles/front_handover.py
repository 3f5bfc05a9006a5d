"""The front's part of the hand-over: which decode unit a prompt's KV goes to, and from when on.

    PREFILLING     hint: choose a unit, count the request there, Ahead | more hints: Ahead to the same unit
    TRANSFERRING   Decode to that unit; without a hint, or if the unit died since, one is chosen now

From the first hint on the request owns its decode unit, so whatever takes it away from its units
tells that one too. Losing it costs a request nothing while its prompt is being prefilled. Knows no
messages but the hint.
"""

from __future__ import annotations

from collections.abc import Callable

from hadal.core.messages import PrefillAhead
from hadal.core.request import State
from hadal.roles.front_record import Record
from hadal.roles.front_units import UnitBook

STEP_SHARE = 16
"""A hint is passed on if it has one of so many parts of the prompt more than the one before: it
carries the prompt.
"""


class Handover:
    """Changes `decode_unit` of the records it is asked about, and the counts in `units` with it."""

    def __init__(
        self, units: UnitBook, choose: Callable[[Record], str | None], *, is_early: bool
    ) -> None:
        """`choose` says which decode unit would be best for a request now; None if it fits into
        none.
        """
        self._units = units
        self._choose = choose
        self._is_early = is_early

    def is_wanted(self, record: Record, hint: PrefillAhead) -> bool:
        """Whether to pass a hint on: not if it is late, was there before, has little news, or if no
        decode follows.
        """
        if (
            not self._is_early
            or record.state is not State.PREFILLING
            or record.prefill_unit != hint.unit
        ):
            return False
        attempt, num_tokens = record.ahead
        num_more = hint.lease.num_tokens - (num_tokens if attempt == record.attempt else 0)
        is_last = record.num_output + 1 >= record.generation.max_tokens
        if is_last or num_more * STEP_SHARE < record.num_tokens:
            return False
        record.ahead = (record.attempt, hint.lease.num_tokens)
        return True

    def unit_for(self, record: Record) -> str | None:
        """The decode unit of a request, chosen and counted there if it has none yet; None if it
        fits nowhere.
        """
        if record.decode_unit is None:
            unit = self._choose(record)
            if unit is None:
                return None
            record.decode_unit = unit
            record.last_units = record.last_units[0], unit
            self._units.sent_to_decode(unit, record.num_blocks)
        return record.decode_unit

    def lost(self, record: Record, unit: str) -> bool:
        """A unit let a request go: True if that was only where its KV would have gone, so that
        nothing is lost.
        """
        if (
            record.state is not State.PREFILLING
            or record.decode_unit != unit
            or record.prefill_unit == unit
        ):
            return False
        self._units.left_decode(unit, record.num_blocks)
        record.decode_unit, record.ahead = None, (-1, 0)
        return True
