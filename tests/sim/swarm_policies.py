"""Invariants of the policies' decisions: capacities, order, conservation.

Within `with guarded():`, every decision of these policies that a role asks for is checked.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import hadal.roles.decode.slots as decode_slots
import hadal.roles.experts.planner as experts_planner
import hadal.roles.fleet.need as fleet_need
import hadal.roles.front.admission as admission
import hadal.roles.front.routing as front_routing
import hadal.roles.prefill.cache as prefill_cache
import hadal.roles.prefill.prompts as prefill_prompts
from hadal.core.placement import EMPTY, Placement
from hadal.policy.admission import Refusal
from hadal.policy.cached_prefix import Prefix
from hadal.policy.decode_balance import Arrival
from hadal.policy.decode_moves import Move, MoveTerms, RunningView
from hadal.policy.experts.balance import Cluster, ExpertPlan
from hadal.policy.fairness import is_batch
from hadal.policy.prefill_balance import PrefillQueueView, StepCut
from hadal.policy.prefill_budget import StepLimits
from hadal.policy.scaling import Decision, ScalingRules, ScalingView
from hadal.policy.views import (
    DecodeRanksView,
    DecodeUnitView,
    HolderView,
    PrefillUnitView,
    PromptView,
)

NEAR = 1e-6


def check_place(
    ranks: list[int], view: DecodeRanksView, arrivals: Sequence[Arrival], **_: Any
) -> None:
    """Check that placed requests fit, and that they are the oldest arrivals."""
    assert len(ranks) <= len(arrivals)
    rows = {rank: row for row, rank in enumerate(view.ranks.tolist())}
    used, requests = view.num_blocks_used.copy(), view.num_requests.copy()
    for rank, arrival in zip(ranks, arrivals, strict=False):
        used[rows[rank]] += arrival.num_blocks
        requests[rows[rank]] += 1
    touched = sorted({rows[rank] for rank in ranks})
    assert (used[touched] <= view.num_blocks[touched]).all(), f"blocks {used}, of {view.num_blocks}"
    assert (requests[touched] <= view.num_requests_max[touched]).all(), f"{requests} requests"


def check_moves(
    moves: list[Move], view: DecodeRanksView, running: RunningView, terms: MoveTerms, **_: Any
) -> None:
    """Check that a request moves once, to a rank with free blocks and slots that gave none away."""
    assert len(moves) <= terms.num_moves_max
    rows = {rank: row for row, rank in enumerate(view.ranks.tolist())}
    used, requests = view.num_blocks_used.copy(), view.num_requests.copy()
    givers: set[int] = set()
    # No request moves twice.
    assert len({(move.from_rank, move.slot) for move in moves}) == len(moves)
    for move in moves:
        givers.add(move.from_rank)
        assert move.to_rank not in givers, f"rank {move.to_rank} takes after it gave"
        num_blocks = int(running.num_blocks_RS[rows[move.from_rank], move.slot])
        assert num_blocks > 0, f"{move} is of nobody"
        used[rows[move.to_rank]] += num_blocks
        requests[rows[move.to_rank]] += 1
    assert (used <= view.num_blocks).all(), f"blocks {used}, of {view.num_blocks}"
    assert (requests <= view.num_requests_max).all(), f"{requests} requests"


def check_victims(slots: list[int], holders: Sequence[HolderView], num_blocks_missing: int) -> None:
    """Check the preempted requests: batches first, each tenant's latest first, no more than needed, never all."""
    by_arrival = sorted(holders, key=lambda holder: -holder.arrival)
    kinds = [is_batch(next(one.tenant for one in holders if one.slot == slot)) for slot in slots]
    assert kinds == sorted(kinds, reverse=True), "those of batches go first"
    for tenant in {holder.tenant for holder in holders}:
        own = [holder.slot for holder in by_arrival if holder.tenant == tenant]
        gone = [slot for slot in slots if slot in own]
        assert gone == own[: len(gone)], "the latest arrived go first"
    assert len(slots) < max(len(holders), 1), "nobody is left"
    blocks = {holder.slot: holder.num_blocks for holder in holders}
    # Without the last victim, too few blocks would be free.
    assert sum(blocks[slot] for slot in slots[:-1]) < max(num_blocks_missing, 1)


