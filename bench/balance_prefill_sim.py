"""Simulate prefill units of synchronous ranks under a rule. A step's price is a formula with estimated constants:

    step = fixed + max over ranks (pair_s * pairs + token_s * tokens) + dispatch_s * max tokens +
    mean_s * mean tokens

Efficiency is the same sum with means instead of maxima and without the fixed cost, divided by the actual time. So a
rule that makes more, shorter steps loses efficiency by their fixed costs. In each run one rule decides to which rank
prompts go and how many tokens a step takes. `hadal.policy.prefill_balance` is called as in the live system.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.balance_loads import Arrival, UnitReport
from hadal.core.rates import StepRates
from hadal.policy.prefill_balance import PrefillQueueView, look_ahead, plan_step
from hadal.policy.prefill_budget import StepLimits
from hadal.policy.views import PromptView

STEP_S = 0.03
"""Estimated fixed seconds per step. 14 ms: a rank of DeepSeek-V3 at EP32 reads 40 GB of FP8 weights (9
experts and the shared one in 58 layers, attention in 61, the head) at 2.8 TB/s, as if no product hid the
reads. 12 ms: 61 layers x 2 micro-batches x some 25 launches of 4 us each. The sum is rounded up.
"""
MEAN_S = 7.3e-5
RATES = StepRates(3.3e-5, 1e-8, 2e-5, STEP_S)
"""1e-8 s per pair: MLA prefill of 61 layers at 500 TFLOP/s. The other rates are roofline estimates
for an H800 unit.
"""
WINDOW = 8
"""Prompts per rank, queued or running, that a saturated run keeps at any time."""


@dataclass(slots=True)
class Running:
    """A prompt and its progress."""

    arrival: Arrival
    num_done: int = 0

    @property
    def context(self) -> int:
        return self.arrival.num_cached + self.num_done

    @property
    def num_left(self) -> int:
        return self.arrival.num_tokens - self.num_done

    def view(self) -> PromptView:
        arrival, num_done = self.arrival, self.num_done
        return PromptView(arrival.num_tokens - num_done, 0, arrival.num_cached + num_done)


Queues = list[list[Running]]
Sizes = list[list[int]]
Rule = Callable[[Queues, deque[Running], StepLimits], Sizes]
"""Function that moves prompts from the waiting ones into the ranks' queues, and returns the tokens
that a step takes of each prompt.
"""


def by_tokens(dispatch: Callable[[Queues], int] | None) -> Rule:
    """Return a rule that gives each rank the same token budget and computes its oldest prompts first. Without
    `dispatch`, ranks with free budget take prompts from a central queue.
    """

    def rule(queues: Queues, waiting: deque[Running], limits: StepLimits) -> Sizes:
        budget = limits.num_tokens_mean
        if dispatch is not None:
            while waiting:
                queues[dispatch(queues)].append(waiting.popleft())
        else:
            left = [sum(p.num_left for p in queue) for queue in queues]
            while waiting and min(left) < budget:
                at = left.index(min(left))
                left[at] += waiting[0].num_left
                queues[at].append(waiting.popleft())
        return [_oldest_first(queue, budget) for queue in queues]

    return rule


def by_cost(dispatch: Callable[[Queues], int], budget_s: float) -> Rule:
    """Return a rule that gives each rank the same budget of seconds, up to the token limit, and computes its
    oldest prompts first.
    """

    def rule(queues: Queues, waiting: deque[Running], limits: StepLimits) -> Sizes:
        while waiting:
            queues[dispatch(queues)].append(waiting.popleft())
        sizes = []
        for queue in queues:
            left_s, of_queue, room = budget_s, [0] * len(queue), limits.num_tokens_max
            for at, prompt in enumerate(queue):
                of_queue[at], seconds = RATES.fit(
                    prompt.context, min(prompt.num_left, room), left_s
                )
                left_s -= seconds
                room -= of_queue[at]
                if of_queue[at] < prompt.num_left:
                    break
            sizes.append(of_queue)
        return sizes

    return rule


def _oldest_first(queue: Sequence[Running], budget: int) -> list[int]:
    sizes = []
    for prompt in queue:
        sizes.append(min(prompt.num_left, budget))
        budget -= sizes[-1]
    return sizes


def ours(queues: Queues, waiting: deque[Running], limits: StepLimits) -> Sizes:
    """Place and cut prompts by hadal.policy.prefill_balance; this is a Rule."""
    views = [
        PrefillQueueView(at, tuple(p.view() for p in queue), 1, 256)
        for at, queue in enumerate(queues)
    ]
    seen = look_ahead(waiting, len(queues), limits, lambda prompt: prompt.num_left)
    cut = plan_step(views, [p.view() for p in seen], RATES, limits)
    num = sum(len(rank.starts) for rank in cut.ranks)
    for queue, rank in zip(queues, cut.ranks, strict=True):
        queue += [seen[index] for index in rank.starts]
    for _ in range(num):
        waiting.popleft()
    return [list(rank.sizes) for rank in cut.ranks]


def round_robin() -> Callable[[Queues], int]:
    """Return a function that chooses the ranks in turn."""
    turn = [0]

    def dispatch(queues: Queues) -> int:
        turn[0] += 1
        return (turn[0] - 1) % len(queues)

    return dispatch


def least_requests(queues: Queues) -> int:
    return min(range(len(queues)), key=lambda at: len(queues[at]))


def least_tokens(queues: Queues) -> int:
    return min(range(len(queues)), key=lambda at: (sum(p.num_left for p in queues[at]), at))


def least_cost(queues: Queues) -> int:
    return min(
        range(len(queues)),
        key=lambda at: (sum(RATES.chunk_s(p.context, p.num_left) for p in queues[at]), at),
    )


@dataclass(slots=True)
class Outcome:
    """Sums of one run. `attention` (pairs), `tokens` and `time` are the balance of the ranks, mean / max,
    averaged over time.
    """

    actual_s: float = 0.0
    ideal_s: float = 0.0
    attention: float = 0.0
    tokens: float = 0.0
    time: float = 0.0
    ttfts_s: list[float] = field(default_factory=list)
    plans_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0
    end_s: float = 0.0
    """Time at which the last prompt was done."""

    @property
    def efficiency(self) -> float:
        """Efficiency, with every step's fixed cost counted as lost."""
        return self.ideal_s / self.actual_s if self.actual_s else 0.0

    @property
    def efficiency_free(self) -> float:
        """Efficiency of the same steps without their fixed cost."""
        return self.ideal_s / (self.actual_s - STEP_S * self.num_steps) if self.actual_s else 0.0


