"""What both kinds of leader do alike: say that they are up, send their report, and keep the
heartbeat.

Holds no request; the fields of a report are filled in by roles/unit/report. A leader asks `heartbeat`
at the end of every event; it answers with what is due. A unit sends
nothing before its first rank is up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.units import FrontUp, UnitUp
from hadal.core.seams import Effect, Send, WakeAt
from hadal.roles.ranks.pools import RankPools
from hadal.roles.unit.report import ReportBuilder, UnitIdentity


class UnitReporter:
    """The unit's name and voice towards the front."""

    def __init__(
        self,
        identity: UnitIdentity,
        pools: RankPools,
        report: ReportBuilder,
        heartbeat_s: float,
        held: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        """`held`: attempt ids that UnitUp names."""
        self._identity = identity
        self._pools = pools
        self._report = report
        self._heartbeat_s = heartbeat_s
        self._held = held
        self._front_epoch: str | None = None
        self._is_known = False
        """The front knows that the unit is up."""
        self._was_up = pools.num_living > 0
        self._said: tuple[int, ...] = ()
        self._busy_s: float | None = None
        """When it last had something to do."""
        self._next_heartbeat_s = -math.inf
        self._wake_s = math.inf

    def up(self) -> list[Effect]:
        """Say that the unit is up, once somebody can work in it. The supervisor waits for it as the
        front does.
        """
        self._is_known = self._pools.num_living > 0
        if not self._is_known:
            return []
        self._was_up = True
        identity, pools = self._identity, self._pools
        up = UnitUp(
            identity.unit,
            identity.role,
            identity.epoch,
            pools.num_usable,
            self._report.num_requests_max,
            pools.num_blocks_request,
            self._held(),
            identity.fingerprint,
        )
        return [Send("front", up), Send(SUPERVISOR, up)]

    def reset(self) -> list[Effect]:
        """Ranks came or went: if the front does not know the unit yet, now may be the time."""
        return [] if self._is_known else self.up()

    @property
    def has_front(self) -> bool:
        """A front was met."""
        return self._front_epoch is not None

    def is_new_front(self, message: FrontUp) -> bool:
        """Whether this front is another than the one before. The first one met counts as new.

        A front's epoch is new at every start. What a unit holds for an earlier one is nobody's, as
        the present one knows none of its attempts and will never release them.
        """
        is_new = message.epoch != self._front_epoch
        self._front_epoch = message.epoch
        return is_new

    def heartbeat(
        self, now_s: float, num_requests: int, num_tokens_waiting: int, deadline_s: float | None
    ) -> list[Effect]:
        """Report if it changed or is due, and the next wake-up if that changed. `deadline_s` is the
        leader's own.
        """
        effects: list[Effect] = []
        pools = self._pools
        if self._busy_s is None or num_requests or num_tokens_waiting:
            self._busy_s = now_s
        says = (
            pools.num_used,
            num_requests,
            num_tokens_waiting,
            pools.num_living,
            pools.formation,
        )
        if says != self._said or now_s >= self._next_heartbeat_s:
            self._said = says
            self._next_heartbeat_s = now_s + self._heartbeat_s
            if self._was_up:
                idle_s = now_s - self._busy_s
                report = self._report.build(num_requests, num_tokens_waiting, idle_s)
                effects.append(Send("front", report))
        wake_s = (
            self._next_heartbeat_s
            if deadline_s is None
            else min(self._next_heartbeat_s, deadline_s)
        )
        # A wake-up that is early does no harm, so it is moved only when it passed or became too
        # late.
        if self._wake_s <= now_s or wake_s < self._wake_s:
            self._wake_s = wake_s
            effects.append(WakeAt(wake_s))
        return effects
