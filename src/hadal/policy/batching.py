"""Order queued prompts, and pack chunks of them into a step of a prefill rank under a token budget.

policy/fairness takes turns among tenants. Within a tenant the order is that of arrival, and each
level of priority counts like AGE_S seconds of waiting. So a request is overtaken only by requests
that arrive within AGE_S seconds per level of difference, and none starves.

Sarathi's chunked prefill (arXiv 2308.16369): a step never computes more than `chunk_tokens`, so a
long prompt costs the others one bounded step at a time. Order is strict: a prompt without enough
free blocks stops all prompts behind it, so a large prompt waits only for those before it. With
several ranks and `request_balance = "auto"`, steps are cut by cost instead
(policy/prefill_balance). On a single rank no other rank waits, so the token budget fills its step.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.policy.views import PromptView

AGE_S = 5.0
"""Seconds of waiting per level of priority: about the mean time to first token of a unit at three
quarters load (bench/balance_prefill). So a level has an effect there, and eight levels delay others
by less than a minute.
"""


def turn_s(arrived_s: float, priority: int) -> float:
    """Return a queued request's sort key, smallest first; callers break ties by sequence number."""
    return arrived_s - AGE_S * priority


def pack_chunks(
    prompts: Sequence[PromptView], chunk_tokens: int, num_blocks_free: int, num_starts_max: int
) -> list[int]:
    """Return how many tokens of prompts[0], prompts[1], ... to compute now; the list ends where
    packing stopped.

    `prompts` are in their queue's order, started ones first. `num_starts_max` limits how many may
    start.
    """
    budget, blocks, starts = chunk_tokens, num_blocks_free, num_starts_max
    sizes: list[int] = []
    for prompt in prompts:
        if budget == 0 or prompt.num_blocks_needed > blocks:
            break
        if prompt.num_blocks_needed:
            if starts == 0:
                break
            starts -= 1
            blocks -= prompt.num_blocks_needed
        size = min(prompt.num_tokens, budget)
        budget -= size
        sizes.append(size)
    return sizes
