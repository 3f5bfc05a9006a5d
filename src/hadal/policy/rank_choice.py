"""Choose the rank of a prefill unit for a prompt, where steps are cut by token budgets: equal work.

(Where steps are cut by cost, policy/prefill_balance chooses; decode's rule is in
policy/decode_balance.)

Independent of tensors, networks and time. The caller owns the state and applies the choice. Goal
(DeepSeek-V3/R1 inference overview): equal attention work and equal numbers of input tokens per GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hadal.policy.prefill_rates import UNMEASURED, cost_s
from hadal.policy.views import PrefillRankView, PromptView


def choose_prefill_rank(
    ranks: Sequence[PrefillRankView],
    prompt: PromptView,
    cached: Mapping[int, PromptView] | None = None,
) -> int | None:
    """Return the rank with the least work where the prompt can start in this step; None if there is
    none.

    `cached`: the prompt as seen by ranks that have part of it cached. Cached work counts as saved,
    so such a rank takes the prompt unless another has so much less work that it finishes sooner
    without the cache.
    """
    there = cached or {}
    fitting = [
        rank
        for rank in ranks
        if rank.num_tokens_free
        and rank.num_starts_free > 0
        and there.get(rank.rank, prompt).num_blocks_needed <= rank.num_blocks_free
    ]
    if not fitting:
        return None
    if not there:
        return min(fitting, key=lambda rank: (rank.work, -rank.num_blocks_free, rank.rank)).rank

    def work_then(rank: PrefillRankView) -> tuple[float, int, int, int]:
        view = there.get(rank.rank, prompt)
        return (
            rank.work + cost_s(view, UNMEASURED),
            view.num_loading,
            -rank.num_blocks_free,
            rank.rank,
        )

    return min(fitting, key=work_then).rank
