"""A leader's choice for a step: overlap schedule, one or two micro-batches, and the cut of ranks'
parts.

One decision holds for all ranks of the unit. It is made for the busiest rank, as the others wait
for it anyway. Prices come from the steps that ran (perf/costs). They change slowly, so a choice for
work of similar size is kept for a while: planning stays a small part of a step. Independent of
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

import numpy as np
from numpy.typing import ArrayLike

from hadal.core.arrays import Bools, Ints
from hadal.core.plans import OpTime
from hadal.core.rates import StepRates
from hadal.overlap.plan import DECODE_FIVE, PREFILL_DUAL, SCHEDULES, SEQUENTIAL, Schedule
from hadal.overlap.split import split_chunks, split_ranks
from hadal.perf.costs import MicroBatchWork, StepCosts, choose, halve_works
from hadal.policy.prefill_rates import UNMEASURED

AUTO = "auto"
HYSTERESIS = 0.03
"""Share by which another schedule must be cheaper than the one in use."""
_ALLOWED = (PREFILL_DUAL, DECODE_FIVE)
_KEPT_STEPS = 32
"""Observed steps after which a choice or rate is computed again; earlier while few were observed."""
_KEPT_CHOICES = 256


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """Execution of a step, the same on every rank."""

    schedule: str
    num_micro_batches: int
    works: tuple[MicroBatchWork, ...]
    """Work of the busiest rank, by micro-batch."""


class StepScheduler:
    """Chooser of schedules. `overlap` is a schedule's name or "auto". `num_moe_layers` 0: ranks
    exchange nothing, and auto never splits.
    """

    def __init__(
        self,
        num_ranks: int,
        overlap: str = AUTO,
        min_split_tokens: int = 32,
        *,
        num_layers: int = 0,
        num_moe_layers: int = 0,
    ) -> None:
        if overlap != AUTO and overlap not in SCHEDULES:
            raise ValueError(f"overlap is {overlap!r}; use one of {AUTO}, {', '.join(SCHEDULES)}.")
        self.costs = StepCosts(num_layers, num_moe_layers)
        self._num_ranks = num_ranks
        self._overlap = overlap
        self._num_tokens_min = max(2, min_split_tokens)
        self._current = SEQUENTIAL
        self._choices: dict[tuple[int, int], tuple[Schedule, int, int]] = {}
        """Size of the work -> (schedule, micro-batches, steps observed when it was chosen)."""
        self._rates = UNMEASURED
        self._rates_at = -1
        self._last: tuple[Schedule, int] = (SEQUENTIAL, 1)
        """Schedule and micro-batches of the last step."""
        self._in_flight: dict[int, tuple[MicroBatchWork, ...]] = {}

    def choose(self, step_id: int, rank_to_work: ArrayLike) -> ScheduleChoice:
        """Choose how step `step_id` runs. `rank_to_work`: int [R, 2], tokens, and pairs of a token
        and a position that it attends to.
        """
        rates = self.rates
        tokens_R, pairs_R = np.asarray(rank_to_work, np.int64).T
        busiest = int((rates.token_s * tokens_R + rates.pair_s * pairs_R).argmax())
        whole = MicroBatchWork(int(tokens_R[busiest]), int(pairs_R[busiest]))
        schedule, num = self._decide(whole, int(tokens_R.max()))
        self._last = (schedule, num)
        works = (whole,) if num == 1 else halve_works(whole)
        # A step's result has the longest time of all ranks per compute operation
        # (roles/ranks/steps). It grows with the tokens of the rank with most tokens, or with the
        # pairs of the rank with most pairs.
        longest = MicroBatchWork(int(tokens_R.max()), int(pairs_R.max()))
        self._in_flight[step_id] = (longest,) if num == 1 else halve_works(longest)
        return ScheduleChoice(schedule.name, num, works)

    def _decide(self, whole: MicroBatchWork, num_tokens_max: int) -> tuple[Schedule, int]:
        if num_tokens_max < self._num_tokens_min or self._overlap == SEQUENTIAL.name:
            return SEQUENTIAL, 1  # Two micro-batches that hide nothing only shrink matrix products.
        if self._overlap != AUTO:
            return SCHEDULES[self._overlap], 2
        if self._num_ranks == 1:
            return SEQUENTIAL, 1
        key = (round(8 * log2(whole.num_tokens + 1)), round(4 * log2(whole.num_pairs + 1)))
        kept = self._choices.get(key)
        if kept is None or self._is_old(kept[2]):
            if len(self._choices) >= _KEPT_CHOICES:
                self._choices.clear()
            schedule, num = choose(
                self.costs,
                whole,
                halve_works(whole),
                num_layers=self.costs.num_layers,
                allowed=_ALLOWED,
                hysteresis=HYSTERESIS,
                current=kept[0] if kept is not None else self._current,
            )
            kept = self._choices[key] = (schedule, num, self.costs.num_steps)
        self._current = kept[0]
        return kept[0], kept[1]

    def _is_old(self, num_steps: int) -> bool:
        return self.costs.num_steps > num_steps + min(num_steps, _KEPT_STEPS)

    @property
    def rates(self) -> StepRates:
        """Rates of the unit's step times, from its steps so far; refitted only now and then."""
        if self.costs.num_steps and (self._rates_at < 0 or self._is_old(self._rates_at)):
            found = self.costs.rates(*self._last)
            if found is not None and self._num_ranks == 1:  # Its experts get no others' tokens.
                found = replace(found, token_s=found.token_s + found.mean_s, mean_s=0.0)
            if found is not None:
                self._rates = found
            self._rates_at = self.costs.num_steps
        return self._rates

    @property
    def is_calibrated(self) -> bool:
        """True if `rates` are measured; before that, they are in no unit of time."""
        return self.rates is not UNMEASURED

    def done(self, step_id: int, op_times: Sequence[OpTime]) -> None:
        """Update the costs from a step's times."""
        works = self._in_flight.pop(step_id, None)
        if works is not None and op_times:
            self.costs.observe(works, op_times)

    def reset(self) -> None:
        """Forget the steps in flight, which will not be done."""
        self._in_flight.clear()

    def cut_chunks(self, chunks: Sequence[tuple[int, int]]) -> list[int]:
        """Return, for each (start, num_tokens) of a rank, the tokens that go into the first micro-batch."""
        return split_chunks(chunks, self._split_token_s, self.rates.pair_s)

    def second_rows(self, lengths_RS: Ints, is_row_RS: Bools) -> Bools:
        """Return which rows of all ranks go into the second micro-batch: bool [R, S]. `lengths_RS`:
        positions that the rows attend to.
        """
        return split_ranks(lengths_RS, is_row_RS, self._split_token_s, self.rates.pair_s)

    @property
    def _split_token_s(self) -> float:
        """Seconds of a token in one micro-batch. All ranks split alike, so if a micro-batch has
        more of a rank's tokens, that rank's experts also get more of the other ranks' tokens in it.
        """
        return self.rates.token_s + self.rates.mean_s
