"""Every request the front holds: its state, its owners, all its output so far, and the queue of those that wait.

A state changes only through core/request.py's table. Knows neither units nor messages.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hadal.core.messages import Generation
from hadal.core.request import MAY_OWN, OWNS, Move, State, next_state
from hadal.kv.blocks import blocks_for
from hadal.roles.front_record import Place, Record
from hadal.roles.front_running import Running

PLACED = (State.PREFILLING, State.TRANSFERRING, State.DECODING)
"""States in which a unit works, or will, for the request."""


@dataclass(slots=True)
class RequestBook:
    """Requests by id, in the order of arrival, with the queue and the sums the policies need."""

    by_id: dict[str, Record] = field(default_factory=dict)
    counts: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    num_blocks_placed: int = 0
    running: Running = field(default_factory=Running)
    """Those in decode."""
    _queue: list[Place] = field(default_factory=list)
    _num_arrived: int = 0

    @property
    def num_placed(self) -> int:
        return sum(self.counts[state] for state in PLACED)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def add(self, generation: Generation, deadline_s: float, *, keeps_text: bool = True) -> Record:
        """A new request, queued behind all whose turn is before its own (policy/batching). `keeps_text`: see Front."""
        output = list(generation.output) if keeps_text else []
        record = Record(
            generation, self._num_arrived, deadline_s, output, len(generation.output), attempt=generation.attempt
        )
        self._num_arrived += 1
        self.by_id[record.request_id] = record
        self.counts[State.QUEUED] += 1
        insort(self._queue, record.place)
        return record

    def move(self, record: Record, move: Move) -> None:
        """Walk the life's table; raises InvariantError for a move that cannot happen. An ended request is forgotten."""
        before, after = record.state, next_state(record.state, move)
        record.state = after
        self.counts[before] -= 1
        self.counts[after] += 1
        if before is State.QUEUED:
            del self._queue[bisect_left(self._queue, record.place)]
        if after is State.QUEUED:
            insort(self._queue, record.place)
        if after not in PLACED:
            self.running.leave(record)
        if before not in PLACED and after in PLACED:
            record.num_blocks = blocks_for(record.num_tokens + 1)
            self.num_blocks_placed += record.num_blocks
        elif before in PLACED and after not in PLACED:
            self.num_blocks_placed -= record.num_blocks
        if after in (State.FINISHED, State.CANCELLED):
            self.counts[after] -= 1
            del self.by_id[record.request_id]

    def grow(self, record: Record) -> int:
        """Count its first token of this attempt; return how many blocks its request grew by."""
        record.num_output += 1
        grown = blocks_for(record.num_tokens + 1) - record.num_blocks
        if grown:
            record.num_blocks += grown
            self.num_blocks_placed += grown
        return grown

    def next_queued(self, now_s: float) -> Record | None:
        """The first in turn that waits and is not backing off."""
        for _, _, request_id in self._queue:
            record = self.by_id[request_id]
            if record.not_before_s <= now_s:
                return record
        return None

    def queued(self) -> list[Record]:
        """Those that wait, in their turn."""
        return [self.by_id[request_id] for _, _, request_id in self._queue]

    def next_retry_s(self, now_s: float) -> float:
        """When the next back-off ends; infinity if nothing backs off."""
        times = [self.by_id[request_id].not_before_s for _, _, request_id in self._queue]
        return min((time_s for time_s in times if time_s > now_s), default=math.inf)

    def overdue(self, now_s: float) -> list[Record]:
        """Requests past their deadline. All are given as long, so the oldest come first."""
        late = []
        for record in self.by_id.values():
            if record.deadline_s > now_s:
                break
            late.append(record)
        return late

    def on_unit(self, unit: str) -> list[Record]:
        """Requests that lose something if this unit is lost, the oldest first."""
        return [record for record in self.by_id.values() if unit in (record.prefill_unit, record.decode_unit)]

    def placed(self) -> Iterator[Record]:
        return (record for record in self.by_id.values() if record.state in PLACED)

    def check(self) -> list[str]:
        """Problems of the book; empty when states, owners, queue and sums agree."""
        problems = self.running.check()
        for record in self.by_id.values():
            self.running.sync(record)
            owns = {name for name in ("prefill_unit", "decode_unit") if getattr(record, name) is not None}
            if not OWNS[record.state] <= owns <= MAY_OWN[record.state]:
                problems.append(f"{record.request_id} is {record.state} and owns {sorted(owns)}")
            if record.state in PLACED and record.num_blocks != blocks_for(record.num_tokens + 1):
                problems.append(f"{record.request_id} counts {record.num_blocks} blocks for {record.num_tokens} tokens")
        queued = [record.place for record in self.by_id.values() if record.state is State.QUEUED]
        if sorted(queued) != self._queue:
            problems.append("the queue does not hold those that are queued")
        if self.num_blocks_placed != sum(record.num_blocks for record in self.placed()):
            problems.append("the sum of placed blocks is wrong")
        counts = Counter(record.state for record in self.by_id.values())
        for state in State:
            if self.counts[state] != counts[state]:
                problems.append(f"the count of {state} requests is wrong")
        return problems
