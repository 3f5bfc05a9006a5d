"""Cut a step of a prefill unit into equal time on all ranks, and as nearly equal tokens as that allows.

Ranks of a unit step together, so the slowest sets the pace. Attention is quadratic in context (a cached
prefix counts as context), so equal tokens are not equal time. Each rank therefore gets a budget of
seconds (`choose_budget`), and its last chunk is cut where its cost (`cost_s`) reaches the budget.
Tokens matter as well, because in dispatch the rank with most tokens holds up the others. So a rank
with a dense oldest prompt (long context) computes lighter prompts alongside, and no rank takes more
than the step's cap.

No prompt starves: prompts start in their order, a started one keeps its rank, and the oldest of a
rank has at least `HEAD_SHARE` of the rank's budget (at least one token) in every step. Independent
of the identity of blocks, of clocks, and of the origin of its rates (perf/costs.StepCosts.rates).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, sqrt
from typing import TypeVar

from hadal.core.rates import StepRates
from hadal.policy.prefill_budget import StepLimits, choose_budget, predict, step_budget_s
from hadal.policy.prefill_rates import cost_s
from hadal.policy.views import PromptView

T = TypeVar("T")
Cached = Mapping[int, PromptView]
"""Rank -> view of a waiting prompt less the part cached there; no entry if nothing is cached."""

HEAD_SHARE = 0.1
"""Share of a rank's budget that its oldest prompt gets before lighter ones may run beside it."""
ROOM = 1.25
"""Prompts start on a rank until its prompts take ROOM times the mean number of tokens."""
GAIN = 0.25
"""Fraction of the densest prompt's time per token that a lighter prompt must save to overtake."""
LOOK_AHEAD = 4
"""Mean steps of queued tokens that a plan looks at: a step takes at most `DRAIN` (1/4) of them."""


@dataclass(frozen=True, slots=True)
class PrefillQueueView:
    """Living rank of a prefill unit, with the prompts that started there, oldest first."""

    rank: int
    prompts: tuple[PromptView, ...]
    num_blocks_free: int
    num_starts_free: int


@dataclass(frozen=True, slots=True)
class RankCut:
    """Work of one rank in a step. A size may be 0: that prompt makes no progress."""

    rank: int
    starts: tuple[int, ...]
    """Positions in `waiting` of the prompts that start here."""
    sizes: tuple[int, ...]
    """Tokens of each started prompt of the view, then of each of `starts`."""


@dataclass(frozen=True, slots=True)
class StepCut:
    """Step of all ranks, with the predictions by which it was chosen."""

    ranks: tuple[RankCut, ...]
    budget_s: float
    cap_tokens: int
    efficiency: float
    """Predicted efficiency (prefill_budget.predict); 1 for an empty step."""


def look_ahead(
    waiting: Iterable[T], num_ranks: int, limits: StepLimits, num_tokens_of: Callable[[T], int]
) -> list[T]:
    """Return the first of `waiting`, as many as the next steps need: more would slow planning."""
    seen, left = [], LOOK_AHEAD * num_ranks * limits.num_tokens_mean
    for prompt in waiting:
        if left <= 0:
            break
        seen.append(prompt)
        left -= num_tokens_of(prompt)
    return seen


def cut_rank(
    prompts: Sequence[PromptView],
    rates: StepRates,
    budget_s: float,
    num_tokens_mean: int,
    num_tokens_max: int,
) -> tuple[list[int], float]:
    """Return the tokens of each of a rank's prompts (oldest first) for a step of `budget_s`, and
    their seconds.

    Time goes to the oldest first. If it is used up with fewer than `num_tokens_mean` tokens,
    lighter prompts take time from the densest until there are that many. The time left is too short
    for another token, unless `num_tokens_max` or the end of the prompts was reached. Only a single
    token that takes longer than the budget may exceed it.
    """
    sizes = [0] * len(prompts)
    left_s, num_left = budget_s, num_tokens_max
    least_s = rates.token_s + rates.pair_s  # Lower bound for any token.
    densest, most_s = -1, -inf
    for at, prompt in enumerate(prompts):
        if at and left_s < least_s:
            break
        size, seconds = rates.fit(prompt.num_context, min(prompt.num_tokens, num_left), left_s)
        if not size and at == 0:
            size, seconds = 1, rates.chunk_s(prompt.num_context, 1)
        if not size:
            break
        sizes[at] = size
        left_s -= seconds
        num_left -= size
        if prompt.num_context + size > most_s:
            densest, most_s = at, prompt.num_context + size
    if densest >= 0 and num_tokens_max - num_left < num_tokens_mean:
        left_s = _blend(prompts, sizes, densest, rates, budget_s, left_s, num_tokens_mean)
        num_left = num_tokens_max - sum(sizes)
    for at, prompt in enumerate(prompts):  # Use up what rounding left, oldest first.
        if num_left <= 0 or left_s < least_s:
            break
        rest = prompt.num_tokens - sizes[at]
        if rest:
            start = prompt.num_context + sizes[at]
            more, seconds = rates.fit(start, min(rest, num_left), left_s)
            sizes[at] += more
            left_s -= seconds
            num_left -= more
    return sizes, budget_s - left_s


