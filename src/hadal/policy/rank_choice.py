"""Choose the rank of a prefill unit that takes a prompt, where steps are cut by token budgets: equal work.

(Where they are cut by cost, policy/prefill_balance chooses; decode's rule is in policy/decode_balance.)

Knows nothing of tensors, networks or time. The caller owns the state and applies the choice.
Goal (DeepSeek-V3/R1 inference overview): equal attention work and equal numbers of input tokens per GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.policy.views import PrefillRankView


def choose_prefill_rank(ranks: Sequence[PrefillRankView], num_blocks_needed: int) -> int | None:
    """Return the rank with the least work of those where the prompt can start in this step; None if there is none."""
    fitting = [
        rank for rank in ranks
        if rank.num_tokens_free and rank.num_starts_free > 0 and num_blocks_needed <= rank.num_blocks_free
    ]  # fmt: skip
    if not fitting:
        return None
    return min(fitting, key=lambda rank: (rank.work, -rank.num_blocks_free, rank.rank)).rank
