"""A prefill unit's prompts: which chunks of which ones a step takes on each rank, and how a rank's
part is cut in two.

    waiting (of the unit) --pack: a rank is chosen--> started (on that rank, with all its blocks)

One whose prefix is read from disk starts without a part: it has one when the blocks are here.

Two rules: by cost, every rank the same time (policy/prefill_balance), or by a token budget of each
rank (policy/batching).

Knows no messages; the leader applies what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from hadal.core.balance import ATTENTION, TIME, TOKENS, balance_of
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation, Key
from hadal.core.plans import NO_FOLLOWING, Chunk, Score
from hadal.core.rates import StepRates
from hadal.kv.blocks import blocks_for
from hadal.overlap.split import num_pairs_of
from hadal.policy.baselines import rank_in_turn
from hadal.policy.batching import pack_chunks, turn_s
from hadal.policy.cached_prefix import NOTHING, Prefix
from hadal.policy.fairness import INPUT_COST, Claim, share_weight
from hadal.policy.prefill_balance import PrefillQueueView, look_ahead, plan_step
from hadal.policy.prefill_budget import StepLimits
from hadal.policy.prefill_rates import UNMEASURED, cost_s
from hadal.policy.rank_choice import choose_prefill_rank
from hadal.policy.views import PrefillRankView, PromptView
from hadal.roles.ranks.pools import RankPools
from hadal.roles.unit.tokens import history_of

Start = tuple["PrefillAttempt", int, Prefix]
"""A prompt that takes its blocks now, its rank, and what it finds there."""
Found = Mapping[int, Prefix]
"""rank -> what a prompt finds there; ranks with nothing of it are not in it."""
MEAN_SHARE = 2 / 3
"""The part of `chunk_tokens` that a rank computes in a mean step that is cut by cost: light ranks
may take half as much again, which makes up for dense ones. Between a half and four fifths
throughput is the same within a point in simulation (bench/balance_prefill_sim) at 30 ms a step, and
better the larger it is where a step costs more; steps are shorter the smaller it is.
"""


@dataclass(slots=True)
class PrefillAttempt:
    """One attempt, from its arrival until its blocks are leased or freed."""

    generation: Generation
    tokens: tuple[int, ...]
    rank: int = -1
    """Where it started."""
    block_ids: tuple[int, ...] = ()
    num_planned: int = 0
    num_done: int = 0
    """Positions whose KV is in its blocks."""
    prefix: Prefix = NOTHING
    """What it found when it started; when it is here, `num_planned` counts it."""
    is_loading: bool = False
    """Some of that is being read."""
    num_named: int = 0
    """Blocks that can be found by others."""
    last_step_id: int = -1
    """The last plan that writes its blocks: they cannot be freed before it is done."""
    is_dropped: bool = False
    """Nobody wants it any more; it only waits for that plan."""
    number: int = 0
    """The prompt's number in the order of arrival here."""
    start_to_scores: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    """Of its tokens behind those of each part, by where that began."""

    @property
    def num_scores(self) -> int:
        """As Chunk has it. A retry's prompt was scored already: that came with the first token."""
        generation = self.generation
        return -1 if generation.output else generation.sampling.num_prompt_logprobs

    @property
    def scores(self) -> tuple[Score, ...]:
        return tuple(one for _, scores in sorted(self.start_to_scores.items()) for one in scores)

    @property
    def key(self) -> Key:
        return self.generation.request_id, self.generation.attempt

    @property
    def turn(self) -> tuple[float, int]:
        """The place among those that wait."""
        return turn_s(self.generation.arrived_s, self.generation.priority), self.number

    @property
    def claim(self) -> Claim:
        """By which those that wait take turns."""
        generation = self.generation
        weight = share_weight(generation.weight, generation.priority)
        return Claim(generation.tenant, INPUT_COST * self.num_left / weight)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_planned

    def view(self) -> PromptView:
        """The prompt as it goes on where it started, or as it waits with nothing of it anywhere."""
        if self.is_loading:
            return self.view_with(self.prefix, num_blocks=0)
        num_blocks = 0 if self.block_ids else blocks_for(len(self.tokens))
        return PromptView(self.num_left, num_blocks, self.num_planned)

    def view_with(self, prefix: Prefix, num_blocks: int | None = None) -> PromptView:
        """The prompt on a rank where it finds this prefix."""
        start = prefix.num_blocks * BLOCK_TOKENS
        if num_blocks is None:
            num_blocks = blocks_for(len(self.tokens)) - prefix.num_shared
        return PromptView(
            len(self.tokens) - start, num_blocks, start, prefix.num_loading, prefix.load_s
        )


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Positions start .. end-1 of a prompt, in one step."""

    prompt: PrefillAttempt
    start: int
    end: int

    def chunk(self) -> Chunk:
        """The chunk that the rank computes; a token is drawn after the prompt's last part."""
        prompt, generation = self.prompt, self.prompt.generation
        request_id, tokens = generation.request_id, prompt.tokens[self.start : self.end]
        block_ids = prompt.block_ids[: blocks_for(self.end)]
        num_scores = prompt.num_scores
        if self.end < len(prompt.tokens):
            following = prompt.tokens[self.end] if num_scores >= 0 else NO_FOLLOWING
            return Chunk(
                request_id,
                tokens,
                self.start,
                block_ids,
                None,
                0,
                num_scores=num_scores,
                following=following,
            )
        return Chunk(
            request_id,
            tokens,
            self.start,
            block_ids,
            generation.sampling,
            len(generation.output),
            *history_of(generation),
            stop_ids=generation.stop_ids,
            min_tokens=generation.min_tokens,
            num_scores=num_scores,
        )