def check_cut(
    cut: StepCut,
    ranks: Sequence[PrefillQueueView],
    waiting: Sequence[PromptView],
    rates: Any,
    limits: StepLimits,
    cached: Sequence[Any] = (),
) -> None:
    """Check that prompts start once, in order and where they fit, and that no chunk exceeds its prompt."""
    starts = sorted(index for of_rank in cut.ranks for index in of_rank.starts)
    assert starts == list(range(len(starts))), f"prompts {starts} of {len(waiting)} start"
    views = {view.rank: view for view in ranks}
    assert {of_rank.rank for of_rank in cut.ranks} == views.keys(), "a rank has no part, or two"
    for of_rank in cut.ranks:
        view = views[of_rank.rank]
        there = [
            cached[index].get(view.rank, waiting[index]) if cached else waiting[index]
            for index in of_rank.starts
        ]
        prompts = [*view.prompts, *there]
        assert len(of_rank.sizes) == len(prompts)
        for size, prompt in zip(of_rank.sizes, prompts, strict=True):
            assert 0 <= size <= prompt.num_tokens, f"{size} tokens of {prompt}"
            assert not (size and prompt.num_loading), "what is being read from disk is computed"
        assert sum(of_rank.sizes) <= limits.num_tokens_max, f"{of_rank} is more than {limits}"
        assert len(of_rank.starts) <= max(0, view.num_starts_free), (
            f"{of_rank} starts more than {view.num_starts_free}"
        )
        # Prompts that start need only free blocks.
        assert sum(prompt.num_blocks_needed for prompt in there) <= view.num_blocks_free
        ready = [prompt for prompt in prompts if not prompt.num_loading and prompt.num_tokens]
        assert bool(ready) == bool(sum(of_rank.sizes)), "a rank with something to do does nothing"


def check_packed(
    sizes: list[int],
    prompts: Sequence[PromptView],
    chunk_tokens: int,
    num_blocks_free: int,
    num_starts_max: int,
) -> None:
    """Check that a rank's limits of tokens, blocks and starts hold."""
    assert sum(sizes) <= chunk_tokens
    assert all(
        0 < size <= prompt.num_tokens for size, prompt in zip(sizes, prompts, strict=False)
    ), sizes
    begun = [prompt for _, prompt in zip(sizes, prompts, strict=False) if prompt.num_blocks_needed]
    assert sum(prompt.num_blocks_needed for prompt in begun) <= num_blocks_free
    assert len(begun) <= max(0, num_starts_max)


def check_prefill_unit(
    unit: str | None, units: Sequence[PrefillUnitView], num_blocks: int, num_tokens: int
) -> None:
    """Check that a request goes to a unit with capacity, and waits only if there is none."""
    fitting = {view.unit for view in units if view.num_requests < view.num_requests_max}
    fitting &= {view.unit for view in units if num_blocks <= view.num_blocks}
    assert unit in fitting if fitting else unit is None, f"{unit} of {fitting}"


def check_decode_unit(
    unit: str | None, units: Sequence[DecodeUnitView], num_blocks: int, num_blocks_max: int
) -> None:
    """Check that the unit has blocks for the request up to its last token."""
    fitting = {view.unit for view in units if num_blocks_max <= view.num_blocks_request}
    assert unit in fitting if fitting else unit is None, f"{unit} of {fitting}"


