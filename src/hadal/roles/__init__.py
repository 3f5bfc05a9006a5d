"""State machines without I/O: `handle(now_s, event) -> list[Effect]`. Hosts, live or simulated, do
the rest.

There is one convention for effects. What `handle` returns is the actor's own list (`_out`), in the
order in which the host has to do it. A part of an actor returns its effects as a list, and the actor
appends them; a part that causes some in the middle of what it does is given the actor's list when it
is made. What must not take its place by when it came about is kept by its owner until the actor asks
for it: blocks that were freed go out before any plan that writes them (RankPools.take_freed), and a
new formation before what the leader wants of its ranks (UnitMembership.effects).
"""
