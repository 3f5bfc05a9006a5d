"""Steps of a unit on its ranks: the parts that ranks return, their merged result, and the hosts
that slow them.

Independent of the membership: the leader (roles/ranks/ranks) drops answers of non-members.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from hadal.core.drafts import summed
from hadal.core.messages.ranks import RankDone
from hadal.core.plans import (
    NO_LINK_BYTES,
    DecodePlan,
    Draw,
    OpTime,
    PrefillPlan,
    Score,
    StepDone,
    StepPlan,
    TraceEvent,
)
from hadal.overlap.plan import COMBINE, DISPATCH
from hadal.policy.slow_hosts import SlowHost
from hadal.roles.ranks.clocks import HostClocks
from hadal.roles.ranks.slow import SlowHosts

PEER_ERRORS = ("PeerLost", "Aborted")
"""Prefixes of errors that are not the rank's own fault (comm/group, model/membership)."""


@dataclass(slots=True)
class RanksStep:
    """One step under way, with the parts that members have returned so far."""

    step_id: int
    offsets: tuple[int, ...]
    """Per rank, the number that is added to its keys to get the inner leader's keys."""
    sent_s: float
    parts: dict[int, StepDone] = field(default_factory=dict)

    @property
    def error(self) -> str:
        """Errors that are ranks' own fault, joined; empty without any."""
        return "; ".join(
            f"rank {rank}: {part.error}"
            for rank, part in self.parts.items()
            if part.error is not None and not part.error.startswith(PEER_ERRORS)
        )

    def is_done(self, members: Mapping[int, str]) -> bool:
        """Return whether every member did its part."""
        is_whole = members.keys() <= self.parts.keys()
        return is_whole and all(part.error is None for part in self.parts.values())


class RanksSteps:
    """Steps in flight, oldest first. `num_slots`: slots of one rank in a decode unit; 0 in a
    prefill unit, which numbers chunks instead. `timeout_s`: a step is aborted if no rank's compute
    thread moves for this time.
    """

    def __init__(self, num_slots: int, timeout_s: float) -> None:
        self.clocks = HostClocks()
        self.timeout_s = timeout_s
        self._num_slots = num_slots
        self._in_flight: deque[RanksStep] = deque()
        self._slow_hosts = SlowHosts(has_rows=num_slots > 0)

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def oldest(self) -> RanksStep | None:
        return self._in_flight[0] if self._in_flight else None

    @property
    def ranks(self) -> set[int]:
        """Ranks that returned a part of a step in flight."""
        return {rank for step in self._in_flight for rank in step.parts}

    def reset(self, rank_to_host: Mapping[int, str]) -> None:
        """Drop all steps, because a new formation begins."""
        self._in_flight.clear()
        self._slow_hosts.began(rank_to_host)

    def begin(self, now_s: float, plans: tuple[StepPlan, ...]) -> None:
        """Add a step that is being sent."""
        self._in_flight.append(RanksStep(plans[0].step_id, self._offsets(plans), now_s))

    def add(self, now_s: float, message: RankDone, host: str | None) -> bool:
        """Add a member's part. Returns False for a repeated part, or if its step is not in flight."""
        step = next((one for one in self._in_flight if one.step_id == message.done.step_id), None)
        if step is None or message.rank in step.parts:
            return False
        step.parts[message.rank] = message.done
        if host is not None:
            self.clocks.measure(now_s, host, step.sent_s, message)
            trip_s = now_s - step.sent_s - (message.answered_s - message.taken_s)
            self._slow_hosts.answered(host, trip_s)
        return True

    def drop(self) -> None:
        """Drop the oldest step."""
        self._in_flight.popleft()

    def done(self, now_s: float, hosts: Callable[[], Mapping[int, str]]) -> SlowHost | None:
        """Remove the oldest step, which all ranks have done. Returns a host that slows the steps,
        or None. `hosts` returns the host of each rank.
        """
        step = self._in_flight.popleft()
        if any(part.events for part in step.parts.values()):
            self.clocks.traced(step.step_id, hosts())
        return self._slow_hosts.stepped(now_s, step.sent_s, step.parts)

    def _offsets(self, plans: tuple[StepPlan, ...]) -> tuple[int, ...]:
        """Return each rank's offset into the inner leader's keys."""
        sizes = []
        for plan in plans:
            match plan:
                case DecodePlan():
                    sizes.append(self._num_slots)
                case PrefillPlan(_, chunks, _, second):
                    sizes.append(len(chunks) + len(second))
        return tuple(accumulate(sizes, initial=0))[:-1]


def merge(step_id: int, offsets: tuple[int, ...], parts: dict[int, StepDone]) -> StepDone:
    """Merge the ranks' parts into one result. `offsets` (by rank) are added to keys; rows follow in
    rank order. Times are those of the slowest rank, and of the fastest for exchanges.
    """
    keys: list[int] = []
    tokens: list[int] = []
    draws: dict[int, Draw] = {}
    failed: dict[int, str] = {}
    scores: dict[int, tuple[Score, ...]] = {}
    chosen: dict[str, OpTime] = {}
    events: list[TraceEvent] = []
    link_bytes = NO_LINK_BYTES
    for rank in sorted(parts):
        part, offset = parts[rank], offsets[rank]
        draws.update({len(tokens) + row: draw for row, draw in part.draws.items()})
        keys += [offset + key for key in part.keys]
        tokens += part.tokens
        failed.update({offset + key: reason for key, reason in part.failed.items()})
        scores.update({offset + key: of_chunk for key, of_chunk in part.scores.items()})
        link_bytes = link_bytes.plus(part.link_bytes)
        for op_time in part.op_times:
            known = chosen.get(op_time.op)
            if known is not None:
                # An exchange lasts until the last peer has sent. Only the shortest one measures
                # the transfer itself.
                pick = min if op_time.op in (DISPATCH, COMBINE) else max
                op_time = pick(known, op_time, key=lambda one: one.seconds)
            chosen[op_time.op] = op_time
        events += [msgspec.structs.replace(event, rank=rank) for event in part.events]
    return StepDone(
        step_id,
        tuple(keys),
        tuple(tokens),
        draws,
        max(part.elapsed_s for part in parts.values()),
        None,
        failed,
        tuple(chosen.values()),
        tuple(events),
        scores=scores,
        link_bytes=link_bytes,
        drafts=summed(part.drafts for part in parts.values()),
    )
