"""The order of those that wait, and chunks of them packed into one step of a prefill rank under a
token budget.

Whose turn it is among tenants, policy/fairness says. Within a tenant the order is that of arrival,
and priority is worth a bounded time of waiting, so whoever waits longer than that by more than
another is ahead of it whatever the priority: nobody starves.

Sarathi's chunked prefill (arXiv 2308.16369): a step never computes more than `chunk_tokens`, so a
long prompt costs the others one bounded step at a time. Nobody is overtaken: a prompt whose blocks
are not free stops everybody behind it, so the largest prompt waits no longer than for those before
it. Several ranks with `request_balance = "auto"` cut by cost instead (policy/prefill_balance); a rank alone
keeps nobody waiting, and the token budget fills its step.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.policy.views import PromptView

AGE_S = 5.0
"""Seconds of waiting that a level of priority is worth: about a mean time to first token at a unit
three quarters full (bench/balance_prefill), so that a level shows there and eight of them keep
nobody waiting for a minute.
"""


def turn_s(arrived_s: float, priority: int) -> float:
    """Return the place among those that wait, the smallest first; the caller breaks ties by
    sequence.
    """
    return arrived_s - AGE_S * priority


def pack_chunks(
    prompts: Sequence[PromptView], chunk_tokens: int, num_blocks_free: int, num_starts_max: int
) -> list[int]:
    """Return how many tokens of prompts[0], prompts[1], ... to compute now; it ends where packing
    stopped.

    `prompts` come in the order of arrival, those that have started first. `num_starts_max` limits
    how many may start.
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