@dataclass(frozen=True, slots=True)
class StepContents:
    """What a step takes."""

    starts: tuple[Start, ...]
    """Prompts that start, in their order. One that the step has no time for yet takes its blocks
    all the same: its rank is settled.
    """
    parts: tuple[tuple[PromptChunk, ...], ...]
    """Chunks of each rank."""


@dataclass(frozen=True, slots=True)
class PackRules:
    """The rules by which a unit's steps are packed."""

    chunk_tokens: int
    """Most tokens of a rank in a step."""
    num_requests_max: int
    """Most prompts that have started on a rank."""
    is_by_cost: bool = True
    """Every rank the same time; else every rank as many tokens as its budget."""
    is_in_turn: bool = False
    """By token budgets: prompts start on ranks in turn."""


def _found_nowhere(prompt: PrefillAttempt) -> Found:
    return {}


def pack(
    started: Iterable[PrefillAttempt],
    waiting: Iterable[PrefillAttempt],
    pools: RankPools,
    rules: PackRules,
    rates: StepRates,
    find: Callable[[PrefillAttempt], Found] = _found_nowhere,
) -> StepContents:
    """Return a step.

    Started prompts go on first; those that wait start in their order, each where the least work is,
    until one fits nowhere. `find` returns what of a prompt can be found; until `starts` have their
    blocks that must stay so.
    """
    rank_to_prompts: list[list[PrefillAttempt]] = [[] for _ in range(pools.num_ranks)]
    num_starts = [rules.num_requests_max] * pools.num_ranks
    for prompt in started:
        num_starts[prompt.rank] -= 1
        if prompt.num_left and not prompt.is_dropped:
            rank_to_prompts[prompt.rank].append(prompt)
    if not rules.is_by_cost:
        return _pack_tokens(rank_to_prompts, num_starts, waiting, pools, rules, find)
    return _pack_cost(rank_to_prompts, num_starts, waiting, pools, rules, rates, find)


def _pack_cost(
    rank_to_prompts: Sequence[Sequence[PrefillAttempt]],
    num_starts: Sequence[int],
    waiting: Iterable[PrefillAttempt],
    pools: RankPools,
    rules: PackRules,
    rates: StepRates,
    find: Callable[[PrefillAttempt], Found],
) -> StepContents:
    """Every rank the same time, as nearly the same tokens as that allows."""
    living = pools.living
    limits = StepLimits(max(1, int(MEAN_SHARE * rules.chunk_tokens)), rules.chunk_tokens)
    views = [
        PrefillQueueView(
            rank,
            tuple(prompt.view() for prompt in rank_to_prompts[rank]),
            pools[rank].num_free,
            num_starts[rank],
        )
        for rank in living
    ]
    candidates = ((prompt, find(prompt)) for prompt in waiting)
    seen = look_ahead(
        islice(candidates, sum(max(0, num_starts[rank]) for rank in living)),
        len(living),
        limits,
        lambda candidate: _num_left(*candidate),
    )
    cached = [_views_with(prompt, found) for prompt, found in seen]
    plan = plan_step(
        views, [prompt.view() for prompt, _ in seen], rates, limits, cached if any(cached) else ()
    )
    parts: list[tuple[PromptChunk, ...]] = [()] * pools.num_ranks
    starts: dict[int, Start] = {}
    for of_rank in plan.ranks:
        rank = of_rank.rank
        starts.update(
            {
                index: (seen[index][0], rank, seen[index][1].get(rank, NOTHING))
                for index in of_rank.starts
            }
        )
        prompts = [(prompt, prompt.num_planned) for prompt in rank_to_prompts[rank]]
        prompts += [
            (starts[index][0], starts[index][2].num_blocks * BLOCK_TOKENS)
            for index in of_rank.starts
        ]
        parts[rank] = tuple(
            PromptChunk(prompt, start, start + size)
            for (prompt, start), size in zip(prompts, of_rank.sizes, strict=True)
            if size
        )
    return StepContents(tuple(starts[index] for index in sorted(starts)), tuple(parts))


def _views_with(prompt: PrefillAttempt, found: Found) -> dict[int, PromptView]:
    """Rank -> the prompt where it finds this. Ranks that find the same share a view, which is then
    priced once.
    """
    views = {id(prefix): prompt.view_with(prefix) for prefix in _kinds(found)}
    return {rank: views[id(prefix)] for rank, prefix in found.items()}


