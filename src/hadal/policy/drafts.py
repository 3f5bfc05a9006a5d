"""Choose the number of speculative tokens (drafts) per request, step by step, for the highest
throughput.

    tokens of a request in a step = 1 + a1 + a1 a2 + ...     aj: acceptance rate of draft j after the others
    chosen                        = the k with the most tokens per second; steps with k drafts are timed for each k

Times and acceptance rates are measured. Seconds are learned for steps with about the same number of
requests, for each k separately: the cost of a second row of a request differs too much between
models and machines to be guessed. So other k are tried now and then, for a few steps: often at
first, rarely once that changes nothing. A step here is one pass of the model. Independent of single
requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2, sqrt

from hadal.core.drafts import Compared

HYSTERESIS = 0.02
"""Minimum relative gain in tokens per second to change the number in use."""
PROBE_STEPS, PROBE_STEPS_MAX = 4, 20
"""Steps of a trial; the first has no drafts to check yet. A trial of more drafts than in use is
prolonged, up to PROBE_STEPS_MAX, while most of them are right.
"""
_RIGHT = 0.75
"""Minimum share of right drafts for which a trial is prolonged."""
FIRST_PROBE = 8
"""Steps (of one _Size) before the first trial, and between trials until every number was tried."""
PERIOD, PERIOD_MAX = 128, 512
"""Steps between trials once every number was tried: doubled after each trial that changed nothing,
up to PERIOD_MAX.
"""
_GAIN = 0.1
"""Weight of a new step in the mean seconds of steps with its number of drafts, from the tenth on."""
_OUTLIER = 2.0
"""Longest time that a step counts with, in mean step times: longer ones had other causes."""
_MEMORY_STEPS = 32.0
"""Steps over which old counts of drafts decay."""
_KEPT_DRAFTS = 2.0
"""Weight, in drafts, below which old counts do not decay. After a long time without drafts, one
trial counts about as much as all earlier drafts.
"""
_LAST_STEPS = 6
"""Number of latest steps that are compared with all steps before them."""
_UNLIKELY, _UNLIKELY_DRAFTS = 4.0, 1.5
"""The latest steps replace older counts if their right drafts differ from the expected number by
over _UNLIKELY standard deviations + _UNLIKELY_DRAFTS.
"""
_PRIOR = 0.8, 1.0
"""Assumed share of right drafts before any were seen, and its weight in drafts."""
_SEEN_MIN = 3
"""Measured steps that a number of drafts needs before it can be chosen."""


@dataclass(slots=True)
class _Size:
    """Statistics of steps with about the same number of requests."""

    chosen: int
    num_max: int
    num_steps: int = 0
    """Steps since the last trial."""
    period: int = FIRST_PROBE
    seconds: list[float] = field(init=False)
    num_seen: list[int] = field(init=False)
    tried_at: list[int] = field(init=False)
    """Step in which each number of drafts was last tried or used; -1: never."""

    def __post_init__(self) -> None:
        self.seconds = [0.0] * (1 + self.num_max)
        self.num_seen = [0] * (1 + self.num_max)
        self.tried_at = [-1] * (1 + self.num_max)

    def add(self, num_drafts: int, seconds: float) -> None:
        self.num_seen[num_drafts] += 1
        mean_s = self.seconds[num_drafts]
        if self.num_seen[num_drafts] > _SEEN_MIN:
            seconds = min(seconds, _OUTLIER * mean_s)
        gain = max(_GAIN, 1.0 / self.num_seen[num_drafts])
        self.seconds[num_drafts] = mean_s + gain * (seconds - mean_s)


@dataclass(slots=True)
class _RightShare:
    """Recent acceptance rate of drafts at one position: over about thirty steps, or only the last
    few if they differ too much to be chance.
    """

    tried: float = 0.0
    right: float = 0.0
    last: deque[tuple[int, int]] = field(default_factory=deque)
    """(tried, right) of each of the last few steps with drafts; not yet in `tried` and `right`."""

    @property
    def value(self) -> float:
        tried, right = map(sum, zip((self.tried, self.right), *self.last, strict=True))
        return self._of(tried, right)

    def add(self, tried: int, right: int) -> None:
        """Record a step's tried drafts and the right ones among them; older counts decay."""
        fading = max(0.0, self.tried - _KEPT_DRAFTS) / _MEMORY_STEPS
        kept = 1.0 - fading / max(self.tried, 1.0)
        self.tried, self.right = kept * self.tried, kept * self.right
        if not tried:
            return
        self.last.append((tried, right))
        last_tried, last_right = map(sum, zip(*self.last, strict=True))
        before = self._of(self.tried, self.right)
        chance = sqrt(last_tried * before * (1.0 - before))
        if abs(last_right - before * last_tried) > _UNLIKELY * chance + _UNLIKELY_DRAFTS:
            self.tried, self.right = last_tried, last_right
            self.last.clear()
        elif len(self.last) > _LAST_STEPS:
            tried, right = self.last.popleft()
            self.tried, self.right = self.tried + tried, self.right + right

    @staticmethod
    def _of(tried: float, right: float) -> float:
        share, weight = _PRIOR
        return (right + share * weight) / (tried + weight)


