"""The choice of a prompt's rank: equal work, with savings by a cache."""

from __future__ import annotations

from hadal.policy.baselines import rank_in_turn
from hadal.policy.rank_choice import choose_prefill_rank
from hadal.policy.views import PrefillRankView, PromptView

PROMPT = PromptView(100, 2)


def prefill(
    rank: int, work: float = 0.0, tokens: int = 64, blocks: int = 8, starts: int = 4
) -> PrefillRankView:
    return PrefillRankView(rank, work, tokens, blocks, starts)


def test_prefill_takes_the_least_work_where_the_prompt_can_start() -> None:
    assert choose_prefill_rank([prefill(0, work=9.0), prefill(1, work=3.0)], PROMPT) == 1
    assert choose_prefill_rank([prefill(0, work=9.0), prefill(1, tokens=0)], PROMPT) == 0
    assert choose_prefill_rank([prefill(0, blocks=1), prefill(1, starts=0)], PROMPT) is None


def test_a_rank_that_has_some_of_it_takes_it_unless_it_has_too_much_else() -> None:
    there = {0: PromptView(36, 1, 64)}
    assert choose_prefill_rank([prefill(0, work=50.0), prefill(1)], PROMPT, there) == 0
    assert choose_prefill_rank([prefill(0, work=80.0), prefill(1)], PROMPT, there) == 1
    assert (
        choose_prefill_rank([prefill(0, work=80.0, blocks=1), prefill(1, blocks=1)], PROMPT, there)
        == 0
    )
    both = {0: PromptView(36, 2, 64, num_loading=1), 1: PromptView(36, 1, 64)}
    # On rank 1 nothing has to be read.
    assert choose_prefill_rank([prefill(0), prefill(1)], PROMPT, both) == 1


def test_in_turn_a_prompt_waits_for_its_rank_alone() -> None:
    ranks = [prefill(3, work=9.0), prefill(5), prefill(6, blocks=1)]
    assert [rank_in_turn(ranks, PROMPT, number) for number in range(5)] == [3, 5, None, 3, 5]
    assert rank_in_turn([prefill(0, blocks=2)], PROMPT, 0) == 0
    assert rank_in_turn([prefill(0, tokens=0)], PROMPT, 0) is None
    assert rank_in_turn([prefill(0, starts=0)], PROMPT, 0) is None