def _kinds(found: Found) -> list[Prefix]:
    return list({id(prefix): prefix for prefix in found.values()}.values())


def _num_left(prompt: PrefillAttempt, found: Found) -> int:
    """Tokens that have to be computed where most of it is."""
    return (
        prompt.num_left
        - max((prefix.num_blocks for prefix in _kinds(found)), default=0) * BLOCK_TOKENS
    )


def _pack_tokens(
    rank_to_prompts: list[list[PrefillAttempt]],
    num_starts: Sequence[int],
    waiting: Iterable[PrefillAttempt],
    pools: RankPools,
    rules: PackRules,
    find: Callable[[PrefillAttempt], Found],
) -> StepContents:
    """Every rank as many tokens as its budget."""
    chunk_tokens = rules.chunk_tokens
    ready = [[(p, p.view()) for p in prompts if not p.is_loading] for prompts in rank_to_prompts]
    views = {
        rank: PrefillRankView(
            rank,
            sum(cost_s(prompt.view(), UNMEASURED) for prompt in rank_to_prompts[rank]),
            max(0, chunk_tokens - sum(view.num_tokens for _, view in ready[rank])),
            pools[rank].num_free,
            num_starts[rank],
        )
        for rank in pools.living
    }
    starts: list[Start] = []
    full: set[int] = set()
    """Whose turn came, and who had no room: those who come later wait behind that prompt."""
    for prompt in islice(
        waiting, chunk_tokens * len(views)
    ):  # Each takes a token at least, if it does not load.
        if rules.is_in_turn:
            due = list(views)[prompt.number % len(views)]
            if (
                due in full
                or rank_in_turn(list(views.values()), prompt.view(), prompt.number) is None
            ):
                full.add(due)
                if len(full) == len(views):
                    break  # Nobody is left: a long queue is not worth a longer look.
                continue
        found = find(prompt)
        there = {rank: prompt.view_with(prefix) for rank, prefix in found.items()}
        rank = (
            due
            if rules.is_in_turn
            else choose_prefill_rank(list(views.values()), prompt.view(), there)
        )
        if rank is None:
            break  # Those behind it wait too: nobody is overtaken.
        starts.append((prompt, rank, found.get(rank, NOTHING)))
        view, taken = there.get(rank, prompt.view()), views[rank]
        num_taken = 0
        if not view.num_loading:
            ready[rank].append((prompt, view))
            num_taken = view.num_tokens
        views[rank] = replace(
            taken,
            work=taken.work + cost_s(view, UNMEASURED),
            num_tokens_free=max(0, taken.num_tokens_free - num_taken),
            num_blocks_free=taken.num_blocks_free - view.num_blocks_needed,
            num_starts_free=taken.num_starts_free - 1,
        )
    parts: list[tuple[PromptChunk, ...]] = []
    for rank, of_rank in enumerate(ready):
        of_rank = of_rank[:chunk_tokens]
        sizes = pack_chunks(
            [view for _, view in of_rank], chunk_tokens, pools[rank].num_free, num_starts[rank]
        )
        parts.append(
            tuple(
                PromptChunk(prompt, view.num_context, view.num_context + size)
                for (prompt, view), size in zip(of_rank, sizes, strict=False)
            )
        )
    running = {id(part.prompt) for of_rank in parts for part in of_rank}
    # By rank, as their blocks are taken; one without a part waits on, unless it is for the disk.
    starts = [start for start in starts if start[2].num_loading or id(start[0]) in running]
    return StepContents(tuple(sorted(starts, key=lambda start: start[1])), tuple(parts))


def work_on(parts: Sequence[PromptChunk]) -> tuple[int, int]:
    """Tokens and (token, position) pairs of a rank's parts."""
    return (
        sum(part.end - part.start for part in parts),
        sum(num_pairs_of(part.start, part.end - part.start) for part in parts),
    )


def step_balance(works: Sequence[tuple[int, int]], rates: StepRates) -> dict[str, float]:
    """How equal a step's living ranks are, by what each does; nothing where there is nobody to be
    equal to.
    """
    if len(works) < 2:
        return {}
    tokens, pairs = zip(*works, strict=True)
    times_s = [rates.token_s * n + rates.pair_s * m for n, m in works]
    return balance_of({ATTENTION: pairs, TOKENS: tokens, TIME: times_s})


def cut(
    parts: Sequence[PromptChunk], num_first: Sequence[int]
) -> tuple[list[PromptChunk], list[PromptChunk]]:
    """The parts of two micro-batches, `num_first` tokens of each part in the first. A prompt cut is
    in both.
    """
    first, second = [], []
    for part, num_tokens in zip(parts, num_first, strict=True):
        middle = part.start + num_tokens
        if middle > part.start:
            first.append(replace(part, end=middle))
        if middle < part.end:
            second.append(replace(part, start=middle))
    return first, second