def ideal_s(load: UnitReport, num_ranks: int) -> float:
    """Return the time of the whole load if every step were balanced and had no fixed cost."""
    token_s = RATES.dispatch_s + MEAN_S
    return (
        sum(
            RATES.chunk_s(a.num_cached, a.num_tokens) + token_s * a.num_tokens
            for a in load.arrivals
        )
        / num_ranks
    )


def simulate(
    load: UnitReport, rule: Rule, limits: StepLimits, *, num_ranks: int = 32, is_saturated: bool
) -> Outcome:
    """Run a load. Saturated: `WINDOW` prompts per rank are queued or running at any time, and the
    run ends with the last arrival.
    """
    queues: Queues = [[] for _ in range(num_ranks)]
    waiting: deque[Running] = deque()
    arrivals = deque(load.arrivals)
    out, now_s = Outcome(), 0.0
    while arrivals or (not is_saturated and (waiting or any(queues))):
        if is_saturated:
            num = len(waiting) + sum(map(len, queues))
            for _ in range(min(len(arrivals), WINDOW * num_ranks - num)):
                waiting.append(Running(arrivals.popleft()))
        else:
            if not waiting and not any(queues):
                now_s = max(now_s, arrivals[0].at_s)
            while arrivals and arrivals[0].at_s <= now_s:
                waiting.append(Running(arrivals.popleft()))
        start_s = time.process_time()
        sizes = rule(queues, waiting, limits)
        out.plans_s.append(time.process_time() - start_s)
        now_s += _step(queues, sizes, out)
        for at, queue in enumerate(queues):
            out.ttfts_s += [now_s - p.arrival.at_s for p in queue if not p.num_left]
            queues[at] = [p for p in queue if p.num_left]
    out.end_s = now_s
    for name in ("attention", "tokens", "time"):
        setattr(out, name, getattr(out, name) / out.actual_s)
    return out


def _step(queues: Queues, sizes: Sizes, out: Outcome) -> float:
    num_tokens = np.array([sum(of_rank) for of_rank in sizes], dtype=float)
    pairs = np.array(
        [
            sum(n * (p.context + 0.5 * (n + 1)) for p, n in zip(queue, of_rank, strict=True))
            for queue, of_rank in zip(queues, sizes, strict=True)
        ]
    )
    for queue, of_rank in zip(queues, sizes, strict=True):
        for prompt, size in zip(queue, of_rank, strict=True):
            prompt.num_done += size
    own_s = RATES.pair_s * pairs + RATES.token_s * num_tokens
    step_s = float(own_s.max() + RATES.dispatch_s * num_tokens.max() + MEAN_S * num_tokens.mean())
    if step_s <= 0.0:
        raise RuntimeError("a rule took nothing although prompts wait")
    step_s += STEP_S
    out.actual_s += step_s
    out.ideal_s += float(own_s.mean() + (RATES.dispatch_s + MEAN_S) * num_tokens.mean())
    out.attention += step_s * float(pairs.mean() / pairs.max())
    out.tokens += step_s * float(num_tokens.mean() / num_tokens.max())
    out.time += step_s * float(own_s.mean() / own_s.max())
    out.num_tokens += int(num_tokens.sum())
    out.num_steps += 1
    return step_s
