"""Pack chunks of waiting prompts into one prefill step: first come, first served, under a token budget.

Sarathi's chunked prefill (arXiv 2308.16369): a step never computes more than `chunk_tokens`, so a long prompt costs the
others one bounded step at a time. Nobody is overtaken: a prompt whose blocks are not free stops everybody behind it,
so the largest prompt waits no longer than for those before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.policy.views import PromptView


def pack_chunks(
    prompts: Sequence[PromptView], chunk_tokens: int, num_blocks_free: int, num_starts_max: int
) -> list[int]:
    """Return how many tokens of prompts[0], prompts[1], ... to compute now; it ends where packing stopped.

    `prompts` come in the order of arrival, those that have started first. `num_starts_max` limits how many may start.
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