def check_experts(
    plan: ExpertPlan,
    loads: Any,
    cluster: Cluster,
    *,
    max_moves: int | None = None,
    current: Placement | None = None,
    **_: Any,
) -> None:
    """Check that experts are placed, once a rank, on living ranks only, within the move limit."""
    problems = plan.placement.check()
    assert not problems, problems
    slots = plan.placement.slot_to_expert_LRS
    for rank, num_expert_slots in enumerate(cluster.expert_slots):
        assert ((slots[:, rank] != EMPTY).sum(axis=1) <= num_expert_slots).all(), (
            f"rank {rank} holds more than {num_expert_slots}"
        )
    assert (plan.balancedness_L > 0).all(), plan.balancedness_L
    assert (plan.balancedness_L <= 1 + NEAR).all(), "a mean is above its maximum"
    if max_moves is not None and current is not None and not any(current.missing()):
        assert plan.moved_replicas <= max_moves, (
            f"{plan.moved_replicas} of {max_moves} replicas move"
        )
    if plan.split_LRS is not None:
        check_split(plan.split_LRS, slots.astype(np.int64), loads)


def check_split(split_LRS: Any, table_LRS: Any, loads: Any, **_: Any) -> None:
    """Check that the shares of an expert's replicas add up to 1."""
    assert (split_LRS >= -NEAR).all()
    for table, split in zip(table_LRS, split_LRS, strict=True):
        held = table != EMPTY
        sums = np.bincount(table[held], split[held])
        there = np.unique(table[held])
        assert np.allclose(sums[there], 1.0, atol=1e-4), (
            f"the parts of an expert add up to {sums[there]}"
        )


def check_decision(decision: Decision, view: ScalingView, rules: ScalingRules) -> None:
    """Check that units are between floor and maximum, on existing nodes."""
    units = decision.units
    for num, role in ((units.prefill, rules.prefill), (units.decode, rules.decode)):
        assert role.num_min <= num <= role.num_max, f"{units} with {rules}"
    assert rules.num_nodes(units) <= rules.num_nodes_max, f"{units} with {rules}"


def check_refusal(refusal: Refusal | None, view: Any) -> None:
    """Check that a refusal has a status, a reason and a retry time; draining admits nothing."""
    assert refusal is None or (
        refusal.status in (429, 503) and refusal.reason and refusal.retry_after_s > 0
    ), refusal
    assert refusal is not None or not view.is_draining, "let in while the server shuts down"


def check_prefix(
    prefix: Prefix, num_memory: int, num_shared: int, num_disk: int, *_: Any, **__: Any
) -> None:
    """Check that the disk's part of a prefix is used whole or not at all."""
    assert (prefix.num_memory, prefix.num_shared) == (num_memory, num_shared)
    assert prefix.num_loading + prefix.num_recomputed in (0, num_disk)


GUARDS: tuple[tuple[Any, str, Callable[..., None]], ...] = (
    (decode_slots, "place", check_place),
    (decode_slots, "place_by_counts", check_place),
    (decode_slots, "choose_moves", check_moves),
    (decode_slots, "choose_victims", check_victims),
    (prefill_prompts, "plan_step", check_cut),
    (prefill_prompts, "pack_chunks", check_packed),
    (prefill_cache, "choose_prefix", check_prefix),
    (front_routing, "choose_prefill_unit", check_prefill_unit),
    (front_routing, "choose_decode_unit", check_decode_unit),
    (admission, "admit", check_refusal),
    (experts_planner, "balance", check_experts),
    (experts_planner, "split_loads", check_split),
    (fleet_need, "decide", check_decision),
)


@contextmanager
def guarded() -> Iterator[Counter[str]]:
    """Check every decision. Yield how often each policy was called."""
    asked: Counter[str] = Counter()
    before = [(module, name, getattr(module, name)) for module, name, _ in GUARDS]
    for (module, name, policy), (_, _, check) in zip(before, GUARDS, strict=True):
        setattr(module, name, _guard(policy, check, name, asked))
    try:
        yield asked
    finally:
        for module, name, policy in before:
            setattr(module, name, policy)


def _guard(policy: Any, check: Callable[..., None], name: str, asked: Counter[str]) -> Any:
    @functools.wraps(policy)
    def decide(*args: Any, **options: Any) -> Any:
        decision = policy(*args, **options)
        asked[f"policy {name}"] += 1
        check(decision, *args, **options)
        return decision

    return decide