def _blend(
    prompts: Sequence[PromptView],
    sizes: list[int],
    densest: int,
    rates: StepRates,
    budget_s: float,
    spare_s: float,
    goal: int,
) -> float:
    """Move time from prompts[densest] to lighter prompts, in their order, until there are `goal`
    tokens.

    Changes `sizes`, and returns the rest of `spare_s`.
    """
    heavy = prompts[densest]
    floor_s = (
        max(HEAD_SHARE * budget_s, rates.chunk_s(heavy.num_context, 1)) if densest == 0 else 0.0
    )
    heavy_s = rates.chunk_s(heavy.num_context, sizes[densest])
    # A prompt that is nearly as dense would overtake without a gain.
    light_s = (1.0 - GAIN) * (rates.token_s + rates.pair_s * (heavy.num_context + sizes[densest]))
    missing = goal - sum(sizes)
    for at, prompt in enumerate(prompts):
        if missing <= 0:
            break
        done = sizes[at]
        rest = min(prompt.num_tokens - done, goal)
        start = prompt.num_context + done
        if (
            at == densest
            or not rest
            or rates.token_s + rates.pair_s * (start + 0.5 * rest) > light_s
        ):
            continue
        both_s = heavy_s + spare_s
        most, _ = rates.fit(start, rest, both_s - floor_s)
        share = _light_share(start, heavy.num_context, sizes[densest] + missing, both_s, rates)
        # `share` assumes that the densest prompt supplies the other tokens, but it may have too few
        # left. So the lighter prompt gets at least `missing`.
        low = min(most, max(missing, share))
        if not low:
            continue
        low_s = rates.chunk_s(start, low)
        kept, kept_s = rates.fit(heavy.num_context, sizes[densest], both_s - low_s)
        if densest == 0 and not kept:
            kept, kept_s = 1, rates.chunk_s(heavy.num_context, 1)
        spare_s += heavy_s - low_s - kept_s
        heavy_s = kept_s
        missing -= low + kept - sizes[densest]
        sizes[at] += low
        sizes[densest] = kept
    return spare_s


def _light_share(light: int, heavy: int, num_tokens: int, budget_s: float, rates: StepRates) -> int:
    """Return the least y such that y of `num_tokens` from position `light`, and the others from
    `heavy`, fit the budget.

    With G = num_tokens and x = G - y, chunk_s(heavy, x) + chunk_s(light, y) = budget becomes pair_s
    x^2 + linear x + constant = 0. At its larger root, more tokens for the dense prompt take longer.
    """
    pair_s, goal = rates.pair_s, num_tokens
    linear = pair_s * (heavy - light - goal)
    constant = rates.chunk_s(light, goal) - budget_s
    square = linear * linear - 4.0 * pair_s * constant
    if pair_s == 0.0 or square < 0.0:
        return goal
    return goal - max(0, int((sqrt(square) - linear) / (2.0 * pair_s)))


@dataclass(slots=True)
class _Queue:
    """Rank while prompts are assigned to it."""

    prompts: list[PromptView]
    starts: list[int]
    cost_s: float
    room_s: float
    room_tokens: int
    num_blocks: int
    num_starts: int


def bind(
    ranks: Sequence[PrefillQueueView],
    waiting: Sequence[PromptView],
    rates: StepRates,
    budget_s: float,
    limits: StepLimits,
    cached: Sequence[Cached] = (),
) -> list[list[int]]:
    """Return, by position in `ranks`, the indices in `waiting` of the prompts that start there in this step.

    In the order of `waiting`, each prompt starts on the rank with the least predicted cost of all
    its prompts, among ranks with time and tokens left in this step. A rank in `cached` counts only
    the uncached rest of the prompt. A rank's oldest prompt reserves only HEAD_SHARE of the time. A
    prompt that fits nowhere, for lack of blocks or starts, stops those behind it.
    """
    heap: list[tuple[float, int]] = []
    queues = [_queue(view, rates, budget_s, limits) for view in ranks]
    for at, queue in enumerate(queues):
        if queue.room_s > 0.0 and queue.room_tokens > 0:
            heappush(heap, (queue.cost_s, at))
    for index, cold in enumerate(waiting):
        there = cached[index] if cached else {}
        cannot: list[tuple[float, int]] = []
        while heap and not _fits(queues[heap[0][1]], there.get(ranks[heap[0][1]].rank, cold)):
            cannot.append(heappop(heap))
        if not heap:
            break
        at = _pop_cheapest(heap, queues, ranks, there, cold, rates) if there else heappop(heap)[1]
        queue, prompt = queues[at], there.get(ranks[at].rank, cold)
        queue.starts.append(index)
        queue.cost_s += cost_s(prompt, rates)
        queue.num_blocks -= prompt.num_blocks_needed
        queue.num_starts -= 1
        _give(queue, prompt, rates, budget_s)
        if queue.room_s > 0.0 and queue.room_tokens > 0:
            heappush(heap, (queue.cost_s, at))
        for entry in cannot:
            heappush(heap, entry)
    return [queue.starts for queue in queues]


