"""State machines without I/O: `handle(now_s, event) -> list[Effect]`. Live or simulated hosts
execute the effects.

One convention holds for effects. A role has one list, `_out`. `handle` empties it, every event
appends to it, and `handle` returns a copy, in the order in which the host must execute it. A part
that causes effects gets that list when it is made (`out`). A helper that only returns due effects
(Alarm, Tracer, UnitReporter) has no such list; its caller appends them at once.

Some effects must not be ordered by the time at which they arose. The part that caused them keeps
them until the role collects them. The method that returns them gives the reason:
RankPools.take_freed and take_named, UnitMembership.take_sends, PrefillCache.end_event.
"""
