"""The rank that takes a prompt: equal work."""

from __future__ import annotations

from hadal.policy.rank_choice import choose_prefill_rank
from hadal.policy.views import PrefillRankView


def prefill(rank: int, work: float = 0.0, tokens: int = 64, blocks: int = 8, starts: int = 4) -> PrefillRankView:
    return PrefillRankView(rank, work, tokens, blocks, starts)


def test_prefill_takes_the_least_work_where_the_prompt_can_start() -> None:
    assert choose_prefill_rank([prefill(0, work=9.0), prefill(1, work=3.0)], 2) == 1
    assert choose_prefill_rank([prefill(0, work=9.0), prefill(1, tokens=0)], 2) == 0
    assert choose_prefill_rank([prefill(0, blocks=1), prefill(1, starts=0)], 2) is None