def _pop_cheapest(
    heap: list[tuple[float, int]],
    queues: Sequence[_Queue],
    ranks: Sequence[PrefillQueueView],
    there: Cached,
    cold: PromptView,
    rates: StepRates,
) -> int:
    """Remove and return the queue where a partly cached prompt finishes first: the heap's top, or a
    queue with a cached part.
    """
    view_to_s: dict[int, float] = {}  # Keyed by id: ranks with the same cached part share a view.
    best: tuple[float, int, int] | None = None
    for entry in heap:
        queued_s, at = entry
        view = there.get(ranks[at].rank)
        if entry is not heap[0] and (view is None or not _fits(queues[at], view)):
            continue
        view = cold if view is None else view
        own_s = view_to_s.get(id(view))
        if own_s is None:
            own_s = view_to_s[id(view)] = cost_s(view, rates)
        done = queued_s + own_s + view.load_s, view.num_loading, at
        if best is None or done < best:
            best, chosen = done, entry
    heap.remove(chosen)
    heapify(heap)
    return chosen[1]


def _fits(queue: _Queue, prompt: PromptView) -> bool:
    return queue.num_starts > 0 and prompt.num_blocks_needed <= queue.num_blocks


def _queue(view: PrefillQueueView, rates: StepRates, budget_s: float, limits: StepLimits) -> _Queue:
    room = min(limits.num_tokens_max, int(ROOM * limits.num_tokens_mean))
    queue = _Queue([], [], 0.0, budget_s, room, view.num_blocks_free, view.num_starts_free)
    for prompt in view.prompts:
        queue.cost_s += cost_s(prompt, rates)
        _give(queue, prompt, rates, budget_s)
    return queue


def _give(queue: _Queue, prompt: PromptView, rates: StepRates, budget_s: float) -> None:
    if not prompt.num_loading:  # A prompt that waits for the disk takes nothing of this step.
        _reserve(queue, prompt, rates, budget_s, is_head=not queue.prompts)
        queue.prompts.append(prompt)


def _reserve(
    queue: _Queue, prompt: PromptView, rates: StepRates, budget_s: float, *, is_head: bool
) -> None:
    """Subtract the time and tokens of the step that a prompt is sure to take."""
    if queue.room_s <= 0.0 or queue.room_tokens <= 0:
        return
    share_s = HEAD_SHARE * budget_s if is_head else queue.room_s
    size, seconds = rates.fit(
        prompt.num_context, min(prompt.num_tokens, queue.room_tokens), share_s
    )
    if not size:
        size, seconds = 1, rates.chunk_s(prompt.num_context, 1)
    queue.room_s -= seconds
    queue.room_tokens -= size


def plan_step(
    ranks: Sequence[PrefillQueueView],
    waiting: Sequence[PromptView],
    rates: StepRates,
    limits: StepLimits,
    cached: Sequence[Cached] = (),
) -> StepCut:
    """Return which of `waiting` start on which rank, and the tokens that every rank computes.

    Every rank uses the step's budget, within the time of one token, unless its prompts end or it reaches the
    cap. `cached`, if not empty, is parallel to `waiting`.
    """
    if not ranks:
        return StepCut((), 0.0, 0, 1.0)
    at_best = (
        [
            min(
                {id(view): view for view in there.values()}.values(),
                key=lambda view: cost_s(view, rates),
            )
            if there
            else cold
            for cold, there in zip(waiting, cached, strict=True)
        ]
        if cached
        else waiting
    )
    nominal_s = step_budget_s(
        (
            prompt
            for prompt in (*(p for view in ranks for p in view.prompts), *at_best)
            if not prompt.num_loading
        ),
        len(ranks),
        rates,
        limits.num_tokens_mean,
    )
    starts = bind(ranks, waiting, rates, nominal_s, limits, cached)
    prompts = [
        [
            *view.prompts,
            *(
                cached[index].get(view.rank, waiting[index]) if cached else waiting[index]
                for index in indices
            ),
        ]
        for view, indices in zip(ranks, starts, strict=True)
    ]
    ready = [[prompt for prompt in of_rank if not prompt.num_loading] for of_rank in prompts]
    budget_s, cap_tokens = choose_budget(ready, rates, nominal_s, limits)
    taken = [
        cut_rank(of_rank, rates, budget_s, limits.num_tokens_mean, cap_tokens) for of_rank in ready
    ]
    cuts = []
    for view, indices, of_rank, (sizes, _) in zip(ranks, starts, prompts, taken, strict=True):
        left = iter(sizes)
        cuts.append(
            RankCut(
                view.rank,
                tuple(indices),
                tuple(0 if prompt.num_loading else next(left) for prompt in of_rank),
            )
        )
    efficiency = predict([(seconds, sum(sizes)) for sizes, seconds in taken], rates)
    return StepCut(tuple(cuts), budget_s, cap_tokens, efficiency)
