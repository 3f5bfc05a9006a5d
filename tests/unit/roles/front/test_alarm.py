"""Test Alarm: requested once, moved earlier by a back-off, and set anew after it fired."""

from __future__ import annotations

import math

from hadal.core.seams import WakeAt
from hadal.roles.front.alarm import Alarm


def never(now_s: float) -> float:
    return math.inf


def test_a_beat_is_asked_for_once_and_again_when_it_was() -> None:
    alarm = Alarm(0.5)
    assert alarm.set(1.0, never) == [WakeAt(1.5)]
    assert alarm.set(1.2, never) == []
    assert alarm.set(1.5, never) == [WakeAt(2.0)]


def test_a_back_off_comes_before_the_beat_and_the_next_one_after_it() -> None:
    alarm = Alarm(0.5)
    alarm.set(1.0, never)
    alarm.retry_at(1.3)
    alarm.retry_at(1.2)
    alarm.retry_at(1.4)
    assert alarm.set(1.0, never) == [WakeAt(1.2)]
    assert alarm.set(1.2, lambda now_s: 1.3) == [WakeAt(1.3)]
    assert alarm.set(1.3, never) == [WakeAt(1.5)]
