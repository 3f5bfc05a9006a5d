"""State machines without I/O: `handle(now_s, event) -> list[Effect]`. Hosts, live or simulated, do
the rest.

There is one convention for effects. An actor has one list, `_out`: `handle` empties it, whatever
happens appends to it, and what `handle` returns is a copy of it, in the order in which the host has
to do it. A part that causes effects is given that list when it is made (`out`); a helper that only
answers what is due (Alarm, Tracer, UnitReporter) returns it, and its caller appends it at once.

What must not take its place by when it came about is kept by its owner until the actor takes it,
and the method that hands it over says why: RankPools.take_freed and take_named, UnitMembership.take_sends,
PrefillCache.end_event.
"""
