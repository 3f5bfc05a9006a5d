"""Reads of the disk cache under way: their blocks, readers, deadlines and measured times.

Until a read is answered it owns its blocks, besides any prompt. A prompt that gives up or is
dropped leaves the blocks to the read, so late data is written where no step computes. Independent
of allocators and indexes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hadal.core.cache import num_names, slice_of
from hadal.policy.cached_prefix import ReadRates
from hadal.roles.prefill.prompts import PrefillAttempt

READ_TIMEOUT_S = 5.0
"""Longest wait of a prompt for the disk, seconds, or `LATE` times the predicted time if that is
longer. Then the prompt is computed.
"""
LATE = 2.0
KNOWN_S = 30.0
"""Seconds for which measured rates are used: after that, a slow disk is tried again."""
_FADE = 0.9
"""Factor on the weight of earlier reads at each new read."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Owner of the blocks of a read."""

    read_id: int


@dataclass(slots=True)
class DiskRead:
    """One read from disk."""

    read_id: int
    rank: int
    names: bytes
    first: int
    """Index in the prompt of the first block that is read."""
    chain: bytes
    into: tuple[int, ...]
    began_s: float
    predicted_s: float
    deadline_s: float
    prompt: PrefillAttempt | None
    """Prompt that waits for the read; None if it gave up or was dropped."""
    owner: Reader
    """Owner of the blocks `into`."""


class ReadMeter:
    """Line fitted to the times of reads: seconds per read and per block. Old reads fade."""

    def __init__(self) -> None:
        self._known_until_s = -math.inf
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Sums of the weights w, and of w n, w n^2, w t and w n t, for reads of n blocks in t seconds."""

    def observe(self, now_s: float, num_blocks: int, elapsed_s: float) -> None:
        """Add a read of `num_blocks`. `elapsed_s`, seconds, begins when the rank's earlier reads
        have ended; for a read that was given up, it includes the wait for those.
        """
        n, t = num_blocks, elapsed_s
        self._sums = tuple(  # type: ignore[assignment]
            _FADE * old + new
            for old, new in zip(self._sums, (1.0, n, n * n, t, n * t), strict=True)
        )
        self._known_until_s = now_s + KNOWN_S

    def rates(self, now_s: float) -> ReadRates | None:
        """Return the measured rates; None without a read in the last KNOWN_S seconds."""
        if now_s > self._known_until_s:
            return None
        w, n, nn, t, nt = self._sums
        spread = w * nn - n * n
        # If all reads have one size, seconds per block and per read cannot be separated.
        block_s = (w * nt - n * t) / spread if spread > 1e-9 * w * nn else t / n
        block_s = min(max(block_s, 0.0), t / n)
        return ReadRates(max(0.0, (t - block_s * n) / w), block_s)


class DiskReads:
    """Disk reads of one unit."""

    def __init__(self, timeout_s: float = READ_TIMEOUT_S) -> None:
        self.meter = ReadMeter()
        self.timeout_s = timeout_s
        self._reads: dict[int, DiskRead] = {}
        """Reads under way, oldest first."""
        self._num_begun = 0
        self._answered_s: dict[int, float] = {}
        """Rank -> time of its last answer."""

    def __len__(self) -> int:
        return len(self._reads)

    def rates(self, now_s: float) -> ReadRates | None:
        """Return the measured rates of reads; None if unknown."""
        return self.meter.rates(now_s)

    def begin(self, now_s: float, prompt: PrefillAttempt, first: int, num_blocks: int) -> DiskRead:
        """Add a read of a prompt's blocks from `first` on, into the blocks that it has for them."""
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
        """Remove an answered read and return it. Raises KeyError if it is not under way."""
        load = self._reads.pop(read_id)
        since_s = max(
            load.began_s, self._answered_s.get(load.rank, -math.inf)
        )  # Reads of a rank run one after another.
        self._answered_s[load.rank] = now_s
        if num_loaded:
            self.meter.observe(now_s, num_loaded, now_s - since_s)
        return load

    def abandon(self, prompt: PrefillAttempt) -> None:
        """Note that the prompt no longer waits for its read."""
        for load in self._reads.values():
            if load.prompt is prompt:
                load.prompt = None
        prompt.is_loading = False

    def give_up(self, now_s: float, load: DiskRead) -> PrefillAttempt:
        """End the wait for an overdue read, count its time so far, and return its prompt."""
        prompt = load.prompt
        assert prompt is not None
        self.abandon(prompt)
        self.meter.observe(now_s, len(load.into), now_s - load.began_s)
        return prompt

    def overdue(self, now_s: float) -> list[DiskRead]:
        """Return reads past their deadline that a prompt still waits for."""
        return [
            load
            for load in self._reads.values()
            if load.prompt is not None and load.deadline_s <= now_s
        ]

    def queued_s(self) -> dict[int, float]:
        """Return rank -> predicted seconds of its reads under way."""
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
        """Remove the reads of a lost rank, which are never answered."""
        for load in [load for load in self._reads.values() if load.rank == rank]:
            if load.prompt is not None:
                load.prompt.is_loading = False
            del self._reads[load.read_id]
        self._answered_s.pop(rank, None)

    def of_rank(self, rank: int) -> list[DiskRead]:
        return [load for load in self._reads.values() if load.rank == rank]

    def check(self) -> list[str]:
        """Return problems; empty if each waiting prompt is marked as such and waits for one read."""
        waiting = [load.prompt for load in self._reads.values() if load.prompt is not None]
        problems = []
        if len({id(prompt) for prompt in waiting}) != len(waiting):
            problems.append("a prompt waits for two reads")
        if not all(prompt.is_loading for prompt in waiting):
            problems.append("a prompt waits for a read and is not marked as loading")
        if any(num_names(load.names) != len(load.into) for load in self._reads.values()):
            problems.append("the numbers of blocks and names of a read differ")
        return problems
