"""What both kinds of leader do alike: say that they are up, report their load, and keep the heartbeat.

Holds no request. A leader asks `beat` at the end of every event; it answers with what is due.
"""

from __future__ import annotations

import math

from hadal.core.messages import FrontUp, Load, UnitUp
from hadal.core.seams import Effect, Send, WakeAt
from hadal.kv.blocks import BlockAllocator
from hadal.roles.meters import StepMeter


class UnitReporter:
    """The unit's name and voice towards the front."""

    def __init__(
        self, unit: str, role: str, epoch: str, blocks: BlockAllocator, num_requests_max: int, heartbeat_s: float
    ) -> None:
        self.unit = unit
        self.role = role
        self.epoch = epoch
        self.meter = StepMeter()
        self._blocks = blocks
        self._num_requests_max = num_requests_max
        self._heartbeat_s = heartbeat_s
        self._front_epoch: str | None = None
        self._said = (-1, -1, -1)
        self._next_beat_s = -math.inf
        self._wake_s = math.inf

    def up(self) -> Send:
        return Send(
            "front", UnitUp(self.unit, self.role, self.epoch, self._blocks.num_usable, self._num_requests_max)
        )

    def is_new_front(self, message: FrontUp) -> bool:
        """Whether this front is another than the one before. The first one met counts as new."""
        is_new = message.epoch != self._front_epoch
        self._front_epoch = message.epoch
        return is_new

    def beat(self, now_s: float, num_requests: int, num_tokens_waiting: int, deadline_s: float | None) -> list[Effect]:
        """Load if it changed or is due, and the next wake-up if that changed. `deadline_s` is the leader's own."""
        effects: list[Effect] = []
        says = (self._blocks.num_used, num_requests, num_tokens_waiting)
        if says != self._said or now_s >= self._next_beat_s:
            self._said = says
            self._next_beat_s = now_s + self._heartbeat_s
            effects.append(Send("front", self._load()))
        wake_s = self._next_beat_s if deadline_s is None else min(self._next_beat_s, deadline_s)
        # A wake-up that is early does no harm, so it is moved only when it passed or became too late.
        if self._wake_s <= now_s or wake_s < self._wake_s:
            self._wake_s = wake_s
            effects.append(WakeAt(wake_s))
        return effects

    def _load(self) -> Load:
        num_blocks_used, num_requests, num_tokens_waiting = self._said
        return Load(
            self.unit, self.role, self.epoch, self._blocks.num_usable, num_blocks_used, num_requests,
            self._num_requests_max, num_tokens_waiting, self.meter.num_steps, self.meter.step_ms,
        )  # fmt: skip
