"""Prompts of a prefill unit: the chunks that each rank computes in a step, and how a rank's
chunks are cut into two micro-batches.

    waiting (of the unit) --pack: a rank is chosen--> started (on that rank, with all its blocks)

A prompt that reads its prefix from disk starts without a chunk; it gets one when the blocks are
there.

Two rules: by cost, with the same time on every rank (policy/prefill_balance), or by a token budget
per rank (policy/batching).

Independent of messages; the leader applies the result.
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
"""(prompt that starts, its rank, the prefix that it finds on that rank)."""
Found = Mapping[int, Prefix]
"""Rank -> prefix that a prompt finds there; ranks without one are left out."""
MEAN_SHARE = 2 / 3
"""Share of `chunk_tokens` that a rank computes in a mean step cut by cost. Ranks with cheap tokens
may take up to 1.5x as many, which makes up for ranks with expensive ones. From 1/2 to 4/5,
simulated throughput is the same within one point (bench/balance_prefill_sim) at 30 ms per step. A
larger share is better if steps cost more; a smaller one makes steps shorter.
"""


@dataclass(slots=True)
class PrefillAttempt:
    """One attempt, from its arrival until its blocks are leased or freed."""

    generation: Generation
    tokens: tuple[int, ...]
    rank: int = -1
    """Rank where the attempt started; -1: not started."""
    block_ids: tuple[int, ...] = ()
    num_planned: int = 0
    num_done: int = 0
    """Positions with KV in `block_ids`."""
    prefix: Prefix = NOTHING
    """Prefix found when the attempt started, without blocks that the disk did not deliver. Its
    blocks in memory count in `num_planned` at once, those on disk when they are read.
    """
    is_loading: bool = False
    """True while the attempt waits for a part of its prefix to be read from disk."""
    num_named: int = 0
    """Leading blocks that were found, or named since; naming continues after them."""
    last_step_id: int = -1
    """Last plan that writes the attempt's blocks; they are not freed before it is done or void."""
    is_dropped: bool = False
    """True if the attempt is no longer needed and only waits for plan `last_step_id`."""
    number: int = 0
    """The prompt's number in the order of arrival here."""
    start_to_scores: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    """Chunk start -> log-probabilities of the tokens after each position of that chunk."""

    @property
    def num_scores(self) -> int:
        """Chunk.num_scores; -1 (none) for a retry with output, as the scores were sent before."""
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
        """Sort key in the queue: (time of its turn, number)."""
        return turn_s(self.generation.arrived_s, self.generation.priority), self.number

    @property
    def claim(self) -> Claim:
        """Tenant and cost, for the turns of tenants."""
        generation = self.generation
        weight = share_weight(generation.weight, generation.priority)
        return Claim(generation.tenant, INPUT_COST * self.num_left / weight)

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_planned

    def view(self) -> PromptView:
        """Return the prompt's view on its rank; without a prefix if the prompt is queued."""
        if self.is_loading:
            return self.view_with(self.prefix, num_blocks=0)
        num_blocks = 0 if self.block_ids else blocks_for(len(self.tokens))
        return PromptView(self.num_left, num_blocks, self.num_planned)

    def view_with(self, prefix: Prefix, num_blocks: int | None = None) -> PromptView:
        """Return the prompt's view on a rank where it finds this prefix."""
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
        """Return the chunk for the rank to compute; a token is drawn after the prompt's last chunk."""
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
    """Contents of a step."""

    starts: tuple[Start, ...]
    """Prompts that start and get their blocks. Some get no chunk yet, as while a prefix is read."""
    parts: tuple[tuple[PromptChunk, ...], ...]
    """Chunks of each rank."""


@dataclass(frozen=True, slots=True)
class PackRules:
    """Rules for packing a unit's steps."""

    chunk_tokens: int
    """Maximum number of tokens per rank and step."""
    num_requests_max: int
    """Maximum number of started prompts per rank."""
    is_by_cost: bool = True
    """True: the same time on every rank. False: a token budget per rank."""
    is_in_turn: bool = False
    """True: prompts start on the ranks round-robin. Used only with a token budget per rank."""


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
    """Return the next step.

    Started prompts come first. Queued prompts then start in their order, each on the rank with the
    least work, until one fits nowhere; with `is_in_turn`, each on the rank that is next in turn,
    where it waits only for prompts of that rank. `find` returns the prefixes that a prompt finds,
    which must stay there until `starts` have their blocks.
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
    """Pack a step with the same time on every rank, and tokens as equal as that allows."""
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
    """Return rank -> the prompt's view there; ranks with the same prefix share a view, priced once."""
    views = {id(prefix): prompt.view_with(prefix) for prefix in _kinds(found)}
    return {rank: views[id(prefix)] for rank, prefix in found.items()}


def _kinds(found: Found) -> list[Prefix]:
    return list({id(prefix): prefix for prefix in found.values()}.values())


def _num_left(prompt: PrefillAttempt, found: Found) -> int:
    """Return the tokens left to compute on the rank with the longest prefix."""
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
    """Pack a step with a token budget per rank."""
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
    """Ranks that were full when their turn came: later prompts for them wait behind that prompt."""
    for prompt in islice(
        waiting, chunk_tokens * len(views)
    ):  # Each prompt takes at least one token, unless it loads.
        if rules.is_in_turn:
            due = list(views)[prompt.number % len(views)]
            if (
                due in full
                or rank_in_turn(list(views.values()), prompt.view(), prompt.number) is None
            ):
                full.add(due)
                if len(full) == len(views):
                    break  # All ranks are full: skip the rest of a long queue.
                continue
        found = find(prompt)
        there = {rank: prompt.view_with(prefix) for rank, prefix in found.items()}
        rank = (
            due
            if rules.is_in_turn
            else choose_prefill_rank(list(views.values()), prompt.view(), there)
        )
        if rank is None:
            break  # Prompts behind it wait too: none overtakes.
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
    # Sorted by rank: blocks are allocated in this order. A prompt without a chunk stays queued,
    # unless it reads from disk.
    starts = [start for start in starts if start[2].num_loading or id(start[0]) in running]
    return StepContents(tuple(sorted(starts, key=lambda start: start[1])), tuple(parts))


def work_on(parts: Sequence[PromptChunk]) -> tuple[int, int]:
    """Return tokens and (token, position) pairs of a rank's chunks."""
    return (
        sum(part.end - part.start for part in parts),
        sum(num_pairs_of(part.start, part.end - part.start) for part in parts),
    )


def step_balance(works: Sequence[tuple[int, int]], rates: StepRates) -> dict[str, float]:
    """Return how equal the work of a step's living ranks is; empty for fewer than two ranks."""
    if len(works) < 2:
        return {}
    tokens, pairs = zip(*works, strict=True)
    times_s = [rates.token_s * n + rates.pair_s * m for n, m in works]
    return balance_of({ATTENTION: pairs, TOKENS: tokens, TIME: times_s})


def cut(
    parts: Sequence[PromptChunk], num_first: Sequence[int]
) -> tuple[list[PromptChunk], list[PromptChunk]]:
    """Return the chunks of two micro-batches, with `num_first` tokens of each chunk in the first. A
    chunk that is cut is in both.
    """
    first, second = [], []
    for part, num_tokens in zip(parts, num_first, strict=True):
        middle = part.start + num_tokens
        if middle > part.start:
            first.append(replace(part, end=middle))
        if middle < part.end:
            second.append(replace(part, start=middle))
    return first, second