class DraftChooser:
    """Chooser of the number of drafts. `num_max`: most drafts; `is_fixed`: always that number."""

    def __init__(self, num_max: int, *, is_fixed: bool = False) -> None:
        self.num_max = num_max
        self.num_tried = [0] * num_max
        """Drafts by position that were compared with the drawn token."""
        self.num_right = [0] * num_max
        """Drafts by position that were equal to the drawn token."""
        self._shares = [_RightShare() for _ in range(num_max)]
        """Recent acceptance rate by position."""
        self._is_fixed = is_fixed
        self._sizes: dict[int, _Size] = {}
        self._last = 0
        self._num_steps = 0
        self._probe: tuple[int, int] = (0, 0)
        """(number of drafts under trial, steps left)."""
        self._is_trying = False
        """True if the number under trial was chosen last."""
        self._probe_steps = 0
        self._probe_drafts = [0, 0]
        """Tried and right drafts of this trial."""

    def choose(self, num_requests: int) -> int:
        """Return the drafts per request of the next plan. `num_requests`: on the fullest rank."""
        if self._is_fixed or self.num_max == 0:
            return self.num_max
        self._num_steps += 1
        tried, num_left = self._probe
        num_tried, num_right = self._probe_drafts
        if num_left == 0 and num_right and num_right >= _RIGHT * num_tried:
            if tried > self._last and self._probe_steps < PROBE_STEPS_MAX:
                num_left = PROBE_STEPS
            self._probe_drafts = [0, 0]
        self._is_trying = num_left > 0
        if num_left:
            self._probe = tried, num_left - 1
            self._probe_steps += 1
            return tried
        size = self._size(num_requests)
        size.num_steps += 1
        size.tried_at[size.chosen] = self._num_steps
        if size.num_steps >= size.period:
            self._begin_probe(size)
        self._last = size.chosen
        return size.chosen

    @property
    def num_passes_left(self) -> int:
        """Limit of further passes, the next one included, with the number of drafts chosen last."""
        return 1 + self._probe[1] if self._is_trying else PERIOD

    def repeated(self, num_requests: int, num_more: int) -> None:
        """Record that the plan chosen last has `num_more` further passes with the same number of drafts."""
        self._num_steps += num_more
        if self._is_trying:
            tried, num_left = self._probe
            self._probe = tried, max(0, num_left - num_more)
            self._probe_steps += num_more
        else:
            self._size(num_requests).num_steps += num_more

    def done(
        self,
        num_requests: int,
        num_checked: int,
        num_drafts: int,
        seconds: Sequence[float],
        drafts: Compared,
    ) -> None:
        """Record a step. Its passes checked `num_checked` drafts of every request and made
        `num_drafts` new ones. `seconds`: of each pass, empty if not measured; `drafts`: of all passes.
        """
        for place, share in enumerate(self._shares):
            tried, right = drafts[place] if place < len(drafts) else (0, 0)
            self.num_tried[place] += tried
            self.num_right[place] += right
            share.add(tried, right)
            # Only drafts of the trial: earlier steps are still under way when it begins.
            if num_checked and num_checked == self._probe[0]:
                self._probe_drafts[0] += tried
                self._probe_drafts[1] += right
        if self._is_fixed or num_checked != num_drafts or not num_requests:
            return  # A mixed step measures neither number.
        size = self._size(num_requests)
        for each_s in seconds:
            size.add(num_drafts, each_s)
        best = max(range(1 + self.num_max), key=lambda num: self._rate(size, num))
        if self._rate(size, best) > (1.0 + HYSTERESIS) * self._rate(size, size.chosen):
            size.chosen = best
            if size.period > PERIOD:
                size.period = PERIOD

    def tokens(self, num_drafts: int) -> float:
        """Return a request's tokens per step with `num_drafts` drafts, at recent acceptance rates."""
        sum_, chance = 1.0, 1.0
        for share in self._shares[:num_drafts]:
            chance *= share.value
            sum_ += chance
        return sum_

    def _rate(self, size: _Size, num_drafts: int) -> float:
        if size.num_seen[num_drafts] < _SEEN_MIN:
            return 0.0
        return self.tokens(num_drafts) / max(size.seconds[num_drafts], 1e-9)

    def _size(self, num_requests: int) -> _Size:
        key = round(2 * log2(max(1, num_requests)))
        if key not in self._sizes:
            self._sizes[key] = _Size(self._last, self.num_max)
        return self._sizes[key]

    def _begin_probe(self, size: _Size) -> None:
        """Start a trial of the number of drafts not used for longest; once all were tried, only of
        those next to the chosen number.
        """
        is_known = min(size.tried_at) >= 0
        most = 1 if is_known else self.num_max
        others = [num for num in range(1 + self.num_max) if 0 < abs(num - size.chosen) <= most]
        tried = min(others, key=lambda num: size.tried_at[num])
        size.tried_at[tried] = self._num_steps
        size.num_steps = 0
        size.period = (
            min(2 * max(size.period, PERIOD // 2), PERIOD_MAX) if is_known else FIRST_PROBE
        )
        self._probe, self._probe_steps, self._probe_drafts = (tried, PROBE_STEPS), 0, [0, 0]
