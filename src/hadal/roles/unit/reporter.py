"""What both kinds of leader do alike: say that they are up, report their load, and keep the
heartbeat.

Holds no request. A leader asks `heartbeat` at the end of every event; it answers with what is due. A
unit none of whose ranks has lived yet is silent: nobody could do anything with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.units import FrontUp, UnitReport, UnitUp
from hadal.core.plans import NO_LINK_BYTES
from hadal.core.seams import Effect, Send, WakeAt
from hadal.roles.ranks.pools import RankPools
from hadal.roles.unit.meters import StepMeter


class UnitReporter:
    """The unit's name and voice towards the front."""

    def __init__(
        self,
        unit: str,
        role: str,
        epoch: str,
        pools: RankPools,
        num_requests_max: int,
        heartbeat_s: float,
        cache_totals: Callable[[], dict[str, int]] = dict,
        held: Callable[[], tuple[int, ...]] = tuple,
        fingerprint: str = "",
    ) -> None:
        """`num_requests_max`: of each rank. `cache_totals`: what the unit's KV cache counted, by
        the names in core/cache; asked for each UnitReport. `held`: attempt ids that UnitUp names,
        as it does `fingerprint`.
        """
        self.unit = unit
        self.role = role
        self.epoch = epoch
        self.meter = StepMeter()
        self.balance: dict[str, float] = {}
        """Objective (core/balance) -> mean over maximum of the ranks, smoothed: the leader keeps it
        (BalanceMeter).
        """
        self.rates_s = (0.0, 0.0)
        """Seconds of a token and of a pair, measured; 0 while unknown. The leader keeps it."""
        self.step_s = 0.0
        """Seconds of a step besides, measured. A decode leader keeps it."""
        self.link_bytes = NO_LINK_BYTES
        """Bytes between ranks since the start. The leader adds to it."""
        self.num_requests_moved = 0
        """Requests that moved from rank to rank. A decode leader counts them."""
        self.num_drafts = 0
        """Drafts that the last plan makes of each request; this and the next two, a decode leader
        keeps.
        """
        self.drafts_tried: Sequence[int] = ()
        self.drafts_accepted: Sequence[int] = ()
        self._pools = pools
        self._num_requests_max = num_requests_max
        self._heartbeat_s = heartbeat_s
        self._cache_totals = cache_totals
        self._held = held
        self._fingerprint = fingerprint
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
        pools, most = self._pools, self._num_requests_max * self._pools.num_living
        up = UnitUp(
            self.unit,
            self.role,
            self.epoch,
            pools.num_usable,
            most,
            pools.num_blocks_request,
            self._held(),
            self._fingerprint,
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
        """Load if it changed or is due, and the next wake-up if that changed. `deadline_s` is the
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
                effects.append(Send("front", self._load(now_s - self._busy_s)))
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

    def _load(self, idle_s: float) -> UnitReport:
        num_blocks_used, num_requests, num_tokens_waiting, num_ranks, formation = self._said
        return UnitReport(
            self.unit,
            self.epoch,
            self._pools.num_usable,
            num_blocks_used,
            num_requests,
            self._num_requests_max * num_ranks,
            num_tokens_waiting,
            self.meter.num_steps,
            self.meter.step_ms,
            num_ranks=num_ranks,
            formation=formation,
            num_blocks_request=self._pools.num_blocks_request,
            token_s=self.rates_s[0],
            pair_s=self.rates_s[1],
            balance=dict(self.balance),
            num_requests_moved=self.num_requests_moved,
            cache=self._cache_totals(),
            idle_s=idle_s,
            step_s=self.step_s,
            num_drafts=self.num_drafts,
            drafts_tried=tuple(self.drafts_tried),
            drafts_accepted=tuple(self.drafts_accepted),
            link_bytes=self.link_bytes,
        )
