"""What a request's token means for its end, and what its sampler must be told. Shared by both
leaders.
"""

from __future__ import annotations

from hadal.core.messages import Generation
from hadal.core.plans import Sampling

STOP = "stop"
LENGTH = "length"

History = tuple[tuple[int, ...], tuple[int, ...]]


def finish_of(generation: Generation, index: int, token: int) -> str | None:
    """How the output ends with `token` at `index`; None if it goes on. A stop id counts from
    `min_tokens` on.
    """
    if token in generation.stop_ids and index + 1 > generation.min_tokens:
        return STOP
    return LENGTH if index + 1 >= generation.max_tokens else None


def has_penalty(sampling: Sampling) -> bool:
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


def history_of(generation: Generation) -> History:
    """Prompt and output for the sampler; empty where no penalty asks for them, as they are long."""
    return (generation.prompt, generation.output) if has_penalty(generation.sampling) else ((), ())
