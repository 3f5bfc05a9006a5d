"""Sender of UnitUp, reports and heartbeats for both kinds of leader.

Holds no request; roles/unit/report fills in the fields of a report. A leader calls `heartbeat` at
the end of every event and gets the effects that are due. A unit sends nothing before its first rank
is up.
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
    """Sender of a unit's UnitUp to front and supervisor, and of its reports to the front."""

    def __init__(
        self,
        identity: UnitIdentity,
        pools: RankPools,
        report: ReportBuilder,
        heartbeat_s: float,
        held: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        """`held`: returns the ids of attempts held from an earlier leader."""
        self._identity = identity
        self._pools = pools
        self._report = report
        self._heartbeat_s = heartbeat_s
        self._held = held
        self._front_epoch: str | None = None
        self._is_known = False
        """True if UnitUp was sent to the present front."""
        self._was_up = pools.num_living > 0
        self._said: tuple[int, ...] = ()
        self._busy_s: float | None = None
        """Last time at which the unit had work."""
        self._next_heartbeat_s = -math.inf
        self._wake_s = math.inf

    def up(self) -> list[Effect]:
        """Return UnitUp for front and supervisor, which both wait for it; empty if no rank lives."""
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
        """Return UnitUp after ranks came or went, if it was not sent to the present front yet."""
        return [] if self._is_known else self.up()

    @property
    def has_front(self) -> bool:
        """True once a front has sent FrontUp."""
        return self._front_epoch is not None

    def is_new_front(self, message: FrontUp) -> bool:
        """Return whether this front is another than the one before. The first one counts as new.

        A front's epoch is new at every start. Attempts held for an earlier front are orphans: the
        present front has no record of them and will never release them.
        """
        is_new = message.epoch != self._front_epoch
        self._front_epoch = message.epoch
        return is_new

    def heartbeat(
        self, now_s: float, num_requests: int, num_tokens_waiting: int, deadline_s: float | None
    ) -> list[Effect]:
        """Return a report if its counts changed or it is due, and a wake-up if the last one has
        passed or is too late. `deadline_s` is the leader's own deadline.
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
        # Early wake-ups are harmless, so a wake-up is moved only when it has passed or is too late.
        if self._wake_s <= now_s or wake_s < self._wake_s:
            self._wake_s = wake_s
            effects.append(WakeAt(wake_s))
        return effects
