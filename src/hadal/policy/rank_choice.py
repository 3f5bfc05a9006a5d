"""Choose the rank of a prefill unit that takes a prompt: equal work. (Decode's rule is in policy/decode_balance.)

Knows nothing of tensors, networks or time. The caller owns the state and applies the choice.
Goal (DeepSeek-V3/R1 inference overview): equal attention work and equal numbers of input tokens per GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.policy.views import PrefillRankView

PAIRS_PER_TOKEN = 14_800
"""Attended positions that cost as much as all else of a token: DeepSeek-V3 activates 37e9 weights, 2 FLOP each, for a
token, and spends 61 layers x 128 heads x (192 + 128) x 2 FLOP on a position that it attends to."""


def work_of(num_done: int, num_tokens: int) -> float:
    """Estimated work of prefilling positions num_done .. num_tokens-1, in tokens without context."""
    num_left = num_tokens - num_done
    return num_left + num_left * (num_done + num_tokens) / 2 / PAIRS_PER_TOKEN


def choose_prefill_rank(ranks: Sequence[PrefillRankView], num_blocks_needed: int) -> int | None:
    """Return the rank with the least work of those where the prompt can start in this step; None if there is none."""
    fitting = [
        rank for rank in ranks
        if rank.num_tokens_free and rank.num_starts_free > 0 and num_blocks_needed <= rank.num_blocks_free
    ]  # fmt: skip
    if not fitting:
        return None
    return min(fitting, key=lambda rank: (rank.work, -rank.num_blocks_free, rank.rank)).rank
