"""Token ids that end a slot's request."""

from __future__ import annotations

import numpy as np

from hadal.core.stops import StopIds


def drawn(stops: StopIds, slot: int, *tokens: int) -> list[bool]:
    return stops.are_drawn(np.full(len(tokens), slot), np.array(tokens)).tolist()


def test_slots_have_their_own_and_leave_no_trace() -> None:
    stops = StopIds(3)
    assert drawn(stops, 0, 0, 1) == [False, False]
    stops.set(0, (1, 2, 3))
    stops.set(1, (7,))
    assert drawn(stops, 0, 1, 3, 7) == [True, True, False]
    assert drawn(stops, 1, 1, 7, 0) == [False, True, False]
    stops.copy(0, 2)
    stops.set(0, (9,))
    assert drawn(stops, 0, 1, 9) == [False, True]
    assert drawn(stops, 2, 2, 9) == [True, False]
