"""State machines without I/O: `handle(now_s, event) -> list[Effect]`. Live or simulated hosts
execute the effects.

One convention holds for effects. An actor has one list, `_out`. `handle` empties it, every event
appends to it, and `handle` returns a copy, in the order in which the host must execute it. A part
that causes effects gets that list when it is made (`out`). A helper that only returns due effects
(Alarm, Tracer, UnitReporter) has no such list; its caller appends them at once.

Some effects must not be ordered by the time at which they arose. Their owner keeps them until the
actor collects them, and the method that hands them over gives the reason: RankPools.take_freed and
take_named, UnitMembership.take_sends, PrefillCache.end_event.
"""
