"""Reads of the disk cache that are under way: their blocks, readers, deadlines and measured times.

Until a read is answered its blocks belong to it, whichever prompt owns them besides: a prompt that
gives up, or is given up, leaves them to it, and late data is written where no step computes. Knows no
allocator and no index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hadal.core.cache import num_names, slice_of
from hadal.policy.cached_prefix import ReadRates
from hadal.roles.prefill.prompts import PrefillAttempt

READ_TIMEOUT_S = 5.0
"""A prompt waits for the disk no longer than this, or than `LATE` times what was predicted; then it
is computed.
"""
LATE = 2.0
KNOWN_S = 30.0
"""What was measured counts for so long: a disk that was slow is tried again."""
_FADE = 0.9
"""Weight of what was measured before, at each new measurement."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Owns the blocks of a read."""

    read_id: int


@dataclass(slots=True)
class DiskRead:
    """One read."""

    read_id: int
    rank: int
    names: bytes
    first: int
    """Which block of its text names[0] is."""
    chain: bytes
    into: tuple[int, ...]
    began_s: float
    predicted_s: float
    deadline_s: float
    prompt: PrefillAttempt | None
    """Who waits for it; None: nobody any more."""
    owner: Reader
    """Owner of the blocks `into`."""


class ReadMeter:
    """A line through the reads so far: seconds of one, and of a block. Old ones fade."""

    def __init__(self) -> None:
        self._known_until_s = -math.inf
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Sums of the weights w, and of w n, w n^2, w t and w n t, where n blocks took t."""

    def observe(self, now_s: float, num_blocks: int, elapsed_s: float) -> None:
        """A read of `num_blocks` took so long, the reads before it aside."""
        n, t = num_blocks, elapsed_s
        self._sums = tuple(  # type: ignore[assignment]
            _FADE * old + new
            for old, new in zip(self._sums, (1.0, n, n * n, t, n * t), strict=True)
        )
        self._known_until_s = now_s + KNOWN_S

    def rates(self, now_s: float) -> ReadRates | None:
        """None while nothing is known, or not any more."""
        if now_s > self._known_until_s:
            return None
        w, n, nn, t, nt = self._sums
        spread = w * nn - n * n
        # All of one size: what a block takes and what the read takes cannot be told apart.
        block_s = (w * nt - n * t) / spread if spread > 1e-9 * w * nn else t / n
        block_s = min(max(block_s, 0.0), t / n)
        return ReadRates(max(0.0, (t - block_s * n) / w), block_s)


class DiskReads:
    """The reads of one unit."""

    def __init__(self, timeout_s: float = READ_TIMEOUT_S) -> None:
        self.meter = ReadMeter()
        self.timeout_s = timeout_s
        self._reads: dict[int, DiskRead] = {}
        """Reads under way, in the order of their beginning."""
        self._num_begun = 0
        self._answered_s: dict[int, float] = {}
        """rank -> when its last answer came."""

    def __len__(self) -> int:
        return len(self._reads)

    def rates(self, now_s: float) -> ReadRates | None:
        """Return what reads take; None while that is unknown."""
        return self.meter.rates(now_s)

    def begin(self, now_s: float, prompt: PrefillAttempt, first: int, num_blocks: int) -> DiskRead:
        """`prompt`'s blocks from `first` on will be read into the blocks that it has for them."""
        chain = prompt.generation.chain
        names = slice_of(chain, first, first + num_blocks)
        rates = self.rates(now_s)
        load = DiskRead(
            self._num_begun,
            prompt.rank,
            names,
            first,
            chain,
            prompt.block_ids[first : first + num_blocks],
            now_s,
            rates.seconds(num_blocks) if rates is not None else 0.0,
            now_s + max(self.timeout_s, LATE * prompt.prefix.load_s),
            prompt,
            Reader(self._num_begun),
        )
        self._num_begun += 1
        self._reads[load.read_id] = load
        return load

    def end(self, now_s: float, read_id: int, num_loaded: int) -> DiskRead:
        """A read is answered; returns it. Raises KeyError if it is not under way."""
        load = self._reads.pop(read_id)
        since_s = max(
            load.began_s, self._answered_s.get(load.rank, -math.inf)
        )  # One behind the other.
        self._answered_s[load.rank] = now_s
        if num_loaded:
            self.meter.observe(now_s, num_loaded, now_s - since_s)
        return load

    def abandon(self, prompt: PrefillAttempt) -> None:
        """The prompt does not wait for it any more."""
        for load in self._reads.values():
            if load.prompt is prompt:
                load.prompt = None
        prompt.is_loading = False

    def give_up(self, now_s: float, load: DiskRead) -> PrefillAttempt:
        """End the wait for an overdue read and return its prompt. It counts as having taken until now."""
        prompt = load.prompt
        assert prompt is not None
        self.abandon(prompt)
        self.meter.observe(now_s, len(load.into), now_s - load.began_s)
        return prompt

    def overdue(self, now_s: float) -> list[DiskRead]:
        """Reads that somebody has waited for too long."""
        return [
            load
            for load in self._reads.values()
            if load.prompt is not None and load.deadline_s <= now_s
        ]

    def queued_s(self) -> dict[int, float]:
        """rank -> what the reads to it are predicted to take."""
        rank_to_s: dict[int, float] = {}
        for load in self._reads.values():
            rank_to_s[load.rank] = rank_to_s.get(load.rank, 0.0) + load.predicted_s
        return rank_to_s

    @property
    def next_deadline_s(self) -> float | None:
        return min(
            (load.deadline_s for load in self._reads.values() if load.prompt is not None),
            default=None,
        )

    def lose(self, rank: int) -> None:
        """The rank is gone: its reads are never answered."""
        for load in [load for load in self._reads.values() if load.rank == rank]:
            if load.prompt is not None:
                load.prompt.is_loading = False
            del self._reads[load.read_id]
        self._answered_s.pop(rank, None)

    def of_rank(self, rank: int) -> list[DiskRead]:
        return [load for load in self._reads.values() if load.rank == rank]

    def check(self) -> list[str]:
        """Problems; empty when those who wait know it, and wait for one read each."""
        waiting = [load.prompt for load in self._reads.values() if load.prompt is not None]
        problems = []
        if len({id(prompt) for prompt in waiting}) != len(waiting):
            problems.append("a prompt waits for two reads")
        if not all(prompt.is_loading for prompt in waiting):
            problems.append("a prompt is waited for and does not know it")
        if any(num_names(load.names) != len(load.into) for load in self._reads.values()):
            problems.append("a read has not as many blocks as names")
        return problems
