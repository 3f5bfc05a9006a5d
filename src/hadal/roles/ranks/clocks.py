"""Clock offsets between a unit's hosts and its leader, measured on the messages of its steps. They
shift the trace of several hosts to the leader's clock.

    leader   RankStep at a ──► received at b           offset   (b - a + c - d) / 2
             d ◄── RankDone    sent at c               error    at most (d - a - (c - b)) / 2

These are NTP's formulas (RFC 5905, 8), without extra messages. The error of a sample grows with
its age, because clocks drift. No decision uses the offsets: decisions compare durations, and each
duration is measured by one clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from hadal.core.messages.questions import HostClock, Trace
from hadal.core.messages.ranks import RankDone
from hadal.core.plans import TraceEvent
from hadal.roles.unit.tracing import REQUESTS_MAX, STEPS_MAX

DRIFT = 1e-4
"""Seconds per second by which two hosts' clocks may drift apart: 50 ppm for each crystal."""


@dataclass(frozen=True, slots=True)
class _ClockSample:
    offset_s: float
    """Seconds by which the host's clock is ahead of the leader's."""
    error_s: float
    at_s: float

    def error_at(self, now_s: float) -> float:
        return self.error_s + DRIFT * (now_s - self.at_s)


class HostClocks:
    """Clock offsets of the hosts of one leader's unit. A host is the address that its ranks report."""

    def __init__(self) -> None:
        self._samples: dict[str, _ClockSample] = {}
        """Host -> the sample of its present clock with the smallest error."""
        self._step_to_hosts: OrderedDict[int, dict[int, str]] = OrderedDict()
        """Step -> (rank -> host), for traced steps that no trace has reported yet."""

    def measure(self, now_s: float, host: str, sent_s: float, done: RankDone) -> None:
        """Measure `host`'s clock on a rank's answer, received now, to a step sent at `sent_s`."""
        error_s = (now_s - sent_s - (done.answered_s - done.taken_s)) / 2
        if error_s < 0.0:
            return  # The rank's times are impossible: its step took longer than the round trip.
        offset_s = (done.taken_s - sent_s + done.answered_s - now_s) / 2
        known = self._samples.get(host)
        if known is not None:
            known_s = known.error_at(now_s)
            # Samples that exclude each other come from two clocks: the host was restarted.
            is_same_clock = abs(offset_s - known.offset_s) <= error_s + known_s
            if is_same_clock and error_s > known_s:
                return
        self._samples[host] = _ClockSample(offset_s, error_s, now_s)

    def traced(self, step_id: int, rank_to_host: Mapping[int, str]) -> None:
        """Note that these ranks finished a traced step."""
        self._step_to_hosts[step_id] = dict(rank_to_host)
        while len(self._step_to_hosts) > REQUESTS_MAX * STEPS_MAX:
            self._step_to_hosts.popitem(last=False)

    def aligned(self, now_s: float, trace: Trace) -> Trace:
        """Return the trace with the times of measured hosts by the leader's clock, and with each
        clock's error. A trace of a single host is returned unchanged.
        """
        steps = [(step, self._step_to_hosts.pop(step.step_id, {})) for step in trace.steps]
        host_to_ranks: dict[str, set[int]] = {}
        for _, rank_to_host in steps:
            for rank, host in rank_to_host.items():
                host_to_ranks.setdefault(host, set()).add(rank)
        if len(host_to_ranks) < 2:
            return trace
        clocks = {
            host: HostClock(host, tuple(sorted(ranks)), sample.offset_s, sample.error_at(now_s))
            for host, ranks in sorted(host_to_ranks.items(), key=lambda one: min(one[1]))
            if (sample := self._samples.get(host)) is not None
        }

        def shifted(event: TraceEvent, rank_to_host: Mapping[int, str]) -> TraceEvent:
            clock = clocks.get(rank_to_host.get(event.rank, ""))
            if clock is None:
                return event
            return msgspec.structs.replace(
                event,
                start_s=event.start_s - clock.offset_s,
                end_s=event.end_s - clock.offset_s,
            )

        return msgspec.structs.replace(
            trace,
            steps=tuple(
                msgspec.structs.replace(
                    step, events=tuple(shifted(event, hosts) for event in step.events)
                )
                for step, hosts in steps
            ),
            clocks=tuple(clocks.values()),
        )
